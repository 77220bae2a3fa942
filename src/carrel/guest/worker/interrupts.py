"""SIGINT raises KeyboardInterrupt where it does no harm: in the user's code, but not in the worker's own steps."""

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

# Without the module `signal` around them, which creates enum members: this is done for every run.
_SIGINT, _SIG_UNBLOCK = int(signal.SIGINT), int(signal.SIG_UNBLOCK)
_SIGWINCH, _SIG_DFL = int(signal.SIGWINCH), int(signal.SIG_DFL)
_ONLY_SIGINT = frozenset((_SIGINT,))
_SAME_INTERRUPT = 0.01
"""Seconds after one interrupt in which another counts as the same: the first needs time to leave the code."""


class Interrupts:
    """While code runs, SIGINT raises KeyboardInterrupt in it; at any other time it is ignored."""

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
        """Whether an interrupt came while the code ran."""
        self.is_for_this_run: Callable[[], bool] = lambda: False
        """Called when an interrupt came before the run began: True when it is for this run and not for the last."""
        self.stop: Callable[[str], bool] | None = None
        """Called first, with the file name of the interrupted code: True when it stops the code itself."""
        if _signal.getsignal(_SIGWINCH) == _SIG_DFL:
            # The host sends it after an interrupt: it ends a system call that waits, and the interrupt is seen.
            _signal.signal(_SIGWINCH, _ignore)

    def install(self) -> None:
        """Handle SIGINT, also where it was ignored at the start (as in a shell's background) or by the last cell."""
        self._owner = os.getpid()
        self._thread = threading.get_ident()
        _signal.signal(_SIGINT, self._handle)
        if sys.unraisablehook != self._unraisable:
            self._plain_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        _signal.pthread_sigmask(_SIG_UNBLOCK, _ONLY_SIGINT)

    def begin(self) -> None:
        """A cell starts; raises the KeyboardInterrupt that came for it before."""
        self._held = self._pending = False
        self._raised = 0.0
        self._cells += 1
        self.running = True
        if self._early:
            self._early = False
            if self.is_for_this_run():
                self.taken = True
                raise KeyboardInterrupt

    def end(self) -> None:
        """The cell is over."""
        self.running = False

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self.running:
            self._early = True
            return
        self.taken = True
        if self._held:
            self._pending = True
        elif time.monotonic() - self._raised < _SAME_INTERRUPT:
            return
        elif self.stop is None or not self.stop(frame.f_code.co_filename if frame is not None else ""):
            self._raised = time.monotonic()
            raise KeyboardInterrupt

    def _unraisable(self, what: Any) -> None:
        """Python drops exceptions of destructors and callbacks of weak references: send a dropped interrupt again."""
        if what.exc_type is KeyboardInterrupt and self.running and os.getpid() == self._owner:
            _thread.start_new_thread(self._interrupt_again, (self._cells,))
        else:
            self._plain_hook(what)

    def _interrupt_again(self, cell: int) -> None:
        time.sleep(_SAME_INTERRUPT)
        if self.running and self._cells == cell:
            os.kill(os.getpid(), signal.SIGINT)

    def in_main_thread(self) -> bool:
        """Whether this is the thread that cells run in."""
        return threading.get_ident() == self._thread

    def hold(self) -> None:
        """Delay interrupts: half a record sent or read would break the channel."""
        if self.in_main_thread():
            self._held = True

    def release(self) -> None:
        """Raise the KeyboardInterrupt that came meanwhile."""
        if self.in_main_thread():
            self._held = False
            self.check()

    def check(self) -> None:
        """Raise a pending interrupt, if this is the thread that cells run in."""
        if self._pending and self.in_main_thread():
            self._pending = False
            raise KeyboardInterrupt

    def wait_for(self, poll: select.poll, seconds: float | None = None) -> None:
        """Wait while interrupts are held; here one may come at any moment."""
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


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """A signal handler that does nothing."""
