"""Locks on a Redis server: a key with a short life that its holder keeps renewing."""

import asyncio
import contextlib
import logging
import uuid

from carrel.errors import StorageError
from carrel.storage.redis_connection import RedisConnections
from carrel.storage.seam import process_name

_LIFE_MS = 6000
_RENEW_SECONDS = 1.5
_KNOWN_MS = 15 * 60 * 1000
"""How long the server knows who took a lock last."""
_log = logging.getLogger("carrel.storage")


class RedisLock:
    """One lock, held or not. The server forgets it `_LIFE_MS` after its holder last spoke, so it dies with its process.

    A holder whose event loop stands still for longer than that loses it to whoever takes it meanwhile. That is logged
    when it is noticed; and a write that comes with its `claim` is refused then."""

    def __init__(self, connections: RedisConnections, key: str) -> None:
        self._connections = connections
        self._key = key
        self._token = f"{process_name()} {uuid.uuid4().hex}"
        self._loop = asyncio.get_running_loop()
        self._renewing: asyncio.Task[None] | None = None

    def claim(self) -> tuple[str, str]:
        """What the server needs to tell whether it is still held."""
        return self._key, self._token

    @property
    def held(self) -> bool:
        return self._renewing is not None

    async def take(self, *, wait: bool) -> bool:
        """False when somebody else holds it and `wait` is False."""
        if not await self._try():
            if not wait:
                return False
            async with self._connections.alone(f"the lock {self._key!r}") as call:
                while not await self._try():
                    # A release pushes here. One who dies pushes nothing: hence at most a second.
                    await call("BLPOP", f"{self._connections.prefix}:freed:{self._key}", 1)
        self._renewing = asyncio.create_task(self._renew(), name=f"renew the lock {self._key}")
        return True

    async def _try(self) -> bool:
        # Cancelled while this is under way, nobody renews it, and it is gone after its short life.
        return await self._ask("take")

    async def _ask(self, script: str) -> bool:
        what = f"the lock {self._key!r}"
        return bool(await self._connections.run(script, what, self._key, self._token, _LIFE_MS, _KNOWN_MS))

    async def _renew(self) -> None:
        held = True
        while held:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                held = await self._ask("renew")
            except StorageError as error:
                _log.warning("the lock %s could not be renewed, trying again: %s", self._key, error)
        _log.error("the lock %s was lost: it was not renewed for too long and somebody else took it", self._key)

    async def release(self) -> None:
        if self._renewing is None:
            return
        renewing, self._renewing = self._renewing, None
        with contextlib.suppress(RuntimeError):  # the loop that took it has ended, and the renewing with it
            self._loop.call_soon_threadsafe(renewing.cancel)
        await self._connections.run("release", f"the lock {self._key!r}", self._key, self._token)

    @staticmethod
    async def holder(connections: RedisConnections, key: str) -> str | None:
        token = await connections.read(f"the lock {key!r}", "GET", f"{connections.prefix}:lock:{key}")
        said = token.decode("utf-8", "replace") if token else ""
        return said.rpartition(" ")[0] or said or None
