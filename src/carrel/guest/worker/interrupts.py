"""SIGINT, taken when it does no harm: in the user's code at once, in the worker's own steps only after them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import os
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

# Without the module `signal` around them, which makes enum members of what it gives back: this is done for every cell.
_SIGINT, _SIG_UNBLOCK = int(signal.SIGINT), int(signal.SIG_UNBLOCK)
_SIGWINCH, _SIG_DFL = int(signal.SIGWINCH), int(signal.SIG_DFL)
_ONLY_SIGINT = frozenset((_SIGINT,))
_AGAIN = 0.01
"""Seconds after one interrupt in which another is taken for the same: the first must have time to leave the code."""


class Interrupts:
    """While a cell runs, SIGINT raises KeyboardInterrupt in it; at any other time it means nothing."""

    def __init__(self) -> None:
        self.running = False
        self._held = False
        self._pending = False
        self._raised = 0.0
        self._cells = 0
        self._plain_hook = sys.unraisablehook
        self._owner = os.getpid()
        self._thread = threading.get_ident()
        self._early = False
        self.taken = False
        """Whether one has come while the cell ran."""
        self.meant: Callable[[], bool] = lambda: False
        """Asked when one came before the cell began: True when it was meant for this cell and not for the last."""
        self.stop: Callable[[str], bool] | None = None
        """Asked first, with the file in which the interrupt found the code: True when it will see to it."""
        if _signal.getsignal(_SIGWINCH) == _SIG_DFL:
            # Sent after an interrupt: what code waits in ends, and the interrupt is seen.
            _signal.signal(_SIGWINCH, _nothing)

    def install(self) -> None:
        """Take SIGINT, also when it came ignored (as in the background of a shell) or the last cell took it."""
        self._owner = os.getpid()
        self._thread = threading.get_ident()
        _signal.signal(_SIGINT, self._came)
        if sys.unraisablehook != self._swallowed:
            self._plain_hook, sys.unraisablehook = sys.unraisablehook, self._swallowed
        _signal.pthread_sigmask(_SIG_UNBLOCK, _ONLY_SIGINT)

    def begin(self) -> None:
        """A cell starts; raises the KeyboardInterrupt that came for it before it did."""
        self._held = self._pending = False
        self._raised = 0.0
        self._cells += 1
        self.running = True
        if self._early:
            self._early = False
            if self.meant():
                self.taken = True
                raise KeyboardInterrupt

    def end(self) -> None:
        """The cell is over."""
        self.running = False

    def _came(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self.running:
            self._early = True
            return
        self.taken = True
        if self._held:
            self._pending = True
        elif time.monotonic() - self._raised < _AGAIN:
            return
        elif self.stop is None or not self.stop(frame.f_code.co_filename if frame is not None else ""):
            self._raised = time.monotonic()
            raise KeyboardInterrupt

    def _swallowed(self, what: Any) -> None:
        """Python drops what is raised in a destructor or a weak reference's callback: an interrupt then comes again."""
        if what.exc_type is KeyboardInterrupt and self.running and os.getpid() == self._owner:
            _thread.start_new_thread(self._press_again, (self._cells,))
        else:
            self._plain_hook(what)

    def _press_again(self, cell: int) -> None:
        time.sleep(_AGAIN)
        if self.running and self._cells == cell:
            os.kill(os.getpid(), signal.SIGINT)

    def in_main_thread(self) -> bool:
        """Whether this is the thread that cells run in."""
        return threading.get_ident() == self._thread

    def hold(self) -> None:
        """What follows must be done whole: half a record sent or read would break the line."""
        if self.in_main_thread():
            self._held = True

    def release(self) -> None:
        """Raises the KeyboardInterrupt that came meanwhile."""
        if self.in_main_thread():
            self._held = False
            self.check()

    def check(self) -> None:
        """Raise what is pending, in the thread that it is meant for."""
        if self._pending and self.in_main_thread():
            self._pending = False
            raise KeyboardInterrupt

    def wait_for(self, poll: select.poll, seconds: float | None = None) -> None:
        """Wait inside of a held step; here an interrupt may come at any moment."""
        longest = None if seconds is None else seconds * 1000
        if not self.in_main_thread():
            poll.poll(longest)
            return
        try:
            self._held = False
            self.check()
            poll.poll(longest)
        finally:
            self._held = True


def _nothing(number: int, frame: types.FrameType | None) -> None:
    """A signal that means nothing."""
