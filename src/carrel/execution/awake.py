"""A loop that is kept awake for a moment, where an answer is about to come."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from time import perf_counter

from carrel.guest.worker.quick import QUICK

_ROUND = 0.00003
"""Seconds after which everything else in the loop has its turn."""
_MOST_LOOKS = 50
_MOST_ROUNDS = 100
"""More than there is time for: where a test has stopped the clock, the loop goes on, and to sleep, all the same."""
_HAS_ROOM = len(os.sched_getaffinity(0)) > 1
"""On one processor the worker would have to wait for whoever does not sleep."""


class Awake:
    """Looks for the answer instead of sleeping until it comes, as long as it may be a quick one: to be woken on an idle
    processor takes longer than to run a small cell. Whoever else has something to do on this processor goes first."""

    _taken_until = 0.0
    """One at a time: where several sessions are asked at once there is always something to do."""

    def __init__(self, look: Callable[[], object]) -> None:
        """`look` takes in what has come, if anything has, and never waits."""
        self._look = look
        self._loop = asyncio.get_running_loop()
        # What is heard there has the session's context, as what the loop itself hears, and not that of who asked.
        self._context = contextvars.copy_context()
        self._since = 0.0
        self._until = 0.0
        self._quick = False
        self._goes_round = False
        self._rounds = 0

    def expect(self) -> None:
        """Something was asked. Where the last answer came quickly, so may this one."""
        self._since = perf_counter()
        if self._quick and _HAS_ROOM and self._since >= Awake._taken_until:
            self._until = Awake._taken_until = self._since + QUICK
            self._rounds = _MOST_ROUNDS
            if not self._goes_round:
                self._goes_round = True
                self._loop.call_soon(self._round, context=self._context)

    def came(self) -> None:
        """The answer is there."""
        self._quick = perf_counter() - self._since < QUICK
        if self._until:
            self._until = Awake._taken_until = 0.0

    def _round(self) -> None:
        now = perf_counter()
        over = now + _ROUND
        looks = _MOST_LOOKS
        while now < self._until and self._rounds:
            if now > over or not looks:
                self._rounds -= 1
                self._loop.call_soon(self._round, context=self._context)
                return
            looks -= 1
            os.sched_yield()
            self._look()
            now = perf_counter()
        self._goes_round = False
