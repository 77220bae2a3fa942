"""The edge of a gateway: what is done for each request, wherever it goes."""

from __future__ import annotations

import re
import time
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import StorageError, StorageUnavailable
from carrel.server.middleware import SECURITY_HEADERS, HttpMetrics
from carrel.server.responses import PREFIX, send_error

_REQUEST_ID = re.compile(rb"[\w.-]{1,100}")
_SESSION_ROUTES = {
    *("exec", "interactions", "run", "interrupt", "variables", "files", "str_replace", "diff", "verify", "fork"),
    *("conversation", "trace", "events", "checkpoints", "rewind", "pause", "resume"),
}
_OTHER_ROUTES = {"health", "metrics", "nodes", "datasets", "samples", "approvals"}


class Edge:
    """Gives each request an id, counts it, and adds security headers to answers that have none."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at, status = time.perf_counter(), 500
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = given if _REQUEST_ID.fullmatch(given) else uuid4().hex.encode()
        scope.setdefault("state", {})["http_id"] = name

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                there = {header for header, _ in message["headers"]}
                added = [pair for pair in (*SECURITY_HEADERS, (b"x-request-id", name)) if pair[0] not in there]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except StorageError as problem:  # of the keys
            await send_error(send_noted, 503, str(problem), StorageUnavailable, [(b"retry-after", b"1")])
        finally:
            route = _route_of(scope["path"])
            self._metrics.add_request(scope["method"], route, status, time.perf_counter() - started_at)


def _route_of(path: str) -> str:
    """Return a route for the metrics, of which there are few."""
    parts = path.removeprefix(PREFIX).strip("/").split("/")
    if not path.startswith(PREFIX):
        return "page"
    if parts[0] == "sessions":
        if len(parts) == 1:
            return "/sessions"
        more = f"/{parts[2]}" if parts[2:] and parts[2] in _SESSION_ROUTES else ""
        return f"/sessions/{{session_id}}{more}"
    return f"/{parts[0]}" if parts[0] in _OTHER_ROUTES else "unknown"
