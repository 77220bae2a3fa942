"""How many lines stand before which byte of a large log, so that nobody has to count it all."""

import bisect
import contextlib
import os
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from carrel.storage.file_objects import open_or_make
from carrel.storage.file_tree import hidden_beside

STEP = 1024 * 1024
"""The bytes between two marks; a smaller log has none."""

_RECORD = struct.Struct("<QQI")
_CHECKED_BYTES = 64
_CHUNK = 256 * 1024
FAR = 1 << 63
"""Behind the end of any log."""


class Mark(NamedTuple):
    """The first `offset` bytes of the log are `lines` whole lines."""

    offset: int
    lines: int


START = Mark(0, 0)


def pack_mark(mark: Mark, fd: int, inode: int) -> bytes:
    """As it is kept, with a check against this very file."""
    start = max(mark.offset - _CHECKED_BYTES, 0)
    check = zlib.crc32(os.pread(fd, mark.offset - start, start), zlib.crc32(b"%d %d %d" % (inode, *mark)))
    return _RECORD.pack(*mark, check)


class LineMarks:
    """The marks of one log, as they were found: derived, perhaps missing or wrong, and never believed unchecked."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self._count = len(packed) // _RECORD.size

    @classmethod
    def load(cls, path: str) -> "LineMarks":
        try:
            with open(hidden_beside(path, "mark"), "rb") as kept:
                return cls(kept.read())
        except OSError:
            return cls(b"")

    @property
    def intact(self) -> bool:
        return len(self.packed) % _RECORD.size == 0

    def _at(self, index: int) -> tuple[int, int, int]:
        offset, lines, check = _RECORD.unpack_from(self.packed, index * _RECORD.size)
        return offset, lines, check

    def before_offset(self, offset: int, fd: int, inode: int) -> Mark:
        """The last mark that is not after this byte."""
        return self._checked(bisect.bisect_right(range(self._count), offset, key=lambda i: self._at(i)[0]), fd, inode)

    def before_line(self, number: int, fd: int, inode: int) -> Mark:
        """The last mark that is not after the beginning of this line."""
        return self._checked(bisect.bisect_left(range(self._count), number, key=lambda i: self._at(i)[1]), fd, inode)

    def _checked(self, index: int, fd: int, inode: int) -> Mark:
        if index == 0 or not self.intact:
            return START
        offset, lines, _ = self._at(index - 1)
        mark = Mark(offset, lines)
        right = _RECORD.size * (index - 1)
        return mark if pack_mark(mark, fd, inode) == self.packed[right : right + _RECORD.size] else START


def keep_marks(path: str, fd: int, inode: int, marks: Sequence[Mark]) -> None:
    """Write down marks that come after those already kept. Derived as they are, a failure only leaves them out."""
    with contextlib.suppress(OSError):
        kept = open_or_make(hidden_beside(path, "mark"), os.O_RDWR | os.O_APPEND)
        try:
            size = os.fstat(kept).st_size
            last = LineMarks(os.pread(kept, _RECORD.size, max(size - _RECORD.size, 0))).before_offset(FAR, fd, inode)
            if last == START or size % _RECORD.size:
                os.ftruncate(kept, 0)
            os.write(kept, b"".join(pack_mark(mark, fd, inode) for mark in marks if mark.offset > last.offset))
        finally:
            os.close(kept)


def count_lines(fd: int, start: Mark, end: int) -> tuple[int, list[Mark]]:
    """The number of newlines in the first `end` bytes, counted from a mark on, and new marks for what was counted."""
    offset, lines = start
    marked, marks = start.offset, []
    while offset < end and (chunk := os.pread(fd, min(_CHUNK, end - offset), offset)):
        found = chunk.count(b"\n")
        if found:
            lines += found
            line_end = offset + chunk.rfind(b"\n") + 1
            if line_end - marked >= STEP:
                marked = line_end
                marks.append(Mark(line_end, lines))
        offset += len(chunk)
    return lines, marks
