"""The end of a log's file: where its whole lines stop, what is torn, and what of a batch may be believed."""

import contextlib
import os
import stat

import orjson

from carrel.storage.file_objects import open_or_make, sync_folder, write_all
from carrel.storage.file_tree import hidden_beside
from carrel.storage.seam import MAX_RECORD

_STEP = 64 * 1024
_PAGE = 4096
_MARK = stat.S_ISVTX


def lines_end(fd: int, size: int, known: int = 0) -> int:
    """Where the last newline of the first `size` bytes ends; `known` is the end of a line before it."""
    while size > known:
        start = max(size - _STEP, known)
        found = os.pread(fd, size - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return known


def whole_record(fd: int, start: int, end: int) -> bytes | None:
    """The record that the bytes after the last newline are, or None when they are torn.

    A JSON value that stands there complete has lost only its newline; a number may have lost digits as well.
    A power cut can leave NUL bytes behind it."""
    if not 0 < end - start <= MAX_RECORD:
        return None
    record = os.pread(fd, end - start, start).rstrip(b"\0")
    if not record.rstrip().endswith((b"}", b"]", b'"', b"true", b"false", b"null")):
        return None
    try:
        orjson.loads(record)
    except orjson.JSONDecodeError:
        return None
    return record


def set_aside(fd: int, path: str, start: int, end: int) -> None:
    """Keep torn bytes in `<stem>.torn` beside the log, on the disk, and cut them off the log."""
    torn = open_or_make(_torn_path(path), os.O_WRONLY | os.O_APPEND)
    try:
        before = os.fstat(torn).st_size
        try:
            if before:
                os.write(torn, b"\n")
            for at in range(start, end, _STEP):
                write_all(torn, os.pread(fd, min(_STEP, end - at), at))
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
# Several records are written with one write, but a kill can stop the kernel between two pages of it. So that it is
# still all of them or none, where the batch begins and ends is noted before, and the log's sticky bit, which means
# nothing on a file, says that the note counts. Whoever finds the bit believes the batch only when it is complete.


def needs_note(size: int, length: int) -> bool:
    """Whether a write of this length at this place can be cut by a kill."""
    return size % _PAGE + length > _PAGE


def begin_batch(fd: int, path: str, end: int, *, sync: bool) -> None:
    """Note that the log is to grow to `end` in one piece; with `sync` the note is on the disk before the batch."""
    found = os.fstat(fd)
    note = open_or_make(hidden_beside(path, "batch"), os.O_WRONLY | os.O_TRUNC)
    try:
        write_all(note, b"%d %d %d" % (found.st_ino, found.st_size, end))
        if sync:
            os.fsync(note)
    finally:
        os.close(note)
    if sync:
        sync_folder(os.path.dirname(path))
    # A log of somebody else that we may only write to: then there is no bit, and the note counts for nothing.
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, stat.S_IMODE(found.st_mode) | _MARK)


def end_batch(fd: int, path: str) -> None:
    """The batch is complete, or taken back. When this fails, the next append does it."""
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~_MARK)
        os.unlink(hidden_beside(path, "batch"))


def in_batch(found: os.stat_result) -> bool:
    return bool(found.st_mode & _MARK)


def believed_size(path: str, found: os.stat_result) -> int:
    """The size of the log without a batch that is not complete."""
    if not in_batch(found):
        return found.st_size
    try:
        # Whatever stands there in its place, nobody waits for it.
        note = os.open(hidden_beside(path, "batch"), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            inode, start, end = map(int, os.read(note, 100).split())
        finally:
            os.close(note)
    except (OSError, ValueError):
        return found.st_size
    return start if inode == found.st_ino and start <= found.st_size < end else found.st_size
