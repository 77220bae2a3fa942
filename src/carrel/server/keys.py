"""Who may use the server, and for what: keys, of which only the hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from carrel.errors import ApiKeyNotFound, ConfigurationError
from carrel.home import resolve_carrel_home
from carrel.server.logs import json_object, parse_lines
from carrel.session import FileStorage
from carrel.storage.base import Stamp, Store

LOG = "server/keys.jsonl"
_NAME = re.compile(r"\w[\w.@-]{0,63}")
_SESSION = re.compile(r"[\w.-]{1,200}")
_SECONDS_TRUSTED = 1.0
"""How long the list is used before it is looked at again; a revoked key is refused after that."""

KeyScope = Literal["full", "agent", "read"]
"""`full` may do everything, `agent` may not see how a sample is solved or judged, `read` may only look."""
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)


@dataclass(frozen=True)
class KnownKey:
    """A key that was handed out."""

    name: str
    """Also the user: sessions belong to it."""
    digest: str
    created_at: datetime
    scope: KeyScope = "full"
    session: str | None = None
    """The only session that it is good for; None for all of the user's."""
    expires_at: datetime | None = None

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)

    def __str__(self) -> str:
        return self.name + (f" ({self.limits})" if self.limits else "")

    @property
    def limits(self) -> str:
        """What it is limited to, for a person to read; empty for none."""
        parts = [self.scope if self.scope != "full" else "", f"session {self.session}" if self.session else ""]
        return ", ".join(filter(None, parts))

    def entry(self) -> dict[str, Any]:
        """The key as a line of the log."""
        return {
            "name": self.name,
            "sha256": self.digest,
            "created_at": self.created_at.isoformat(),
            "scope": self.scope,
            "session": self.session,
            "expires_at": self.expires_at.isoformat() if self.expires_at is not None else None,
        }

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> KnownKey:
        """A key as a line of the log has it; the lines of earlier versions have no limits."""
        name, digest, scope, session = entry["name"], entry["sha256"], entry.get("scope", "full"), entry.get("session")
        if not isinstance(name, str) or not isinstance(digest, str) or scope not in SCOPES:
            raise ValueError("it is not a key")
        if session is not None and not isinstance(session, str):
            raise ValueError("session is not a text")
        expires = entry.get("expires_at")
        return cls(
            name, digest, _time(entry["created_at"]), scope, session, _time(expires) if expires is not None else None
        )


@dataclass(frozen=True)
class _Revoked:
    """A line that takes keys back: all of a name, or those with this scope or session."""

    name: str
    scope: KeyScope | None
    session: str | None

    def covers(self, key: KnownKey) -> bool:
        return (
            key.name == self.name
            and self.scope in (None, key.scope)
            and (self.session is None or key.session == self.session)
        )


class Keys:
    """The keys in a store; other processes may add and revoke some meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: list[KnownKey] = []
        self._stamp: Stamp | None = None
        self._lines = 0
        self._looked = float("-inf")

    async def add(
        self,
        name: str,
        *,
        scope: KeyScope = "full",
        session: str | None = None,
        lifetime: timedelta | None = None,
    ) -> str:
        """A new key for a user, returned this once; ConfigurationError when there is one with the same limits."""
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(f"{name!r} is no name for a key: letters, digits and . _ @ -, at most 64")
        if session is not None and _SESSION.fullmatch(session) is None:
            raise ConfigurationError(f"{session!r} is not the id of a session")
        key = f"carrel_{secrets.token_urlsafe(32)}"
        now = datetime.now(UTC)
        try:
            expires = now + lifetime if lifetime is not None else None
        except OverflowError:
            raise ConfigurationError("the key would expire after the year 9999; leave --expires out") from None
        made = KnownKey(name, _digest(key), now, scope, session, expires)
        while True:
            await self._look(now=True)
            if any(_same_limits(made, known) for known in self._valid()):
                raise ConfigurationError(f"there is a key {made} already; revoke it first, or take another name")
            # Two who add one of this name at once would both be told a key, and only the later one would be valid.
            if await self._note(made.entry(), after=self._lines):
                return key

    async def revoke(self, name: str, *, scope: KeyScope | None = None, session: str | None = None) -> list[KnownKey]:
        """Refuse a user's keys from now on, or only those with this scope or session; returns them.

        ApiKeyNotFound when there is none."""
        await self._look(now=True)
        revoked = _Revoked(name, scope, session)
        gone = [key for key in self._valid() if revoked.covers(key)]
        if not gone:
            there = ", ".join(map(str, self._valid())) or "none"
            raise ApiKeyNotFound(f"there is no such key of {name!r}; there is: {there}")
        entry = {"revoked": name, "scope": scope, "session": session, "at": datetime.now(UTC).isoformat()}
        await self._note(entry)
        return gone

    async def list(self) -> list[KnownKey]:
        """Those that are valid, by name."""
        await self._look(now=True)
        return sorted(self._valid(), key=lambda key: (key.name, SCOPES.index(key.scope), key.session or ""))

    async def find(self, key: str, *, look_again: bool = False) -> KnownKey | None:
        """The key that this is, or None; takes as long for a nearly right one as for any other.

        The list is up to a second old, unless it is looked at again for one that was added a moment ago."""
        digest = _digest(key)
        await self._look(trusted=0.0 if look_again else _SECONDS_TRUSTED)
        found = None
        for known in self._valid():
            if hmac.compare_digest(known.digest.encode(), digest.encode()):
                found = known
        return found

    def _valid(self) -> Iterator[KnownKey]:
        return (key for key in self._known if not key.expired)

    async def _note(self, entry: dict[str, Any], after: int | None = None) -> bool:
        """Write it down; with `after`, False and nothing written unless that is the number of the last line."""
        written = await self._store.append(LOG, [orjson.dumps(entry)], sync=True, after=after)
        await self._look(now=True)
        return bool(written)

    async def _look(self, now: bool = False, trusted: float = _SECONDS_TRUSTED) -> None:
        if not now and time.monotonic() - self._looked < trusted:
            return
        stamp = await self._store.stamp(LOG)
        if stamp != self._stamp or now:
            known, lines = list[KnownKey](), 0
            async for block in self._store.read(LOG):
                lines = block.last_seq
                for _, line in parse_lines(LOG, block, _parse):
                    if isinstance(line, _Revoked):
                        known = [key for key in known if not line.covers(key)]
                    else:
                        known = [key for key in known if not _same_limits(line, key)] + [line]
            self._known, self._stamp, self._lines = known, stamp, lines
        self._looked = time.monotonic()


def _same_limits(one: KnownKey, other: KnownKey) -> bool:
    return (one.name, one.scope, one.session) == (other.name, other.scope, other.session)


def _parse(line: bytes) -> KnownKey | _Revoked:
    entry = json_object(line)
    if "revoked" not in entry:
        return KnownKey.of_entry(entry)
    return _Revoked(str(entry["revoked"]), entry.get("scope"), entry.get("session"))


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _digest(key: str) -> str:
    """A key is 256 bits of chance, so a plain hash of it tells nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def data_folder(named: Path | None) -> Path:
    """Where a server keeps what it keeps."""
    return named.expanduser().absolute() if named is not None else resolve_carrel_home() / "server"


@asynccontextmanager
async def opened_keys(data: Path | None) -> AsyncIterator[Keys]:
    """The keys of a server's data, whether it runs or not."""
    folder = data_folder(data)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with FileStorage(folder) as storage:
        yield Keys(storage.store)
