"""The event bus: subscribers get events in order and do not wait for one another."""

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

from carrel.events import Bus, Event, EventType
from carrel.events import bus as shared_bus


@pytest.fixture
def bus() -> Iterator[Bus]:
    made = Bus()
    yield made
    made.clear()
    assert made.drain(60), "a handler was still at work at the end of the test"


def run_program(text: str) -> str:
    """What a program of its own prints; it must end well and by itself."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110, what is waited for has no event of its own
            await asyncio.sleep(0.001)


# --- hearing of it


async def test_awaiting_publish_waits_for_plain_and_async_handlers(bus: Bus) -> None:
    heard: list[str] = []

    async def slowly(event: Event) -> None:
        await asyncio.sleep(0.05)
        heard.append(f"async {event.data['session_id']}")

    bus.subscribe(EventType.SESSION_CREATED, lambda event: heard.append(f"plain {event.data['session_id']}"))
    bus.subscribe(EventType.SESSION_CREATED, slowly)
    await bus.publish(Event(EventType.SESSION_CREATED, {"session_id": "a1"}))
    assert sorted(heard) == ["async a1", "plain a1"]


async def test_publish_need_not_be_awaited(bus: Bus) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def keep(event: Event) -> None:
        await heard.put(event.type)

    bus.subscribe("session.updated", keep)
    bus.publish(Event("session.updated"))
    assert await asyncio.wait_for(heard.get(), 60) == "session.updated"


async def test_a_type_is_the_same_written_as_text_and_as_a_member(bus: Bus) -> None:
    heard: list[str] = []
    bus.subscribe("session.created", lambda event: heard.append("by text"))
    bus.subscribe(EventType.SESSION_CREATED, lambda event: heard.append("by member"))
    await bus.publish(Event("session.created"))
    await bus.publish(Event(type=EventType.SESSION_CREATED, data={}))
    assert sorted(heard) == ["by member", "by member", "by text", "by text"]


async def test_a_program_may_bring_its_own_types(bus: Bus) -> None:
    class Own(Enum):
        LUNCH = "lunch"

    class OwnText(str, Enum):  # noqa: UP042, programs have such ones
        TEA = "tea"

    heard: list[str] = []
    bus.subscribe(Own.LUNCH, lambda event: heard.append(str(event.type)))  # type: ignore[arg-type]
    bus.subscribe("tea", lambda event: heard.append("tea"))
    await bus.publish(Event(Own.LUNCH))  # type: ignore[arg-type]
    await bus.publish(Event(OwnText.TEA))
    assert heard == ["lunch", "tea"]


async def test_one_who_wants_all_hears_all_and_others_only_theirs(bus: Bus) -> None:
    all_types: list[str] = []
    deleted: list[str] = []
    bus.subscribe_all(lambda event: all_types.append(event.type))
    bus.subscribe(EventType.SESSION_DELETED, lambda event: deleted.append(event.type))
    for name in ("session.created", "my.own", "session.deleted"):
        await bus.publish(Event(name))
    assert all_types == ["session.created", "my.own", "session.deleted"]
    assert deleted == ["session.deleted"]


async def test_once_is_called_for_the_next_event_only(bus: Bus) -> None:
    heard: list[int] = []
    bus.once("n", lambda event: heard.append(event.data["n"]))
    for n in range(3):
        await bus.publish(Event("n", {"n": n}))
    assert heard == [0]


async def test_once_can_be_taken_back(bus: Bus) -> None:
    heard: list[Event] = []
    bus.once("n", heard.append)()
    await bus.publish(Event("n"))
    assert heard == []


def test_once_is_called_once_when_many_threads_publish(bus: Bus) -> None:
    heard: list[Event] = []
    bus.once("n", heard.append)
    barrier = threading.Barrier(8)

    def publish() -> None:
        barrier.wait(30)
        bus.publish(Event("n")).wait(30)

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 1


async def test_publishing_without_subscribers_starts_nothing(bus: Bus) -> None:
    threads = threading.active_count()
    assert bus.publish(Event("n")).wait(0)
    bus.subscribe("other", lambda event: None)
    await bus.publish(Event("n"))
    assert threading.active_count() == threads


# --- order


@pytest.mark.parametrize("manner", ["plain", "async"])
async def test_each_subscriber_gets_the_events_in_order(bus: Bus, manner: str) -> None:
    heard: list[int] = []

    async def now_and_then_slow(event: Event) -> None:
        if event.data["n"] % 50 == 0:
            await asyncio.sleep(0.001)
        heard.append(event.data["n"])

    bus.subscribe("n", now_and_then_slow if manner == "async" else lambda event: heard.append(event.data["n"]))
    for n in range(499):
        bus.publish(Event("n", {"n": n}))
    await bus.publish(Event("n", {"n": 499}))
    assert heard == list(range(500))


async def test_many_threads_publish_and_nothing_is_lost_or_out_of_order(bus: Bus) -> None:
    plain: list[tuple[int, int]] = []
    on_loop: list[tuple[int, int]] = []

    async def keep(event: Event) -> None:
        on_loop.append(event.data["n"])

    bus.subscribe("n", lambda event: plain.append(event.data["n"]))
    bus.subscribe("n", keep)

    def publish(thread: int) -> None:
        for n in range(200):
            last = bus.publish(Event("n", {"n": (thread, n)}))
        last.wait()

    await asyncio.gather(*(asyncio.to_thread(publish, thread) for thread in range(4)))
    for heard in (plain, on_loop):
        assert len(heard) == 800
        for thread in range(4):
            assert [n for t, n in heard if t == thread] == list(range(200))


# --- handlers do not wait for one another


@pytest.mark.parametrize("manner", ["plain", "async"])
async def test_a_handler_that_never_ends_holds_up_neither_the_publisher_nor_the_others(bus: Bus, manner: str) -> None:
    let_go = threading.Event()
    let_go_async = asyncio.Event()
    heard: list[int] = []

    async def stuck(event: Event) -> None:
        await let_go_async.wait()

    bus.subscribe("n", stuck if manner == "async" else lambda event: let_go.wait(60))
    bus.subscribe("n", lambda event: heard.append(event.data["n"]))
    deliveries = [bus.publish(Event("n", {"n": n})) for n in range(20)]
    await bus.publish(Event("other"))
    await until(lambda: len(heard) == 20)
    assert not deliveries[0].wait(0)
    let_go.set()
    let_go_async.set()
    await deliveries[-1]


async def test_a_handler_that_raises_is_named_in_the_log_and_stops_no_other(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def clumsy(event: Event) -> None:
        raise ValueError("oh dear")

    async def clumsy_too(event: Event) -> None:
        raise KeyError("oh my")

    bus.subscribe("n", clumsy)
    bus.subscribe("n", clumsy_too)
    bus.subscribe("n", heard.append)
    with caplog.at_level(logging.ERROR, "carrel.events"):
        await bus.publish(Event("n"))
        await bus.publish(Event("n"))
    assert len(heard) == 2
    named = [record.getMessage() for record in caplog.records]
    assert sum("clumsy raised on n" in text for text in named) == 2
    assert sum("clumsy_too raised on n" in text for text in named) == 2
    assert "oh dear" in caplog.text


async def test_a_handler_with_cancelled_work_is_called_again(bus: Bus) -> None:
    calls: list[Event] = []

    async def cancelled(event: Event) -> None:
        calls.append(event)
        raise asyncio.CancelledError

    bus.subscribe("n", cancelled)
    await bus.publish(Event("n"))
    await bus.publish(Event("n"))
    assert len(calls) == 2


async def test_quick_handlers_have_finished_after_settling_and_a_slow_one_is_waited_for_only_once(bus: Bus) -> None:
    let_go = asyncio.Event()
    heard: list[int] = []

    async def slow(event: Event) -> None:
        await let_go.wait()

    bus.subscribe("n", slow)
    bus.subscribe("n", lambda event: heard.append(event.data["n"]))
    await bus.publish(Event("n", {"n": 0})).settle(0.05)
    assert heard == [0]
    for n in range(1, 100):
        # Were the slow one waited for each time, this test would not end.
        await bus.publish(Event("n", {"n": n})).settle(60)
    assert heard == list(range(100))
    let_go.set()


async def test_events_for_one_who_never_comes_back_are_bounded_and_the_newest_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = Bus(backlog=10)
    let_go = asyncio.Event()
    heard: list[int] = []

    async def stuck(event: Event) -> None:
        heard.append(event.data["n"])
        await let_go.wait()

    bus.subscribe("n", stuck)
    first = bus.publish(Event("n", {"n": 0}))
    await until(lambda: heard)
    with caplog.at_level(logging.WARNING, "carrel.events"):
        deliveries = [bus.publish(Event("n", {"n": n})) for n in range(1, 101)]
        await deliveries[0]  # dropped, so awaiting it ends
        let_go.set()
        await first
        await deliveries[-1]
        assert heard == [0, *range(91, 101)]
        await until(lambda: "it missed 90 events" in caplog.text)
    assert "10 events behind" in caplog.text


# --- ending it


async def test_a_handler_that_was_unsubscribed_is_not_called_any_more(bus: Bus) -> None:
    heard: list[Event] = []
    unsubscribe = bus.subscribe("n", heard.append)
    await bus.publish(Event("n"))
    unsubscribe()
    unsubscribe()
    await bus.publish(Event("n"))
    assert len(heard) == 1


async def test_what_still_waited_when_it_was_unsubscribed_is_not_delivered(bus: Bus) -> None:
    let_go = asyncio.Event()
    heard: list[int] = []

    async def slow(event: Event) -> None:
        heard.append(event.data["n"])
        await let_go.wait()

    unsubscribe = bus.subscribe("n", slow)
    first = bus.publish(Event("n", {"n": 1}))
    second = bus.publish(Event("n", {"n": 2}))
    await until(lambda: heard)
    unsubscribe()
    await second
    let_go.set()
    await first
    assert heard == [1]


async def test_unsubscribing_during_publish_skips_no_other(bus: Bus) -> None:
    heard: list[str] = []
    ends: dict[str, Any] = {}

    def leave(name: str) -> None:
        heard.append(name)
        ends[name]()

    for name in ("a", "b", "c", "d"):
        ends[name] = bus.subscribe("n", lambda event, name=name: leave(name))  # type: ignore[misc]
    await bus.publish(Event("n"))
    assert sorted(heard) == ["a", "b", "c", "d"]
    await bus.publish(Event("n"))
    assert sorted(heard) == ["a", "b", "c", "d"]


async def test_the_same_handler_subscribed_twice_is_called_twice_and_ended_one_by_one(bus: Bus) -> None:
    heard: list[Event] = []
    first = bus.subscribe("n", heard.append)
    bus.subscribe("n", heard.append)
    await bus.publish(Event("n"))
    assert len(heard) == 2
    first()
    await bus.publish(Event("n"))
    assert len(heard) == 3


async def test_clear_ends_all_subscriptions(bus: Bus) -> None:
    heard: list[Event] = []
    bus.subscribe("n", heard.append)
    bus.subscribe_all(heard.append)
    bus.once("n", heard.append)
    bus.clear()
    await bus.publish(Event("n"))
    assert heard == []


# --- handlers that publish, and other places


async def test_a_handler_may_await_an_event_that_comes_back_to_itself(bus: Bus) -> None:
    heard: list[int] = []

    async def count_down(event: Event) -> None:
        heard.append(event.data["n"])
        if event.data["n"]:
            await bus.publish(Event("n", {"n": event.data["n"] - 1}))

    bus.subscribe("n", count_down)
    bus.publish(Event("n", {"n": 3}))
    await until(lambda: len(heard) == 4)
    assert heard == [3, 2, 1, 0]


async def test_two_handlers_that_await_each_other_do_not_hang(bus: Bus) -> None:
    heard: list[str] = []

    async def ping(event: Event) -> None:
        heard.append("ping")
        if len(heard) < 6:
            await bus.publish(Event("pong"))

    async def pong(event: Event) -> None:
        heard.append("pong")
        await bus.publish(Event("ping"))

    bus.subscribe("ping", ping)
    bus.subscribe("pong", pong)
    bus.publish(Event("ping"))
    await until(lambda: len(heard) >= 6)
    assert heard[:4] == ["ping", "pong", "ping", "pong"]


async def test_a_queue_can_be_the_handler(bus: Bus) -> None:
    heard: asyncio.Queue[Event] = asyncio.Queue()
    bus.subscribe_all(heard.put_nowait)
    waiting = asyncio.create_task(heard.get())
    await asyncio.sleep(0)
    bus.publish(Event("n", {"n": 1}))
    assert (await asyncio.wait_for(waiting, 60)).data == {"n": 1}


async def test_a_plain_function_that_gives_back_a_coroutine_is_awaited_on_the_loop(bus: Bus) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def note(event: Event) -> None:
        loops.append(asyncio.get_running_loop())

    bus.subscribe("n", lambda event: note(event))
    await bus.publish(Event("n"))
    assert loops == [asyncio.get_running_loop()]


async def test_an_object_with_an_async_call_is_a_handler(bus: Bus) -> None:
    class Counter:
        count = 0

        async def __call__(self, event: Event) -> None:
            self.count += 1

    counter = Counter()
    bus.subscribe("n", counter)
    await bus.publish(Event("n"))
    assert counter.count == 1


async def test_an_async_handler_runs_on_its_own_loop_when_a_thread_publishes(bus: Bus) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def note(event: Event) -> None:
        loops.append(asyncio.get_running_loop())

    bus.subscribe("n", note)
    await asyncio.to_thread(lambda: bus.publish(Event("n")).wait(60))
    assert loops == [asyncio.get_running_loop()]


def test_without_a_loop_both_kinds_of_handlers_are_called(bus: Bus) -> None:
    heard: list[str] = []

    async def keep(event: Event) -> None:
        await asyncio.sleep(0)
        heard.append("async")

    bus.subscribe("n", keep)
    bus.subscribe("n", lambda event: heard.append("plain"))
    bus.publish_sync(Event("n"))
    assert sorted(heard) == ["async", "plain"]
    assert bus.publish(Event("n")).wait(60)
    assert sorted(heard) == ["async", "async", "plain", "plain"]


def test_a_subscription_outlives_the_loop_it_was_made_on(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    async def keep(event: Event) -> None:
        heard.append(event.data["n"])

    async def first() -> None:
        bus.subscribe("n", keep)
        await bus.publish(Event("n", {"n": 1}))

    async def second() -> None:
        await bus.publish(Event("n", {"n": 2}))

    asyncio.run(first())
    asyncio.run(second())
    bus.publish_sync(Event("n", {"n": 3}))
    assert heard == [1, 2, 3]


def test_a_loop_that_ends_before_its_handler_did_leaves_a_word_in_the_log(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    async def slow(event: Event) -> None:
        heard.append(event.data["n"])
        await asyncio.sleep(60)

    async def main() -> None:
        bus.subscribe("n", slow)
        for n in range(3):
            bus.publish(Event("n", {"n": n}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING, "carrel.events"):
        asyncio.run(main())
    assert heard == [0]
    assert "2 more events did not reach it" in caplog.text


def test_a_loop_closed_under_a_handler_does_not_end_its_subscription(bus: Bus) -> None:
    heard: list[int] = []

    async def keep(event: Event) -> None:
        heard.append(event.data["n"])
        if event.data["n"] == 1:
            await asyncio.Event().wait()

    async def publish_and_leave() -> None:
        bus.publish(Event("n", {"n": 1}))
        await until(lambda: heard)

    bus.subscribe("n", keep)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(publish_and_leave())
    loop.close()
    assert bus.publish(Event("n", {"n": 2})).wait(60)
    assert heard == [1, 2]
    gc.collect()  # asyncio complains of the call that was cut off when it finds it: here, and not in another test


def test_the_last_events_of_a_short_program_reach_their_handlers() -> None:
    printed = run_program("""
        import asyncio
        from carrel.events import bus, Event

        async def later(event):
            await asyncio.sleep(0.2)
            print("async", event.data["n"])

        bus.subscribe("n", lambda event: print("plain", event.data["n"]))
        bus.subscribe("n", later)
        bus.publish(Event("n", {"n": 1}))
    """)
    assert sorted(printed.split("\n")) == ["", "async 1", "plain 1"]


def test_a_handler_that_never_ends_does_not_keep_a_program_from_ending() -> None:
    printed = run_program("""
        import threading
        from carrel.events import bus, Event

        bus.subscribe("n", lambda event: threading.Event().wait())
        bus.publish(Event("n"))
        print("done")
    """)
    assert printed == "done\n"


def test_a_forked_process_has_handlers_that_work() -> None:
    printed = run_program("""
        import os
        from carrel.events import bus, Event

        bus.subscribe("n", lambda event: print("in", event.data["who"], flush=True))
        bus.publish_sync(Event("n", {"who": "the parent"}))
        child = os.fork()
        if child == 0:
            bus.publish_sync(Event("n", {"who": "the child"}))
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert printed == "in the parent\nin the child\n"


async def test_there_is_one_bus_for_all() -> None:
    heard: list[Event] = []
    unsubscribe = shared_bus.subscribe("test.shared", heard.append)
    await shared_bus.publish(Event("test.shared"))
    unsubscribe()
    assert heard == [Event("test.shared")]
