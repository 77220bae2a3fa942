"""The Store in plain files: every key is a path below one folder, and a person can read and edit what is there."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from carrel.errors import KeyMissing, StorageWriteError
from carrel.storage.base import (
    MISSING,
    Block,
    Expected,
    Guard,
    KeyedLock,
    Lock,
    Signals,
    Stamp,
    check_key,
    finish,
    is_within,
    process_name,
)
from carrel.storage.files import objects
from carrel.storage.files.log_reader import (
    IN_LOOP,
    START,
    BackwardReader,
    ForwardReader,
    LogSnapshot,
    Position,
    end_of_record,
    next_block,
)
from carrel.storage.files.log_writer import AppendRequest, LogFile, joined_lines, sync_pool
from carrel.storage.files.objects import PIECE, PendingObject, make_folders, open_or_create
from carrel.storage.files.paths import PathMapper, read_error, write_error

_FEW = 16
"""So many small files are read or looked at in the event loop's own thread; more, in another one."""

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.01
"""How long to wait before a file that another process has locked is tried again: at first, and at most."""
_POLL_SECONDS = (0.05, 0.5)
"""How often a watched log is looked at for records of other processes: soon after the last one, then less often."""


class FileStore:
    """Objects and logs below `root`, which is made by the first write.

    Folders are 0700 and files 0600. A log is a file of lines; its sequence numbers are its line numbers. Names that
    begin with a dot are the store's own. A folder that this user may not enter is left out of lists of folders and of
    scans for names, and logged. Objects are compared and replaced under a lock on their folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._paths = PathMapper(root)
        self._reset()
        _stores.add(self)

    def _reset(self) -> None:
        self._logs = LogFileCache(self._paths)
        self._locks = FileLocks(self._paths)
        self._turns = KeyedLock()
        self._watched = Signals()

    def _reset_in_child(self) -> None:
        """After a fork no open file may be shared with the parent: a lock on it would belong to both."""
        self._locks.close_in_child()
        self._reset()

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"

    # --- objects ----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        opened = self._paths.open(key)
        if opened is None:
            return None
        file, found = opened
        if found.st_size <= IN_LOOP:
            return self._paths.read(key, file, found.st_size)
        return await asyncio.to_thread(self._paths.read, key, file, found.st_size)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) <= _FEW:
            return [await self.get(key) for key in keys]
        return await asyncio.to_thread(self._paths.get_many, keys)

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        return await finish(None, objects.put, self._paths, key, data, expect, guard)

    async def put_pieces(
        self, key: str, pieces: AsyncIterable[bytes], *, expect: Expected = None, guard: Guard | None = None
    ) -> Stamp | None:
        pending = await finish(None, PendingObject, self._paths, key, expect, guard, undo=PendingObject.discard)
        try:
            async for piece in pieces:
                await finish(None, pending.write, piece)
            return await finish(None, pending.place)
        finally:
            pending.discard()

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        opened = self._paths.open(key)
        if opened is None:
            raise KeyMissing(f"there is no object {key!r}")
        file = opened[0]
        try:
            while piece := await asyncio.to_thread(os.pread, file.fd, PIECE, start):
                yield piece
                start += len(piece)
        except OSError as error:
            raise read_error(self._paths.path(key), error) from error

    async def delete(self, key: str, *, expect: tuple[str, Expected] | None = None, guard: Guard | None = None) -> bool:
        removed = await finish(None, self._delete, key, expect, guard)
        if removed:
            self._watched.set_below(key)
        return removed

    def _delete(self, key: str, expect: tuple[str, Expected] | None, guard: Guard | None) -> bool:
        removed = objects.remove(self._paths, key, expect, guard)
        if removed:
            self._logs.mark_deleted(key)
        return removed

    async def copy(self, source: str, target: str, *, guard: Guard | None = None) -> None:
        await finish(None, objects.copy, self._paths, source, target, guard)

    # --- what is there ----------------------------------------------------------------------------------------------

    async def stamp(self, key: str) -> Stamp | None:
        return self._paths.stamps([key])[0]

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        if len(keys) <= _FEW:
            return self._paths.stamps(keys)
        return await asyncio.to_thread(self._paths.stamps, keys)

    async def scan(self, prefix: str, names: Collection[str] = ()) -> dict[str, Stamp]:
        return await asyncio.to_thread(self._paths.scan, prefix, names)

    async def folders(self, prefix: str = "") -> list[str]:
        return await asyncio.to_thread(self._paths.folders, prefix)

    # --- logs -------------------------------------------------------------------------------------------------------

    async def append(
        self,
        key: str,
        records: Sequence[bytes],
        *,
        sync: bool = False,
        create: bool = True,
        after: int | None = None,
        guard: Guard | None = None,
    ) -> int:
        data = joined_lines(key, records)
        request = AppendRequest(data, len(records), create and not after, sync, after, guard)
        log = self._logs.get(key)
        appended = log.append(request, in_loop=True) if self._turns.is_free(key) else None
        if appended is None:
            appended = await self._append_later(key, log, request)
        self._watched.set(key)
        seq, unsynced = appended
        if sync and unsynced is not None:
            await sync_pool.synced(unsynced)
        return seq

    async def _append_later(self, key: str, log: LogFile, request: AppendRequest) -> "tuple[int, Any]":
        """Append in a thread and in the order of the calls, trying again while another process holds the log."""
        request = request._replace(create=request.create and not log.was_opened())
        async with self._turns.hold(key):
            pause = _FIRST_PAUSE
            while (appended := await finish(None, partial(log.append, request, in_loop=False))) is None:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            return appended

    async def copy_log(
        self, source: str, target: str, *, through: int, more: Sequence[bytes] = (), guard: Guard | None = None
    ) -> int:
        lines = joined_lines(target, more)
        self._paths.path(target)
        await finish(None, self._copy_log, source, target, through, lines, guard)
        return through + len(more)

    def _copy_log(self, source: str, target: str, through: int, lines: bytes, guard: Guard | None) -> None:
        log = LogSnapshot.open(self._paths, source)
        found = end_of_record(log, through) if log is not None else None
        if log is None or found is None:
            raise KeyMissing(f"the log {source!r} has no record {through} to copy to {target!r}; nothing was written")
        pending = PendingObject(self._paths, target, MISSING, guard)
        try:
            end, has_newline = found
            pending.copy_range(log.fd, end)
            pending.write(lines if has_newline else b"\n" + lines)
            placed = pending.place()
        finally:
            pending.discard()
        if placed is None:
            raise StorageWriteError(f"{target!r} exists already, so it cannot become a copy of {source!r}")

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        log = LogSnapshot.open(self._paths, key)
        if log is None:
            return
        reader = ForwardReader(log, max(from_seq, 1))
        while block := await next_block(reader):
            yield block

    async def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        log = LogSnapshot.open(self._paths, key)
        if log is None:
            return
        known = Position(hint[1], hint[0]) if hint else None
        try:
            if log.size <= IN_LOOP:
                reader = BackwardReader(log, before_seq, known)
            else:
                reader = await asyncio.to_thread(BackwardReader, log, before_seq, known)
        except OSError as error:
            raise read_error(log.path, error) from error
        while block := await next_block(reader):
            if block.first_seq == 1:
                # Close the file first: a caller who wants one block may keep this generator for long.
                del log, reader
                yield block
                return
            yield block

    async def incomplete_tail(self, key: str) -> bytes:
        log = LogSnapshot.open(self._paths, key)
        if log is None:
            return b""
        try:
            return log.incomplete_tail()
        except OSError as error:
            raise read_error(log.path, error) from error

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        path = self._paths.safe_path(key)
        log: LogSnapshot | None = None
        position = START
        seq = max(from_seq, 1)
        with self._watched.waiting_for(key) as signal:
            pause = _POLL_SECONDS[0]
            while True:
                signal.clear()
                log = LogSnapshot.open(self._paths, key) if log is None else log.renewed()
                if log is not None:
                    was_deleted = not self._is_at(log, path)
                    reader = ForwardReader(log, seq, position)
                    while block := await next_block(reader):
                        pause = _POLL_SECONDS[0]
                        for record in block.records:
                            yield seq, record
                            seq += 1
                    if was_deleted or log.size < reader.offset:
                        return
                    position = Position(reader.offset, reader.lines)
                await signal.wait(pause)
                pause = min(pause * 1.5, _POLL_SECONDS[1])

    def _is_at(self, log: LogSnapshot, path: str) -> bool:
        """Return whether the file is still the log: while it is open here, its number is given to no other file."""
        try:
            return os.stat(path).st_ino == log.inode
        except OSError as error:
            if self._paths.is_missing(error):
                return False
            raise read_error(path, error) from error

    # --- locks ------------------------------------------------------------------------------------------------------

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        return await self._locks.take(key, wait=wait)

    async def lock_owner(self, key: str) -> str | None:
        return await self._locks.owner(key)

    async def close(self) -> None:
        self._logs.close()
        self._locks.release_all()

    async def list(self, prefix: str = "") -> list[str]:
        return await asyncio.to_thread(self._paths.keys, prefix)


class LogFileCache:
    """The logs that were written last, kept open; a file is closed when the last append that uses it is done."""

    _MOST = 128
    _SHARE = 4
    """The cache uses at most this part of the files that the process may have open."""

    def __init__(self, paths: PathMapper) -> None:
        self._paths = paths
        self._guard = threading.Lock()
        self._logs: OrderedDict[str, LogFile] = OrderedDict()

    def get(self, key: str) -> LogFile:
        with self._guard:
            log = self._logs.get(key)
            if log is not None:
                self._logs.move_to_end(key)
                return log
        fresh = LogFile(self._paths, key)
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self._MOST if allowed == resource.RLIM_INFINITY else max(1, min(self._MOST, allowed // self._SHARE))
        with self._guard:
            log = self._logs.setdefault(key, fresh)
            while len(self._logs) > most:
                self._logs.popitem(last=False)
        return log

    def mark_deleted(self, key: str) -> None:
        """Forget the log `key` and those below it, which were deleted."""
        with self._guard:
            for known in [known for known in self._logs if is_within(known, key)]:
                self._logs.pop(known).mark_deleted()

    def close(self) -> None:
        with self._guard:
            logs = list(self._logs.values())
            self._logs.clear()
        for log in logs:
            log.close()


# --- locks between processes ----------------------------------------------------------------------------------------
# Files that are `flock`ed, so that a lock is released when its process ends.

_LONGEST_NAME = 200
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


_stores: "weakref.WeakSet[FileStore]" = weakref.WeakSet()


def _reset_in_child() -> None:
    for store in [*_stores]:
        store._reset_in_child()


os.register_at_fork(after_in_child=_reset_in_child)
