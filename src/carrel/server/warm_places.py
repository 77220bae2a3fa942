"""Places kept open for the samples that were asked for last: the next session of one has nothing to wait for."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from carrel.errors import CarrelError
from carrel.execution.executor import Executor
from carrel.session import unanswered
from carrel.tasks.place import Prepared, open_place

logger = logging.getLogger(__name__)

IDLE = 300.0
"""Seconds after which a place that nobody took is let go."""


class WarmPlaces:
    """At most so many, one for each sample; a place that was taken is made again while nobody waits for it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ready: OrderedDict[str, tuple[Executor, asyncio.TimerHandle]] = OrderedDict()
        self._work: set[asyncio.Task[None]] = set()
        self._making: set[str] = set()
        self._closed = False

    def take(self, prepared: Prepared) -> Executor | None:
        """One that is open, or None; either way another will be there for who comes next."""
        if self._most <= 0 or self._closed:
            return None
        found = self._ready.pop(_name(prepared), None)
        self._do(self._make(prepared))
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    async def close(self) -> None:
        self._closed = True
        for name in list(self._ready):
            self._let_go(name)
        while self._work:
            await asyncio.wait(self._work)

    async def _make(self, prepared: Prepared) -> None:
        name = _name(prepared)
        if name in self._ready or name in self._making:
            return
        self._making.add(name)
        try:
            place = await open_place(prepared, handlers=unanswered())
        except (CarrelError, OSError) as problem:
            logger.warning("no place of %s could be kept ready: %s", prepared.sample.sample_id, problem)
            return
        finally:
            self._making.discard(name)
        if self._closed:
            await place.close()
            return
        timer = asyncio.get_running_loop().call_later(IDLE, self._let_go, name)
        self._ready[name] = (place, timer)
        while len(self._ready) > self._most:
            self._let_go(next(iter(self._ready)))

    def _let_go(self, name: str) -> None:
        place, timer = self._ready.pop(name)
        timer.cancel()
        self._do(place.close())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _name(prepared: Prepared) -> str:
    """Equal for places that begin alike: the settings name the folder of the files, and that one their content."""
    return repr(prepared.config)
