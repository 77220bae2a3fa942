"""Publish events to subscribers within the process, in order and without waiting for them."""

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

BACKLOG = 10_000
"""How many events may wait for one handler; beyond that, the oldest of them are dropped."""


class EventType(StrEnum):
    """Types of events: first those that carrel publishes, then others for programs to use."""

    SESSION_CREATED = "session.created"
    SESSION_UPDATED = "session.updated"
    SESSION_DELETED = "session.deleted"
    SESSION_FORKED = "session.forked"
    SESSION_REWOUND = "session.rewound"
    SESSION_COMPACTED = "session.compacted"
    SESSION_LABELLED = "session.labelled"
    SESSION_ARCHIVED = "session.archived"
    SESSION_UNARCHIVED = "session.unarchived"
    MESSAGE_CREATED = "message.created"
    MESSAGE_UPDATED = "message.updated"

    SESSION_BUDGET = "session.budget"
    SESSION_TASK_BUDGET = "session.task_budget"
    MESSAGE_PART_CREATED = "message.part.created"
    MESSAGE_PART_UPDATED = "message.part.updated"
    TOOL_START = "tool.start"
    TOOL_COMPLETE = "tool.complete"
    TOOL_ERROR = "tool.error"
    PROVIDER_REQUEST = "provider.request"
    PROVIDER_RESPONSE = "provider.response"
    PROVIDER_ERROR = "provider.error"
    PERMISSION_REQUEST = "permission.request"
    PERMISSION_GRANTED = "permission.granted"
    PERMISSION_DENIED = "permission.denied"
    HOOK_FIRED = "hook.fired"
    HOOK_BLOCKED = "hook.blocked"
    FILE_CHANGED = "file.changed"
    AGENT_STARTED = "agent.started"
    AGENT_COMPLETED = "agent.completed"


@dataclass(slots=True)
class Event:
    """Something that happened."""

    type: EventType | str
    data: dict[str, Any] = field(default_factory=dict)
    source: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.type, str):
            self.type = _name_of(self.type)


Handler = Callable[[Event], Awaitable[Any] | Any]


class Delivery:
    """What `publish` returns; await it to wait until every handler of the event has finished.

    Within a handler it does not wait for that handler itself, nor for one that waits for it."""

    def __init__(self, calls: dict["_Subscriber", "Future[None]"]) -> None:
        self._calls = calls

    def __await__(self) -> Generator[Any, None, None]:
        return self._finished(_running_handlers.get()).__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, blocking, for code without a loop; False when the timeout passed."""
        return not wait_for_futures(self._calls_except(_running_handlers.get()), timeout).not_done

    async def settle(self, timeout: float = 0.05) -> None:
        """Wait briefly for the handlers; one that exceeds the timeout is skipped here until it has caught up."""
        late = {subscriber for subscriber in self._calls if subscriber.is_late}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._finished(_running_handlers.get() | late)
        for subscriber, call in self._calls.items():
            subscriber.is_late = subscriber.is_late or not call.done()

    async def _finished(self, ignored: Iterable["_Subscriber"]) -> None:
        if calls := [asyncio.wrap_future(call) for call in self._calls_except(ignored)]:
            await asyncio.wait(calls)

    def _calls_except(self, ignored: Iterable["_Subscriber"]) -> list["Future[None]"]:
        return [call for subscriber, call in self._calls.items() if subscriber not in ignored and not call.done()]


class _Item(NamedTuple):
    """An event in the queue of a subscriber."""

    event: Event
    done: "Future[None]"
    publishing: frozenset["_Subscriber"]
    """The handlers that were running where this was published; they do not wait for one another."""
    loop: asyncio.AbstractEventLoop | None
    """The loop on which it was published."""


class _Subscriber:
    """One handler, its queue of events, and the task that calls it with one event at a time, in order."""

    def __init__(self, bus: "Bus", handler: Handler, is_once: bool = False) -> None:
        self.is_once = is_once
        self.is_late = False
        """Whether it exceeded the timeout of `Delivery.settle` and has not caught up since."""
        self.newest: Future[None] = _finished_future()
        """The call for the newest event."""
        self._bus = bus
        self._handler = handler
        self._name = str(getattr(handler, "__qualname__", None) or repr(handler))
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
        self._home = _current_loop()
        self._lock = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._missed = 0
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the task, while there is one."""

    def put(self, item: _Item) -> None:
        with self._lock:
            if self._is_closed:
                item.done.set_result(None)
                return
            if len(self._queue) >= self._bus.backlog:
                self._drop_oldest()
            self._queue.append(item)
            self.newest = item.done
            if self._loop is not None and not self._loop.is_closed():
                return
            loop = self._loop = self._choose_loop(item.loop if self._is_async else None)
        try:
            loop.call_soon_threadsafe(self._start_task, loop)
        except RuntimeError:  # closed since it was chosen
            self._loop = self._bus.own_loop()
            self._loop.call_soon_threadsafe(self._start_task, self._loop)

    def close(self) -> None:
        """Start no more calls; a running one is not interrupted."""
        self._is_closed = True
        self._drop_all()

    def forget_task(self) -> None:
        """After a fork: the threads, and with them the task, stayed in the parent."""
        self._lock = threading.Lock()
        self._loop = None
        self._drop_all()

    @property
    def is_stuck(self) -> bool:
        """Whether the loop of the task was closed before the task ended."""
        return self._loop is not None and self._loop.is_closed()

    def _choose_loop(self, published_on: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
        """An async handler runs where it was subscribed; the calls of a plain one are started on the bus's loop."""
        for loop in (self._home, published_on) if self._is_async else ():
            if loop is not None and loop.is_running():
                return loop
        return self._bus.own_loop()

    def _drop_oldest(self) -> None:
        if not self._missed:
            logger.warning(
                "the event handler %s is %d events behind; from now on its oldest waiting ones are dropped",
                self._name,
                len(self._queue),
            )
        self._missed += 1
        self._queue.popleft().done.set_result(None)

    def _drop_all(self) -> int:
        with self._lock:
            dropped = [*self._queue]
            self._queue.clear()
        for item in dropped:
            item.done.set_result(None)
        return len(dropped)

    def _start_task(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.create_task(self._work()).add_done_callback(self._task_ended)

    async def _work(self) -> None:
        while (item := self._next()) is not None:
            _running_handlers.set(item.publishing | {self})
            try:
                await self._call(item)
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                logger.exception(
                    "the event handler %s raised on %s; other handlers are not affected", self._name, item.event.type
                )
            finally:
                item.done.set_result(None)

    async def _call(self, item: _Item) -> None:
        if self._is_async:
            await self._handler(item.event)
            return
        answer = await _in_thread(lambda: self._handler(item.event))
        if self._home is not None:
            # Wake the loop of the subscriber: the handler may have put the event into an asyncio queue of it.
            with contextlib.suppress(RuntimeError):
                self._home.call_soon_threadsafe(lambda: None)
        if inspect.isawaitable(answer):
            loops = [loop for loop in (self._home, item.loop) if loop is not None and loop.is_running()]
            loop = loops[0] if loops else self._bus.own_loop()
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(answer), loop))

    def _next(self) -> _Item | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            if self._missed:
                logger.warning("the event handler %s has caught up; it missed %d events", self._name, self._missed)
            self._loop, self._missed, self.is_late = None, 0, False
            return None

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            left = self._drop_all()
            self._next()
            level = logging.WARNING if left else logging.DEBUG
            text = "the loop of the event handler %s ended; %d more events did not reach it"
            logger.log(level, text, self._name, left)


class Bus:
    """Event bus: `publish` puts an event into the queue of each subscriber and returns.

    An async handler runs on the loop it was subscribed on, else on the publisher's, else on one of the bus; a plain
    handler runs in a thread. Thread-safe."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self.backlog = backlog
        self.subscribers: dict[_Subscriber, str | None] = {}
        """Every subscription with its type (None: all events); while it is empty, callers need not create an event."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def subscribe(self, type: EventType | str, handler: Handler) -> Callable[[], None]:
        """Call `handler` with each event of a type; returns a function that ends the subscription."""
        return self._add(_Subscriber(self, handler), _name_of(type))

    def subscribe_all(self, handler: Handler) -> Callable[[], None]:
        """Call `handler` with every event."""
        return self._add(_Subscriber(self, handler), None)

    def once(self, type: EventType | str, handler: Handler) -> Callable[[], None]:
        """Call `handler` with the next event of a type only."""
        return self._add(_Subscriber(self, handler, is_once=True), _name_of(type))

    def publish(self, event: Event) -> Delivery:
        """Queue the event for its handlers and return at once; await the result to wait for them."""
        with self._lock:
            chosen = [each for each, type in self.subscribers.items() if type is None or type == event.type]
            for subscriber in chosen:
                if subscriber.is_once:
                    del self.subscribers[subscriber]
        calls = {subscriber: _new_future() for subscriber in chosen}
        for subscriber, done in calls.items():
            subscriber.put(_Item(event, done, _running_handlers.get(), _current_loop()))
        return Delivery(calls)

    def publish_sync(self, event: Event) -> None:
        """Publish and wait for the handlers, for code without a loop; inside a loop it does not wait."""
        delivery = self.publish(event)
        if _current_loop() is None:
            delivery.wait()

    def clear(self) -> None:
        """End all subscriptions."""
        with self._lock:
            subscribers = [*self.subscribers]
            self.subscribers.clear()
        for subscriber in subscribers:
            subscriber.close()

    def drain(self, timeout: float) -> bool:
        """Wait, blocking, until the handlers have had all events; False when the timeout passed."""
        calls = [subscriber.newest for subscriber in [*self.subscribers] if not subscriber.is_stuck]
        return not wait_for_futures(calls, timeout).not_done

    def own_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the bus, which runs in a thread of its own once it is needed."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="events", daemon=True).start()
            return self._loop

    def _add(self, subscriber: _Subscriber, type: str | None) -> Callable[[], None]:
        with self._lock:
            self.subscribers[subscriber] = type

        def unsubscribe() -> None:
            with self._lock:
                self.subscribers.pop(subscriber, None)
            subscriber.close()

        return unsubscribe

    def _restart_in_child(self) -> None:
        self._lock = threading.Lock()
        self._loop = None
        for subscriber in self.subscribers:
            subscriber.forget_task()


EventBus = Bus


def _new_future() -> "Future[None]":
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # from now on a cancelled waiter does not cancel it
    return future


def _finished_future() -> "Future[None]":
    future = _new_future()
    future.set_result(None)
    return future


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Call it in a daemon thread: unlike those of `asyncio.to_thread`, one that never ends lets the program end."""
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001  it is raised in the task that waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _name_of(type: Any) -> str:
    return str(getattr(type, "value", type))


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_running_handlers: contextvars.ContextVar[frozenset[_Subscriber]] = contextvars.ContextVar(
    "the running handlers", default=frozenset()
)

bus = Bus()
"""The bus that carrel publishes on by default."""

os.register_at_fork(after_in_child=bus._restart_in_child)

# Let the last events of a short program reach their handlers.
atexit.register(bus.drain, 2.0)
