"""Waiting without going to sleep, where the next record is about to come: a program that asks again and again."""

from __future__ import annotations

import select
from os import sched_yield
from time import perf_counter  # by name: what code sets on the module time does not matter here

QUICK = 0.0005
"""Seconds after which it is not about to come any more."""
_MOST_LOOKS = 1000
"""More than there is time for: whoever has stopped the clock, as programs that test others do, is not kept awake."""


class QuickSuccession:
    """Whether what is waited for came quickly the last time, and so is looked for without sleep the next time."""

    def __init__(self) -> None:
        self._since = 0.0
        self._quick = False

    def begin(self) -> None:
        """From now on it may come."""
        self._since = perf_counter()

    def came(self) -> None:
        self._quick = perf_counter() - self._since < QUICK

    def look(self, poll: select.poll) -> list[tuple[int, int]]:
        """What has come, nothing where it takes longer: to be woken on an idle processor takes longer than to run a
        small cell. Whoever else has something to do goes first."""
        events: list[tuple[int, int]] = []
        looks = _MOST_LOOKS if self._quick else 0
        until = self._since + QUICK
        while looks and not events and perf_counter() < until:
            looks -= 1
            sched_yield()
            events = poll.poll(0)
        return events
