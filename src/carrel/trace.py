"""What was done: each run, call, command and install, with its time, outcome and sizes, a line of `trace.jsonl`."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

import orjson

from carrel.errors import CarrelError
from carrel.guest.worker.reprs import safe_repr
from carrel.storage.base import Store

logger = logging.getLogger(__name__)

Kind = Literal["run", "tool", "workflow", "command", "install", "uninstall", "checkpoint", "rewind"]
Outcome = Literal["ok", "error", "timeout", "cancelled"]
_LONGEST = 500
"""Characters kept of a text; the whole of it is where it was said."""
_A_MOMENT = 0.05
"""Seconds that lines wait for others, to be written together."""


@dataclass(slots=True)
class Step:
    """One thing that was done; `outcome` is None while it goes on."""

    kind: Kind
    name: str
    parent: "Step | None" = None
    """The step in which this one happened: the run that made the call."""
    message: str | None = None
    """The conversation's message that stood last when it began."""
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    started: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    duration: float = 0.0
    outcome: Outcome | None = None
    error_type: str | None = None
    error: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes or characters that went in and came out, by name."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else there is to say of this kind of step."""

    def failed(self, error_type: str, text: str) -> None:
        self.outcome = "timeout" if error_type in ("Timeout", "ToolTimeoutError", "TimeoutError") else "error"
        self.error_type, self.error = error_type, text

    def raised(self, problem: BaseException) -> None:
        """What was done did not come to its end."""
        if isinstance(problem, asyncio.CancelledError | GeneratorExit):
            self.outcome = "cancelled"
        else:
            self.failed(type(problem).__name__, str(problem))


class Watcher(Protocol):
    """Whoever wants to know of steps. Neither method waits or raises."""

    def begun(self, step: Step) -> None: ...

    def ended(self, step: Step) -> None: ...


class Trace:
    """Tells its watchers of each step."""

    def __init__(self, watchers: Sequence[Watcher], *, hide: Callable[[str], str] = str) -> None:
        """`hide` takes secrets out of a text."""
        self._watchers = watchers
        self._hide = hide

    def begin(self, kind: Kind, name: str, *, parent: Step | None = None, message: str | None = None) -> Step:
        # Hidden first: a secret that is cut in two would not be known as one.
        told = name if isinstance(name, str) else safe_repr(name, _LONGEST)
        step = Step(kind, self._hide(_clean(told))[:_LONGEST], parent, message)
        for watcher in self._watchers:
            watcher.begun(step)
        return step

    def end(self, step: Step) -> None:
        step.duration = time.perf_counter() - step.began
        step.outcome = step.outcome or "ok"
        if step.error is not None:
            step.error = self._hide(_clean(step.error))[-_LONGEST:]
        for watcher in self._watchers:
            watcher.ended(step)

    @contextmanager
    def step(self, kind: Kind, name: str, *, parent: Step | None = None, message: str | None = None) -> Iterator[Step]:
        """A step that ends with the block; what the block raises is its outcome, and goes on."""
        step = self.begin(kind, name, parent=parent, message=message)
        try:
            yield step
        except BaseException as problem:
            step.raised(problem)
            raise
        finally:
            self.end(step)


class TraceLog:
    """Steps as lines of a log, written in order, a moment later, so that no caller waits for the disk."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self.key = key
        self._steps: list[Step] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def begun(self, step: Step) -> None:
        """Nothing is written before there is an outcome."""

    def ended(self, step: Step) -> None:
        self._steps.append(step)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_A_MOMENT, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        while self._steps:
            # Many at once, off every caller's way: it costs less than after each step.
            lines = [_record(step) for step in self._steps]
            self._steps.clear()
            try:
                await self._store.append(self.key, lines)
            except (CarrelError, KeyError) as problem:
                # The work goes on: a full disk must not cost the agent its session.
                logger.warning("%d lines of %s could not be written: %s", len(lines), self.key, problem)

    async def flush(self) -> None:
        """Everything that has ended is written."""
        if self._timer is not None:
            self._timer.cancel()
        self._begin()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def read(self, from_seq: int = 1) -> AsyncIterator[dict[str, Any]]:
        """The lines that are written, oldest first."""
        async for block in self._store.read(self.key, from_seq):
            for seq, record in enumerate(block.records, block.first_seq):
                try:
                    line = orjson.loads(record)
                except ValueError as problem:
                    logger.warning("line %d of %s cannot be read: %s", seq, self.key, problem)
                    continue
                yield line


def _record(step: Step) -> bytes:
    """A step as it is kept; what there is nothing to say of is left out."""
    line: dict[str, Any] = {
        "id": step.id,
        "kind": step.kind,
        "name": step.name,
        "started_at": datetime.fromtimestamp(step.started, UTC),
        "duration": round(step.duration, 6),
        "outcome": step.outcome,
    }
    if step.parent is not None:
        line["parent"] = step.parent.id
    if step.message:
        line["message"] = step.message
    if step.error_type:
        line["error_type"] = step.error_type
    if step.error:
        line["error"] = step.error
    if step.sizes:
        line["sizes"] = step.sizes
    if step.facts:
        line.update(step.facts)
    try:
        return orjson.dumps(line, default=str)
    except TypeError:
        # A number of more than 64 bits, or a text that no file takes: facts may come from inside.
        told = {name: _clean(safe_repr(value, _LONGEST)) for name, value in step.facts.items()}
        return orjson.dumps(line | told, default=str)


def _clean(text: str) -> str:
    """Without lone surrogates, which JSON does not take."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def size_of(value: Any) -> int:
    """About how many bytes a value of plain data has."""
    if isinstance(value, str | bytes):
        return len(value)
    try:
        return len(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))
    except (TypeError, ValueError):
        return len(safe_repr(value))
