"""The line to a server: one that waits without blocking and one that blocks, with the same coroutine on top of both."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar
from uuid import uuid4

import httpx2

from carrel.client.arguments import must_be_seconds, refuse_unknown
from carrel.client.failures import failure, retry_after
from carrel.errors import ConfigurationError, ServerUnreachable, WaitedTooLong

T = TypeVar("T")
PIECE = 1 << 20
LONGEST_EVENT = 1 << 28
"""Bytes of one server-sent event; a result with all of its output is one."""
LONGEST_PAUSE = 8.0
"""Seconds between two tries, where the server does not ask for more."""
HELD = 30.0
"""Seconds that a server may take longer than it was asked to."""
IDLE = 4.0
"""Seconds that an unused connection is kept: less than servers keep it, so that it is we who close it."""
BUSY = (429, 503)
"""The server has not begun with what was asked."""
BROKEN = (500, 502, 504)
"""It may have begun, and may even be done."""


class Asked(NamedTuple):
    """One request, as often as it has to be sent."""

    method: str
    path: str
    words: str
    """What is wanted, for the error: `run a command in session ab12`."""
    query: Mapping[str, Any] | None = None
    json: Any = None
    content: bytes | Path | None = None
    headers: Mapping[str, str] | None = None
    repeatable: bool = True
    """Whether it does no harm when it is sent again after it may have been done."""
    deadline: float | None = None
    """On the monotonic clock; nothing is waited for beyond it."""
    held: float | None = None
    """Seconds that the server is asked to hold its answer, at most; None where it has nothing to hold."""


class Options(TypedDict, total=False):
    """Settings of a client that can be others for some calls."""

    timeout: float | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, Any] | None


class Line(Protocol):
    """How requests go out and answers come in. Nothing here knows what is asked."""

    async def send(self, request: httpx2.Request, *, stream: bool) -> httpx2.Response: ...
    async def read(self, answer: httpx2.Response) -> bytes: ...
    async def end(self, answer: httpx2.Response) -> None: ...
    def pieces(self, answer: httpx2.Response) -> AsyncGenerator[bytes, None]: ...
    def events(self, answer: httpx2.Response) -> AsyncGenerator[httpx2.ServerSentEvent, None]: ...
    def build(self, asked: Asked, headers: dict[str, str], timeout: httpx2.Timeout) -> httpx2.Request: ...
    async def sleep(self, seconds: float) -> None: ...
    async def aside(self, work: Callable[..., T], *arguments: Any) -> T: ...
    async def close(self) -> None: ...


class AsyncLine:
    """Waits as asyncio does."""

    def __init__(self, http: httpx2.AsyncClient, base: httpx2.URL) -> None:
        self.http = http
        self.base = base

    async def send(self, request: httpx2.Request, *, stream: bool) -> httpx2.Response:
        return await self.http.send(request, stream=stream)

    async def read(self, answer: httpx2.Response) -> bytes:
        return await answer.aread()

    async def end(self, answer: httpx2.Response) -> None:
        await answer.aclose()

    async def pieces(self, answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
        async for piece in answer.aiter_bytes(PIECE):
            yield piece

    async def events(self, answer: httpx2.Response) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        async for event in httpx2.EventSource(answer, LONGEST_EVENT):
            yield event

    def build(self, asked: Asked, headers: dict[str, str], timeout: httpx2.Timeout) -> httpx2.Request:
        content = self._file(asked.content) if isinstance(asked.content, Path) else asked.content
        return _build(self.http, self.base, asked, headers, timeout, content)

    async def _file(self, path: Path) -> AsyncGenerator[bytes, None]:
        pieces = _file_pieces(path)
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(work, *arguments)

    async def close(self) -> None:
        await self.http.aclose()


class BlockingLine:
    """Blocks where the other waits, so a coroutine on it never pauses and is done in one step: see `finished`."""

    def __init__(self, http: httpx2.Client, base: httpx2.URL) -> None:
        self.http = http
        self.base = base

    async def send(self, request: httpx2.Request, *, stream: bool) -> httpx2.Response:
        return self.http.send(request, stream=stream)

    async def read(self, answer: httpx2.Response) -> bytes:
        return answer.read()

    async def end(self, answer: httpx2.Response) -> None:
        answer.close()

    async def pieces(self, answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
        for piece in answer.iter_bytes(PIECE):
            yield piece

    async def events(self, answer: httpx2.Response) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        for event in httpx2.EventSource(answer, LONGEST_EVENT):
            yield event

    def build(self, asked: Asked, headers: dict[str, str], timeout: httpx2.Timeout) -> httpx2.Request:
        content = _file_pieces(asked.content) if isinstance(asked.content, Path) else asked.content
        return _build(self.http, self.base, asked, headers, timeout, content)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)

    async def close(self) -> None:
        self.http.close()


def _build(
    http: httpx2.Client | httpx2.AsyncClient,
    base: httpx2.URL,
    asked: Asked,
    headers: dict[str, str],
    timeout: httpx2.Timeout,
    content: Any,
) -> httpx2.Request:
    # The whole address, so that a client of the caller's own keeps its `base_url`.
    path = base.raw_path.rstrip(b"/") + httpx2.URL(asked.path).raw_path
    return http.build_request(
        asked.method,
        base.copy_with(raw_path=path),
        params=asked.query or None,
        json=asked.json,
        content=content,
        headers=headers,
        timeout=timeout,
    )


def _file_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


class Wire:
    """Requests on a line: the key, safe retries, and errors instead of bad answers."""

    def __init__(
        self,
        line: Line,
        *,
        timeout: float | None,
        retries: int,
        headers: Mapping[str, str],
        query: Mapping[str, Any] | None = None,
    ) -> None:
        must_be_seconds("timeout", timeout)
        self.line = line
        self.timeout = timeout
        self.retries = retries
        self.headers = dict(headers)
        self.query = dict(query or {})

    def with_options(self, given: Options) -> Wire:
        """Another one on the same line."""
        refuse_unknown("with_options", given, Options.__annotations__)
        return Wire(
            self.line,
            timeout=given.get("timeout", self.timeout),
            retries=given.get("max_retries", self.retries),
            headers={**self.headers, **(given.get("default_headers") or {})},
            query={**self.query, **(given.get("default_query") or {})},
        )

    async def ask(self, asked: Asked) -> httpx2.Response:
        """The whole answer."""
        return await self._until_answered(asked, stream=False)

    async def open(self, asked: Asked) -> httpx2.Response:
        """An answer whose body is still to come; whoever asked ends it with `line.end`."""
        return await self._until_answered(asked, stream=True)

    async def _until_answered(self, asked: Asked, *, stream: bool) -> httpx2.Response:
        headers = {**self.headers, **(asked.headers or {})}
        if asked.method == "POST" and not any(name.lower() == "idempotency-key" for name in headers):
            headers["Idempotency-Key"] = uuid4().hex
        if asked.held is not None:
            headers["Prefer"] = f"wait={asked.held:g}"
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            try:
                answer = await self.line.send(self.line.build(asked, headers, self._limits(asked)), stream=stream)
            except httpx2.TransportError as problem:
                self._give_up_on(problem, asked, last=last)
                pause = self._pause(attempt, None)
            else:
                if answer.status_code < 400:
                    return answer
                again = answer.status_code in BUSY or (asked.repeatable and answer.status_code in BROKEN)
                if last or not again or not self._worth(asked, retry_after(answer.headers)):
                    raise await self._refused(answer, asked)
                pause = self._pause(attempt, retry_after(answer.headers))
                await self.line.end(answer)
            await self.line.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _limits(self, asked: Asked) -> httpx2.Timeout:
        """Of one try; never beyond the deadline of the whole."""
        if asked.deadline is not None and time.monotonic() >= asked.deadline:
            raise WaitedTooLong(f"{asked.words}: the time given for it is over")
        if self.timeout is None and asked.deadline is None:
            return httpx2.Timeout(None, connect=5.0)
        most = float("inf") if self.timeout is None else self.timeout
        if asked.held:
            most = min(most, asked.held + HELD)
        if asked.deadline is not None:
            most = min(most, asked.deadline - time.monotonic())
        return httpx2.Timeout(most, connect=min(5.0, most))

    def _give_up_on(self, problem: httpx2.TransportError, asked: Asked, *, last: bool) -> None:
        """Raise, unless it does no harm to try again."""
        never_sent = isinstance(problem, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
        hopeless = isinstance(problem, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError | httpx2.ProxyError)
        over = asked.deadline is not None and time.monotonic() >= asked.deadline
        if isinstance(problem, httpx2.TimeoutException) and over:
            raise WaitedTooLong(f"{asked.words}: no answer in the time given for it") from problem
        if not last and not hopeless and not over and (never_sent or asked.repeatable):
            return
        what = str(problem) or type(problem).__name__
        done = "" if never_sent or asked.repeatable else "; it may have been done, so it was not asked for again"
        where = problem.request.url.netloc.decode()
        raise ServerUnreachable(f"{asked.words}: no answer from {where}: {what}{done}") from problem

    def _worth(self, asked: Asked, wanted: float | None) -> bool:
        """Whether what the server wants to be waited for fits into what the caller gives, or else into a minute."""
        left = 60.0 if asked.deadline is None else asked.deadline - time.monotonic()
        return (wanted or 0.0) < left

    def _pause(self, attempt: int, wanted: float | None) -> float:
        if wanted is not None:
            return wanted + random.uniform(0, 0.1)
        return min(LONGEST_PAUSE, 0.1 * 2.0**attempt) * random.uniform(0.5, 1.0)

    async def _refused(self, answer: httpx2.Response, asked: Asked) -> Exception:
        body = await self.line.read(answer)
        await self.line.end(answer)
        return failure(answer.status_code, body, answer.headers, asked.words)


def headers_for(key: str | None, more: Mapping[str, str] | None) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": "carrel"}
    if key is not None:
        if not key.isascii() or not key.isprintable() or not key.strip():
            raise ConfigurationError("api_key: expected a line of plain characters, as `carrel keys add` prints it")
        headers["Authorization"] = f"Bearer {key.strip()}"
    return headers | dict(more or {})


def address(base_url: str | None, http: httpx2.Client | httpx2.AsyncClient | None = None) -> httpx2.URL:
    """Where the server is, with its version of the API: as named, else as the given client has it, else a default."""
    own = str(http.base_url) if http is not None else ""
    text = base_url or own or os.environ.get("CARREL_BASE_URL") or "http://127.0.0.1:8765"
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as problem:
        raise ConfigurationError(f"base_url {text!r}: {problem}") from problem
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(f"base_url {text!r}: expected one like http://127.0.0.1:8765/api/v1")
    return url.copy_with(path="/api/v1") if url.path in ("", "/") else url


def http_settings(url: httpx2.URL) -> dict[str, Any]:
    """How connections to this server are made; to this machine no proxy leads."""
    here = url.host == "localhost" or url.host.startswith("127.") or url.host == "::1"
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=IDLE)
    if here and url.scheme == "http":
        # Reading the certificates of all authorities takes 50 ms, and nobody here shows one.
        return {"limits": limits, "trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    return {"limits": limits, "trust_env": not here}
