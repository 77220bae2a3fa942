"""A run's output: read from pipes, bounded for the result, and in pieces for a reader while the code runs."""

from __future__ import annotations

import array
import asyncio
import codecs
import errno
import fcntl
import os
import resource
import stat
import termios
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

from carrel.execution.executor import ExecutionResult, Output
from carrel.processes import BoundedOutput

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


# --- pipes ----------------------------------------------------------------------------------------------------------

CAPACITY = 1 << 18
_MOST_AT_ONCE = 1 << 20
_MOST_DISCARDED = 64
_KEPT_FREE = 64

Sink = Callable[[bytes], None]


def refuse_the_last(descriptor: int) -> None:
    """Raise OSError where hardly any descriptors are left.

    A session takes eight; one that gets some of them and not all would die in the middle of a run. The limit itself is
    the program's own: it is never raised here."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and descriptor > limit - min(_KEPT_FREE, limit // 4):
        raise OSError(
            errno.EMFILE,
            f"this process has too many files open for another session, which takes eight; its limit is {limit}:"
            " raise the limit (ulimit -n), or close sessions",
        )


class OutputPipe:
    """One stream of a session; the write end goes to the session."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        # Refused when the user's share of pipe memory is used up; a pipe of the usual size does, slower.
        with suppress(PermissionError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, CAPACITY)
        self.sink: Sink | None = None
        self._watching = False
        self._closed = False
        self._waiting = array.array("i", [0])
        self.watch(True)

    def watch(self, on: bool) -> None:
        """Whether to take what comes; when not, the writer waits as soon as the pipe is full."""
        if on and not self._watching and not self._closed:
            self._loop.add_reader(self._read, self._readable)
        elif not on and self._watching:
            self._loop.remove_reader(self._read)
        self._watching = on and not self._closed

    def _readable(self) -> None:
        try:
            data = os.read(self._read, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        if not data:
            self.watch(False)
        elif self.sink is not None:
            self.sink(data)

    def drain(self) -> None:
        """Take what is in the pipe now, and no more: a program left in the background may write for ever."""
        if self._closed:
            return
        fcntl.ioctl(self._read, termios.FIONREAD, self._waiting)
        left = self._waiting[0]
        while left > 0:
            try:
                data = os.read(self._read, min(left, _MOST_AT_ONCE))
            except BlockingIOError:  # Code may open its own end for reading, and have taken it.
                return
            left -= len(data)
            if not data:
                return
            if self.sink is not None:
                self.sink(data)

    def handed_over(self) -> None:
        """The session has its write end now."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def give_up(self) -> int:
        """Give away the read end; this pipe is not used any more."""
        self.watch(False)
        self._closed = True
        self.handed_over()
        return self._read

    def close(self) -> None:
        if not self._closed:
            self.watch(False)
            self._closed = True
            self.handed_over()
            os.close(self._read)


class Discard:
    """Descriptors whose output is not wanted, read all the same so that no writer has to wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: list[int] = []

    def take(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            # Nothing but pipes: a device or a counter has something to read for ever, at no cost to who sent it.
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._readable, descriptor)
            self._open.append(descriptor)
        while len(self._open) > _MOST_DISCARDED:
            self._drop(self._open[0])

    def _readable(self, descriptor: int) -> None:
        try:
            ended = not os.read(descriptor, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in list(self._open):
            self._drop(descriptor)
