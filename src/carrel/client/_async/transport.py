"""Sending requests: retries, streams of events, downloads, and waiting for a result."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import httpx2

from carrel.client.errors import error_from
from carrel.client.transport import (
    CHUNK,
    HOLD,
    MAX_EVENT,
    NOT_HELD,
    Progress,
    Request,
    Settings,
    async_call,
    async_file_chunks,
    async_sleep,
    is_folder,
    parse_json,
)
from carrel.errors import ServerFailed, ServerUnreachable, WaitedTooLong

T = TypeVar("T")


class ServerEvent(NamedTuple):
    """One event of a stream."""

    kind: str
    data: Any
    seq: int | None


class AsyncTransport:
    """Sends requests with the key, retries them where that is safe, and raises errors instead of bad answers."""

    def __init__(self, http: httpx2.AsyncClient, settings: Settings) -> None:
        self.http = http
        self.settings = settings

    async def send(self, request: Request, *, stream: bool = False) -> httpx2.Response:
        """Return the answer; with `stream`, before its body has been received: the caller closes it."""
        headers = {**self.settings.headers, **request.headers}
        if request.method == "POST" and not any(name.lower() == "idempotency-key" for name in headers):
            headers["Idempotency-Key"] = uuid4().hex
        if request.hold is not None:
            headers["Prefer"] = f"wait={request.hold:g}"
        attempt = 0
        while True:
            try:
                answer = await self.http.send(self._build(request, headers), stream=stream)
            except httpx2.TransportError as problem:
                seconds = self.settings.pause_after_error(problem, request, attempt)
            else:
                if answer.status_code < 400:
                    return answer
                again = self.settings.pause_after_answer(answer, request, attempt)
                if again is None:
                    body = await answer.aread()
                    await answer.aclose()
                    raise error_from(answer.status_code, body, answer.headers, request.action)
                seconds = again
                await answer.aclose()
            await async_sleep(seconds)
            attempt += 1

    def _build(self, request: Request, headers: Mapping[str, str]) -> httpx2.Request:
        content = request.content
        return self.http.build_request(
            request.method,
            self.settings.url(request),
            params=dict(self.settings.query) | dict(request.query) or None,
            json=request.json,
            content=async_file_chunks(content) if isinstance(content, Path) else content,
            headers=headers,
            timeout=self.settings.limits(request),
        )

    async def events(self, request: Request) -> AsyncGenerator[ServerEvent]:
        """Iterate over server-sent events; closing the iterator closes the connection."""
        answer = await self.send(request, stream=True)
        try:
            async for event in httpx2.EventSource(answer, MAX_EVENT):
                if event.event == "error":
                    raise error_from(409, event.data.encode(), {}, request.action)
                seq = int(event.id) if event.id.isdigit() else None
                yield ServerEvent(event.event, parse_json(event.data, request), seq)
        except httpx2.SSEError as problem:
            raise ServerFailed(f"{request.action}: {problem}", answer.status_code) from problem
        except httpx2.TransportError as problem:
            reason = str(problem) or type(problem).__name__
            raise ServerUnreachable(f"{request.action}: the connection was lost: {reason}") from problem
        finally:
            await answer.aclose()

    async def download(self, request: Request, to: Path, on_progress: Progress | None) -> Path:
        """Write the body of an answer into a file, which appears only when it is complete."""
        answer = await self.send(request, stream=True)
        size = answer.headers.get("content-length", "")
        part = to.with_name(f".{to.name}.{time.monotonic_ns():x}.part")
        try:
            if is_folder(answer):
                raise IsADirectoryError(f"{request.action}: it is a folder")
            with await async_call(part.open, "xb") as file:
                written = 0
                async for chunk in answer.aiter_bytes(CHUNK):
                    written += await async_call(file.write, chunk)
                    if on_progress:
                        on_progress(written, int(size) if size.isdigit() else None)
            await async_call(part.replace, to)
        except httpx2.TransportError as problem:
            raise ServerUnreachable(f"{request.action}: the connection was lost: {problem}") from problem
        finally:
            part.unlink(missing_ok=True)
            await answer.aclose()
        return to

    async def wait(
        self,
        state: T,
        is_finished: Callable[[T], bool],
        look: Callable[[float, Request], Awaitable[T]],
        request: Request,
        on_progress: Callable[[T], object] | None,
    ) -> T:
        """Look again until it is finished; `look` gets the seconds that the server may hold its answer."""
        interval = 0.02
        while not is_finished(state):
            if on_progress:
                on_progress(state)
            began = time.monotonic()
            if request.time_left <= 0:
                raise WaitedTooLong(_not_finished(request))
            if request.poll_interval is not None:
                await async_sleep(min(request.poll_interval, request.time_left))
            try:
                state = await look(max(0.0, min(HOLD, request.time_left)), request)
            except WaitedTooLong as problem:
                raise WaitedTooLong(_not_finished(request)) from problem
            if request.poll_interval is None and not is_finished(state) and time.monotonic() - began < NOT_HELD:
                await async_sleep(max(0.0, min(interval, request.time_left)))
                interval = min(1.0, interval * 2)
        if on_progress:
            on_progress(state)
        return state


def _not_finished(request: Request) -> str:
    return f"{request.action}: not finished within the time limit of the call; it goes on"
