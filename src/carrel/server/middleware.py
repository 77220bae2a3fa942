"""The outermost layers of the app: metrics, security headers, and the size of request bodies."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import RequestRefused
from carrel.server.responses import PREFIX, send_error

_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_DATA_ONLY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


class Metrics:
    """The numbers of one server, for Prometheus; two servers in one process have separate ones."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "carrel_http_requests", "Requests answered", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "carrel_http_request_seconds", "Until answered", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self.sessions = Counter("carrel_sessions_created", "Sessions requested", registry=self._registry)
        self.commands = Counter("carrel_commands", "Commands requested", registry=self._registry)
        self.runs = Counter("carrel_runs", "Runs of code requested", registry=self._registry)
        self.verifications = Counter("carrel_verifications", "Verifications requested", registry=self._registry)
        self._live = Gauge("carrel_sessions_alive", "Sessions being created or ready", registry=self._registry)

    def count_live(self, count: Callable[[], float]) -> None:
        """Read the number of live sessions from this function."""
        self._live.set_function(count)

    def add_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class EdgeMiddleware:
    """Counts every request, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), *_HEADERS]
                if scope["path"].startswith(PREFIX):
                    headers.append(_DATA_ONLY)
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "unknown").removeprefix(PREFIX)
            self._metrics.add_request(str(scope["method"]), route, status, time.perf_counter() - start)


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
