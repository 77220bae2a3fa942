"""Authentication: API keys, what each may do, and how many requests its user may send. Only digests are kept.

server/keys/<digest>.json               a key
server/key-names/<user>/<limits>.json   the digest of the user's key with these limits"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import orjson

from carrel.errors import (
    ApiKeyNotFound,
    ConfigurationError,
    KeyNotAccepted,
    SessionNotFound,
    StorageUnavailable,
    TooMany,
)
from carrel.server.answers import json_object
from carrel.server.records import parse_lines
from carrel.server.responses import PREFIX, send_error
from carrel.server.settings import ServerSettings, open_storage
from carrel.storage.base import MISSING, Store

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

_KEYS = "server/keys"
_NAMES = "server/key-names"
_OLD_LOG = "server/keys.jsonl"
"""Where versions up to 0.1 kept all keys."""
_NAME = re.compile(r"\w[\w.@-]{0,63}")
_SESSION = re.compile(r"[\w.-]{1,200}")
_TRUSTED_SECONDS = 1.0
"""How long a key that was found is accepted without another look; a revoked key is refused after that."""
_CACHED = 1000
_STORE_SECONDS = 5.0
"""How long a request waits for the store to say whether its key is valid."""

_WITHOUT_KEY = (f"{PREFIX}/health",)
_WRONG_KEYS_BURST = 50
_MAX_KEY = 500
"""Characters of a key; longer ones are not looked up."""

KeyScope = Literal["full", "agent", "read"]
"""`full` may do everything, `agent` may not see how a sample is solved or judged, `read` may change nothing."""
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)


@dataclass(frozen=True)
class ApiKey:
    """A key that was handed out."""

    name: str
    """Also the user: sessions belong to it."""
    digest: str
    created_at: datetime
    scope: KeyScope = "full"
    session: str | None = None
    """The only session that the key may use; None for all of the user's."""
    expires_at: datetime | None = None

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)

    def __str__(self) -> str:
        return self.name + (f" ({self.limits})" if self.limits else "")

    @property
    def limits(self) -> str:
        """What the key is limited to, for a person to read; empty for none."""
        parts = [self.scope if self.scope != "full" else "", f"session {self.session}" if self.session else ""]
        return ", ".join(filter(None, parts))

    def to_json(self) -> bytes:
        """Return the key as it is kept."""
        return orjson.dumps(
            {
                "name": self.name,
                "sha256": self.digest,
                "created_at": self.created_at,
                "scope": self.scope,
                "session": self.session,
                "expires_at": self.expires_at,
            }
        )

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ApiKey:
        """Return the key that these JSON fields describe; those of early versions have no limits."""
        name, digest = fields["name"], fields["sha256"]
        scope, session, expires = fields.get("scope", "full"), fields.get("session"), fields.get("expires_at")
        if not isinstance(name, str) or not isinstance(digest, str) or scope not in SCOPES:
            raise ValueError("it is not a key")
        if session is not None and not isinstance(session, str):
            raise ValueError("session is not a text")
        expires_at = _time(expires) if expires is not None else None
        return cls(name, digest, _time(fields["created_at"]), scope, session, expires_at)


class ApiKeys:
    """The keys in a store, each read by its digest; other processes may add and revoke some meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[str, tuple[ApiKey, float]] = OrderedDict()
        """Keys that were found, and when."""

    async def add(
        self,
        name: str,
        *,
        scope: KeyScope = "full",
        session: str | None = None,
        lifetime: timedelta | None = None,
    ) -> str:
        """Create a key and return it, this once; ConfigurationError if the user has one with the same limits."""
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"{name!r} is not a valid name for a key; use letters, digits and . _ @ -, at most 64"
            )
        if session is not None and _SESSION.fullmatch(session) is None:
            raise ConfigurationError(f"{session!r} is not the id of a session")
        text = f"carrel_{secrets.token_urlsafe(32)}"
        now = datetime.now(UTC)
        try:
            expires_at = now + lifetime if lifetime is not None else None
        except OverflowError:
            raise ConfigurationError("the key would expire after the year 9999; leave --expires out") from None
        key = ApiKey(name, _digest(text), now, scope, session, expires_at)
        await self._import_old_log()
        if not await self._save(key):
            raise ConfigurationError(f"there is a key {key} already; revoke it first, or use another name")
        return text

    async def _save(self, key: ApiKey) -> bool:
        """Write a key; False if the user has a valid one with the same limits."""
        name = _name_key(key)
        stamp = await self._store.stamp(name)
        if stamp is not None:
            digest = (await self._store.get(name) or b"").decode("ascii", "replace")
            if (other := await self._read(digest)) is not None and not other.is_expired:
                return False
            await self._store.delete(f"{_KEYS}/{digest}.json")
        # The name decides between two that add such a key at once; the key is valid when it is written.
        if await self._store.put(name, key.digest.encode(), expect=stamp or MISSING) is None:
            return False
        await self._store.put(f"{_KEYS}/{key.digest}.json", key.to_json())
        return True

    async def revoke(self, name: str, *, scope: KeyScope | None = None, session: str | None = None) -> list[ApiKey]:
        """Refuse a user's keys from now on, or only those with this scope or session; returns them.

        ApiKeyNotFound if there is none."""
        revoked = [
            key
            for key in await self.list()
            if key.name == name and scope in (None, key.scope) and session in (None, key.session)
        ]
        if not revoked:
            there = ", ".join(map(str, await self.list())) or "none"
            raise ApiKeyNotFound(f"there is no such key of {name!r}; there is: {there}")
        for key in revoked:
            await self._store.delete(f"{_KEYS}/{key.digest}.json")
            await self._store.delete(_name_key(key))
            self._cache.pop(key.digest, None)
        return revoked

    async def list(self) -> list[ApiKey]:
        """Return the valid keys, by name."""
        await self._import_old_log()
        digests = [_digest_of(key) for key in await self._store.list(_KEYS)]
        keys = [key for digest in digests if (key := await self._read(digest)) is not None and not key.is_expired]
        return sorted(keys, key=lambda key: (key.name, SCOPES.index(key.scope), key.session or ""))

    async def exist(self) -> bool:
        """Return whether there is any key."""
        await self._import_old_log()
        return bool(await self._store.list(_KEYS))

    async def find(self, text: str) -> ApiKey | None:
        """Return the key that this text is, or None. Costs one read of one object at most."""
        return await self.find_digest(_digest(text))

    async def find_digest(self, digest: str) -> ApiKey | None:
        """Return the valid key with this digest, or None."""
        cached = self._cache.get(digest)
        if cached is not None and time.monotonic() - cached[1] < _TRUSTED_SECONDS:
            key: ApiKey | None = cached[0]
        else:
            key = await self._read(digest)
            self._cache.pop(digest, None)
            if key is not None:
                self._cache[digest] = (key, time.monotonic())
                if len(self._cache) > _CACHED:
                    self._cache.popitem(last=False)
        return key if key is not None and not key.is_expired else None

    async def _read(self, digest: str) -> ApiKey | None:
        if not digest:
            return None
        data = await self._store.get(f"{_KEYS}/{digest}.json")
        if data is None:
            return None
        try:
            key = ApiKey.from_fields(orjson.loads(data))
        except (ValueError, KeyError, TypeError) as problem:
            logger.warning("%s/%s.json is damaged and ignored: %s", _KEYS, digest, problem)
            return None
        # A file that was copied to another name is not a key.
        return key if key.digest == digest else None

    async def _import_old_log(self) -> None:
        """Take over the keys of a server that kept all of them in one log."""
        if await self._store.stamp(_OLD_LOG) is None:
            return
        found: dict[str, ApiKey] = {}
        async for block in self._store.read(_OLD_LOG):
            for _, entry in parse_lines(_OLD_LOG, block, _old_line):
                if isinstance(entry, ApiKey):
                    found[_name_key(entry)] = entry
                    continue
                name, scope, session = entry
                for key in list(found.values()):
                    if key.name == name and scope in (None, key.scope) and session in (None, key.session):
                        del found[_name_key(key)]
        for key in found.values():
            await self._save(key)
        await self._store.delete(_OLD_LOG)


@asynccontextmanager
async def open_keys(store: str | Path | None) -> AsyncIterator[ApiKeys]:
    """The keys of a server, whether it runs or not."""
    async with open_storage(store) as storage:
        yield ApiKeys(storage.store)


# --- requests ---------------------------------------------------------------------------------------------------------


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
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                key = await self._find_key(dict(scope["headers"]))
        except TimeoutError:
            raise StorageUnavailable("the store with the keys does not answer in time") from None
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
        if b"authorization" in dict(scope["headers"]):
            detail = "the key is unknown, expired or revoked; `carrel keys list` shows those that there are"
        else:
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


def _old_line(line: bytes) -> ApiKey | tuple[str, str | None, str | None]:
    """Read a line of the old log: a key, or the name, scope and session of keys that were revoked."""
    fields = json_object(line)
    if "revoked" in fields:
        return str(fields["revoked"]), fields.get("scope"), fields.get("session")
    return ApiKey.from_fields(fields)


def _name_key(key: ApiKey) -> str:
    return f"{_NAMES}/{key.name}/{key.scope}{f'-{key.session}' if key.session else ''}.json"


def _digest_of(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _digest(text: str) -> str:
    """A key is 256 random bits, so a plain hash of it reveals nothing, and can be looked up by itself."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
