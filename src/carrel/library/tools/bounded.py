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

    def data(self) -> bytes:
        """What was kept, the gap marked."""
        if not self.left_out:
            return bytes(self._head + self._tail)
        return (
            bytes(self._head)
            + f"\n[… {self.left_out:,} bytes left out …]\n".encode()
            + bytes(self._tail[-self._room :])
        )

    def text(self) -> str:
        return self.data().decode("utf-8", "replace")

    def end(self, limit: int) -> str:
        """The last `limit` bytes as text, from the beginning of a line where one begins there."""
        kept = self.data().strip()
        if len(kept) <= limit:
            return kept.decode("utf-8", "replace")
        cut = kept[-limit:]
        return "…" + cut[cut.find(b"\n") + 1 :].decode("utf-8", "replace")
