"""The suite, watching: what every kind of store promises to those who follow a log."""

import asyncio

import pytest

from tests.support.stores import Backend, Listener, in_a_thread


async def test_a_watcher_hears_what_was_and_then_what_comes(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"1", b"2" * 50_000])
    listener = Listener(backend.open(), "log")
    assert [await listener.next(), await listener.next()] == [(1, b"1"), (2, b"2" * 50_000)]
    for number in range(3, 20):
        await store.append("log", [b"%d" % number])
        assert await listener.next() == (number, b"%d" % number)
    await store.append("log", [b"20", b"\xff" * 70_000, b"22"])
    assert [await listener.next() for _ in range(3)] == [(20, b"20"), (21, b"\xff" * 70_000), (22, b"22")]
    await listener.stop()


async def test_a_watcher_may_begin_in_the_middle_or_after_the_end(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"1", b"2", b"3"])
    middle, live, later = (Listener(store, "log", seq) for seq in (2, 4, 6))
    assert [await middle.next(), await middle.next()] == [(2, b"2"), (3, b"3")]
    for number in (4, 5, 6):
        await store.append("log", [b"%d" % number])
        assert await middle.next() == (number, b"%d" % number)
    assert [await live.next() for _ in range(3)] == [(4, b"4"), (5, b"5"), (6, b"6")]
    assert await later.next() == (6, b"6")
    for listener in (middle, live, later):
        await listener.stop()


async def test_a_watcher_waits_for_a_log_that_is_not_there_yet(backend: Backend) -> None:
    store = backend.open()
    await store.put("other/o", b"x")
    first, second = Listener(store, "s/1/log"), Listener(backend.open(), "s/1/log", 2)
    await asyncio.sleep(0.1)
    await store.append("s/1/log", [b"1"])
    assert await first.next() == (1, b"1")
    await store.append("s/1/log", [b"2"])
    assert await first.next() == (2, b"2")
    assert await second.next() == (2, b"2")
    await first.stop()
    await second.stop()


async def test_a_watcher_of_an_empty_log_hears_its_first_record(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [])
    listener = Listener(store, "log")
    await asyncio.sleep(0.05)
    await store.append("log", [b"1"])
    assert await listener.next() == (1, b"1")
    await store.delete("log")
    assert await listener.next() is None


async def test_a_watch_ends_when_the_log_is_deleted(backend: Backend) -> None:
    store = backend.open()
    await store.append("s/log", [b"1"])
    at_work, idle = Listener(backend.open(), "s/log"), Listener(store, "s/log", 5)
    assert await at_work.next() == (1, b"1")
    await asyncio.sleep(0.1)
    await store.delete("s")
    assert await at_work.next() is None
    assert await idle.next() is None


async def test_a_watcher_is_not_given_the_records_of_another_log_of_that_name(backend: Backend) -> None:
    store = backend.open()
    await store.append("s/log", [b"old 1"])
    listener, slow = Listener(backend.open(), "s/log"), aiter(store.watch("s/log"))
    assert await listener.next() == (1, b"old 1")
    assert await anext(slow) == (1, b"old 1")
    await store.delete("s")
    await store.append("s/log", [b"new 1", b"new 2"])
    assert await listener.next() is None
    assert await anext(slow, "ended") == "ended"


async def test_a_watcher_keeps_up_with_many_records_at_once(backend: Backend) -> None:
    store = backend.open()
    listener = Listener(backend.open(), "log")
    records = [b"%d" % number + b"." * (number % 50) for number in range(1, 2001)]
    for start in range(0, 2000, 40):
        await store.append("log", records[start : start + 40])
    assert [await listener.next() for _ in records] == list(enumerate(records, 1))
    await listener.stop()


async def test_a_watcher_in_another_thread_is_woken(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"1"])
    heard_one, heard_two = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def follow() -> list[tuple[int, bytes] | None]:
        their_store = backend.open()
        listener = Listener(their_store, "log")
        heard = [await listener.next()]
        loop.call_soon_threadsafe(heard_one.set)
        heard.append(await listener.next())
        # A store that is looked at could miss what is deleted at once.
        loop.call_soon_threadsafe(heard_two.set)
        heard.append(await listener.next())
        await backend.done_with(their_store)
        return heard

    following = asyncio.ensure_future(in_a_thread(follow))
    await heard_one.wait()
    await store.append("log", [b"2"])
    await heard_two.wait()
    await store.delete("log")
    assert await following == [(1, b"1"), (2, b"2"), None]


async def test_a_watch_that_is_given_up_leaves_the_store_usable(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"1"])
    for _ in range(30):
        listener = Listener(store, "log")
        assert await listener.next() == (1, b"1")
        await listener.stop()
    async for seq, _ in store.watch("log"):
        assert seq == 1
        break
    assert await store.append("log", [b"2"]) == 2


@pytest.mark.promise("between processes")
async def test_a_watcher_in_another_process_hears_what_comes_and_the_end(backend: Backend) -> None:
    store = backend.open()
    await store.append("s/log", [b"before"])
    other = await backend.other("watch", "s/log")
    assert await other.line() == "watching"
    assert await other.line() == f"1 {b'before'.hex()}"
    for number in range(2, 12):
        await store.append("s/log", [b"\xff%d" % number])
        assert await other.line() == f"{number} {(b'%s%d' % (bytes([255]), number)).hex()}"
    await store.delete("s")
    assert await other.line() == "ended"


@pytest.mark.promise("between processes")
async def test_what_another_process_appends_is_heard_here(backend: Backend) -> None:
    listener = Listener(backend.open(), "s/log")
    other = await backend.other("append", "s/log", "20", "theirs")
    assert await other.line() == "ready"
    await other.send()
    assert [await listener.next() for _ in range(20)] == [(at + 1, f"theirs {at}".encode()) for at in range(20)]
    await listener.stop()


async def test_who_watches_can_give_up_at_any_moment(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"1"])

    async def watch() -> None:
        async for _ in store.watch("log", 1):
            pass

    for steps in range(24):
        watching = [asyncio.create_task(watch()) for _ in range(4)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for one in watching:
            one.cancel()
        _, deaf = await asyncio.wait(watching, timeout=60)
        assert not deaf, f"cancelled after {steps} steps"
    assert await store.append("log", [b"2"]) == 2
