"""Steps of a session (runs, calls, commands, installs) as lines of `trace.jsonl` and as OpenTelemetry spans."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, Protocol, TypeVar

import orjson

from carrel.errors import CarrelError
from carrel.guest.worker.values import safe_repr
from carrel.request_id import current_request
from carrel.storage.base import Store

logger = logging.getLogger(__name__)

Kind = Literal[
    "run",
    "tool",
    "workflow",
    "command",
    "install",
    "uninstall",
    "checkpoint",
    "rewind",
    "verify",
    "resume",
    "pause",
    "close",
]
Outcome = Literal["ok", "error", "timeout", "cancelled"]
Item = TypeVar("Item")
_MAX_TEXT = 500
"""Characters kept of a name or an error."""
_WRITE_DELAY = 0.05
"""Seconds that lines wait to be written together with others."""


@dataclass(slots=True)
class Step:
    """Something a session did; `outcome` is None until it has ended."""

    kind: Kind
    name: str
    parent: Step | None = None
    """The run that made this call."""
    message: str | None = None
    """The id of the conversation's last message when the step started."""
    request: str | None = None
    """The id of the HTTP request that caused the step."""
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    duration: float = 0.0
    outcome: Outcome | None = None
    error_type: str | None = None
    error: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes or characters of inputs and outputs, by name."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further fields of the line."""

    def mark_failed(self, error_type: str, text: str) -> None:
        self.outcome = "timeout" if error_type in ("Timeout", "ToolTimeoutError", "TimeoutError") else "error"
        self.error_type, self.error = error_type, text

    def mark_raised(self, problem: BaseException) -> None:
        """Set the outcome from an exception that ended the step."""
        if isinstance(problem, asyncio.CancelledError | GeneratorExit):
            self.outcome = "cancelled"
        else:
            self.mark_failed(type(problem).__name__, str(problem))


class StepListener(Protocol):
    """Is called at the start and the end of each step. Neither method waits or raises."""

    def on_start(self, step: Step) -> None: ...

    def on_end(self, step: Step) -> None: ...


class StepRecorder:
    """Creates the steps of one session and reports them to listeners.

    A session runs code in one run at a time; the calls that code makes have that run as their parent."""

    def __init__(
        self,
        listeners: Sequence[StepListener],
        *,
        last_message: Callable[[], str | None] = lambda: None,
        redact: Callable[[str], str] = str,
    ) -> None:
        """`last_message` returns the id of the conversation's last message; `redact` removes secrets from a text."""
        self._listeners = listeners
        self._last_message = last_message
        self._redact = redact
        self.running: Step | None = None
        self._workflows: dict[str, list[Step]] = {}
        """The workflows that have started and not ended, by name."""

    def start(self, kind: Kind, name: str, parent: Step | None = None) -> Step:
        text = name if isinstance(name, str) else safe_repr(name, _MAX_TEXT)
        # Redact before cutting: half a secret would not be recognized.
        # A call is answered in a task of the connection, which knows no request; the run that it belongs to does.
        request = parent.request if parent is not None else current_request.get()
        step = Step(kind, self._redact(_to_utf8(text))[:_MAX_TEXT], parent, self._last_message(), request)
        for listener in self._listeners:
            listener.on_start(step)
        return step

    def end(self, step: Step) -> None:
        step.duration = time.perf_counter() - step.started
        step.outcome = step.outcome or "ok"
        if step.error is not None:
            step.error = self._redact(_to_utf8(step.error))[-_MAX_TEXT:]
        for listener in self._listeners:
            listener.on_end(step)

    @contextmanager
    def step(self, kind: Kind, name: str, parent: Step | None = None) -> Iterator[Step]:
        """Record the block as a step; an exception becomes its outcome and is raised again."""
        step = self.start(kind, name, parent)
        try:
            yield step
        except BaseException as problem:
            step.mark_raised(problem)
            raise
        finally:
            self.end(step)

    @contextmanager
    def run(self, code: str) -> Iterator[Step]:
        """Record a run of code; calls that the code makes meanwhile belong to it."""
        first_line = code.strip().partition("\n")[0] if isinstance(code, str) else type(code).__name__
        step = self.running = self.start("run", first_line)
        try:
            yield step
        except BaseException as problem:
            step.mark_raised(problem)
            raise
        finally:
            self.running = None
            self._end_workflows(step)
            self.end(step)

    def _end_workflows(self, run: Step) -> None:
        """End the workflows that have not reported their end: the run was killed, timed out or abandoned them."""
        for step in (step for steps in self._workflows.values() for step in steps):
            if run.error is not None:
                step.mark_failed(run.error_type or "Error", run.error)
            else:
                step.outcome = "cancelled"
            self.end(step)
        self._workflows.clear()

    async def install(
        self, kind: Kind, what: str, work: Awaitable[dict[str, Any]], parent: Step | None = None
    ) -> dict[str, Any]:
        """Record the installation or removal of packages and return its report."""
        with self.step(kind, what, parent) as step:
            report = await work
            step.facts |= {name: value for name, value in report.items() if isinstance(value, list) and value}
            if report.get("failed"):
                step.mark_failed("DependencyError", str(report.get("message", "")))
            return report

    def start_workflow(self, name: str) -> None:
        self._workflows.setdefault(name, []).append(self.start("workflow", name, self.running))

    def end_workflow(self, name: str, error: Any = None) -> None:
        if not self._workflows.get(name):
            return
        step = self._workflows[name].pop()
        if error:
            step.mark_failed("WorkflowExecutionError", str(error))
        self.end(step)


def note_sizes(step: Step, arguments: Any, value: Any) -> Any:
    """Note the sizes of a call's arguments and result, and return the result."""
    step.sizes |= {"arguments": data_size(arguments), "result": data_size(value)}
    return value


def data_size(value: Any) -> int:
    """Return about how many bytes a value of plain data has."""
    if isinstance(value, str | bytes):
        return len(value)
    try:
        return len(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))
    except (TypeError, ValueError):
        return len(safe_repr(value))


class LogWriter(Generic[Item]):
    """Writes lines to a log, in order and shortly after they were added, so that no caller waits for the disk."""

    def __init__(self, store: Store, key: str, encode: Callable[[list[Item]], Awaitable[list[bytes]]]) -> None:
        self._store = store
        self.key = key
        self._encode = encode
        self._items: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def add(self, item: Item) -> None:
        self._items.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WRITE_DELAY, self._start_writing)

    def _start_writing(self) -> None:
        self._timer = None
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        while self._items:
            items, self._items = self._items, []
            try:
                await self._store.append(self.key, await self._encode(items))
            except (CarrelError, OSError, KeyError) as problem:
                # A full disk must not end the session, whose work goes on.
                logger.warning("%d lines of %s could not be written: %s", len(items), self.key, problem)

    async def flush(self) -> None:
        """Write the lines that were added so far."""
        if self._timer is not None:
            self._timer.cancel()
        self._start_writing()
        if self._writing is not None:
            await asyncio.shield(self._writing)


class TraceLog(LogWriter[Step]):
    """Writes the steps that have ended."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store, key, _lines)

    def on_start(self, step: Step) -> None:
        """Do nothing: a line is written when the outcome is known."""

    def on_end(self, step: Step) -> None:
        self.add(step)

    async def read(self, from_seq: int = 1) -> AsyncIterator[dict[str, Any]]:
        """Yield the written lines, oldest first."""
        async for block in self._store.read(self.key, from_seq):
            for seq, record in enumerate(block.records, block.first_seq):
                try:
                    line = orjson.loads(record)
                except ValueError as problem:
                    logger.warning("line %d of %s cannot be read: %s", seq, self.key, problem)
                    continue
                yield line


async def _lines(steps: list[Step]) -> list[bytes]:
    return [_line(step) for step in steps]


def _line(step: Step) -> bytes:
    """Return a step as a line; empty fields are left out."""
    line: dict[str, Any] = {
        "id": step.id,
        "kind": step.kind,
        "name": step.name,
        "started_at": datetime.fromtimestamp(step.started_at, UTC),
        "duration": round(step.duration, 6),
        "outcome": step.outcome,
    }
    if step.parent is not None:
        line["parent"] = step.parent.id
    for name in ("message", "request", "error_type", "error", "sizes"):
        if value := getattr(step, name):
            line[name] = value
    line.update(step.facts)
    try:
        return orjson.dumps(line, default=str)
    except TypeError:
        # Facts may come from inside the sandbox: an int of more than 64 bits, a text that is not valid Unicode.
        texts = {name: _to_utf8(safe_repr(value, _MAX_TEXT)) for name, value in step.facts.items()}
        return orjson.dumps(line | texts, default=str)


def _to_utf8(text: str) -> str:
    """Replace lone surrogates, which JSON does not allow."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class OtelExporter:
    """Creates an OpenTelemetry span for each step, named by the conventions for generative AI.

    The parent of a span is that of its step's parent, else the caller's current span."""

    def __init__(self, session_id: str, tracer: Any) -> None:
        self._session_id = session_id
        self._tracer = tracer
        self._open: dict[str, Any] = {}

    def on_start(self, step: Step) -> None:
        from opentelemetry import trace  # noqa: PLC0415 -- an extra, loaded by the program that has set up a tracer

        parent = self._open.get(step.parent.id) if step.parent is not None else None
        context = trace.set_span_in_context(parent) if parent is not None else None
        called = "run_code" if step.kind == "run" else step.name
        attributes: dict[str, Any] = {
            "gen_ai.conversation.id": self._session_id,
            "carrel.step.kind": step.kind,
            "carrel.step.id": step.id,
        }
        if step.request is not None:
            attributes["carrel.request.id"] = step.request
        name = f"{step.kind} {step.name}"
        if step.kind in ("tool", "workflow", "run"):
            name = f"execute_tool {called}"
            attributes |= {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": called,
                "gen_ai.tool.type": "function" if step.kind == "tool" else "extension",
                "gen_ai.tool.call.id": step.id,
            }
        start = int(step.started_at * 1e9)
        self._open[step.id] = self._tracer.start_span(name, context=context, attributes=attributes, start_time=start)

    def on_end(self, step: Step) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

        span = self._open.pop(step.id, None)
        if span is None:
            return
        for size, number in step.sizes.items():
            span.set_attribute(f"carrel.size.{size}", number)
        if step.outcome != "ok":
            span.set_attribute("error.type", step.error_type or step.outcome or "error")
            span.set_status(Status(StatusCode.ERROR, step.error))
        span.end(int((step.started_at + step.duration) * 1e9))


def otel_exporter(session_id: str) -> OtelExporter | None:
    """Return an exporter to the tracer that the program has set up; None where it has set up none."""
    # A program that has set up a tracer has loaded this module. Others may have loaded it as well (the mcp package
    # does), but then there is only the proxy of a provider.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return OtelExporter(session_id, trace.get_tracer("carrel"))
