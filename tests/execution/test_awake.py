"""A loop is kept awake while a quick answer is due, and no longer."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from carrel.execution import awake
from carrel.execution.awake import Awake

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "_HAS_ROOM", True)
    monkeypatch.setattr(awake, "QUICK", 20.0)
    monkeypatch.setattr(Awake, "_taken_until", 0.0)


class Looked:
    """Counts how often it was looked; the answer comes at the given look."""

    def __init__(self, comes_at: int = 0) -> None:
        self.times, self.comes_at, self.wanted = 0, comes_at, 0
        self.enough = asyncio.Event()
        self.awake = Awake(self.look)
        self.whose: set[str] = set()

    def look(self) -> None:
        self.times += 1
        self.whose.add(WHO.get())
        if self.times == self.comes_at:
            self.awake.came()
        if self.times >= self.wanted:
            self.enough.set()

    async def until(self, times: int) -> None:
        self.wanted = times
        self.enough.clear()
        async with asyncio.timeout(10):
            await self.enough.wait()

    def was_quick(self) -> None:
        self.awake.expect()
        self.awake.came()


async def test_the_first_answer_is_waited_for_asleep() -> None:
    looked = Looked()
    looked.awake.expect()
    await asyncio.sleep(0.01)
    assert looked.times == 0


async def test_after_a_quick_answer_the_next_is_looked_for_until_it_comes() -> None:
    looked = Looked(comes_at=7)
    looked.was_quick()
    looked.awake.expect()
    await looked.until(7)
    await asyncio.sleep(0.01)
    assert looked.times == 7


async def test_an_answer_that_takes_longer_is_waited_for_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "QUICK", 0.05)
    looked = Looked()
    looked.was_quick()
    looked.awake.expect()
    await asyncio.sleep(0.1)
    so_far = looked.times
    await asyncio.sleep(0.1)
    assert 0 < looked.times == so_far
    looked.awake.came()
    looked.awake.expect()
    await asyncio.sleep(0.02)
    assert looked.times == so_far


async def test_others_in_the_loop_have_their_turn_meanwhile() -> None:
    looked = Looked()
    looked.was_quick()
    looked.awake.expect()
    for _ in range(10):
        await asyncio.sleep(0)
    so_far = looked.times
    await looked.until(so_far + 1)
    assert so_far >= 10
    looked.awake.came()


async def test_only_one_at_a_time_is_looked_for() -> None:
    one, other = Looked(), Looked()
    one.was_quick()
    other.was_quick()
    one.awake.expect()
    other.awake.expect()
    await one.until(3)
    assert other.times == 0
    one.awake.came()
    other.awake.expect()
    await other.until(3)
    other.awake.came()


async def test_where_the_clock_stands_still_the_loop_goes_on_and_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "perf_counter", lambda: 1.0)
    looked = Looked(comes_at=100_000)
    looked.was_quick()
    looked.awake.expect()
    so_far = -1
    async with asyncio.timeout(10):
        while so_far != looked.times:
            so_far = looked.times
            await asyncio.sleep(0.1)
    assert 0 < so_far < 100_000


async def test_on_one_processor_nobody_stays_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "_HAS_ROOM", False)
    looked = Looked()
    looked.was_quick()
    looked.awake.expect()
    await asyncio.sleep(0.01)
    assert looked.times == 0


async def test_what_is_heard_has_the_context_of_the_session_and_not_of_who_asked() -> None:
    looked = Looked()
    looked.was_quick()
    WHO.set("who asked")
    looked.awake.expect()
    await looked.until(3)
    looked.awake.came()
    assert looked.whose == {"nobody"}
