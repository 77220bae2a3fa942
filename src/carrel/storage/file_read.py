"""Reading a log's file in blocks of whole lines, from a sequence number on or from the end; never writing."""

import asyncio
import os
import threading
from collections.abc import Sequence

from carrel.storage.file_tail import believed_size, lines_end, whole_record
from carrel.storage.file_tree import FileTree, OpenFile, read_failed
from carrel.storage.line_marks import FAR, START, STEP, LineMarks, Mark, count_lines, pack_mark
from carrel.storage.seam import MAX_RECORD, Block

READ = 1024 * 1024
"""What is read from the file at once."""
BLOCK = 256 * 1024
"""What is given out at once: so little that it is still in the processor's cache when it is parsed."""
DIRECT = 256 * 1024
"""What is read at once in the event loop's own thread."""

_PROBED = 128 * 1024
"""How far apart the kernel is asked whether it has a byte in memory."""

_FIRST_BLOCK_BACK = 64 * 1024
_FAR_BEHIND = 4 * STEP
_APART = STEP // 4
_EXCERPT = 1024
"""What is given of a line that is longer than any record may be."""


class LogView:
    """A log as it is at the moment it is opened."""

    def __init__(self, path: str, file: OpenFile, found: os.stat_result) -> None:
        self.path = path
        self.inode = found.st_ino
        self.size = believed_size(path, found)
        self.whole = found.st_size
        self._file = file

    @classmethod
    def open(cls, tree: FileTree, key: str) -> "LogView | None":
        opened = tree.open(key)
        return cls(tree.path(key), *opened) if opened else None

    def again(self) -> "LogView":
        """The same file as it is now."""
        return LogView(self.path, self._file, os.fstat(self.fd))

    @property
    def fd(self) -> int:
        return self._file.fd

    def marks(self) -> LineMarks:
        return LineMarks.load(self.path) if self.size > STEP else LineMarks(b"")

    def torn(self) -> bytes:
        """What comes after the last whole record."""
        if self.whole > self.size:
            return self._bytes(self.size, self.whole)
        end = lines_end(self.fd, self.size)
        return b"" if whole_record(self.fd, end, self.size) is not None else self._bytes(end, self.size)

    def record(self, start: int, end: int) -> bytes:
        """A line that is longer than a block; only its beginning when it is too long to be a record."""
        return self._bytes(start, end if end - start <= MAX_RECORD else start + _EXCERPT)

    def _bytes(self, start: int, end: int) -> bytes:
        data = os.pread(self.fd, end - start, start)
        while start + len(data) < end and (more := os.pread(self.fd, end - start - len(data), start + len(data))):
            data += more
        return data


class Forward:
    """Blocks from a sequence number on; where it has come to can be asked."""

    def __init__(self, view: LogView, from_seq: int, mark: Mark = START) -> None:
        self.offset, self.lines = mark
        self.path = view.path
        self._view = view
        self._from_seq = from_seq
        self._tail_given = False
        self._held = b""
        self._given = 0

    @classmethod
    def from_line(cls, view: LogView, from_seq: int, counted: "Counted | None" = None) -> "Forward":
        mark = START
        if from_seq > 1:
            marks = view.marks() if counted is None else counted.marks(view)
            mark = marks.before_line(from_seq, view.fd, view.inode)
        return cls(view, from_seq, mark if mark.offset <= view.size else START)

    @property
    def at_hand(self) -> bool:
        """Whether the next block needs no waiting for the disk."""
        return bool(self._held) or self._view.size - self.offset <= DIRECT

    def is_cached(self) -> bool:
        """Whether the kernel seems to have the next one in memory."""
        return _is_cached(self._view.fd, self.offset, min(self._view.size, self.offset + READ))

    def next_block(self) -> Block | None:
        if self._held:
            return self._next_held()
        view, fd = self._view, self._view.fd
        while self.offset < view.size:
            chunk = os.pread(fd, min(READ, view.size - self.offset), self.offset)
            cut = chunk.rfind(b"\n")
            seq = self.lines + 1
            if cut < 0:
                end = _newline_after(fd, self.offset + len(chunk), view.size)
                if end is None:
                    return self._tail(seq)
                start, self.offset = self.offset, end + 1
                self.lines += 1
                if seq >= self._from_seq:
                    return Block(seq, [view.record(start, end)])
                continue
            skip = max(self._from_seq - seq, 0)
            if skip and (lines := chunk.count(b"\n")) <= skip:
                self.lines += lines
                self.offset += cut + 1
                continue
            start = len(chunk) - len(chunk.split(b"\n", skip)[-1]) if skip else 0
            self.lines += skip
            self.offset += start
            self._held, self._given = chunk[start : cut + 1], 0
            return self._next_held()
        return None

    def _next_held(self) -> Block:
        held, start = self._held, self._given
        end = held.rfind(b"\n", start, start + BLOCK)
        if end < 0:
            end = held.index(b"\n", start)
        block = Block(self.lines + 1, joined=memoryview(held)[start:end])
        self.lines += block.count
        self.offset += end + 1 - start
        self._given = end + 1
        if self._given == len(held):
            self._held = b""
        return block

    def _tail(self, seq: int) -> Block | None:
        if self._tail_given or seq < self._from_seq:
            return None
        self._tail_given = True
        record = whole_record(self._view.fd, self.offset, self._view.size)
        return None if record is None else Block(seq, [record])


class Backward:
    """Blocks from the end, or from just before a line, to the beginning."""

    def __init__(self, view: LogView, before_seq: int | None, counted: "Counted") -> None:
        self.path = view.path
        self._view = view
        self._window = _FIRST_BLOCK_BACK
        self._tail: Block | None = None
        self._held = b""
        self._held_start = self._held_end = 0
        self._end, self._lines = START
        if before_seq is not None and before_seq <= 1:
            return
        marks = counted.marks(view)
        if before_seq is not None:
            mark = marks.before_line(before_seq, view.fd, view.inode)
            place = _skip_lines(view.fd, mark, before_seq - 1, view.size)
            if place.lines == before_seq - 1:
                self._end, self._lines = place
                return
        self._end = lines_end(view.fd, view.size)
        start = marks.before_offset(self._end, view.fd, view.inode)
        self._lines, found = count_lines(view.fd, start, self._end)
        counted.keep(view, [*found, Mark(self._end, self._lines)])
        record = whole_record(view.fd, self._end, view.size)
        if record is not None and (before_seq is None or before_seq > self._lines + 1):
            self._tail = Block(self._lines + 1, [record])

    def next_block(self) -> Block | None:
        if self._tail is not None:
            tail, self._tail = self._tail, None
            return tail
        if self._held_end:
            return self._next_held()
        if self._end <= 0:
            return None
        view, end = self._view, self._end
        start = max(end - self._window, 0)
        chunk = os.pread(view.fd, end - start, start)
        if len(chunk) < end - start:
            return None  # cut by somebody while we read
        self._window = min(self._window * 4, READ)
        first = chunk.find(b"\n") + 1 if start else 0
        if first == len(chunk):
            self._end = lines_end(view.fd, end - 1)
            self._lines -= 1
            return Block(self._lines + 1, [view.record(self._end, end - 1)])
        self._end = start + first
        self._held, self._held_start, self._held_end = chunk, first, len(chunk)
        return self._next_held()

    def _next_held(self) -> Block:
        held, first, end = self._held, self._held_start, self._held_end - 1
        start = first
        if end - first > BLOCK:
            start = held.find(b"\n", end - BLOCK, end) + 1 or held.rfind(b"\n", first, end) + 1 or first
        self._held_end = start
        if start == first:
            self._held, self._held_end = b"", 0
        block = Block(0, joined=memoryview(held)[start:end])
        self._lines -= block.count
        block.first_seq = self._lines + 1
        return block

    @property
    def at_hand(self) -> bool:
        """Whether the next block needs no waiting for the disk."""
        return self._held_end > 0 or self._end <= DIRECT

    def is_cached(self) -> bool:
        """Whether the kernel seems to have the next one in memory."""
        return _is_cached(self._view.fd, max(self._end - self._window, 0), self._end)


async def next_block(blocks: Forward | Backward) -> Block | None:
    """The next one: at once when little is left to read or the kernel has it in memory, else from a thread."""
    try:
        if not blocks.at_hand:
            if not blocks.is_cached():
                return await asyncio.to_thread(blocks.next_block)
            await asyncio.sleep(0)  # a long log must not keep the loop from its other tasks
        return blocks.next_block()
    except OSError as error:
        raise read_failed(blocks.path, error) from error


def _is_cached(fd: int, start: int, end: int) -> bool:
    byte = [bytearray(1)]
    try:
        return all(os.preadv(fd, byte, at, os.RWF_NOWAIT) for at in (*range(start, end, _PROBED), end - 1))
    except OSError:
        return False  # it is not, or this file system does not tell


class Counted:
    """Marks of large logs that were counted here, because nobody had written any down."""

    _MOST = 256

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        self._guard = threading.Lock()
        self._counting = threading.Lock()

    def marks(self, view: LogView) -> LineMarks:
        """Those written down, or where they end far from the log's end those counted here."""
        written = view.marks()
        if view.path not in self._packed or _is_marked(view, written):
            return written
        return LineMarks(self._packed.get(view.path, b""))

    def keep(self, view: LogView, marks: Sequence[Mark]) -> None:
        """Remember what was counted behind the marks that there were."""
        written = view.marks()
        if _is_marked(view, written):
            return
        with self._guard:
            for known in (LineMarks(self._packed.pop(view.path, b"")), written, LineMarks(b"")):
                last = known.before_offset(FAR, view.fd, view.inode)
                if last != START:
                    break
            packed = known.packed
            for mark in marks:
                if mark.offset - last.offset >= _APART:
                    packed, last = packed + pack_mark(mark, view.fd, view.inode), mark
            while len(self._packed) >= self._MOST:
                self._packed.pop(next(iter(self._packed)))
            self._packed[view.path] = packed

    def is_marked(self, view: LogView) -> bool:
        """Whether no line lies far behind a mark."""
        return _is_marked(view, self.marks(view))

    def mark(self, view: LogView) -> None:
        """Count what nobody has; those who come meanwhile wait for it and need not."""
        with self._counting:
            if not self.is_marked(view):
                start = self.marks(view).before_offset(view.size, view.fd, view.inode)
                self.keep(view, count_lines(view.fd, start, view.size)[1])


def _is_marked(view: LogView, marks: LineMarks) -> bool:
    if view.size <= _FAR_BEHIND:
        return True
    return view.size - marks.before_offset(view.size, view.fd, view.inode).offset <= _FAR_BEHIND


def _newline_after(fd: int, offset: int, end: int) -> int | None:
    while offset < end and (chunk := os.pread(fd, min(READ, end - offset), offset)):
        found = chunk.find(b"\n")
        if found >= 0:
            return offset + found
        offset += len(chunk)
    return None


def _skip_lines(fd: int, place: Mark, lines: int, end: int) -> Mark:
    """The place after so many lines, or the last one there is."""
    while place.lines < lines and (chunk := os.pread(fd, max(min(READ, end - place.offset), 0), place.offset)):
        found = chunk.count(b"\n")
        if found == 0:
            following = _newline_after(fd, place.offset + len(chunk), end)
            if following is None:
                break
            place = Mark(following + 1, place.lines + 1)
            continue
        wanted = min(found, lines - place.lines)
        rest = chunk.split(b"\n", wanted)[-1]
        place = Mark(place.offset + len(chunk) - len(rest), place.lines + wanted)
    return place
