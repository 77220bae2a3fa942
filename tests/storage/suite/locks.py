"""The suite, locks: what every kind of store promises to those who want a key for themselves."""

import asyncio

import pytest

from carrel.storage.base import process_name
from tests.support.stores import Backend, in_a_thread


async def test_a_lock_is_held_by_one_at_a_time(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    lock = await store.lock("s/1", wait=False)
    assert lock
    assert await store.lock("s/1", wait=False) is None
    assert await other.lock("s/1", wait=False) is None
    beside = await other.lock("s/2", wait=False)
    assert beside
    await lock.release()
    again = await other.lock("s/1", wait=False)
    assert again
    assert await store.lock("s/1", wait=False) is None
    await again.release()
    await beside.release()


async def test_the_holder_is_named(backend: Backend) -> None:
    store = backend.open()
    assert await store.lock_owner("s") is None
    lock = await store.lock("s")
    assert lock
    assert await store.lock_owner("s") == process_name()
    assert await backend.open().lock_owner("s") == process_name()
    assert await store.lock_owner("s/other") is None
    await lock.release()
    assert await store.lock_owner("s") is None


async def test_a_second_release_takes_the_lock_from_no_other(backend: Backend) -> None:
    store = backend.open()
    lock = await store.lock("s")
    assert lock
    await lock.release()
    await lock.release()
    another = await backend.open().lock("s")
    assert another
    await lock.release()
    assert await store.lock("s", wait=False) is None
    await another.release()


async def test_who_waits_gets_the_lock_when_it_is_released(backend: Backend) -> None:
    store = backend.open()
    lock = await store.lock("s")
    assert lock
    waiting = asyncio.create_task(backend.open().lock("s"))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await lock.release()
    theirs = await asyncio.wait_for(waiting, 30)
    assert theirs
    assert await store.lock("s", wait=False) is None
    await theirs.release()


async def test_one_who_gave_up_waiting_does_not_hold_up_the_others(backend: Backend) -> None:
    store = backend.open()
    lock = await store.lock("s")
    assert lock
    waiting = [asyncio.create_task(store.lock("s")) for _ in range(4)]
    await asyncio.sleep(0.1)
    for impatient in waiting[:3]:
        impatient.cancel()
    await asyncio.wait(waiting[:3])
    await lock.release()
    theirs = await asyncio.wait_for(waiting[3], 30)
    assert theirs
    await theirs.release()
    assert await store.lock_owner("s") is None


async def test_who_waits_can_give_up_at_any_moment(backend: Backend) -> None:
    store = backend.open()
    lock = await store.lock("s")
    assert lock
    for steps in range(12):
        waiting = [asyncio.create_task(store.lock("s")) for _ in range(4)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for impatient in waiting:
            impatient.cancel()
        _, deaf = await asyncio.wait(waiting, timeout=60)
        assert not deaf, f"cancelled after {steps} steps"
    await lock.release()


async def test_many_tasks_and_threads_take_turns(backend: Backend) -> None:
    await backend.open().put("count", b"0")

    async def work() -> None:
        store = backend.open()
        for _ in range(5):
            lock = await store.lock("count")
            assert lock
            number = int(await store.get("count") or b"")
            await asyncio.sleep(0)
            await store.put("count", b"%d" % (number + 1))
            await lock.release()
        await backend.done_with(store)

    await asyncio.gather(work(), work(), in_a_thread(work), in_a_thread(work))
    assert await backend.open().get("count") == b"20"


async def test_a_lock_is_no_key_and_does_not_keep_the_key_from_being_written(backend: Backend) -> None:
    store = backend.open()
    lock = await store.lock("s/1")
    assert lock
    assert await store.list() == []
    assert await store.folders("s") == []
    await store.put("s/1/meta", b"x")
    assert await store.list() == ["s/1/meta"]
    await store.delete("s/1")
    assert await store.list() == []
    assert await store.lock_owner("s/1") == process_name()
    await lock.release()
    assert await store.list() == []
    assert await store.folders() == []


async def test_close_lets_go_of_the_locks(backend: Backend) -> None:
    store = backend.open()
    assert await store.lock("s/1")
    assert await store.lock("s/2")
    await store.close()
    other = backend.open()
    assert await other.lock_owner("s/1") is None
    assert await other.lock("s/1", wait=False)
    assert await other.lock("s/2", wait=False)


@pytest.mark.promise("between processes")
async def test_processes_exclude_each_other(backend: Backend) -> None:
    store = backend.open()
    other = await backend.other("hold", "s")
    assert await other.line() == "asking"
    name = await other.line()
    assert await store.lock_owner("s") == name != process_name()
    assert await store.lock("s", wait=False) is None
    waiting = asyncio.create_task(store.lock("s"))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await other.send("let go")
    lock = await asyncio.wait_for(waiting, 30)
    assert lock
    assert await store.lock_owner("s") == process_name()
    third = await backend.other("hold", "s")
    assert await third.line() == "asking"
    await lock.release()
    assert await third.line() != process_name()


@pytest.mark.promise("between processes")
async def test_a_lock_dies_with_its_process(backend: Backend) -> None:
    store = backend.open()
    other = await backend.other("hold", "s")
    assert await other.line() == "asking"
    assert await other.line() == await store.lock_owner("s")
    waiting = asyncio.create_task(store.lock("s"))
    await asyncio.sleep(0.1)
    await other.kill()
    lock = await asyncio.wait_for(waiting, 60)
    assert lock
    assert await store.lock_owner("s") == process_name()
    await lock.release()
