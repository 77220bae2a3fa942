"""Leases over a store: taking, renewing, observing, and the keeper with its own deadline."""

from __future__ import annotations

import asyncio

import pytest

from carrel.errors import GuardLost, LeaseHeld, StorageUnavailable
from carrel.storage.base import Guard, Stamp, Store, guarded
from carrel.storage.leases import LeaseKeeper, Leases
from carrel.storage.memory import MemoryStore
from tests.support.stores import Backend


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def seen_for(leases: Leases, clock: Clock, seconds: float) -> None:
    """Look again and again while this time passes."""
    until = clock.now + seconds
    await leases.look()
    while clock.now < until:
        clock.now = min(until, clock.now + 0.5)
        await leases.look()


async def test_of_many_that_take_a_name_at_once_one_gets_it(backend: Backend) -> None:
    stores = [backend.open() for _ in range(3)]
    taken = await asyncio.gather(*(Leases(stores[number % 3]).take("n", b"x") for number in range(30)))
    assert len([lease for lease in taken if lease is not None]) == 1
    [holder] = await Leases(stores[0]).look()
    assert (holder.name, holder.info) == ("n", b"x")


async def test_an_overdue_name_is_taken_and_its_holder_can_write_nothing(backend: Backend) -> None:
    store, clock = backend.open(), Clock()
    holder, observer = Leases(store, 5), Leases(backend.open(), 5, clock=clock)
    lease = await holder.take("n")
    assert lease is not None
    mine = guarded(store, lease.guard)
    await mine.put("data", b"before")
    await seen_for(observer, clock, 5)
    assert await observer.take("n") is None
    await seen_for(observer, clock, 0.5)
    assert [each.is_overdue for each in observer.holders()] == [True]
    assert await observer.take("n", b"mine now") is not None
    for write in (
        mine.put("data", b"after"),
        mine.append("log", [b"after"]),
        mine.delete("data"),
        mine.copy("data", "copy"),
        holder.renew(lease, b"after"),
    ):
        with pytest.raises(GuardLost):
            await write
    assert await store.get("data") == b"before"
    await holder.give_back(lease)
    assert [each.info for each in await observer.look()] == [b"mine now"]


async def test_of_many_observers_one_takes_an_overdue_name(backend: Backend) -> None:
    clock = Clock()
    assert await Leases(backend.open(), 5).take("n") is not None
    observers = [Leases(backend.open(), 5, clock=clock) for _ in range(5)]
    for _ in range(12):
        await asyncio.gather(*(each.look() for each in observers))
        clock.now += 0.5
    await asyncio.gather(*(each.look() for each in observers))
    taken = await asyncio.gather(*(each.take("n") for each in observers))
    assert len([lease for lease in taken if lease is not None]) == 1


async def test_a_renewal_counts_also_if_no_look_has_seen_it() -> None:
    store, clock = MemoryStore(), Clock()
    holder, observer = Leases(store, 5), Leases(store, 5, clock=clock)
    lease = await holder.take("n")
    assert lease is not None
    await seen_for(observer, clock, 6)
    await holder.renew(lease, b"alive")
    assert await observer.take("n") is None


async def test_an_outage_of_the_store_makes_no_holder_overdue() -> None:
    store, clock = MemoryStore(), Clock()
    assert await Leases(store, 5).take("n") is not None
    observer = Leases(store, 5, clock=clock)
    await seen_for(observer, clock, 4)
    clock.now += 100
    await observer.look()
    assert [each.unchanged for each in observer.holders()] == [0]
    await seen_for(observer, clock, 5.5)
    assert [each.is_overdue for each in observer.holders()] == [True]


async def test_the_length_of_a_lease_is_that_of_its_holder() -> None:
    store, clock = MemoryStore(), Clock()
    assert await Leases(store, 20).take("slow") is not None
    assert await Leases(store, 2).take("quick") is not None
    observer = Leases(store, clock=clock)
    await seen_for(observer, clock, 10)
    assert {each.name: each.is_overdue for each in observer.holders()} == {"quick": True, "slow": False}


async def test_a_name_that_was_given_back_is_free_at_once() -> None:
    store = MemoryStore()
    lease = await Leases(store).take("n")
    assert lease is not None
    await Leases(store).give_back(lease)
    assert await store.list() == []
    assert await Leases(store).take_or_wait("n") is not None


async def test_a_name_is_waited_for_until_its_holder_is_overdue() -> None:
    store = MemoryStore()
    assert await Leases(store, 0.3).take("n") is not None
    async with asyncio.timeout(30):
        assert await Leases(store, 0.3).take_or_wait("n") is not None


async def test_a_name_of_a_living_process_is_refused() -> None:
    store = MemoryStore()
    leases = Leases(store, 1)
    lease = await leases.take("n")
    assert lease is not None
    keeper = LeaseKeeper(leases, lease, lambda: b"ready", _ignore)
    keeper.start()
    with pytest.raises(LeaseHeld, match="is alive; use another name"):
        await Leases(store, 1).take_or_wait("n")
    await keeper.close()


async def test_a_name_is_waited_for_while_its_sessions_are_settled() -> None:
    store = MemoryStore()
    settling = Leases(store, 1)
    lease = await settling.take("n")
    assert lease is not None
    waiting = asyncio.create_task(Leases(store, 0.6).take_or_wait("n"))
    for _ in range(10):
        await asyncio.sleep(0.1)
        await settling.renew(lease, b"")
    assert not waiting.done()
    await settling.give_back(lease)
    assert await waiting is not None


async def _ignore(is_late: bool) -> None:
    pass


class CutOff:
    """A store of which some writes get no answer, an error, or the answer that they would get."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.mode = "pass"

    async def put(self, key: str, data: bytes, *, guard: Guard | None = None) -> Stamp | None:
        if self.mode == "swallow":
            await asyncio.sleep(1000)
        if self.mode == "reset":
            raise StorageUnavailable("the server does not answer")
        return await self._store.put(key, data, guard=guard)


@pytest.mark.parametrize("mode", ["swallow", "reset"])
async def test_a_keeper_is_late_after_half_of_its_lease_and_then_continues(mode: str) -> None:
    store, changes = MemoryStore(), asyncio.Queue[bool]()
    lease = await Leases(store, 0.6).take("n")
    assert lease is not None
    line = CutOff(store)
    keeper = LeaseKeeper(Leases(line, 0.6), lease, lambda: b"info", changes.put)  # type: ignore[arg-type]
    keeper.start()
    line.mode = mode
    async with asyncio.timeout(30):
        assert await changes.get() is True
        assert keeper.is_late
        line.mode = "pass"
        assert await changes.get() is False
    assert not keeper.lost.is_set()
    await keeper.close()


async def test_a_keeper_is_lost_when_its_lease_was_taken() -> None:
    store = MemoryStore()
    lease = await Leases(store, 0.6).take("n")
    assert lease is not None
    keeper = LeaseKeeper(Leases(store, 0.6), lease, lambda: b"info", _ignore)
    keeper.start()
    await store.put(lease.guard[0], b"{}")
    async with asyncio.timeout(30):
        await keeper.lost.wait()
    await keeper.close()


async def test_a_process_that_stood_still_is_late_before_it_does_anything() -> None:
    """The deadline counts from before the last renewal was sent, by a clock that goes on while the machine sleeps."""
    store, clock, changes = MemoryStore(), Clock(), asyncio.Queue[bool]()
    lease = await Leases(store, 60, clock=clock).take("n")
    assert lease is not None
    line = CutOff(store)
    keeper = LeaseKeeper(Leases(line, 60), lease, lambda: b"", changes.put, clock=clock)  # type: ignore[arg-type]
    line.mode = "swallow"
    keeper.start()
    clock.now += 29.9
    await asyncio.sleep(0.6)
    assert not keeper.is_late
    clock.now += 0.2
    async with asyncio.timeout(30):
        assert await changes.get() is True
    await keeper.close()
