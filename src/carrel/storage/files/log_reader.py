"""Reading a log's file in blocks of whole lines, from a sequence number or from the end; never writing."""

import asyncio
import os
import stat
from typing import NamedTuple

import orjson

from carrel.storage.base import MAX_RECORD, Block
from carrel.storage.files.paths import FileHandle, PathMapper, hidden_beside, read_error, read_range

READ_SIZE = 1024 * 1024
"""Bytes that are read and parsed at a time; with a quarter of it, loading an agent's log takes half as long again."""
IN_LOOP = 256 * 1024
"""Bytes that are read or counted at a time in the event loop's own thread."""
_FIRST_READ_BACK = 64 * 1024
_STEP_BACK = 64 * 1024
BATCH_BIT = stat.S_ISVTX
"""Set on the file of a log while a batch of records is written to it; see `log_writer`."""
_EXCERPT = 1024
"""Bytes that are given of a line that is too long to be a record."""


class Position(NamedTuple):
    """The first `offset` bytes of a log are `lines` whole lines."""

    offset: int
    lines: int


START = Position(0, 0)


class LogSnapshot:
    """A log's file as it was when this was made."""

    def __init__(self, path: str, fd: int, found: os.stat_result, file: FileHandle | None = None) -> None:
        self.path = path
        self.fd = fd
        self.inode = found.st_ino
        self.size = committed_size(path, found)
        self._whole = found.st_size
        self._file = file

    @classmethod
    def open(cls, paths: PathMapper, key: str) -> "LogSnapshot | None":
        opened = paths.open(key)
        if opened is None:
            return None
        file, found = opened
        return cls(paths.path(key), file.fd, found, file)

    def renewed(self) -> "LogSnapshot":
        """Return a snapshot of the same open file as it is now."""
        return LogSnapshot(self.path, self.fd, os.fstat(self.fd), self._file)

    def incomplete_tail(self) -> bytes:
        """Return what comes after the last whole record."""
        if self._whole > self.size:
            return read_range(self.fd, self.size, self._whole)
        end = last_newline(self.fd, self.size)
        is_whole = parse_unterminated(self.fd, end, self.size) is not None
        return b"" if is_whole else read_range(self.fd, end, self.size)

    def long_line(self, start: int, end: int) -> bytes:
        """Return a line that is longer than what is read at a time, or the beginning of one that is no record."""
        return read_range(self.fd, start, end if end - start <= MAX_RECORD else start + _EXCERPT)


def count_lines(fd: int, start: Position, end: int) -> int:
    """Return the number of lines in the first `end` bytes, counted from a position on; 100 MB take about 35 ms."""
    offset, lines = start
    while offset < end and (chunk := os.pread(fd, min(READ_SIZE, end - offset), offset)):
        lines += chunk.count(b"\n")
        offset += len(chunk)
    return lines


class ForwardReader:
    """Blocks from a sequence number on."""

    def __init__(self, log: LogSnapshot, from_seq: int, start: Position = START) -> None:
        self.offset, self.lines = start
        self.path = log.path
        self._log = log
        self._from_seq = from_seq
        self._tail_given = False

    @property
    def is_quick(self) -> bool:
        """Whether little is left to be read."""
        return self._log.size - self.offset <= IN_LOOP

    def next_block(self) -> Block | None:
        log, fd = self._log, self._log.fd
        while self.offset < log.size:
            chunk = os.pread(fd, min(READ_SIZE, log.size - self.offset), self.offset)
            cut = chunk.rfind(b"\n")
            seq = self.lines + 1
            if cut < 0:
                end = _next_newline(fd, self.offset + len(chunk), log.size)
                if end is None:
                    return self._tail(seq)
                start, self.offset = self.offset, end + 1
                self.lines += 1
                if seq >= self._from_seq:
                    return Block(seq, [log.long_line(start, end)])
                continue
            skip = max(self._from_seq - seq, 0)
            if skip and (lines := chunk.count(b"\n")) <= skip:
                self.lines += lines
                self.offset += cut + 1
                continue
            start = len(chunk) - len(chunk.split(b"\n", skip)[-1]) if skip else 0
            block = Block(seq + skip, joined=memoryview(chunk)[start:cut])
            self.lines += skip + block.count
            self.offset += cut + 1
            return block
        return None

    def _tail(self, seq: int) -> Block | None:
        if self._tail_given or seq < self._from_seq:
            return None
        self._tail_given = True
        record = parse_unterminated(self._log.fd, self.offset, self._log.size)
        return None if record is None else Block(seq, [record])


class BackwardReader:
    """Blocks from the end, or from just before a line, to the beginning."""

    def __init__(self, log: LogSnapshot, before_seq: int | None, hint: Position | None = None) -> None:
        self.path = log.path
        self._log = log
        self._window = _FIRST_READ_BACK
        self._tail: Block | None = None
        self._end, self._lines = START
        if before_seq is not None and before_seq <= 1:
            return
        if before_seq is not None:
            position = _skip_lines(log.fd, before_seq - 1, log.size)
            if position.lines == before_seq - 1:
                self._end, self._lines = position
                return
        self._end = last_newline(log.fd, log.size)
        is_valid = hint is not None and 0 < hint.offset <= self._end and os.pread(log.fd, 1, hint.offset - 1) == b"\n"
        self._lines = count_lines(log.fd, hint if hint is not None and is_valid else START, self._end)
        record = parse_unterminated(log.fd, self._end, log.size)
        if record is not None and (before_seq is None or before_seq > self._lines + 1):
            self._tail = Block(self._lines + 1, [record])

    @property
    def is_quick(self) -> bool:
        """Whether little is left to be read, or the next block is short."""
        return self._tail is not None or min(self._end, self._window) < IN_LOOP

    def next_block(self) -> Block | None:
        if self._tail is not None:
            tail, self._tail = self._tail, None
            return tail
        if self._end <= 0:
            return None
        log, end = self._log, self._end
        start = max(end - self._window, 0)
        chunk = os.pread(log.fd, end - start, start)
        if len(chunk) < end - start:
            return None  # the file was cut while it was read
        self._window = min(self._window * 4, READ_SIZE)
        first = chunk.find(b"\n") + 1 if start else 0
        if first == len(chunk):
            self._end = last_newline(log.fd, end - 1)
            self._lines -= 1
            return Block(self._lines + 1, [log.long_line(self._end, end - 1)])
        self._end = start + first
        block = Block(0, joined=memoryview(chunk)[first : len(chunk) - 1])
        self._lines -= block.count
        block.first_seq = self._lines + 1
        return block


async def next_block(reader: ForwardReader | BackwardReader) -> Block | None:
    """Return the next block, read in a thread unless that is quick."""
    try:
        if reader.is_quick:
            return reader.next_block()
        return await asyncio.to_thread(reader.next_block)
    except OSError as error:
        raise read_error(reader.path, error) from error


def _next_newline(fd: int, offset: int, end: int) -> int | None:
    while offset < end and (chunk := os.pread(fd, min(READ_SIZE, end - offset), offset)):
        found = chunk.find(b"\n")
        if found >= 0:
            return offset + found
        offset += len(chunk)
    return None


def _skip_lines(fd: int, lines: int, end: int) -> Position:
    """Return the position after so many lines, or the last one there is."""
    position = START
    while position.lines < lines:
        chunk = os.pread(fd, max(min(READ_SIZE, end - position.offset), 0), position.offset)
        found = chunk.count(b"\n")
        if not chunk:
            break
        if found == 0:
            following = _next_newline(fd, position.offset + len(chunk), end)
            if following is None:
                break
            position = Position(following + 1, position.lines + 1)
            continue
        wanted = min(found, lines - position.lines)
        rest = chunk.split(b"\n", wanted)[-1]
        position = Position(position.offset + len(chunk) - len(rest), position.lines + wanted)
    return position


def end_of_record(log: LogSnapshot, seq: int) -> tuple[int, bool] | None:
    """Return the offset at which a record ends and whether it has its newline, or None if the log is shorter."""
    position = _skip_lines(log.fd, seq, log.size)
    if position.lines == seq:
        return position.offset, True
    record = parse_unterminated(log.fd, position.offset, log.size) if position.lines == seq - 1 else None
    return None if record is None else (position.offset + len(record), False)


def last_newline(fd: int, size: int, known: int = 0) -> int:
    """Return where the last newline of the first `size` bytes ends; `known` is the end of a line before it."""
    while size > known:
        start = max(size - _STEP_BACK, known)
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


def committed_size(path: str, found: os.stat_result) -> int:
    """Return the size of the log without an incomplete batch."""
    if not found.st_mode & BATCH_BIT:
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
