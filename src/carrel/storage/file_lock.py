"""Locks among processes: files that are `flock`ed, so that a lock goes with the process that holds it."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections import deque
from urllib.parse import quote

from carrel.storage.file_objects import make_folders, open_or_make
from carrel.storage.file_tree import FileTree, read_failed, write_failed
from carrel.storage.seam import checked_key, process_name

_LONGEST_NAME = 200
_MOMENT = 0.0005
_MOMENTS = 4
"""Who asks for the holder has the lock for a moment: so often one who does not wait asks again before giving up."""


class FileLock:
    """A lock that is held."""

    def __init__(self, locks: "FileLocks", key: str, fd: int) -> None:
        self.fd = fd
        self._locks = locks
        self._key = key
        self._process = os.getpid()

    async def release(self) -> None:
        if os.getpid() == self._process:  # a forked child does not hold what its parent holds
            self._locks.let_go(self._key, self)


class FileLocks:
    """The locks of one store. Its own tasks queue up here, and the first of them asks for the file."""

    def __init__(self, tree: FileTree) -> None:
        self._root = tree.root
        self._gate = threading.Lock()
        self._turns: dict[str, deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._held: dict[str, FileLock] = {}

    async def take(self, key: str, *, wait: bool) -> FileLock | None:
        checked_key(key)
        if not await self._own_turn(key, wait):
            return None
        try:
            fd = self._locked(key, wait=False)
            if fd is None and wait:
                fd = await self._wait_for(key)
            for _ in range(0 if wait else _MOMENTS):
                if fd is not None:
                    break
                await asyncio.sleep(_MOMENT)
                fd = self._locked(key, wait=False)
        except BaseException:
            self._end_turn(key)
            raise
        if fd is None:
            self._end_turn(key)
            return None
        lock = self._held[key] = FileLock(self, key, fd)
        return lock

    def let_go(self, key: str, lock: FileLock) -> None:
        with self._gate:
            if self._held.get(key) is not lock:
                return
            del self._held[key]
        self._unlock(key, lock.fd)
        self._end_turn(key)

    def close(self) -> None:
        for key, lock in list(self._held.items()):
            self.let_go(key, lock)

    def forget(self) -> None:
        """In a forked child: the locks are its parent's, and must not outlive it here."""
        for lock in self._held.values():
            os.close(lock.fd)

    async def holder(self, key: str) -> str | None:
        if checked_key(key) in self._held:
            return process_name()
        for _ in range(_MOMENTS * 10):
            name = self._holder_in_file(key)
            if name != "":
                return name
            await asyncio.sleep(_MOMENT)  # it has the lock and is about to write its name
        return "a process that has not said its name"

    def _holder_in_file(self, key: str) -> str | None:
        try:
            with open(self._path(key), "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read(1024).decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise read_failed(f"the lock of {key!r}", error) from error
        return None

    # --- among the tasks of this store ------------------------------------------------------------------------------

    async def _own_turn(self, key: str, wait: bool) -> bool:
        loop = asyncio.get_running_loop()
        with self._gate:
            if key not in self._turns:
                self._turns[key] = deque()
                return True
            if not wait:
                return False
            turn = loop.create_future()
            self._turns[key].append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end_turn(key)  # it came in this very moment
            raise
        return True

    def _end_turn(self, key: str) -> None:
        """It is the turn of the next one, if any."""
        with self._gate:
            waiting = self._turns[key]
            while waiting:
                loop, turn = waiting.popleft()
                # RuntimeError: that loop was closed, so nobody waits there any more.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._give_turn, key, turn)
                    return
            del self._turns[key]

    def _give_turn(self, key: str, turn: "asyncio.Future[None]") -> None:
        if turn.done():
            self._end_turn(key)
        else:
            turn.set_result(None)

    # --- among processes --------------------------------------------------------------------------------------------

    async def _wait_for(self, key: str) -> int:
        """Wait in a thread, so that the loop goes on; who is cancelled lets go when it comes."""
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[int] = loop.create_future()

        def arrived(fd: int | None, error: BaseException | None) -> None:
            if not coming.done():
                coming.set_result(fd) if fd is not None else coming.set_exception(error or OSError())
            elif fd is not None:
                self._unlock(key, fd)

        def waiting() -> None:
            fd, error = None, None
            try:
                fd = self._locked(key, wait=True)
            except BaseException as failed:  # noqa: BLE001  whatever it is, the caller gets it
                error = failed
            try:
                loop.call_soon_threadsafe(arrived, fd, error)
            except RuntimeError:  # that loop was closed, so nobody waits any more
                if fd is not None:
                    self._unlock(key, fd)

        threading.Thread(target=waiting, name="carrel-lock", daemon=True).start()
        try:
            return await coming
        except asyncio.CancelledError:
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                self._unlock(key, coming.result())  # it came in this very moment
            raise

    def _locked(self, key: str, *, wait: bool) -> int | None:
        """The locked file with our name in it, or None when another process has it."""
        path = self._path(key)
        try:
            make_folders(os.path.dirname(path), self._root)
            while True:
                fd = open_or_make(path, os.O_RDWR)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Whoever lets go removes the file; then this lock is on one that nobody else will find.
                    if _same_file(fd, path):
                        os.ftruncate(fd, 0)
                        _sign(fd)
                        return fd
                except BaseException as error:
                    os.close(fd)
                    if isinstance(error, BlockingIOError):
                        return None
                    raise
                os.close(fd)
        except OSError as error:
            raise write_failed(f"the lock of {key!r}", error) from error

    def _unlock(self, key: str, fd: int) -> None:
        with contextlib.suppress(OSError):  # removed already, together with the whole folder
            os.unlink(self._path(key))
        fcntl.flock(fd, fcntl.LOCK_UN)  # not by closing alone: a child that is just being forked has it open too
        os.close(fd)

    def _path(self, key: str) -> str:
        """The same for `sessions/s1/life` here and for `s1/life` in a store whose root is our folder `sessions`."""
        first, _, rest = key.partition("/")
        folder, key = (f"{self._root}/{first}", rest) if "/" in rest else (self._root, key)
        name = quote(key, safe="", errors="surrogatepass")
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(name.encode()).hexdigest()
        return f"{folder}/.locks/{name}"


def _sign(fd: int) -> None:
    """Say who holds the lock. It is held without a name too, as on a full disk, where somebody wants to make room."""
    try:
        os.pwrite(fd, process_name().encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
