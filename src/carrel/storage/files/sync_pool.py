"""Writing files to the disk for many tasks: a few threads, and one sync at a time for each file."""

import asyncio
import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from carrel.errors import StorageWriteError
from carrel.storage.files.objects import sync_names
from carrel.storage.files.paths import OpenFile

_THREADS = 16
"""So many files are synced side by side: on a fast disk 32 writers get six times the appends of one."""

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class SyncedFile(OpenFile):
    """A file that is written here and can be synced."""

    __slots__ = ("has_durable_name", "path", "root")

    def __init__(self, fd: int, path: str, root: str) -> None:
        super().__init__(fd)
        self.path = path
        self.root = root
        self.has_durable_name = False

    def sync(self) -> None:
        """Write it to the disk, the first time with its name."""
        os.fdatasync(self.fd)
        if not self.has_durable_name:
            # A file that was deleted meanwhile has no name to keep.
            with contextlib.suppress(FileNotFoundError):
                sync_names(self.path, self.root)
            self.has_durable_name = True


def sync_error(file: SyncedFile, error: OSError) -> StorageWriteError:
    """Return the error for records that the disk did not accept."""
    failed = StorageWriteError(
        f"the newest records of {file.path} are written but may not survive a power cut: {error.strerror}; "
        "check the system log before you rely on the disk"
    )
    failed.errno = error.errno
    return failed


class SyncPool:
    """Syncs files for tasks of any number of event loops; tasks that wait for the same file share a sync."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, as a forked child must: the threads stayed in its parent."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="carrel-sync")
        self._guard = threading.Lock()
        self._waiting: dict[SyncedFile, list[_Waiter]] = {}
        """The files being synced, each with the tasks that need the sync after this one."""

    def synced(self, file: SyncedFile) -> "asyncio.Future[None]":
        """Return a future that is done when everything written to the file so far is on the disk."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._guard:
            waiting = self._waiting.get(file)
            if waiting is not None:
                waiting.append((loop, future))
                return future
            self._waiting[file] = []
        self._start(file, [(loop, future)])
        return future

    def _start(self, file: SyncedFile, waiters: list[_Waiter]) -> None:
        try:
            self._threads.submit(self._sync, file, waiters)
        except RuntimeError:  # no thread can be started: then the caller's own has to wait for the disk
            self._sync(file, waiters)

    def _sync(self, file: SyncedFile, waiters: list[_Waiter]) -> None:
        failure: OSError | None = None
        try:
            file.sync()
        except Exception as error:  # noqa: BLE001  whatever it is, the waiting tasks must learn of it
            failure = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
        with self._guard:
            following = self._waiting.pop(file, [])
            if following:
                self._waiting[file] = []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits any more
                loop.call_soon_threadsafe(_settle, future, file, failure)
        if following:
            self._start(file, following)


def _settle(future: "asyncio.Future[None]", file: SyncedFile, failure: OSError | None) -> None:
    if not future.done():
        future.set_exception(sync_error(file, failure)) if failure else future.set_result(None)


sync_pool = SyncPool()
"""The one pool of this process."""

os.register_at_fork(after_in_child=sync_pool.reset)
