"""Following a log as it grows: woken by the kernel, or looking again and again where it does not tell."""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator

from carrel.storage.file_read import Forward, LogView, next_block
from carrel.storage.file_tree import FileTree, read_failed
from carrel.storage.inotify import OVERFLOW, Inotify
from carrel.storage.line_marks import Mark

_POLL_SECONDS = 0.1
_RECHECK_SECONDS = 1.0
"""Some file systems tell nothing of what other machines write."""


class _Bell:
    """Rings in one event loop when something may have happened to one log."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.watch: int | None = None
        self.name = ""
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    def hush(self) -> None:
        self._rung.clear()

    async def wait(self) -> None:
        """Until it rings, or long enough to look by ourselves."""
        seconds = _POLL_SECONDS if self.watch is None else _RECHECK_SECONDS
        timer = asyncio.get_running_loop().call_later(seconds, self._rung.set)
        try:
            await self._rung.wait()
        finally:
            timer.cancel()


class _Bells:
    """The bells of one event loop, on one inotify instance."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._inotify = Inotify.new()
        self._bells: dict[int, set[_Bell]] = {}
        loop.add_reader(self._inotify.fd, self._ring)

    def hang(self, bell: _Bell) -> None:
        """Have it ring for the log's folder, or for the nearest one above that is there."""
        folder, name = os.path.split(bell.path)
        while (watch := self._inotify.add(folder)) is None:
            folder, name = os.path.split(folder)
        bell.name = name
        if watch != bell.watch:
            self.take_down(bell)
            bell.watch = watch
            self._bells.setdefault(watch, set()).add(bell)

    def take_down(self, bell: _Bell) -> bool:
        """True when no bell is left."""
        watch, bell.watch = bell.watch, None
        if watch is not None and (bells := self._bells.get(watch)):
            bells.discard(bell)
            if not bells:
                del self._bells[watch]
                self._inotify.drop(watch)
        return not self._bells

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._inotify.fd)

    def _ring(self) -> None:
        for watch, mask, name in self._inotify.happened():
            bells = self._bells.values() if mask & OVERFLOW else [self._bells.get(watch, set())]
            for bell in (bell for some in bells for bell in some):
                if not name or name == bell.name:
                    bell.ring()


class FileWatch:
    """Everyone who follows logs of one store, in whichever loops."""

    def __init__(self, tree: FileTree, *, inotify: bool) -> None:
        self._tree = tree
        self._inotify = inotify
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Bells] = weakref.WeakKeyDictionary()

    async def follow(self, key: str, from_seq: int) -> AsyncIterator[tuple[int, bytes]]:
        path = self._tree.guarded(key)
        bell = _Bell(path)
        view: LogView | None = None
        place: Mark | None = None
        seq = max(from_seq, 1)
        try:
            while True:
                bell.hush()
                self._hang(bell)  # before looking, so that nothing falls between
                view = LogView.open(self._tree, key) if view is None else view.again()
                gone = view is not None and not self._is_at(view, path)
                if view is not None:
                    forward = Forward(view, seq, place) if place else Forward.from_line(view, seq)
                    while block := await next_block(forward):
                        for record in block.records:
                            yield seq, record
                            seq += 1
                    if gone or view.size < forward.offset:
                        return
                    place = Mark(forward.offset, forward.lines)
                await bell.wait()
        finally:
            self._take_down(bell)

    def _is_at(self, view: LogView, path: str) -> bool:
        """Whether what we follow is still the log; open as it is, its number cannot be given to another."""
        try:
            return os.stat(path).st_ino == view.inode
        except OSError as error:
            if self._tree.absent(error):
                return False
            raise read_failed(path, error) from error

    def _hang(self, bell: _Bell) -> None:
        if not self._inotify:
            return
        loop = asyncio.get_running_loop()
        # OSError: the machine gives no more instances or watches. Then we look by ourselves.
        with contextlib.suppress(OSError, NotImplementedError):
            bells = self._loops.get(loop)
            if bells is None:
                bells = self._loops[loop] = _Bells(loop)
            bells.hang(bell)

    def _take_down(self, bell: _Bell) -> None:
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            bells = self._loops.get(loop)
            if bells is not None and bells.take_down(bell):
                del self._loops[loop]
                bells.close(loop)
