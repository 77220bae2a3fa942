"""What the stores on a server share: conditions as text, what a write answers, and locks that are renewed."""

import asyncio
import contextlib
import logging
import uuid
from typing import Protocol

from carrel.errors import KeyMissing, StorageError, StorageWriteError
from carrel.storage.base import Expected, Guard, Missing, Stamp, guard_lost, process_name

_LOCK_SECONDS = 6
_RENEW_SECONDS = 1.5
_LOCK_PAUSE_SECONDS = 0.02
_log = logging.getLogger("carrel.storage")


def stamp_text(stamp: Stamp) -> str:
    """Return a stamp as servers compare it."""
    return f"{stamp.size} {round(stamp.modified * 1e6)} {stamp.version}"


def condition_text(expect: Expected) -> str | None:
    """Return a condition as servers compare it; None for no condition."""
    if expect is None:
        return None
    return "-" if isinstance(expect, Missing) else stamp_text(expect)


def check_outcome(outcome: str, key: str, guard: Guard | None, source: str = "") -> str:
    """Return the outcome of a write on the server, or raise the error that it stands for."""
    if outcome == "guard" and guard is not None:
        raise guard_lost(key, guard)
    if outcome == "log":
        raise StorageWriteError(f"{key!r} is a log and cannot be replaced by an object; delete it first")
    if outcome == "object":
        raise StorageWriteError(f"{key!r} is an object; use another key for a log")
    if outcome == "expired":
        raise StorageWriteError(f"the pieces of {key!r} took too long and have expired; nothing was written")
    if outcome == "exists":
        raise StorageWriteError(f"{key!r} exists already, so it cannot become a copy of {source!r}")
    if outcome == "missing" and source:
        raise KeyMissing(f"there is no {source!r} to copy to {key!r}, or it is too short; nothing was written")
    if outcome == "missing":
        raise KeyMissing(f"there is no log {key!r}; nothing was written")
    return outcome


class TokenServer(Protocol):
    """Tokens that a server keeps for keys until they expire."""

    async def take(self, key: str, token: str, seconds: float) -> bool:
        """Keep the token unless the key has one; return whether it was kept."""

    async def renew(self, key: str, token: str, seconds: float) -> bool:
        """Keep the token for longer; False if the key does not have it any more."""

    async def release(self, key: str, token: str) -> None:
        """Remove the token, if the key has it."""


class RenewedLock:
    """A lock that expires unless its holder renews it, so it is released when its process ends.

    A holder that does not renew it in time, because its process or the server stood still, loses it: `lost` is set."""

    def __init__(self, leases: TokenServer, key: str) -> None:
        self.lost = asyncio.Event()
        self._leases = leases
        self._key = key
        self._token = f"{process_name()} {uuid.uuid4().hex}"
        self._loop = asyncio.get_running_loop()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        return self._renewing is not None and not self.lost.is_set()

    async def take(self, *, wait: bool) -> bool:
        """Take the lock; return False if it is held and `wait` is False."""
        # If this is cancelled while it is under way, the lock expires soon.
        while not await self._leases.take(self._key, self._token, _LOCK_SECONDS):
            if not wait:
                return False
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        self._renewing = asyncio.create_task(self._renew(), name=f"renew the lock {self._key}")
        return True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                if not await self._leases.renew(self._key, self._token, _LOCK_SECONDS):
                    break
            except StorageError as error:
                _log.warning("the lock %s could not be renewed, trying again: %s", self._key, error)
        _log.error("the lock %s was lost: it was not renewed in time", self._key)
        self.lost.set()

    async def release(self) -> None:
        if self._renewing is None:
            return
        renewing, self._renewing = self._renewing, None
        with contextlib.suppress(RuntimeError):  # the loop that took it has ended, and the renewing with it
            self._loop.call_soon_threadsafe(renewing.cancel)
        await self._leases.release(self._key, self._token)


def owner_in(token: str) -> str:
    """Return the name of the process that made a token."""
    return token.rpartition(" ")[0] or token
