"""Locks between processes: files that are `flock`ed, so that a lock is released when its process ends."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from urllib.parse import quote

from carrel.storage.base import KeyedLock, check_key, process_name
from carrel.storage.files.objects import make_folders, open_or_create
from carrel.storage.files.paths import PathMapper, read_error, write_error

_LONGEST_NAME = 200
_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.01
_TRIES_WITHOUT_WAIT = 4
"""`lock_owner` holds a lock for a moment, so one busy attempt does not mean that another process has it."""


class FileLock:
    """A lock that is held."""

    def __init__(self, locks: "FileLocks", key: str, fd: int, end_turn: Callable[[], None]) -> None:
        self.fd = fd
        self.lost = asyncio.Event()
        self._locks = locks
        self._key = key
        self._end_turn = end_turn
        self._process = os.getpid()

    async def release(self) -> None:
        if os.getpid() == self._process:  # a forked child does not hold the locks of its parent
            self.release_now()

    def release_now(self) -> None:
        if self._locks.forget(self._key, self):
            self._locks.unlock(self._key, self.fd)
            self._end_turn()


class FileLocks:
    """The locks of one store: its own tasks wait in order, other processes are asked again and again."""

    def __init__(self, paths: PathMapper) -> None:
        self._root = paths.root
        self._turns = KeyedLock()
        self._held: dict[str, FileLock] = {}

    async def take(self, key: str, *, wait: bool) -> FileLock | None:
        check_key(key)
        if not wait and not self._turns.is_free(key):
            return None
        end_turn = await self._turns.acquire(key)
        try:
            fd, pause, tries = self._try_lock(key), _FIRST_PAUSE, 1
            while fd is None and (wait or tries < _TRIES_WITHOUT_WAIT):
                await asyncio.sleep(pause)
                fd, pause, tries = self._try_lock(key), min(pause * 2, _LONGEST_PAUSE), tries + 1
        except BaseException:
            end_turn()
            raise
        if fd is None:
            end_turn()
            return None
        lock = self._held[key] = FileLock(self, key, fd, end_turn)
        return lock

    def forget(self, key: str, lock: FileLock) -> bool:
        """Take a lock out of those that are held; False if it was not there any more."""
        if self._held.get(key) is not lock:
            return False
        return self._held.pop(key, None) is lock

    def release_all(self) -> None:
        for lock in list(self._held.values()):
            lock.release_now()

    def close_in_child(self) -> None:
        """Close the files in a forked child: the locks are its parent's, and must not outlive it here."""
        for lock in self._held.values():
            os.close(lock.fd)

    async def owner(self, key: str) -> str | None:
        if check_key(key) in self._held:
            return process_name()
        for _ in range(_TRIES_WITHOUT_WAIT * 10):
            name = self._read_owner(key)
            if name != "":
                return name
            await asyncio.sleep(_FIRST_PAUSE)  # the owner has the lock and is about to write its name
        return "a process that did not write its name"

    def _read_owner(self, key: str) -> str | None:
        try:
            with open(self._path(key), "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read(1024).decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise read_error(f"the lock of {key!r}", error) from error
        return None

    def _try_lock(self, key: str) -> int | None:
        """Return the locked file with our name in it, or None if another process has it."""
        path = self._path(key)
        try:
            make_folders(os.path.dirname(path), self._root)
            while True:
                fd = open_or_create(path, os.O_RDWR)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Who releases a lock removes its file; then this one is on a file that nothing else can find.
                    if _is_same_file(fd, path):
                        os.ftruncate(fd, 0)
                        _write_owner(fd)
                        return fd
                except BaseException as error:
                    os.close(fd)
                    if isinstance(error, BlockingIOError):
                        return None
                    raise
                os.close(fd)
        except OSError as error:
            raise write_error(f"the lock of {key!r}", error) from error

    def unlock(self, key: str, fd: int) -> None:
        with contextlib.suppress(OSError):  # removed already, together with the whole folder
            os.unlink(self._path(key))
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that is being forked has it open too
        os.close(fd)

    def _path(self, key: str) -> str:
        """Return the file of a lock: the same one for `sessions/s1/x` as for `s1/x` in a store below `sessions`."""
        first, _, rest = key.partition("/")
        folder, key = (f"{self._root}/{first}", rest) if "/" in rest else (self._root, key)
        name = quote(key, safe="", errors="surrogatepass")
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(name.encode()).hexdigest()
        return f"{folder}/.locks/{name}"


def _write_owner(fd: int) -> None:
    """Write down who holds the lock. A full disk is no reason not to hold it: the caller may want to free space."""
    try:
        os.pwrite(fd, process_name().encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _is_same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
