"""What a program writes, bounded: its beginning and its end are kept, and the gap says how much it left out."""

LIMIT = 10 * 1024 * 1024


class Bounded:
    """Takes bytes of any amount in flat memory."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._room = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        space = self._room - len(self._head)
        if space > 0:
            self._head += data[:space]
            data = data[space:]
        self._tail += data
        # Cut seldom: moving the tail for each piece would cost the square of what is written.
        if len(self._tail) > 2 * self._room:
            del self._tail[: -self._room]

    @property
    def left_out(self) -> int:
        """How many bytes are not kept."""
        return max(0, self.total - len(self._head) - self._room)

    @property
    def head(self) -> bytes:
        """All of it, or what came before the gap."""
        return bytes(self._head) if self.left_out else bytes(self._head + self._tail)

    @property
    def tail(self) -> bytes:
        """What came after the gap, where there is one."""
        return bytes(self._tail[-self._room :]) if self.left_out else b""

    def end(self, limit: int) -> tuple[bytes, bool]:
        """The last bytes, at most `limit` and half of what is kept; and whether there were others before them."""
        kept = self.tail or self.head
        return kept[-limit:], self.total > min(limit, len(kept))


def gap(left_out: int) -> bytes:
    """What stands in the place of what was not kept."""
    return f"\n[… {left_out:,} bytes left out …]\n".encode()


def last_lines(text: str, limit: int, *, cut: bool) -> str:
    """The last `limit` characters, from the beginning of a line where one begins there; `cut`: more stood before."""
    text = text.strip()
    if len(text) > limit:
        text, cut = text[-limit:], True
        text = text[text.find("\n") + 1 :]
    return f"…{text}" if cut else text
