"""The layers around the routes: metrics, security headers, the size of request bodies, and idempotent POSTs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import RequestRefused, StorageError
from carrel.request_id import HEADER, request_id_from
from carrel.server.answers import AnswerStore, KeptAnswer
from carrel.server.auth import ApiKey
from carrel.server.records import session_id_from
from carrel.server.responses import PREFIX, send_error, send_json

requests_logger = logging.getLogger("carrel.requests")

_MAX_ANSWER = 1024 * 1024
"""Bytes of an answer that is kept; a larger one is not."""
_MAX_UNKEPT = 1000
_SESSION_ID = re.compile(r"[\w.-]{1,200}")
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_DATA_ONLY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


class HttpMetrics:
    """The numbers of one server's requests, for Prometheus; two servers in one process have separate ones."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "carrel_http_requests", "Requests answered", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "carrel_http_request_seconds", "Until answered", ["route"], buckets=_SECONDS, registry=self._registry
        )

    def add_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Metrics(HttpMetrics):
    """The numbers of a server with sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Counter("carrel_sessions_created", "Sessions requested", registry=self._registry)
        self.commands = Counter("carrel_commands", "Commands requested", registry=self._registry)
        self.runs = Counter("carrel_runs", "Runs of code requested", registry=self._registry)
        self.verifications = Counter("carrel_verifications", "Verifications requested", registry=self._registry)
        self._live = Gauge("carrel_sessions_alive", "Sessions being created or ready", registry=self._registry)

    def count_live(self, count: Callable[[], float]) -> None:
        """Read the number of live sessions from this function."""
        self._live.set_function(count)


class EdgeMiddleware:
    """Gives every request an id, counts it, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        id_ = take_request_id(scope)
        status, has_started = 500, False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
                headers = [*message.get("headers", []), *SECURITY_HEADERS, (HEADER, id_)]
                if scope["path"].startswith(PREFIX):
                    headers.append(_DATA_ONLY)
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except StorageError as problem:
            # Of the layers around the routes, which answer for themselves.
            if has_started:
                raise
            await send_error(send_with_headers, 503, str(problem), type(problem), [(b"retry-after", b"1")])
        finally:
            route = getattr(scope.get("route"), "path", "unknown").removeprefix(PREFIX)
            seconds = time.perf_counter() - start
            self._metrics.add_request(str(scope["method"]), route, status, seconds)
            log_request(scope, status, seconds)


def take_request_id(scope: Scope) -> bytes:
    """Return the id of a request, from its header or a new one. Logs and traces of this task have it from now on."""
    sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
    id_ = request_id_from(sent).encode()
    scope.setdefault("state", {})["http_id"] = id_
    return id_


def log_request(scope: Scope, status: int, seconds: float, where: str = "") -> None:
    """Write a line for a request; only `--log-requests` shows it."""
    if requests_logger.isEnabledFor(logging.INFO):
        line = "%s %s: %d after %.1f ms%s"
        requests_logger.info(line, scope["method"], scope["path"], status, seconds * 1000, where)


class BodyTooLarge(HTTPException):
    """A request body above the limit. FastAPI passes an HTTPException on that is raised while it reads a body."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the request is too large; the limit is {limit:,} bytes")


class BodyLimitMiddleware:
    """Answers 413 for a request body above the limit, whether its length was announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            await self._refuse(send)
            return
        received, has_started = 0, False

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise BodyTooLarge(self._limit)
            return message

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive_counted, send_noted)
        except BodyTooLarge:
            if not has_started:
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        await send_error(send, 413, BodyTooLarge(self._limit).detail, RequestRefused)


class IdempotencyMiddleware:
    """Keeps answers with a status of 2xx. The ids of what a request creates are derived from its key.

    `scope["state"]["request_id"]` has the name that such ids begin with: a command that was begun is found by it, also
    if its answer was not kept."""

    def __init__(self, app: ASGIApp, answers: AnswerStore) -> None:
        self._app = app
        self._answers = answers
        self._running: dict[str, asyncio.Event] = {}
        self._unkept: OrderedDict[str, KeptAnswer] = OrderedDict()
        """Answers that could not be written yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"idempotency-key", b"")
        if scope["type"] != "http" or scope["method"] != "POST" or not given or "key" not in scope.get("state", {}):
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        key: ApiKey = scope["state"]["key"]
        name = request_id(key, scope["path"], given)
        content = _digest(scope.get("query_string", b""), body)
        while (running := self._running.get(name)) is not None:
            await running.wait()
        self._running[name] = done = asyncio.Event()
        scope["state"]["request_id"] = name
        session_id = _session_of(scope["path"], name)
        try:
            if (unkept := self._unkept.get(name)) is not None:
                await self._keep(session_id, name, unkept)
            kept = unkept or await self._answers.get(session_id, name)
            if kept is None:
                await self._answer(session_id, name, content, scope, body, receive, send)
            elif kept.content != content:
                await send_error(send, 422, "this Idempotency-Key was used for another request", RequestRefused)
            else:
                await send_json(send, kept.status, kept.body, [(b"idempotent-replayed", b"true")])
        finally:
            del self._running[name]
            done.set()

    async def _answer(
        self, session_id: str, name: str, content: str, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        status, sent, is_json, was_read = 0, bytearray(), False, False
        start: Message | None = None
        """The beginning of an answer that is kept; it is sent when the answer is in the store."""
        not_kept: StorageError | None = None

        async def receive_again() -> Message:
            nonlocal was_read
            if was_read:
                return await receive()
            was_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_and_keep(message: Message) -> None:
            nonlocal status, is_json, start, not_kept
            if message["type"] == "http.response.start":
                status = message["status"]
                is_json = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"application/json")
                if 200 <= status < 300 and is_json:
                    start = message
                else:
                    await send(message)
                return
            sent.extend(message.get("body", b"") if start is not None else b"")
            if start is None:
                await send(message)
                return
            is_last = not message.get("more_body")
            if len(sent) <= _MAX_ANSWER and not is_last:
                return
            if len(sent) <= _MAX_ANSWER:
                # Before it is sent: a client that has seen the answer may rely on it.
                try:
                    await self._keep(session_id, name, KeptAnswer(content, status, bytes(sent), time.time()))
                except StorageError as problem:
                    # The route has answered: an error that it gets from here is reported as a bug in it.
                    not_kept = problem
                    return
            beginning, start = start, None
            await send(beginning)
            await send({**message, "body": bytes(sent)})

        await self._app(scope, receive_again, send_and_keep)
        if not_kept is not None:
            raise not_kept

    async def _keep(self, session_id: str, name: str, answer: KeptAnswer) -> None:
        """Write an answer; if that fails, a repeat gets it from memory, and nothing is done again."""
        self._unkept[name] = answer
        while len(self._unkept) > _MAX_UNKEPT:
            self._unkept.popitem(last=False)
        await self._answers.keep(session_id, name, answer)
        self._unkept.pop(name, None)


def request_id(key: ApiKey, path: str, given: bytes) -> str:
    """Return the name of a POST with this Idempotency-Key, from which the ids of what it creates are derived.

    The limits are part of the name, so that no key gets an answer that it could not get by itself."""
    return _digest(key.name, path, given, *([key.limits] if key.limits else []))


def _session_of(path: str, request_id: str) -> str:
    """Return the session that a POST is about: the one in its path, or the one that it creates."""
    parts = path.removeprefix(PREFIX).strip("/").split("/")
    if parts[0] == "sessions" and parts[1:2] and parts[2:] != ["fork"]:
        return parts[1] if _SESSION_ID.fullmatch(parts[1]) and parts[1].strip(".") else "unknown"
    return session_id_from(request_id)


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, or None if the client has disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()
