"""Logging in to the page: a cookie for a key or a one-time link, and which requests are accepted at all."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from carrel.conversation.session_state import is_id
from carrel.server.auth import ApiKeys, RateLimiter
from carrel.server.listener import is_loopback
from carrel.storage.base import Store

COOKIE = "carrel-page"
_LOGIN_SECONDS = 12 * 3600.0
_LINK_SECONDS = 300.0
"""How long a one-time link is valid."""
_FOLDER = "server/logins"
_SHARES = "server/shares"
SHARE_DAYS = (1, 7, 30)
"""For how long a session can be shared."""
_MAX_FORM = 1024 * 1024
"""Bytes of a form."""


@dataclass(frozen=True)
class Visitor:
    """Who has logged in, and what the page shows and does for them."""

    user: str | None
    """None for the owner of the machine, who sees everything."""
    session: str | None = None
    """The only session that is shown; None for all."""
    may_act: bool = False
    sees_tests: bool = True
    is_guest: bool = False
    """Whether they came by a share link: they see one session, without secrets and tests."""


class Logins:
    """Logins in a store: `server/logins/<digest of the cookie>.json`. A login ends with its key."""

    def __init__(
        self, store: Store, keys: ApiKeys | None, *, may_act: bool, clock: Callable[[], float] = time.time
    ) -> None:
        """Without `keys`, only one-time links log in, as the owner of the machine."""
        self._store = store
        self._keys = keys
        self._may_act = may_act
        self._clock = clock
        self._attempts = RateLimiter(1.0, 20)

    async def new_link(self) -> str:
        """Return the token of a link that logs in once, within five minutes."""
        token = secrets.token_urlsafe(24)
        await self._put(token, {"link": True, "expires": self._clock() + _LINK_SECONDS})
        return token

    async def share(self, user: str | None, session: str, days: int) -> str:
        """Return the token of a link by which everyone can read one session until it expires or is ended."""
        token = secrets.token_urlsafe(24)
        entry = {"user": user, "session": session, "expires": self._clock() + days * 86400.0}
        await self._store.put(f"{_SHARES}/{session}/{text_digest(token)}.json", orjson.dumps(entry))
        return f"{session}.{token}"

    async def shares(self, user: str | None, session: str) -> list[float]:
        """Return when the links to a session expire."""
        keys = await self._store.list(f"{_SHARES}/{session}")
        found = [entry for key in keys if (entry := await self._read(key)) is not None]
        return sorted(float(str(entry["expires"])) for entry in found if entry["user"] == user)

    async def end_shares(self, user: str | None, session: str) -> None:
        """End the links to a session, and what was opened by them."""
        for key in await self._store.list(f"{_SHARES}/{session}"):
            if ((await self._read(key)) or {}).get("user") == user:
                await self._store.delete(key)

    async def _shared(self, text: str) -> tuple[str, dict[str, object]] | None:
        """Return the key and the entry of a share by its token."""
        session, _, token = text.rpartition(".")
        if not is_id(session) or len(token) > 100:
            return None
        key = f"{_SHARES}/{session}/{text_digest(token)}.json"
        entry = await self._read(key)
        return (key, entry) if entry is not None else None

    async def enter(self, text: str, address: str) -> str | None:
        """Return a cookie for a key or the token of a link; None if it is neither."""
        if self._attempts.take(address) > 0:
            raise HTTPException(429, "too many attempts; wait a moment")
        key = await self._keys.find(text) if self._keys is not None else None
        if key is not None:
            entry: dict[str, object] = {"key": text_digest(text)}
        elif (link := await self._get(text)) is not None and link.get("link"):
            if not await self._store.delete(_key(text)):
                return None  # Used at the same moment.
            entry = {}
        elif (shared := await self._shared(text)) is not None:
            entry = {"share": shared[0]}
        else:
            return None
        cookie = secrets.token_urlsafe(32)
        await self._put(cookie, {**entry, "expires": self._clock() + _LOGIN_SECONDS})
        await self._remove_expired()
        return cookie

    async def leave(self, cookie: str) -> None:
        await self._store.delete(_key(cookie))

    async def visitor(self, request: Request) -> Visitor | None:
        """Return who sends a request; None without a login, or if the key was revoked."""
        entry = await self._get(request.cookies.get(COOKIE, ""))
        if entry is None or entry.get("link"):
            return None
        if "share" in entry:
            share = await self._read(str(entry["share"]))
            if share is None:
                return None
            user = share["user"]
            return Visitor(None if user is None else str(user), str(share["session"]), sees_tests=False, is_guest=True)
        if "key" not in entry:
            return Visitor(None, may_act=self._may_act)
        key = await self._keys.find_digest(str(entry["key"])) if self._keys is not None else None
        if key is None:
            return None
        may_act = self._may_act and key.scope == "full" and key.session is None
        return Visitor(key.name, key.session, may_act=may_act, sees_tests=key.scope != "agent")

    async def _put(self, secret: str, entry: dict[str, object]) -> None:
        await self._store.put(_key(secret), orjson.dumps(entry))

    async def _get(self, secret: str) -> dict[str, object] | None:
        return await self._read(_key(secret)) if secret and len(secret) < 500 else None

    async def _read(self, key: str) -> dict[str, object] | None:
        """Return an entry; one that has expired is removed."""
        data = await self._store.get(key)
        entry: dict[str, object] | None = orjson.loads(data) if data is not None else None
        if entry is None or float(str(entry["expires"])) > self._clock():
            return entry
        await self._store.delete(key)
        return None

    async def _remove_expired(self) -> None:
        for key in await self._store.list(_FOLDER):
            await self._read(key)


def text_digest(text: str) -> str:
    """Return the digest by which a secret is kept."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(secret: str) -> str:
    return f"{_FOLDER}/{text_digest(secret)}.json"


def refuse_foreign(headers: Headers, method: str, host: str) -> str:
    """Return why a request is refused: its host name may have been pointed here, or its form is of another site's page.

    `host` is the address that the server listens on."""
    name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if is_loopback(host) and not is_loopback(name) and name != host:
        return f"this server is reached as {host}, not as {name}"
    if method in ("GET", "HEAD"):
        return ""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return "" if site == "same-origin" else "the form is on the page of another site"
    origin = headers.get("origin", "")
    return "" if origin and urlsplit(origin).netloc == headers.get("host") else "the request names no Origin"


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FORM:
            raise HTTPException(413, "the form is too large")
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=50)
    return {name: values[-1] for name, values in fields.items()}
