"""Who may use the server: a key for each user, of which only the hash is kept."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from carrel.assembly import FileStorage
from carrel.errors import ApiKeyNotFound, ConfigurationError
from carrel.home import resolve_carrel_home
from carrel.storage.seam import Stamp, Store

LOG = "server/keys.jsonl"
_NAME = re.compile(r"\w[\w.@-]{0,63}")
_SECONDS_TRUSTED = 1.0
"""How long the list is used before it is looked at again; a revoked key is refused after that."""


@dataclass(frozen=True)
class KnownKey:
    """A key that was handed out."""

    name: str
    """Also the user: sessions belong to it."""
    digest: str
    created_at: datetime


class Keys:
    """The keys in a store; other processes may add and revoke some meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, KnownKey] = {}
        self._stamp: Stamp | None = None
        self._lines = 0
        self._looked = float("-inf")

    async def add(self, name: str) -> str:
        """A new key for a user, told this once; ConfigurationError for a name that is taken or none."""
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(f"{name!r} is no name for a key: letters, digits and . _ @ -, at most 64")
        key = f"carrel_{secrets.token_urlsafe(32)}"
        entry = {"name": name, "sha256": _digest(key), "created_at": datetime.now(UTC).isoformat()}
        while True:
            await self._look(now=True)
            if name in self._known:
                raise ConfigurationError(f"there is a key {name} already; revoke it first, or take another name")
            # Two who add one of this name at once would both be told a key, and only the later one would be valid.
            if await self._note(entry, after=self._lines):
                return key

    async def list(self) -> list[KnownKey]:
        """Those that are valid, by name."""
        await self._look(now=True)
        return sorted(self._known.values(), key=lambda key: key.name)

    async def revoke(self, name: str) -> None:
        """Refuse it from now on; ApiKeyNotFound when there is none."""
        await self._look(now=True)
        if name not in self._known:
            there = ", ".join(sorted(self._known)) or "none"
            raise ApiKeyNotFound(f"there is no key {name!r}; there is: {there}")
        await self._note({"revoked": name, "at": datetime.now(UTC).isoformat()})

    async def user_of(self, key: str) -> str | None:
        """Whose key this is, or None; takes as long for a nearly right one as for any other."""
        digest = _digest(key)
        await self._look()
        found = self._user(digest)
        if found is None:
            await self._look(trusted=0.0)  # it may have been added a moment ago
            found = self._user(digest)
        return found

    def _user(self, digest: str) -> str | None:
        found = None
        for known in self._known.values():
            if hmac.compare_digest(known.digest, digest):
                found = known.name
        return found

    async def _note(self, entry: dict[str, str], after: int | None = None) -> bool:
        """Write it down; with `after`, False and nothing written unless that is the number of the last line."""
        written = await self._store.append(LOG, [orjson.dumps(entry)], sync=True, after=after)
        await self._look(now=True)
        return bool(written)

    async def _look(self, now: bool = False, trusted: float = _SECONDS_TRUSTED) -> None:
        if not now and time.monotonic() - self._looked < trusted:
            return
        stamp = await self._store.stamp(LOG)
        if stamp != self._stamp or now:
            known, lines = dict[str, KnownKey](), 0
            async for block in self._store.read(LOG):
                lines = block.last_seq
                for line in block.records:
                    entry = orjson.loads(line)
                    if "revoked" in entry:
                        known.pop(entry["revoked"], None)
                    else:
                        made = datetime.fromisoformat(entry["created_at"])
                        known[entry["name"]] = KnownKey(entry["name"], entry["sha256"], made)
            self._known, self._stamp, self._lines = known, stamp, lines
        self._looked = time.monotonic()


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
