"""Server-sent events: what happens, as it happens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import orjson
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from carrel.execution.executor import ExecutionResult, Output
from carrel.server.ledger import Ledger
from carrel.server.live_task import LiveTask
from carrel.wire.answers import RunResult, RunUsage, repr_of
from carrel.wire.requests import RunCode, RunCommand
from carrel.wire.verification import Job

KEEP_ALIVE = 15.0
"""Seconds of silence after which a comment is sent, so that nobody between takes the line for dead."""
MOST_PENDING = 4 * 1024 * 1024
"""Characters that wait for a slow reader; what comes beyond them is left out, and told as such."""
_SHOWN = 64 * 1024
"""Characters of a command's output in an event."""


def sent_event(kind: str, data: BaseModel | dict[str, Any], seq: int | None = None) -> bytes:
    body = data.model_dump_json().encode() if isinstance(data, BaseModel) else orjson.dumps(data)
    number = f"id: {seq}\n".encode() if seq is not None else b""
    return b"%sevent: %s\ndata: %s\n\n" % (number, kind.encode(), body)


def streamed(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(_alive(events), media_type="text/event-stream", headers=headers)


async def _alive(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same with a sign of life where nothing happens for long."""
    coming: asyncio.Task[bytes] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait({coming}, timeout=KEEP_ALIVE)
            if not done:
                yield b": keep-alive\n\n"
                continue
            piece, coming = coming.result(), None
            if not piece:
                return
            yield piece
    finally:
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError):
                await coming
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events, b"")


class _Pieces:
    """Between a command that writes and a reader that may be slow."""

    def __init__(self) -> None:
        self._waiting: deque[Output] = deque()
        self._size = 0
        self._left_out = 0
        self.came = asyncio.Event()

    def put(self, piece: Output) -> None:
        if self._size > MOST_PENDING:
            self._left_out += len(piece.text)
            return
        self._waiting.append(piece)
        self._size += len(piece.text)
        self.came.set()

    def take(self) -> Output | None:
        if self._waiting:
            piece = self._waiting.popleft()
            self._size -= len(piece.text)
            return piece
        self.came.clear()
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            return Output("stderr", f"\n[… {left_out:,} characters left out: they came too fast to be sent …]\n")
        return None


async def command_stream(task: LiveTask, asked: RunCommand, once: str | None = None) -> StreamingResponse:
    """`output` as it is written, then `done` with the interaction. The command goes on when the reader leaves."""
    pieces = _Pieces()
    interaction = await task.begin_command(asked, pieces.put, once)

    async def events() -> AsyncIterator[bytes]:
        yield sent_event("begun", interaction)
        ended = asyncio.ensure_future(task.interaction(interaction.interaction_id, None))
        try:
            while True:
                while (piece := pieces.take()) is not None:
                    yield sent_event("output", {"stream": piece.stream, "text": piece.text})
                if ended.done():
                    break
                more = asyncio.ensure_future(pieces.came.wait())
                await asyncio.wait({ended, more}, return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
            yield sent_event("done", ended.result())
        finally:
            ended.cancel()

    return streamed(events())


def run_stream(task: LiveTask, asked: RunCode) -> StreamingResponse:
    """`output` as it is written, then `result`. The code is stopped when the reader leaves."""
    code = task.opened.code

    async def events() -> AsyncIterator[bytes]:
        pieces = code.stream(asked.code, asked.timeout)
        try:
            async for piece in pieces:
                if isinstance(piece, ExecutionResult):
                    await task.note_run(asked.code, piece)
                    yield sent_event("result", run_record(piece))
                else:
                    yield sent_event("output", {"stream": piece.stream, "text": piece.text})
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    return streamed(events())


def run_record(result: ExecutionResult) -> RunResult:
    """The result of a run as an answer."""
    fields = {name: getattr(result, name) for name in RunResult.model_fields if hasattr(result, name)}
    usage = RunUsage(cpu_seconds=result.usage.cpu_seconds, max_rss_bytes=result.usage.max_rss_bytes)
    return RunResult(**{**fields, "usage": usage, "value_repr": repr_of(result.value)})


def happenings(
    ledger: Ledger, session_id: str, from_seq: int, follow: bool, *, hide_tests: bool = False
) -> StreamingResponse:
    """Everything noted of a session from a number on; ends with the session."""

    async def events() -> AsyncIterator[bytes]:
        over = not follow or ledger.sessions[session_id].status not in ("creating", "ready")
        lines = ledger.entries(session_id, from_seq) if over else ledger.watch(session_id, from_seq)
        async for seq, entry in lines:
            kind = str(entry.pop("type", "other"))
            if hide_tests and kind == "job":
                try:
                    entry = Job.model_validate(entry).without_tests().model_dump(mode="json")
                except ValueError:
                    continue  # a damaged line: what is in it is not known
            for stream in ("stdout", "stderr"):
                if isinstance(text := entry.get(stream), str) and len(text) > _SHOWN:
                    entry[stream] = f"[… {len(text) - _SHOWN:,} characters left out …]\n{text[-_SHOWN:]}"
            yield sent_event(kind, entry, seq)
            if not over and kind == "session" and entry.get("status") not in ("creating", "ready"):
                return

    return streamed(events())
