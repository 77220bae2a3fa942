"""Group commit: those who wait for the disk at the same moment wait for the same sync."""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Sequence

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

_Waiters = list[tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]]


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


class GroupSync:
    """A few threads that sync files for any number of tasks in any number of event loops.

    A sync serves the appends that were written before it began. While a file is being synced, others who wait
    for it gather for the next one; what different files wait for is done side by side, or all at once."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Also in a forked child: the threads stayed behind."""
        self._gate = threading.Lock()
        self._gathering: dict[asyncio.AbstractEventLoop, list[tuple[SyncedFile, asyncio.Future[None]]]] = {}
        self._waiting: dict[SyncedFile, _Waiters] = {}
        self._syncing: set[SyncedFile] = set()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0

    async def synced(self, file: SyncedFile) -> None:
        """Wait until all that was written to the file before this call is on the disk."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        gathered = self._gathering.get(loop)
        if gathered is None:
            # Handed over when this turn of the loop ends, so that all tasks of the turn go together.
            gathered = self._gathering[loop] = []
            loop.call_soon(self._hand_over, loop)
        gathered.append((file, future))
        await future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._gate:
            for file, future in self._gathering.pop(loop):
                self._waiting.setdefault(file, []).append((loop, future))
            self._call()

    def _call(self) -> None:
        self._calls.put(None)
        if not self._idle and self._threads < _THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="carrel-sync", daemon=True).start()

    # --- in the threads ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._called():
            while batch := self._take():
                failed = _sync(list(batch))
                self._answer(batch, failed)

    def _called(self) -> bool:
        """Wait for work; False when there was none for long."""
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

    def _take(self) -> dict[SyncedFile, _Waiters]:
        """Files that wait and are not being synced now: all of one file system, or a thread's share."""
        with self._gate:
            free = [file for file in self._waiting if file not in self._syncing]
            taken = free[: max(1, len(free) // _SHARES)]
            if len(free) >= _TOGETHER and (device := free[0].device) is not None:
                together = [file for file in free if file.device is device]
                if len(together) >= _TOGETHER and quiet():
                    taken = together
            if len(taken) < len(free):
                self._call()
            self._syncing.update(taken)
            return {file: self._waiting.pop(file) for file in taken}

    def _answer(self, batch: dict[SyncedFile, _Waiters], failed: dict[SyncedFile, OSError]) -> None:
        """Wake every loop once."""
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], StorageWriteError | None]]] = {}
        for file, waiters in batch.items():
            error = failed.get(file)
            for loop, future in waiters:
                answers.setdefault(loop, []).append((future, not_safe(file, error) if error else None))
        with self._gate:
            self._syncing.difference_update(batch)
        for loop, answered in answers.items():
            # RuntimeError: that loop was closed, so nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answered)


def _sync(files: Sequence[SyncedFile]) -> dict[SyncedFile, OSError]:
    """Put the files on the disk; the errors of those for which it failed."""
    device = files[0].device
    if len(files) > 1 and device is not None and device.sync():
        for file in files:
            file.named = True
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


def _settle(answered: Sequence[tuple["asyncio.Future[None]", StorageWriteError | None]]) -> None:
    for future, error in answered:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


group_sync = GroupSync()
"""One for the process: the disk is one, too."""

os.register_at_fork(after_in_child=group_sync._begin)
