"""Appending to a log's file: one write under its lock, with a known sequence number, whole or not at all."""

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from carrel.errors import KeyMissing, StorageError, StorageWriteError
from carrel.storage.base import Guard, check_records
from carrel.storage.files.log_reader import (
    BATCH_BIT,
    START,
    Position,
    committed_size,
    count_lines,
    last_newline,
    parse_unterminated,
)
from carrel.storage.files.objects import (
    check_guard,
    create_file,
    guard_folder,
    locked_folders,
    make_folders,
    open_or_create,
    sync_folder,
    sync_names,
    write_all,
)
from carrel.storage.files.paths import FileHandle, PathMapper, hidden_beside, write_error

_IN_LOOP = 256 * 1024
"""Bytes that may be written or counted at a time in the event loop's own thread."""

_LOCK_TRIES = 20
"""How often a busy lock is tried before the caller waits: other writers hold it for microseconds."""

_PAGE = 4096
_PIECE = 64 * 1024

_FLAGS = os.O_RDWR | os.O_APPEND


class SyncedFile(FileHandle):
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


Appended = tuple[int, SyncedFile | None]
"""The sequence number of the last record, and the file that is still to be synced."""


def joined_lines(key: str, records: Sequence[bytes]) -> bytes:
    """Return the records as lines; `StorageWriteError` if one of them cannot be a line."""
    data = b"\n".join([*records, b""])
    if data.count(b"\n") != len(records) or len(data) > _IN_LOOP:
        check_records(key, records)
    return data


class AppendRequest(NamedTuple):
    """What is to be appended, and how."""

    data: bytes
    lines: int
    create: bool
    sync: bool
    after: int | None
    guard: Guard | None


class LogFile:
    """A log that is written here. Threads exclude each other by a mutex, processes by `flock` on the file.

    The known size and number of lines are compared with the file at each append, so other programs may write too."""

    def __init__(self, paths: PathMapper, key: str) -> None:
        self._paths = paths
        self._key = key
        self._path = paths.path(key)
        self._file: SyncedFile | None = None
        self._inode = 0
        self._size = 0
        self._lines = 0
        self._mutex = threading.Lock()
        self._deleted = False

    def append(self, request: AppendRequest, *, in_loop: bool) -> Appended | None:
        """Write the records, or return None if the log is busy or, `in_loop`, this would take long."""
        if in_loop and (len(request.data) > _IN_LOOP or request.guard is not None):
            return None
        if not self._mutex.acquire(blocking=not in_loop):
            return None
        try:
            if request.guard is None:
                return self._append(request, in_loop)
            with locked_folders(guard_folder(self._paths, request.guard)):
                check_guard(self._paths, self._key, request.guard)
                return self._append(request, in_loop)
        finally:
            self._mutex.release()

    def was_opened(self) -> bool:
        """Return whether the log existed here: if it is missing at the next append, it was deleted meanwhile."""
        return self._file is not None

    def mark_deleted(self) -> None:
        """Make appends that still wait fail instead of recreating the log."""
        self._deleted = True

    def close(self) -> None:
        """Close the file when no append or sync uses it any more."""
        with self._mutex:
            self._file = None

    # --- under the mutex --------------------------------------------------------------------------------------------
    # Only `self._file` refers to the open file, and no local variable: a caller may keep an error for as long as it
    # likes, and with it the variables of all functions that it was raised through.

    def _append(self, request: AppendRequest, in_loop: bool) -> Appended | None:
        while True:
            if self._deleted:
                raise self._missing()
            fd = (self._file or self._open(request.create)).fd
            if not _try_lock(fd, self._path):
                return None
            try:
                found = self._find()
                if found is not None and found.st_ino == self._inode:
                    return self._append_locked(found, request, in_loop)
            except FileNotFoundError:
                raise self._missing() from None  # deleted while it was written
            except StorageError:
                raise
            except OSError as error:
                raise write_error(self._path, error) from error
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self._file = None  # deleted, or replaced by another file
            if found is None and not request.create:
                raise self._missing()

    def _find(self) -> os.stat_result | None:
        try:
            return os.lstat(self._path)
        except FileNotFoundError:
            return None

    def _append_locked(self, found: os.stat_result, request: AppendRequest, in_loop: bool) -> Appended | None:
        assert self._file is not None
        fd, data, count = self._file.fd, request.data, request.lines
        if (found.st_size != self._size or found.st_mode & BATCH_BIT) and not self._catch_up(fd, found, in_loop):
            return None
        if request.after is not None and request.after != self._lines:
            return 0, None
        if count > 1 and _needs_note(self._size, len(data)):
            if request.sync and in_loop:
                return None
            self._write_batch(data, count, request.sync)
            return self._lines, None if request.sync else self._file
        if count:
            self._write(fd, data, count)
        return self._lines, self._file

    def _missing(self) -> KeyMissing:
        return KeyMissing(f"there is no log {self._key!r}, or it was deleted meanwhile; nothing was written")

    def _open(self, create: bool) -> SyncedFile:
        path = self._paths.safe_path(self._key)
        try:
            file = SyncedFile(self._open_or_create(path, create), path, self._paths.root)
            found = os.fstat(file.fd)
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise write_error(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise StorageWriteError(f"{path} is not a regular file, so it cannot be a log; use another key")
        self._file, self._inode = file, found.st_ino
        self._size = self._lines = 0
        return file

    def _open_or_create(self, path: str, create: bool) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, _FLAGS | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            if not create:
                raise self._missing()
            with contextlib.suppress(FileExistsError):
                try:
                    return create_file(path, _FLAGS)
                except FileNotFoundError:
                    make_folders(os.path.dirname(path), self._paths.root)
                    return create_file(path, _FLAGS)

    def _write(self, fd: int, data: bytes, count: int) -> None:
        try:
            if (written := os.write(fd, data)) < len(data):
                write_all(fd, data[written:])
        except OSError:
            # Cut off what the failed write left; if even that fails, the next append finds it.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
            raise
        self._size += len(data)
        self._lines += count

    def _write_batch(self, data: bytes, count: int, sync: bool) -> None:
        """Write records that a kill could separate; with `sync`, also a power cut."""
        assert self._file is not None
        size, fd = self._size, self._file.fd
        _begin_batch(fd, self._path, size + len(data), sync=sync)
        try:
            self._write(fd, data, count)
        except OSError:
            if os.fstat(fd).st_size == size:
                _end_batch(fd, self._path)
            raise
        try:
            if sync:
                self._file.sync()
        except OSError as error:
            raise sync_error(self._file, error) from error.with_traceback(None)  # which refers to the open file
        finally:
            _end_batch(fd, self._path)

    def _catch_up(self, fd: int, found: os.stat_result, in_loop: bool) -> bool:
        """Learn what others did to the file and repair its end; False if that takes too long for the loop."""
        size = committed_size(self._path, found)
        known = Position(self._size, self._lines) if self._size <= size else START
        if in_loop and (found.st_mode & BATCH_BIT or size - known.offset > _IN_LOOP):
            return False
        end = last_newline(fd, size, known.offset)
        if in_loop and end < size:
            return False
        self._lines = count_lines(fd, known, end)
        self._size = end
        if found.st_mode & BATCH_BIT:
            if size < found.st_size:
                _set_aside(fd, self._path, size, found.st_size)
            _end_batch(fd, self._path)
        if end < size:
            self._repair_tail(fd, end, size)
        return True

    def _repair_tail(self, fd: int, start: int, end: int) -> None:
        """Give a record that lacks only its newline that newline, and set anything else aside."""
        record = parse_unterminated(fd, start, end)
        if record is None:
            _set_aside(fd, self._path, start, end)
            return
        os.ftruncate(fd, start + len(record))
        write_all(fd, b"\n")
        self._size = start + len(record) + 1
        self._lines += 1


def _try_lock(fd: int, path: str) -> bool:
    """Lock the file; False if another process holds the lock."""
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
    except OSError as error:
        raise write_error(path, error) from error
    return False


def _set_aside(fd: int, path: str, start: int, end: int) -> None:
    """Move incomplete bytes from the log to `<stem>.torn` beside it, durably."""
    torn = open_or_create(_torn_path(path), os.O_WRONLY | os.O_APPEND)
    try:
        before = os.fstat(torn).st_size
        try:
            if before:
                os.write(torn, b"\n")
            for at in range(start, end, _PIECE):
                write_all(torn, os.pread(fd, min(_PIECE, end - at), at))
            os.fsync(torn)
        except OSError:
            os.ftruncate(torn, before)
            raise
    finally:
        os.close(torn)
    os.ftruncate(fd, start)


def _torn_path(path: str) -> str:
    folder, name = os.path.split(path)
    stem = os.fsencode(os.path.splitext(name)[0])[: 255 - len(".torn")]
    return f"{folder}/{stem.decode(errors='ignore')}.torn"


# --- batches --------------------------------------------------------------------------------------------------------
# Several records are written with one write, but a kill can stop the kernel between two pages of it. To keep all of
# them or none, a hidden file notes the sizes before and after the batch, and the log's sticky bit, which has no meaning
# on a file, says that the note is valid. A reader that finds the bit counts the batch only if it is complete.


def _needs_note(size: int, length: int) -> bool:
    """Return whether a write of this length at this place can be cut by a kill."""
    return size % _PAGE + length > _PAGE


def _begin_batch(fd: int, path: str, end: int, *, sync: bool) -> None:
    """Note that the log is to grow to `end` in one piece; with `sync` the note is on the disk before the batch."""
    found = os.fstat(fd)
    note = open_or_create(hidden_beside(path, "batch"), os.O_WRONLY | os.O_TRUNC)
    try:
        write_all(note, b"%d %d %d" % (found.st_ino, found.st_size, end))
        if sync:
            os.fsync(note)
    finally:
        os.close(note)
    if sync:
        sync_folder(os.path.dirname(path))
    # The log of another user, which we may only write to, cannot get the bit; then the note is not valid.
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, stat.S_IMODE(found.st_mode) | BATCH_BIT)


def _end_batch(fd: int, path: str) -> None:
    """Mark the batch as complete or taken back. If this fails, the next append does it."""
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~BATCH_BIT)
        os.unlink(hidden_beside(path, "batch"))


# --- syncing ----------------------------------------------------------------------------------------------------------

_THREADS = 16
"""So many files are synced side by side: on a fast disk 32 writers get six times the appends of one."""

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


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
