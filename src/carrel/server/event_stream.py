"""Server-sent events: the output of commands and code as it is written, and the events of a session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent

from carrel.execution.executor import ExecutionResult, Output
from carrel.server.hosted_session import HostedSession
from carrel.server.session_manager import SessionManager
from carrel.text import json_bytes
from carrel.wire.answers import Interaction, RunResult, RunUsageRecord, repr_of
from carrel.wire.requests import RunCode
from carrel.wire.verification import Job

_MAX_WAITING = 4 * 1024 * 1024
"""Characters that wait for a slow reader; further output is left out of the stream, and the stream says so."""
_MAX_SHOWN = 64 * 1024
"""Characters of a command's output in an event of a session."""


def event(kind: str, data: BaseModel | dict[str, Any], seq: int | None = None) -> ServerSentEvent:
    """Return an event with JSON data."""
    text = data.model_dump_json() if isinstance(data, BaseModel) else json_bytes(data).decode()
    return ServerSentEvent(data=text, event=kind, id=str(seq) if seq is not None else None, sep="\n")


def stream(events: AsyncIterator[ServerSentEvent]) -> EventSourceResponse:
    """Return an answer that sends these events."""
    return EventSourceResponse(events, sep="\n")


class OutputQueue:
    """Holds the output of a command for a reader that may be slower than the command."""

    def __init__(self) -> None:
        self._waiting: deque[Output] = deque()
        self._size = 0
        self._left_out = 0
        self.arrived = asyncio.Event()

    def put(self, piece: Output) -> None:
        if self._size > _MAX_WAITING:
            self._left_out += len(piece.text)
            return
        self._waiting.append(piece)
        self._size += len(piece.text)
        self.arrived.set()

    def take(self) -> Output | None:
        """Return the next piece, or None if none is waiting."""
        if self._waiting:
            piece = self._waiting.popleft()
            self._size -= len(piece.text)
            return piece
        self.arrived.clear()
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            return Output("stderr", f"\n[… {left_out:,} characters left out: they came too fast to be sent …]\n")
        return None


def command_stream(
    manager: SessionManager, user: str, interaction: Interaction, output: OutputQueue
) -> EventSourceResponse:
    """Send `begun`, `output` as it is written, and `done` at the end. The command continues when the reader leaves."""

    async def events() -> AsyncIterator[ServerSentEvent]:
        yield event("begun", interaction)
        work = manager.wait(user, interaction.session_id, Interaction, interaction.interaction_id, float("inf"))
        ended = asyncio.ensure_future(work)
        try:
            while True:
                while (piece := output.take()) is not None:
                    yield event("output", {"stream": piece.stream, "text": piece.text})
                if ended.done():
                    break
                more = asyncio.ensure_future(output.arrived.wait())
                await asyncio.wait({ended, more}, return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
            yield event("done", ended.result())
        finally:
            ended.cancel()

    return stream(events())


def run_stream(hosted: HostedSession, request: RunCode) -> EventSourceResponse:
    """Send `output` as it is written, and `result` at the end. The code is stopped when the reader leaves."""
    session = hosted.workspace().session

    async def events() -> AsyncIterator[ServerSentEvent]:
        async with aclosing(session.stream(request.code, request.timeout)) as pieces:
            async for piece in pieces:
                if isinstance(piece, ExecutionResult):
                    await hosted.note_run(request.code, piece)
                    yield event("result", run_record(piece))
                else:
                    yield event("output", {"stream": piece.stream, "text": piece.text})

    return stream(events())


def run_record(result: ExecutionResult) -> RunResult:
    """Return the result of a run as an answer."""
    fields = {name: getattr(result, name) for name in RunResult.model_fields if hasattr(result, name)}
    usage = RunUsageRecord(cpu_seconds=result.usage.cpu_seconds, max_rss_bytes=result.usage.max_rss_bytes)
    return RunResult(**{**fields, "usage": usage, "value_repr": repr_of(result.value)})


def session_stream(
    manager: SessionManager, session_id: str, from_seq: int, *, follow: bool, hide_tests: bool
) -> EventSourceResponse:
    """Send the events of a session from a number on; ends with the session.

    `hide_tests` leaves out of verdicts what an agent may not see."""

    async def events() -> AsyncIterator[ServerSentEvent]:
        record = await manager.records.get_session(session_id)
        is_followed = follow and record is not None and record.is_live
        async with aclosing(manager.records.events(session_id, from_seq, follow=is_followed)) as lines:
            async for seq, data in lines:
                kind = str(data.pop("type", "other"))
                if hide_tests and kind == "job":
                    try:
                        data = Job.model_validate(data).without_tests().model_dump(mode="json")
                    except ValueError:
                        continue  # A damaged line: it is not known what it would reveal.
                for name in ("stdout", "stderr"):
                    if isinstance(text := data.get(name), str) and len(text) > _MAX_SHOWN:
                        data[name] = f"[… {len(text) - _MAX_SHOWN:,} characters left out …]\n{text[-_MAX_SHOWN:]}"
                yield event(kind, data, seq)
                if is_followed and kind == "session" and data.get("status") not in ("creating", "ready"):
                    return

    return stream(events())
