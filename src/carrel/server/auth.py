"""Authentication: the API key of a request, what it may do, and how many requests its user may send."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from carrel.errors import KeyNotAccepted, SessionNotFound, TooMany
from carrel.server.api_keys import ApiKey, ApiKeys
from carrel.server.responses import PREFIX, send_error
from carrel.server.settings import ServerSettings

_WITHOUT_KEY = (f"{PREFIX}/health",)
_WRONG_KEYS_BURST = 50
_MAX_KEY = 500
"""Characters of a key; longer ones are not looked up."""


class RateLimiter:
    """A token bucket for each name: a burst at once, and then so many per second."""

    def __init__(self, per_second: float, burst: float, max_names: int = 10_000) -> None:
        self._per_second, self._burst, self._max_names = per_second, burst, max_names
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """For each name, the tokens that were left, and when."""

    def take(self, name: str) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        now = time.monotonic()
        left, at = self._left.pop(name, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        seconds = 0.0 if left >= 1 else (1 - left) / self._per_second
        self._left[name] = (left - 1 if seconds == 0 else left, now)
        if len(self._left) > self._max_names:
            self._left.popitem(last=False)
        return seconds


class AuthMiddleware:
    """Lets requests with a valid key through; `scope["state"]` has its `user` and `key` then."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, settings: ServerSettings) -> None:
        self._app = app
        self._keys = keys
        self._requests = RateLimiter(settings.requests_per_second, settings.burst)
        self._wrong_keys = RateLimiter(settings.wrong_keys_per_second, _WRONG_KEYS_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(PREFIX) or path in _WITHOUT_KEY:
            await self._app(scope, receive, send)
            return
        key = await self._find_key(dict(scope["headers"]))
        if key is None:
            await self._refuse_key(scope, send)
            return
        seconds = self._requests.take(key.name)
        if seconds > 0:
            await _refuse_rate(send, seconds)
            return
        refusal = refuse(key, scope["method"], path.removeprefix(PREFIX))
        if refusal is not None:
            await send_error(send, *refusal)
            return
        scope.setdefault("state", {}).update(user=key.name, key=key)
        await self._app(scope, receive, send)

    async def _find_key(self, headers: dict[bytes, bytes]) -> ApiKey | None:
        scheme, _, text = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text or len(text) >= _MAX_KEY:
            return None
        return await self._keys.find(text)

    async def _refuse_key(self, scope: Scope, send: Send) -> None:
        client: Any = scope.get("client")
        seconds = self._wrong_keys.take(str(client[0]) if client else "unknown")
        if seconds > 0:
            await _refuse_rate(send, seconds)
            return
        detail = "a key is needed: send `Authorization: Bearer KEY`; `carrel keys add NAME` creates one"
        await send_error(send, 401, detail, KeyNotAccepted, [(b"www-authenticate", b"Bearer")])


def refuse(key: ApiKey, method: str, path: str) -> tuple[int, str, type[Exception]] | None:
    """Return the status, text and class of the error if the limits of a key forbid a request."""
    if key.scope == "read" and method not in ("GET", "HEAD"):
        return 403, f"this key is only for reading; {method} needs one with another scope", KeyNotAccepted
    if key.scope == "agent" and method == "POST" and path.startswith("/approvals/"):
        return 403, "a key with the scope agent cannot answer approvals", KeyNotAccepted
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


async def _refuse_rate(send: Send, seconds: float) -> None:
    headers = [(b"retry-after", str(max(1, round(seconds))).encode())]
    await send_error(send, 429, "too many requests; slow down", TooMany, headers)
