"""A run's output: bounded for the result, and in pieces for a reader while the code runs."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Literal

from carrel.execution.executor import ExecutionResult, Output

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

    def is_cut(self) -> bool:
        """Whether something is left out."""
        return self.total > self._head_room + self._tail_room

    def text(self) -> str:
        return self.content().decode("utf-8", "replace") if self.total else ""

    def content(self) -> bytes:
        """The bytes, with a mark at the gap. No character of UTF-8 is cut in two there."""
        tail = b"".join(self._tail)
        if not self.is_cut():
            return bytes(self._head) + tail
        tail = tail[-self._tail_room :]
        head = bytes(self._head[: _last_boundary(self._head)])
        tail = tail[_first_boundary(tail) :]
        left_out = self.total - len(head) - len(tail)
        return head + f"\n[… {left_out:,} bytes left out …]\n".encode() + tail


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


MOST_PENDING = 4 * 1024 * 1024
"""Bytes that wait for a slow reader; beyond them the code waits when it writes."""


class Streaming:
    """Both streams of one run; `watch` switches the pipes on and off."""

    def __init__(self, limit: int) -> None:
        self.stdout = _Streamed(limit, "stdout", self)
        self.stderr = _Streamed(limit, "stderr", self)
        self.watch: Callable[[bool], None] = _nothing_to_watch
        self._pieces: deque[tuple[Output, int]] = deque()
        self._pending = 0
        self._came = asyncio.Event()

    def put(self, piece: Output, size: int) -> None:
        self._pieces.append((piece, size))
        self._pending += size
        self._came.set()
        if self._pending > MOST_PENDING:
            self.watch(False)

    def take(self) -> Output | None:
        if not self._pieces:
            self._came.clear()
            return None
        piece, size = self._pieces.popleft()
        if self._pending > MOST_PENDING >= self._pending - size:
            self.watch(True)
        self._pending -= size
        return piece

    async def wait(self) -> None:
        await self._came.wait()

    def finish(self) -> None:
        """What was waiting for the rest of a character comes out as it is."""
        self.stdout.finish()
        self.stderr.finish()
        self._came.set()


class _Streamed(BoundedOutput):
    def __init__(self, limit: int, name: Literal["stdout", "stderr"], to: Streaming) -> None:
        super().__init__(limit)
        self._name: Literal["stdout", "stderr"] = name
        self._to = to
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        super().add(data)
        self._give(self._decoder.decode(data), len(data))

    def finish(self) -> None:
        self._give(self._decoder.decode(b"", final=True), 0)

    def _give(self, text: str, size: int) -> None:
        if text:
            self._to.put(Output(self._name, text), size)


def _nothing_to_watch(on: bool) -> None:
    """The run has not begun."""


async def streamed(
    limit: int, run: Callable[[Streaming], Coroutine[Any, Any, ExecutionResult]]
) -> AsyncGenerator[Output | ExecutionResult]:
    """Run, and give out the pieces and then the result; a reader who leaves cancels the run."""
    streaming = Streaming(limit)
    task = asyncio.get_running_loop().create_task(run(streaming))
    task.add_done_callback(lambda _: streaming.finish())
    try:
        while True:
            piece = streaming.take()
            if piece is not None:
                yield piece
            elif task.done():
                break
            else:
                await streaming.wait()
        yield task.result()
    finally:
        streaming.watch(True)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
