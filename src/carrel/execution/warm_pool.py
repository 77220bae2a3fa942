"""Executors and containers that are started in advance, when the same are requested repeatedly."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from carrel.errors import CarrelError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 300.0
"""After so long what was not used is closed."""
_REMEMBERED = 10_000
"""Names of which it is remembered when they were last requested."""


class Closable(Protocol):
    @property
    def alive(self) -> bool:
        """Whether it can still be used."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class WarmPool(Generic[T]):
    """Keeps one ready object of each name that was requested twice within `IDLE_SECONDS`, up to a maximum.

    After one was taken the next is started in the background. Names that are requested once cost nothing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last_requests: OrderedDict[str, float] = OrderedDict()
        self._ready: OrderedDict[str, tuple[T, asyncio.TimerHandle]] = OrderedDict()
        self._starting: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(self, name: str, start: Callable[[], Awaitable[T]]) -> T:
        """Return a ready object that belongs to the caller from now on; those of one name are all started alike."""
        return self._take_ready(name, start) or await start()

    def _take_ready(self, name: str, start: Callable[[], Awaitable[T]]) -> T | None:
        if self._most <= 0 or self._closed:
            return None
        if self._was_requested(name):
            self._run(self._prepare(name, start))
        if name not in self._ready:
            return None
        found, timer = self._ready.pop(name)
        timer.cancel()
        if not found.alive:
            self._run(found.close())
            return None
        return found

    def _was_requested(self, name: str) -> bool:
        now = asyncio.get_running_loop().time()
        before = self._last_requests.pop(name, None)
        self._last_requests[name] = now
        if len(self._last_requests) > _REMEMBERED:
            self._last_requests.popitem(last=False)
        return before is not None and now - before < IDLE_SECONDS

    def ready_names(self) -> list[str]:
        """The names of which one is ready now."""
        return list(self._ready)

    async def close(self) -> None:
        """Close all that were not taken."""
        self._closed = True
        for name in list(self._ready):
            self._discard(name)
        while self._background:
            await asyncio.wait(self._background)

    async def _prepare(self, name: str, start: Callable[[], Awaitable[T]]) -> None:
        if name in self._ready or name in self._starting:
            return
        self._starting.add(name)
        try:
            ready = await start()
        except (CarrelError, OSError) as problem:
            logger.warning("nothing could be started in advance for %s: %s", name[:100], problem)
            return
        finally:
            self._starting.discard(name)
        if self._closed:
            await ready.close()
            return
        timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._discard, name)
        self._ready[name] = (ready, timer)
        while len(self._ready) > self._most:
            self._discard(next(iter(self._ready)))

    def _discard(self, name: str) -> None:
        unused, timer = self._ready.pop(name)
        timer.cancel()
        self._run(unused.close())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
