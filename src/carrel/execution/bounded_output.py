"""A stream's output, bounded: its beginning and its end are kept, and the gap says how much it left out."""

from __future__ import annotations

from collections import deque

LIMIT = 10 * 1024 * 1024


class BoundedOutput:
    """Takes bytes of any amount in flat memory, and gives a text of at most about `limit` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._head_room = max(limit // 2, 1)
        self._tail_room = max(limit - self._head_room, 1)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        # Whole pieces are dropped while the rest fills the room; the last cut is made when the text is wanted.
        while self._tail_size - len(self._tail[0]) >= self._tail_room:
            self._tail_size -= len(self._tail.popleft())

    def text(self) -> str:
        if not self.total:
            return ""
        tail = b"".join(self._tail)
        if len(self._head) + len(tail) == self.total and len(tail) <= self._tail_room:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        tail = tail[-self._tail_room :]
        head = bytes(self._head[: _last_boundary(self._head)])
        tail = tail[_first_boundary(tail) :]
        left_out = self.total - len(head) - len(tail)
        mark = f"\n[… {left_out:,} bytes left out …]\n"
        return head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")


def _first_boundary(data: bytes) -> int:
    """Where the first whole character of UTF-8 begins."""
    for number, byte in enumerate(data[:4]):
        if byte & 0xC0 != 0x80:
            return number
    return 0


def _last_boundary(data: bytearray) -> int:
    """Where the last whole character of UTF-8 ends."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) if length <= back else len(data) - back
    return len(data)
