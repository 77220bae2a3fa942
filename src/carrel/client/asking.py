"""How every call asks: its own words for errors, typed answers, waiting until something is finished, streams."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from carrel.client.arguments import exact, must_be_seconds, takes_more
from carrel.client.failures import failure
from carrel.client.line import Asked, Wire
from carrel.errors import ServerFailed, ServerUnreachable, WaitedTooLong

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
FilePath = str | os.PathLike[str]
WAIT = 20.0
"""Seconds that the server is asked to hold an answer until there is something to tell."""
SHORT = 0.5
"""An answer that took less was not held."""


class Extra(TypedDict, total=False):
    """What every call takes besides its own arguments."""

    timeout: float | None
    """Seconds for the whole call, waiting included; without it, as long as it takes."""
    extra_headers: Mapping[str, str] | None
    extra_query: Mapping[str, Any] | None
    extra_body: Mapping[str, Any] | None


class Waiting(Extra, total=False):
    """What calls that wait take too."""

    poll_interval: float | None
    """Seconds between two looks; without it, the server holds its answer until there is something to tell."""


class Happened(NamedTuple):
    """One event of a stream."""

    kind: str
    data: Any
    seq: int | None


class Asking:
    """What the groups of calls stand on."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if not name.startswith("_") and takes_more(method):
                setattr(cls, name, exact(method))

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def _asked(
        self,
        method: str,
        path: str,
        words: str,
        more: Extra | Mapping[str, Any],
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        content: bytes | Path | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        held: float | None = None,
    ) -> Asked:
        timeout = more.get("timeout")
        must_be_seconds("timeout", timeout)
        must_be_seconds("poll_interval", more.get("poll_interval"))
        extra = more.get("extra_body")
        return Asked(
            method,
            path,
            words,
            query=self._wire.query | given(query) | dict(more.get("extra_query") or {}),
            json=given(body) | dict(extra or {}) if body is not None or extra else None,
            content=content,
            headers={**(headers or {}), **(more.get("extra_headers") or {})},
            repeatable=repeatable,
            deadline=None if timeout is None else time.monotonic() + timeout,
            held=held,
        )

    async def _data(self, asked: Asked) -> Any:
        return json_of(await self._wire.ask(asked), asked)

    async def _typed(self, kind: type[M], asked: Asked) -> M:
        return typed(kind, await self._data(asked), asked)

    async def _until_finished(
        self,
        thing: T,
        is_finished: Callable[[T], bool],
        look: Callable[[float, Extra], Awaitable[T]],
        asked: Asked,
        more: Waiting,
        tell: Callable[[T], object] | None,
    ) -> T:
        """Look again and again; `look` is given how long the server may hold its answer."""
        interval, pause = more.get("poll_interval"), 0.02
        while not is_finished(thing):
            if tell:
                tell(thing)
            began = time.monotonic()
            left = float("inf") if asked.deadline is None else asked.deadline - began
            if left <= 0:
                raise WaitedTooLong(f"{asked.words}: not finished in the time given for it; it goes on")
            if interval is not None:
                await self._wire.line.sleep(min(interval, left))
            thing = await look(min(WAIT, left), _left_of(more, asked.deadline))
            if interval is None and not is_finished(thing) and time.monotonic() - began < SHORT:
                await self._wire.line.sleep(min(pause, left))
                pause = min(1.0, pause * 2)
        if tell:
            tell(thing)
        return thing

    async def _stream(self, asked: Asked) -> AsyncGenerator[Happened, None]:
        """Server-sent events; leaving early closes the connection."""
        answer = await self._wire.open(asked)
        try:
            async with aclosing(self._wire.line.events(answer)) as events:
                async for event in events:
                    if event.event == "error":
                        raise failure(409, event.data.encode(), {}, asked.words)
                    seq = int(event.id) if event.id.isdigit() else None
                    yield Happened(event.event, _event_data(event, asked), seq)
        except httpx2.SSEError as problem:
            raise ServerFailed(f"{asked.words}: {problem}", answer.status_code) from problem
        except httpx2.TransportError as problem:
            what = str(problem) or type(problem).__name__
            raise ServerUnreachable(f"{asked.words}: the connection was lost: {what}") from problem
        finally:
            await self._wire.line.end(answer)

    async def _download(self, asked: Asked, to: Path, tell: Callable[[int, int | None], object] | None) -> Path:
        """Into a file, which is there whole or not at all."""
        answer = await self._wire.open(asked)
        if is_folder(answer):
            await self._wire.line.end(answer)
            raise IsADirectoryError(f"{asked.words}: it is a folder")
        size = answer.headers.get("content-length", "")
        beside = to.with_name(f".{to.name}.{time.monotonic_ns():x}.part")
        aside = self._wire.line.aside
        try:
            with await aside(beside.open, "xb") as file:
                done = 0
                async with aclosing(self._wire.line.pieces(answer)) as pieces:
                    async for piece in pieces:
                        done += await aside(file.write, piece)
                        if tell:
                            tell(done, int(size) if size.isdigit() else None)
            await aside(beside.replace, to)
        except httpx2.TransportError as problem:
            raise ServerUnreachable(f"{asked.words}: the connection was lost: {problem}") from problem
        finally:
            beside.unlink(missing_ok=True)
            await self._wire.line.end(answer)
        return to


def is_folder(answer: httpx2.Response) -> bool:
    """A folder is answered as JSON, a file as bytes, whatever it holds."""
    return str(answer.headers.get("content-type", "")).startswith("application/json")


def json_of(answer: httpx2.Response, asked: Asked) -> Any:
    try:
        return json.loads(answer.content)
    except ValueError as problem:
        raise _nonsense(asked, answer.text) from problem


def typed(kind: type[M], data: Any, asked: Asked) -> M:
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        raise _nonsense(asked, str(problem)) from problem


def given(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Only what was given: a server has its own defaults."""
    return {name: value for name, value in (values or {}).items() if value is not None}


def part(name: str, value: str) -> str:
    """A name as a part of an address, whatever is in it."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a name, got {value!r}")
    return "%2E" * len(value) if value in (".", "..") else quote(value, safe="")


def session_path(session_id: str) -> str:
    return f"/sessions/{part('session_id', session_id)}"


def path_text(path: FilePath, name: str = "path") -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} is a text (str) or a path, and this is {path!r}")
    return os.fspath(path)


def file_part(path: FilePath) -> str:
    """A path as the end of an address; its dots are the session's to understand, not ours."""
    names = path_text(path).split("/")
    return "/".join(
        "%2E" * len(name) if name in (".", "..") else quote(name, safe="", errors="surrogateescape") for name in names
    )


def _left_of(more: Waiting, deadline: float | None) -> Extra:
    left: Extra = {"extra_headers": more.get("extra_headers"), "extra_query": more.get("extra_query")}
    if deadline is not None:
        left["timeout"] = max(deadline - time.monotonic(), 0.001)
    return left


def _event_data(event: httpx2.ServerSentEvent, asked: Asked) -> Any:
    try:
        return json.loads(event.data)
    except ValueError as problem:
        raise _nonsense(asked, event.data) from problem


def _nonsense(asked: Asked, said: str) -> ServerFailed:
    return ServerFailed(f"{asked.words}: this version of carrel does not understand the answer: {said[:500]}")
