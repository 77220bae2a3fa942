"""A run's output as it comes: pieces for the reader, while the whole is kept for the result."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Literal

from carrel.execution.bounded_output import BoundedOutput
from carrel.execution.executor import ExecutionResult, Output

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
