"""Appending to a log's file: one write under its lock, its number known, torn ends settled, nothing half-written."""

import asyncio
import contextlib
import fcntl
import os
import resource
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carrel.errors import KeyMissing, StorageError, StorageWriteError
from carrel.storage import file_tail as tail
from carrel.storage.file_objects import make_file, make_folders, write_all
from carrel.storage.file_tree import FileTree, write_failed
from carrel.storage.group_sync import SyncedFile, not_safe
from carrel.storage.line_marks import START, STEP, LineMarks, Mark, count_lines, keep_marks
from carrel.storage.seam import MAX_RECORD
from carrel.storage.sync_device import device_of

_DIRECT = 256 * 1024
"""What may be written or counted at once in the event loop's own thread."""

_TRIES = 20
"""How often a lock is asked for before a thread waits for it: others hold it for microseconds."""

_OPEN = os.O_RDWR | os.O_APPEND

Appended = tuple[int, SyncedFile | None]
"""The sequence number of the last record, and what is still to be synced."""


def joined(key: str, records: Sequence[bytes]) -> bytes:
    """The records as lines, or StorageWriteError when one cannot be a line."""
    data = b"\n".join([*records, b""])
    if data.count(b"\n") != len(records) or (len(data) > MAX_RECORD and max(map(len, records)) > MAX_RECORD):
        raise StorageWriteError(
            f"a record for {key!r} has a newline or is longer than {MAX_RECORD} bytes; nothing was written"
        )
    return data


class Adding(NamedTuple):
    """What is to be appended, and how."""

    data: bytes
    records: int
    create: bool
    sync: bool
    after: int | None


@dataclass(slots=True, eq=False)
class _Waiting:
    """An append that waits for the lock in a thread."""

    adding: Adding
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Appended]"


class OpenLog:
    """One log that is written here. Threads exclude each other by a mutex, processes by `flock` on the file.

    What it knows of the file (size, lines) it compares with the file at each append, so others may write too."""

    def __init__(self, tree: FileTree, key: str) -> None:
        self._tree = tree
        self._key = key
        self._path = tree.path(key)
        self._file: SyncedFile | None = None
        self._inode = 0
        self._size = 0
        self._lines = 0
        self._marked = 0
        self._mutex = threading.Lock()
        self._gate = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._draining = False
        self._retired = False
        self._deleted = False

    # --- at once, or later ------------------------------------------------------------------------------------------

    def append_now(self, adding: Adding) -> Appended | None:
        """Write without waiting for anybody, or None when that cannot be."""
        if self._draining or len(adding.data) > _DIRECT or not self._mutex.acquire(blocking=False):
            return None
        try:
            return self._append(adding, wait=False)
        finally:
            self._mutex.release()

    def append_later(self, adding: Adding) -> "asyncio.Future[Appended] | None":
        """Have it written by a thread, in the order of the calls; None when this log is not in use any more.

        One that is cancelled is either written whole or not at all."""
        loop = asyncio.get_running_loop()
        # Once it was there, a log that is missing when the lock is ours was deleted while we waited.
        adding = adding._replace(create=adding.create and self._file is None)
        waiting = _Waiting(adding, loop, loop.create_future())
        with self._gate:
            if self._retired:
                return None
            self._queue.append(waiting)
            if not self._draining:
                try:
                    threading.Thread(target=self._drain, name="carrel-append", daemon=True).start()
                except RuntimeError as error:
                    self._queue.pop()
                    raise StorageWriteError(f"{self._path} is busy and no thread could wait for it: {error}") from error
                self._draining = True
        return waiting.future

    def _drain(self) -> None:
        while True:
            with self._gate:
                if not self._queue:
                    self._draining = False
                    return
                waiting = self._queue.popleft()
            with self._mutex:
                if waiting.future.cancelled():
                    continue
                done: Appended | None = None
                error: BaseException | None = None
                try:
                    done = self._append(waiting.adding, wait=True)
                except BaseException as failed:  # noqa: BLE001  whatever it is, the caller gets it
                    error = failed
            # RuntimeError: that loop was closed, so nobody waits any more.
            with contextlib.suppress(RuntimeError):
                waiting.loop.call_soon_threadsafe(_settle, waiting.future, done, error)

    def retire(self) -> bool:
        """Whether nobody waits for it; then nobody will."""
        with self._gate:
            self._retired = not self._draining
            return self._retired

    def delete(self) -> None:
        """The log was deleted: what still waits for its lock must not bring it back."""
        self._deleted = True

    def close(self) -> None:
        """Close the file when no append or sync uses it any more."""
        with self._mutex:
            self._file = None

    # --- under the mutex --------------------------------------------------------------------------------------------
    # Only `_file` refers to the open file here, and no local variable: a caller may keep an error for as long as it
    # likes, and with it the variables of all functions that it came through.

    def _append(self, adding: Adding, *, wait: bool) -> Appended | None:
        while True:
            if self._deleted:
                raise self._missing()
            fd = (self._file or self._opened(adding.create)).fd
            if not _locked(fd, self._path, wait):
                return None
            try:
                found = self._found()
                if found is not None and found.st_ino == self._inode:
                    return self._append_locked(found, adding, wait)
            except FileNotFoundError:
                raise self._missing() from None  # deleted while we wrote
            except StorageError:
                raise
            except OSError as error:
                raise write_failed(self._path, error) from error
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self._file = None  # deleted, or replaced by another file
            if found is None and not adding.create:
                raise self._missing()

    def _found(self) -> os.stat_result | None:
        try:
            return os.lstat(self._path)
        except FileNotFoundError:
            return None

    def _append_locked(self, found: os.stat_result, adding: Adding, wait: bool) -> Appended | None:
        assert self._file is not None
        data, count, _, sync, after = adding
        if (found.st_size != self._size or tail.in_batch(found)) and not self._catch_up(self._file.fd, found, wait):
            return None
        if after is not None and after != self._lines:
            return 0, None
        if count > 1 and tail.needs_note(self._size, len(data)):
            if sync and not wait:
                return None
            self._write_batch(data, count, sync)
            return self._lines, None if sync else self._file
        if count:
            self._write(self._file.fd, data, count)
        return self._lines, self._file

    def _missing(self) -> KeyMissing:
        return KeyMissing(f"there is no log {self._key!r}, or it was deleted meanwhile; nothing was written")

    def _opened(self, create: bool) -> SyncedFile:
        path = self._tree.guarded(self._key)
        try:
            fd = self._open_or_make(path, create)
            file = SyncedFile(fd, path, self._tree.root)
            found = os.fstat(fd)
            file.device = device_of(os.path.dirname(path), found.st_dev)
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise write_failed(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise StorageWriteError(f"{path} is no regular file, so it cannot be a log; use another key")
        self._file, self._inode = file, found.st_ino
        self._size = self._lines = self._marked = 0
        return file

    def _open_or_make(self, path: str, create: bool) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, _OPEN | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            if not create:
                raise self._missing()
            with contextlib.suppress(FileExistsError):
                try:
                    return make_file(path, _OPEN)
                except FileNotFoundError:
                    make_folders(os.path.dirname(path), self._tree.root)
                    return make_file(path, _OPEN)

    def _write(self, fd: int, data: bytes, count: int) -> None:
        try:
            written = os.write(fd, data)
            if written != len(data):
                write_all(fd, data[written:])
        except OSError:
            self._take_back(fd)
            raise
        self._size += len(data)
        self._lines += count
        if self._size - self._marked >= STEP:
            end = Mark(self._size, self._lines)
            before = Mark(end.offset - len(data), end.lines - count)
            # Much at once has marks on its way too, or who wants a line of it would count it all.
            marks = [end] if len(data) <= 2 * STEP else count_lines(fd, before, self._size)[1] or [end]
            self._marked = marks[-1].offset
            keep_marks(self._path, fd, self._inode, marks)

    def _take_back(self, fd: int) -> None:
        """Cut off what a failed write left; where even that fails, the next append finds it."""
        with contextlib.suppress(OSError):
            os.ftruncate(fd, self._size)

    def _write_batch(self, data: bytes, count: int, sync: bool) -> None:
        """Several records that a kill could part; with `sync`, also a power cut."""
        assert self._file is not None
        size, fd = self._size, self._file.fd
        tail.begin_batch(fd, self._path, size + len(data), sync=sync)
        try:
            self._write(fd, data, count)
        except OSError:
            if os.fstat(fd).st_size == size:
                tail.end_batch(fd, self._path)
            raise
        try:
            if sync:
                self._file.sync()
        except OSError as error:
            raise not_safe(self._file, error) from error.with_traceback(None)  # which holds the file open
        finally:
            tail.end_batch(fd, self._path)

    def _catch_up(self, fd: int, found: os.stat_result, wait: bool) -> bool:
        """Learn what others did to the file, and settle its end; False when that takes a thread."""
        known = Mark(self._size, self._lines)
        if found.st_size < known.offset or known == START:
            known = self._last_mark(fd, found)
            self._marked = known.offset
        size = tail.believed_size(self._path, found)
        if size < known.offset:
            known = START
        if not wait and (tail.in_batch(found) or size - known.offset > _DIRECT):
            return False
        end = tail.lines_end(fd, size, known.offset)
        if not wait and end < size:
            return False
        self._lines, marks = count_lines(fd, known, end)
        self._size = end
        if marks:
            self._marked = marks[-1].offset
            keep_marks(self._path, fd, self._inode, marks)
        if tail.in_batch(found):
            if size < found.st_size:
                tail.set_aside(fd, self._path, size, found.st_size)
            tail.end_batch(fd, self._path)
        if end < size:
            self._settle_end(fd, end, size)
        return True

    def _last_mark(self, fd: int, found: os.stat_result) -> Mark:
        if found.st_size <= STEP:
            return START
        return LineMarks.load(self._path).before_offset(found.st_size, fd, found.st_ino)

    def _settle_end(self, fd: int, start: int, end: int) -> None:
        """A record that lacks only its newline gets it; anything else is set aside."""
        record = tail.whole_record(fd, start, end)
        if record is None:
            tail.set_aside(fd, self._path, start, end)
            return
        os.ftruncate(fd, start + len(record))
        write_all(fd, b"\n")
        self._size = start + len(record) + 1
        self._lines += 1


def _locked(fd: int, path: str, wait: bool) -> bool:
    """Lock the file; False when somebody else has it and we do not wait."""
    try:
        if wait:
            fcntl.flock(fd, fcntl.LOCK_EX)
            return True
        for _ in range(_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
    except OSError as error:
        raise write_failed(path, error) from error
    return False


def _settle(future: "asyncio.Future[Appended]", done: Appended | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif done is not None:
        future.set_result(done)


class OpenLogs:
    """The logs that were written last, kept open; a file is closed when the last append that uses it is done."""

    _MOST = 128
    _SHARE = 4
    """And no more than this part of the files that the process may have open."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._gate = threading.Lock()
        self._logs: OrderedDict[str, OpenLog] = OrderedDict()

    def get(self, key: str) -> OpenLog:
        log = self._logs.get(key)
        if log is None:
            return self._add(key)
        try:
            self._logs.move_to_end(key)
        except KeyError:
            return self._add(key)  # another thread let go of it in this moment
        return log

    def _add(self, key: str) -> OpenLog:
        fresh = OpenLog(self._tree, key)
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self._MOST if allowed == resource.RLIM_INFINITY else min(self._MOST, allowed // self._SHARE)
        with self._gate:
            log = self._logs.setdefault(key, fresh)
            for oldest in list(self._logs)[: max(len(self._logs) - most, 0)]:
                if self._logs[oldest].retire():
                    del self._logs[oldest]
        return log

    def delete(self, key: str) -> None:
        """Forget the log `key` and those below it, which were deleted."""
        with self._gate:
            for known in [known for known in self._logs if known == key or known.startswith(f"{key}/")]:
                self._logs.pop(known).delete()

    def close(self) -> None:
        with self._gate:
            for key in list(self._logs):
                if self._logs[key].retire():
                    self._logs.pop(key).close()
