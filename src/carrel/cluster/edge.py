"""The edge of a gateway: what is done for each request, wherever it goes."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import StorageError, StorageUnavailable
from carrel.request_id import HEADER
from carrel.server.middleware import SECURITY_HEADERS, HttpMetrics, log_request, take_request_id
from carrel.server.responses import PREFIX, send_error

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
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        if scope["type"] != "http":
            return
        started_at, status = time.perf_counter(), 500
        id_ = take_request_id(scope)

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                there = {header for header, _ in message["headers"]}
                added = [pair for pair in (*SECURITY_HEADERS, (HEADER, id_)) if pair[0] not in there]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except StorageError as problem:  # of the keys
            await send_error(send_noted, 503, str(problem), StorageUnavailable, [(b"retry-after", b"1")])
        finally:
            route = _route_of(scope["path"])
            seconds = time.perf_counter() - started_at
            self._metrics.add_request(scope["method"], route, status, seconds)
            log_request(scope, status, seconds, scope["state"].get("passed_to", ""))


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    message: Message = {}
    while message.get("type") != "lifespan.shutdown":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})


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
