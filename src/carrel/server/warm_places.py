"""Places kept open for samples that are asked for again and again: the next session of one has nothing to wait for."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from carrel.errors import CarrelError
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.session import unavailable_handlers
from carrel.tasks.environment import PreparedSample, open_executor

logger = logging.getLogger(__name__)

IDLE = 300.0
"""Seconds after which a place that nobody took is let go."""
_REMEMBERED = 10_000
"""Samples of which it is known when they were asked for."""


class WarmPlaces:
    """At most so many, one for each sample that was asked for twice within `IDLE`; where each of thousands is asked for
    once nothing is made for nobody. A place that was taken is made again while nobody waits for it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._ready: OrderedDict[str, tuple[SubprocessExecutor, asyncio.TimerHandle]] = OrderedDict()
        self._work: set[asyncio.Task[None]] = set()
        self._making: set[str] = set()
        self._closed = False

    def take(self, prepared: PreparedSample) -> SubprocessExecutor | None:
        """One that is open, or None; who comes next for the same finds one, where this is not the first."""
        if self._most <= 0 or self._closed:
            return None
        name = _name(prepared)
        if self._asked_before(name):
            self._do(self._make(prepared))
        if name not in self._ready:
            return None
        place, timer = self._ready.pop(name)
        timer.cancel()
        if not place.alive:
            self._do(place.close())
            return None
        return place

    def _asked_before(self, name: str) -> bool:
        now = asyncio.get_running_loop().time()
        before = self._asked.pop(name, None)
        self._asked[name] = now
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        return before is not None and now - before < IDLE

    async def close(self) -> None:
        self._closed = True
        for name in list(self._ready):
            self._let_go(name)
        while self._work:
            await asyncio.wait(self._work)

    async def _make(self, prepared: PreparedSample) -> None:
        name = _name(prepared)
        if name in self._ready or name in self._making:
            return
        self._making.add(name)
        try:
            place = await open_executor(prepared, handlers=unavailable_handlers())
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


def _name(prepared: PreparedSample) -> str:
    """Equal for places that begin alike: the settings name the folder of the files, and that one their content."""
    return repr(prepared.config)
