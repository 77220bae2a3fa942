"""The end of a log's file: where its whole lines end, what is incomplete, and which part of a batch counts."""

import contextlib
import os
import stat

import orjson

from carrel.storage.base import MAX_RECORD
from carrel.storage.files.objects import open_or_create, sync_folder, write_all
from carrel.storage.files.paths import hidden_beside

_STEP = 64 * 1024
_PAGE = 4096
_BATCH_BIT = stat.S_ISVTX


def last_newline(fd: int, size: int, known: int = 0) -> int:
    """Return where the last newline of the first `size` bytes ends; `known` is the end of a line before it."""
    while size > known:
        start = max(size - _STEP, known)
        found = os.pread(fd, size - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return known


def parse_unterminated(fd: int, start: int, end: int) -> bytes | None:
    """Return the record that the bytes after the last newline are, or None if they are incomplete.

    A complete JSON value has lost only its newline; a number may have lost digits as well. A power cut can leave NUL
    bytes after it."""
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
    """Move incomplete bytes from the log to `<stem>.torn` beside it, durably."""
    torn = open_or_create(_torn_path(path), os.O_WRONLY | os.O_APPEND)
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
# Several records are written with one write, but a kill can stop the kernel between two pages of it. To keep all of
# them or none, a hidden file notes the sizes before and after the batch, and the log's sticky bit, which has no meaning
# on a file, says that the note is valid. A reader that finds the bit counts the batch only if it is complete.


def needs_note(size: int, length: int) -> bool:
    """Return whether a write of this length at this place can be cut by a kill."""
    return size % _PAGE + length > _PAGE


def begin_batch(fd: int, path: str, end: int, *, sync: bool) -> None:
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
        os.fchmod(fd, stat.S_IMODE(found.st_mode) | _BATCH_BIT)


def end_batch(fd: int, path: str) -> None:
    """Mark the batch as complete or taken back. If this fails, the next append does it."""
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~_BATCH_BIT)
        os.unlink(hidden_beside(path, "batch"))


def in_batch(found: os.stat_result) -> bool:
    """Return whether a batch was begun and not ended."""
    return bool(found.st_mode & _BATCH_BIT)


def committed_size(path: str, found: os.stat_result) -> int:
    """Return the size of the log without an incomplete batch."""
    if not in_batch(found):
        return found.st_size
    try:
        note = os.open(hidden_beside(path, "batch"), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            inode, start, end = map(int, os.read(note, 100).split())
        finally:
            os.close(note)
    except (OSError, ValueError):
        return found.st_size
    return start if inode == found.st_ino and start <= found.st_size < end else found.st_size
