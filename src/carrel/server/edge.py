"""What stands before every route: the key, the rate, the size of what is sent, and headers that browsers heed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import KeyNotAccepted, RequestRefused, SessionNotFound, TooMany
from carrel.server.keys import Keys, KnownKey
from carrel.server.metrics import Metrics

PREFIX = "/api/v1"
_OPEN = (f"{PREFIX}/health",)
"""What is answered without a key."""
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_NOTHING_BUT_DATA = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


@dataclass(frozen=True)
class Bounds:
    """What one user may send."""

    requests_per_second: float = 500.0
    burst: int = 2000
    wrong_keys_per_second: float = 5.0
    """Of one address."""
    body: int = 64 * 1024 * 1024
    """Bytes of one request."""


class Bucket:
    """So many at once, and so many a second after that, for each of many."""

    def __init__(self, rate: float, burst: float, most: int = 10_000) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> float:
        """0 when there is one, else the seconds until there is."""
        now = time.monotonic()
        left, at = self._left.pop(who, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate
        self._left[who] = (left - 1 if wait == 0 else left, now)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return wait


class TooLarge(HTTPException):
    """A body larger than is allowed. FastAPI passes on an HTTPException that is raised while it reads a body."""

    def __init__(self, most: int) -> None:
        super().__init__(413, f"a request may have {most:,} bytes, and no more")


class Edge:
    """The outermost layer; `scope["state"]` has the `user` and the `key` of the request, for all within."""

    def __init__(self, app: ASGIApp, keys: Keys, bounds: Bounds, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._bounds = bounds
        self._metrics = metrics
        self._rates = Bucket(bounds.requests_per_second, bounds.burst)
        self._wrong = Bucket(bounds.wrong_keys_per_second, 50)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), *_HEADERS]
                if scope["path"].startswith(PREFIX):
                    headers.append(_NOTHING_BUT_DATA)
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._let_in(scope, receive, told)
        finally:
            route = getattr(scope.get("route"), "path", "unknown").removeprefix(PREFIX)
            self._metrics.asked(str(scope["method"]), route, status, time.perf_counter() - began)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        path = scope["path"]
        if path.startswith(PREFIX) and path not in _OPEN:
            key = await self._key(scope, headers, send)
            if key is None:
                return
            wait = self._rates.take(f"user {key.name}")
            if wait > 0:
                await _slow_down(send, wait)
                return
            refused = refusal(key, scope["method"], path.removeprefix(PREFIX))
            if refused is not None:
                await answer(send, *refused)
                return
            scope.setdefault("state", {}).update(user=key.name, key=key)
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._bounds.body:
            await self._refuse_size(send)
            return
        try:
            begun = False

            async def bounded_send(message: Message) -> None:
                nonlocal begun
                begun = True
                await send(message)

            await self._app(scope, self._bounded(receive), bounded_send)
        except TooLarge:
            if not begun:
                await self._refuse_size(send)

    async def _key(self, scope: Scope, headers: dict[bytes, bytes], send: Send) -> KnownKey | None:
        """The key of a request; None when it was refused."""
        scheme, _, text = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        text = text.strip() if scheme.lower() == "bearer" and len(text) < 500 else ""
        key = await self._keys.find(text) if text else None
        if key is not None:
            return key
        # Before the log of keys is read again for one that was added a moment ago: a wrong key must not cost that.
        wait = self._wrong.take(_address(scope))
        if wait > 0:
            await _slow_down(send, wait)
            return None
        key = await self._keys.find(text, look_again=True) if text else None
        if key is None:
            detail = "this needs a key: send `Authorization: Bearer KEY`; `carrel keys add NAME` makes one"
            await answer(send, 401, detail, KeyNotAccepted, [(b"www-authenticate", b"Bearer")])
        return key

    def _bounded(self, receive: Receive) -> Receive:
        """For a body of which nobody said how long it is."""
        came = 0

        async def counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._bounds.body:
                raise TooLarge(self._bounds.body)
            return message

        return counted

    async def _refuse_size(self, send: Send) -> None:
        await answer(send, 413, TooLarge(self._bounds.body).detail, RequestRefused)


def refusal(key: KnownKey, method: str, path: str) -> tuple[int, str, type[Exception]] | None:
    """Why the limits of a key forbid a request, as status, text and error; None when they do not."""
    if key.scope == "read" and method not in ("GET", "HEAD"):
        return 403, f"this key is only for reading; {method} needs one with another scope", KeyNotAccepted
    if key.session is None:
        return None
    parts = path.strip("/").split("/")
    if parts[0] == "sessions" and len(parts) > 1:
        if parts[1] != key.session:
            return 404, str(SessionNotFound(f"there is no session {parts[1]!r}")), SessionNotFound
        if parts[2:] != ["fork"]:
            return None
    elif parts == ["sessions"] and method in ("GET", "HEAD"):
        return None
    return 403, f"this key is only for session {key.session}", KeyNotAccepted


async def _slow_down(send: Send, wait: float) -> None:
    headers = [(b"retry-after", str(max(1, round(wait))).encode())]
    await answer(send, 429, "too many requests; slow down", TooMany, headers)


def _address(scope: Scope) -> str:
    client: Any = scope.get("client")
    return str(client[0]) if client else "nobody"


async def answer(
    send: Send, status: int, detail: str, kind: type[Exception], headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """A refusal before any route is asked; `kind` is the error that a client of carrel raises for it."""
    body = orjson.dumps({"detail": detail, "code": kind.__name__})
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
