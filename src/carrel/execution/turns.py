"""One request after the other: the turn of a request lasts until what it has begun has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Turn:
    """Holds a lock for one request: `async with Turn(lock) as turn`."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._work: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        return self

    async def __aexit__(self, *problem: object) -> None:
        if self._work is None:
            self._lock.release()

    async def finish(self, work: Coroutine[Any, Any, T], stop: Callable[[], None]) -> T:
        """Wait for work that cannot be left halfway; the last step of a turn.

        A caller that is cancelled has it stopped, and waits for its end. Cancelled once more the caller returns at
        once; the work goes on to its end, and keeps the turn until then."""
        self._work = asyncio.get_running_loop().create_task(work)
        self._work.add_done_callback(self._ended)
        try:
            return await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if not self._work.done():
                stop()
                await asyncio.wait([self._work])
            raise

    def _ended(self, work: asyncio.Task[Any]) -> None:
        self._lock.release()
        if not work.cancelled():
            work.exception()  # The caller may be gone; asyncio is not to log it.
