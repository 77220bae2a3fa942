"""Executors that are started in advance, for samples that are requested repeatedly."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from carrel.errors import CarrelError
from carrel.session import unavailable_handlers
from carrel.tasks.environment import ContainerSampleExecutor, PreparedSample, SampleExecutor, sample_executor

logger = logging.getLogger(__name__)

IDLE_SECONDS = 300.0
"""After so long an executor that was not used is closed."""
Started = SampleExecutor | ContainerSampleExecutor
_REMEMBERED = 10_000
"""Samples of which it is remembered when they were last requested."""


async def start_executor(prepared: PreparedSample) -> Started:
    """Start an executor on a private copy of the sample's workspace; a session takes it over later."""
    executor = sample_executor(prepared.sample, prepared=prepared)
    executor.handlers.update(unavailable_handlers())
    try:
        await executor.start()
    except BaseException:
        await executor.close()
        raise
    return executor


class ExecutorPool:
    """Keeps one executor for each sample that was requested twice within `IDLE_SECONDS`, up to a maximum.

    After one was taken the next is started in the background. Samples that are requested once cost nothing."""

    def __init__(self, max_executors: int) -> None:
        self._max = max_executors
        self._last_requests: OrderedDict[str, float] = OrderedDict()
        self._ready: OrderedDict[str, tuple[Started, asyncio.TimerHandle]] = OrderedDict()
        self._starting: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(self, prepared: PreparedSample) -> Started:
        """Return a started executor that belongs to the caller from now on."""
        return self._take_ready(prepared) or await start_executor(prepared)

    def _take_ready(self, prepared: PreparedSample) -> Started | None:
        if self._max <= 0 or self._closed:
            return None
        name = _name(prepared)
        if self._was_requested(name):
            self._run(self._prepare(prepared))
        if name not in self._ready:
            return None
        executor, timer = self._ready.pop(name)
        timer.cancel()
        if not executor.alive:
            self._run(executor.close())
            return None
        return executor

    def _was_requested(self, name: str) -> bool:
        now = asyncio.get_running_loop().time()
        before = self._last_requests.pop(name, None)
        self._last_requests[name] = now
        if len(self._last_requests) > _REMEMBERED:
            self._last_requests.popitem(last=False)
        return before is not None and now - before < IDLE_SECONDS

    async def close(self) -> None:
        """Close all executors that were not taken."""
        self._closed = True
        for name in list(self._ready):
            self._discard(name)
        while self._background:
            await asyncio.wait(self._background)

    async def _prepare(self, prepared: PreparedSample) -> None:
        name = _name(prepared)
        if name in self._ready or name in self._starting:
            return
        self._starting.add(name)
        try:
            executor = await start_executor(prepared)
        except (CarrelError, OSError) as problem:
            logger.warning("no executor for %s could be started in advance: %s", prepared.sample.sample_id, problem)
            return
        finally:
            self._starting.discard(name)
        if self._closed:
            await executor.close()
            return
        timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._discard, name)
        self._ready[name] = (executor, timer)
        while len(self._ready) > self._max:
            self._discard(next(iter(self._ready)))

    def _discard(self, name: str) -> None:
        executor, timer = self._ready.pop(name)
        timer.cancel()
        self._run(executor.close())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _name(prepared: PreparedSample) -> str:
    """Return a name that is equal for executors that start alike.

    The settings name the folder of the files, and its name is their digest; the sample decides how it is verified."""
    return f"{prepared.sample.dataset}/{prepared.sample.sample_id}@{prepared.sample.version} {prepared.config!r}"
