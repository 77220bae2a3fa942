"""Group commit: those who wait for the disk at the same moment wait for the same sync."""

import asyncio
import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from carrel.errors import StorageWriteError
from carrel.storage.file_objects import sync_names
from carrel.storage.file_tree import OpenFile
from carrel.storage.sync_device import Device, quiet

_THREADS = 16
_IDLE_SECONDS = 10.0
_SHARES = 8
"""Into so many parts files are divided that are synced one by one; the rest of the threads is for who comes later."""
_TOGETHER = 4
"""From so many files on, one sync of the whole file system is cheaper than one of each."""
_WRITING = 20e-6
"""Seconds of the processor that an append takes, about."""
_ONE_MORE = 100e-6
"""Seconds that a sync takes at least: what two in place of one must be worth."""


class SyncedFile(OpenFile):
    """A file that is written here and can be put on the disk."""

    __slots__ = ("device", "named", "path", "root")

    def __init__(self, fd: int, path: str, root: str, device: Device | None = None) -> None:
        super().__init__(fd)
        self.path = path
        self.root = root
        self.device = device
        self.named = False
        """Whether the names that lead to it are known to be on the disk."""

    def sync(self) -> None:
        """Put it on the disk, the first time with its name."""
        os.fdatasync(self.fd)
        if not self.named:
            # Deleted meanwhile: then its name need not last.
            with contextlib.suppress(FileNotFoundError):
                sync_names(self.path, self.root)
            self.named = True


_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class _Line:
    """Those who wait for files of the same file system, and the loops they are in.

    A thread hands it back to the loops as it is: what it touches here, they would have to fetch from its processor."""

    __slots__ = ("failed", "files", "loops", "ripe")

    def __init__(self) -> None:
        self.files: dict[SyncedFile, list[_Waiter]] = {}
        """Who waits for which; who came first stands first."""
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.ripe = False
        """Whether a loop of theirs has come to the end of its turn since: it waits for no more to come."""
        self.failed: Mapping[SyncedFile, OSError] = {}
        """The files that could not be synced, and why."""

    def part(self, files: Iterable[SyncedFile]) -> "_Line":
        """These files and who waits for them leave it, and are a line of their own."""
        part = _Line()
        part.files = {file: self.files.pop(file) for file in files}
        part.loops = {loop for waiters in part.files.values() for loop, _ in waiters}
        return part

    def settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell those in this loop how it went; to be called there."""
        for file, waiters in self.files.items():
            error = self.failed.get(file) if self.failed else None
            if error is None:
                file.named = True
            for where, future in waiters:
                if where is not loop or future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(not_safe(file, error))


class _Turn:
    """What a loop has to do at the end of the turn it is in."""

    __slots__ = ("gathered", "synced")

    def __init__(self) -> None:
        self.gathered: list[tuple[SyncedFile, asyncio.Future[None]]] = []
        """Who is to be put in line then."""
        self.synced: list[_Line] = []
        """Whose sync ended meanwhile."""


class GroupSync:
    """A few threads that sync files for any number of tasks in any number of event loops.

    A sync serves the appends that were written before it began. While a file system is synced as a whole, those who
    come gather for the next time. Where a sync is swift, that begins as soon as this one ends: some tasks write while
    the disk is at work for others. Where it is slow, it waits for those who were just served and write again: one sync
    for all. While files are synced one by one, other files are so side by side."""

    def __init__(self, is_quiet: Callable[[], bool] = quiet) -> None:
        """`is_quiet`: whether a sync of a whole file system would not have to write much that others left."""
        self._is_quiet = is_quiet
        self._begin()

    def _begin(self) -> None:
        """Also in a forked child: the threads stayed behind."""
        self._gate = threading.Lock()
        self._lines: dict[Device | None, _Line] = {}
        """Whom a thread may serve, by file system; the one that was served last stands last."""
        self._whole: set[Device | None] = set()
        """The file systems that are being synced as a whole; the thread that does it comes back for who waits."""
        self._syncing: set[SyncedFile] = set()
        self._turns: dict[asyncio.AbstractEventLoop, _Turn] = {}
        """The loops that are in a turn and will call a thread when it ends."""
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._called = False
        self._threads = 0
        self._idle = 0

    def synced(self, file: SyncedFile) -> "asyncio.Future[None]":
        """Done when all that was written to the file before this call is on the disk."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._gate:
            turn = self._turns.get(loop)
            if turn is None:
                self._forget_closed()
                turn = self._turns[loop] = _Turn()
                loop.call_soon(self._end_turn, loop)
            if file.device is None or not file.device.is_swift:
                turn.gathered.append((file, future))
            elif self._put_in_line(file, loop, future) >= _TOGETHER and file.device not in self._whole:
                self._call()
        return future

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Now that all tasks of the turn have come, they go together."""
        with self._gate:
            turn = self._turns.pop(loop, None)
            if turn is None:
                return  # in a forked child
            for file, future in turn.gathered:
                self._put_in_line(file, loop, future)
            self._ripen(loop)
            self._call_for_the_rest()
        for line in turn.synced:
            line.settle(loop)

    def _ripen(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in self._lines.values():
            if loop in line.loops:
                line.ripe = True

    def _forget_closed(self) -> None:
        """A loop that was closed in mid-turn never comes to its end."""
        for loop in [loop for loop in self._turns if loop.is_closed()]:
            del self._turns[loop]
            self._ripen(loop)

    def _put_in_line(self, file: SyncedFile, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]") -> int:
        """How many files of its file system are waited for now."""
        line = self._lines.get(file.device)
        if line is None:
            line = self._lines[file.device] = _Line()
        if file in line.files:
            line.files[file].append((loop, future))
        else:
            line.files[file] = [(loop, future)]
        line.loops.add(loop)
        return len(line.files)

    def _call_for_the_rest(self) -> None:
        """A thread that syncs a whole file system comes back for those who wait for that."""
        if self._lines and self._lines.keys() - self._whole:
            self._call()

    def _call(self) -> None:
        if self._called:
            return
        if not self._idle and self._threads < _THREADS:
            try:
                threading.Thread(target=self._work, name="carrel-sync", daemon=True).start()
            except (RuntimeError, MemoryError):
                if not self._threads:
                    # None can be had: better a loop that stands still for a moment than tasks that wait for ever.
                    asyncio.get_running_loop().call_soon(self._serve)
                    return
            else:
                self._threads += 1
        self._calls.put(None)
        self._called = True

    # --- in the threads ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait():
            self._serve()

    def _serve(self) -> None:
        while taken := self._take():
            device, line = taken
            start = time.monotonic()
            try:
                line.failed = _sync(device, line.files)
            except Exception as error:  # noqa: BLE001  whatever it is, who waits is told
                line.failed = dict.fromkeys(line.files, OSError(errno.EIO, str(error) or type(error).__name__))
            self._answer(device, line, time.monotonic() - start)

    def _wait(self) -> bool:
        """Wait to be called; False when nobody did for long."""
        with self._gate:
            self._idle += 1
        try:
            self._calls.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            with self._gate:
                self._idle -= 1
                if self._calls.empty():
                    self._threads -= 1
                    return False
            return True
        with self._gate:
            self._idle -= 1
        return True

    def _take(self) -> tuple[Device | None, _Line] | None:
        """A file system to be synced as a whole and all who wait for it, or None and those for a thread's share."""
        with self._gate:
            self._called = False
            for device, line in self._lines.items():
                if device in self._whole:
                    continue
                if device is not None and len(line.files) >= _TOGETHER:
                    if self._is_quiet():
                        self._whole.add(device)
                        del self._lines[device]
                        self._call_for_the_rest()
                        return device, line
                    device.forget()
                elif device is not None and device.is_swift and not line.ripe:
                    continue  # a few can wait until a loop of theirs is at the end of its turn, and calls
                free = [file for file in line.files if file not in self._syncing]
                if free:
                    taken = line.part(free[: max(1, len(free) // _SHARES)])
                    self._syncing.update(taken.files)
                    del self._lines[device]
                    if line.files:
                        self._lines[device] = line
                    self._call_for_the_rest()
                    return None, taken
            return None

    def _answer(self, device: Device | None, line: _Line, seconds: float) -> None:
        """Wake the loops that sleep, and let others come for the files or the file system again."""
        pause = 0.0
        with self._gate:
            if device is None:
                self._syncing.difference_update(line.files)
            else:
                waiting = len(self._lines[device].files) if device in self._lines else 0
                device.took(seconds + _ONE_MORE, _WRITING * (len(line.files) + waiting))
                if waiting and not device.is_swift:
                    pause = _WRITING * len(line.files)
                else:
                    self._whole.discard(device)
            asleep = []
            for loop in line.loops:
                if (turn := self._turns.get(loop)) is not None:
                    turn.synced.append(line)
                else:
                    asleep.append(loop)
        for loop in asleep:
            # RuntimeError: that loop was closed, so nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(line.settle, loop)
        if pause:
            # Those who were served write again meanwhile; without them the next sync would be for a few only.
            time.sleep(pause)
            with self._gate:
                self._whole.discard(device)


def _sync(device: Device | None, files: Collection[SyncedFile]) -> dict[SyncedFile, OSError]:
    """Put the files on the disk, or the whole file system; the errors of those files for which it failed."""
    if device is not None and device.sync():
        return {}
    failed = {}
    for file in files:
        try:
            file.sync()
        except OSError as error:
            failed[file] = error
    return failed


def not_safe(file: SyncedFile, error: OSError) -> StorageWriteError:
    """The error for those whose records the disk did not take."""
    answer = StorageWriteError(
        f"the newest records of {file.path} are written but may not survive a power cut: {error.strerror}; "
        "look into the system log before you trust the disk further"
    )
    answer.errno = error.errno
    return answer


group_sync = GroupSync()
"""One for the process: the disk is one, too."""

os.register_at_fork(after_in_child=group_sync._begin)
