"""Files of the host in a container: an archive that comes in pieces, unpacked by a process of its own."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable

from .contained_children import become_unpacker


class Unpacker:
    """One archive at a time; `told` is called with how it ended."""

    def __init__(self, selector: selectors.BaseSelector, told: Callable[[int], None]) -> None:
        self._selector, self._told = selector, told
        self._pid = 0
        self._pipe = -1
        self._archive: list[memoryview] = []

    def begin(self, at: str, remove: list[str]) -> None:
        """Have the archive that follows unpacked there; `remove` goes before. One that was given up is ended."""
        self._end()
        read, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            become_unpacker(read, at, remove)
        os.close(read)

    def take(self, data: bytes) -> None:
        """Without waiting: code could stop who unpacks."""
        if self._pipe >= 0:
            self._archive.append(memoryview(data))
            if len(self._archive) == 1:
                self._write(0)

    def _write(self, mask: int) -> None:
        self._unwatch()
        try:
            while self._archive:
                if not self._archive[0]:
                    self._close()
                    return
                left = self._archive[0][os.write(self._pipe, self._archive[0]) :]
                self._archive[0] = left
                if not left:
                    self._archive.pop(0)
        except BlockingIOError:
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self._write)
        except BrokenPipeError:
            self._close()  # How it ended is told when it has.

    def _close(self) -> None:
        self._archive = []
        if self._pipe >= 0:
            self._unwatch()
            os.close(self._pipe)
            self._pipe = -1

    def _end(self) -> None:
        self._close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = 0

    def buried(self, pid: int, status: int) -> None:
        """A child has ended; where it was this one, its end is told."""
        if pid == self._pid:
            self._pid = 0
            self._close()
            self._told(status)

    def _unwatch(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._pipe)
