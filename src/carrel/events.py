"""Publish events to subscribers within the process, in order and without waiting for them."""

import asyncio
import atexit
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

BACKLOG = 10_000
"""How many events may wait for one handler; beyond that, the oldest of them are dropped."""

_LINGER = 1.0
"""Seconds for which the thread of a plain handler waits for another event before it ends."""

_RAISED = "the event handler %s raised on %s; other handlers are not affected"

_MANY_TYPES = 1000
"""How many event types are cached with their subscribers."""


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
    """What `publish` returns; await it to wait until every handler of the event has finished."""

    __slots__ = ("_lock", "_pending", "_waiters")

    def __init__(self, lanes: Iterable["_Lane"]) -> None:
        self._lock = threading.Lock()
        self._pending = set(lanes)
        self._waiters: list[tuple[frozenset[_Lane], Callable[[], None]]] = []

    def __await__(self) -> Generator[Any, None, None]:
        return self._finished(_inside.get()).__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, blocking, for code without a loop; False when the timeout passed."""
        done = threading.Event()
        return not self._notify_when_done(_inside.get(), done.set) or done.wait(timeout)

    async def settle(self, timeout: float = 0.05) -> None:
        """Wait briefly for the handlers; one that exceeds the timeout is skipped here until it has caught up."""
        if not self._pending:
            return
        late = frozenset(lane for lane in tuple(self._pending) if lane.late)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._finished(_inside.get() | late)
        for lane in tuple(self._pending):
            lane.late = True

    async def _finished(self, but: frozenset["_Lane"]) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def notify() -> None:
            # The loop of the waiting task may have been closed meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, future)

        if self._notify_when_done(but, notify):
            await future

    def _notify_when_done(self, but: frozenset["_Lane"], notify: Callable[[], None]) -> bool:
        """Call `notify` once all handlers except `but` have finished; False when they have already."""
        with self._lock:
            if self._pending <= but:
                return False
            self._waiters.append((but, notify))
            return True

    def _finish(self, lane: "_Lane") -> None:
        with self._lock:
            self._pending.discard(lane)
            ready = [notify for but, notify in self._waiters if self._pending <= but]
            self._waiters = [(but, notify) for but, notify in self._waiters if not self._pending <= but]
        for notify in ready:
            notify()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Item(NamedTuple):
    """An event on its way to one handler."""

    event: Event
    delivery: Delivery
    inside: frozenset["_Lane"]
    """The handlers that were running where this was published; waiting for them there would be a deadlock."""
    loop: asyncio.AbstractEventLoop | None
    """The loop on which it was published."""


class _Lane:
    """One handler with its queue of events; a task or a thread calls it with one event at a time, in order."""

    def __init__(self, bus: "Bus", handler: Handler, once: bool = False) -> None:
        self.once = once
        self.late = False
        self._bus = bus
        self._handler = handler
        self._name = str(getattr(handler, "__qualname__", None) or repr(handler))
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
        self._home = _running_loop()
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[_Item] = deque()
        self._missed = 0
        self._closed = False
        self._at_work = False
        self._served = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def put(self, item: _Item) -> None:
        start, dropped = False, None
        with self._changed:
            if self._closed:
                dropped = item
            else:
                dropped = self._make_room()
                self._waiting.append(item)
                start = not self._served or self._is_dead()
                self._served = self._at_work = True
                self._bus._at_work.add(self)
                self._changed.notify_all()
        if dropped is not None:
            dropped.delivery._finish(self)
        if start:
            self._start(item.loop)

    def close(self) -> None:
        """Start no more calls; a running one is not interrupted."""
        with self._changed:
            self._closed = True
        self._drop_waiting()

    def wait_idle(self, until: float) -> bool:
        with self._changed:
            left = max(0.0, until - time.monotonic())
            return self._is_dead() or self._changed.wait_for(lambda: not self._at_work, left)

    def _make_room(self) -> _Item | None:
        if len(self._waiting) < self._bus.backlog:
            return None
        if not self._missed:
            logger.warning(
                "the event handler %s is %d events behind; from now on its oldest waiting ones are dropped",
                self._name,
                len(self._waiting),
            )
        self._missed += 1
        return self._waiting.popleft()

    def _drop_waiting(self) -> int:
        with self._changed:
            left = tuple(self._waiting)
            self._waiting.clear()
        for item in left:
            item.delivery._finish(self)
        return len(left)

    def _is_dead(self) -> bool:
        """Whether the loop or thread that calls the handler is gone, after a loop was closed or the process forked."""
        if self._thread is not None:
            return not self._thread.is_alive()
        return self._loop is not None and self._loop.is_closed()

    def _rest(self) -> None:
        if self._missed:
            logger.warning("the event handler %s has caught up; it missed %d events", self._name, self._missed)
        self._at_work, self.late, self._missed = False, False, 0
        self._bus._at_work.discard(self)
        self._changed.notify_all()

    def _start(self, published_on: asyncio.AbstractEventLoop | None) -> None:
        if self._is_async:
            self._start_on(self._pick_loop(published_on))
            return
        thread = threading.Thread(target=self._serve_in_thread, name=f"events for {self._name}", daemon=True)
        thread.start()
        self._thread = thread

    def _start_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if loop is _running_loop():
            self._serve_on(loop)
            return
        try:
            loop.call_soon_threadsafe(self._serve_on, loop)
        except RuntimeError:
            # The loop was closed after it was chosen.
            self._start_on(self._bus._own_loop())

    def _pick_loop(self, published_on: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
        for loop in (self._home, published_on):
            if loop is not None and loop.is_running():
                return loop
        return self._bus._own_loop()

    def _serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._serve_as_task())
        self._task.add_done_callback(self._task_ended)

    async def _serve_as_task(self) -> None:
        while (item := self._next()) is not None:
            _inside.set(item.inside | {self})
            try:
                await self._handler(item.event)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                logger.exception(_RAISED, self._name, item.event.type)
            except Exception:
                logger.exception(_RAISED, self._name, item.event.type)
            finally:
                item.delivery._finish(self)

    def _next(self) -> _Item | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            self._rest()
            self._served, self._loop = False, None
            return None

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            return
        left = self._drop_waiting()
        with self._changed:
            self._rest()
            self._served, self._loop = False, None
        level = logging.WARNING if left else logging.DEBUG
        logger.log(level, "the loop of the event handler %s ended; %d more events did not reach it", self._name, left)

    def _serve_in_thread(self) -> None:
        while (item := self._next_or_end()) is not None:
            _inside.set(item.inside | {self})
            try:
                answer = self._handler(item.event)
                if inspect.isawaitable(answer):
                    asyncio.run_coroutine_threadsafe(_awaited(answer), self._pick_loop(item.loop)).result()
            except Exception:
                logger.exception(_RAISED, self._name, item.event.type)
            finally:
                item.delivery._finish(self)
                self._wake_home()

    def _next_or_end(self) -> _Item | None:
        with self._changed:
            if not self._waiting:
                self._rest()
                self._changed.wait_for(lambda: self._waiting, _LINGER)
            if self._waiting:
                return self._waiting.popleft()
            self._served, self._thread = False, None
            return None

    def _wake_home(self) -> None:
        """Wake the loop of the subscriber: a plain handler may have fed an asyncio queue or event of it."""
        if self._home is not None and self._home.is_running():
            with contextlib.suppress(RuntimeError):
                self._home.call_soon_threadsafe(lambda: None)


class Bus:
    """Event bus: `publish` puts an event into the queue of each subscriber and returns.

    An async handler runs on the loop it was subscribed on, else on the publisher's, else on one of the bus; a plain
    handler runs in a thread of its own. Thread-safe."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self.backlog = backlog
        self._lock = threading.Lock()
        self.subscribers: dict[_Lane, str | None] = {}
        """Every subscription with its type (None: all events); while it is empty, callers need not create an event."""
        self._routes: dict[str, tuple[_Lane, ...]] = {}
        self._at_work: set[_Lane] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def subscribe(self, type: EventType | str, handler: Handler) -> Callable[[], None]:
        """Call `handler` with each event of a type; returns a function that ends the subscription."""
        return self._add(_Lane(self, handler), _name_of(type))

    def subscribe_all(self, handler: Handler) -> Callable[[], None]:
        """Call `handler` with every event."""
        return self._add(_Lane(self, handler), None)

    def once(self, type: EventType | str, handler: Handler) -> Callable[[], None]:
        """Call `handler` with the next event of a type only."""
        return self._add(_Lane(self, handler, once=True), _name_of(type))

    def publish(self, event: Event) -> Delivery:
        """Queue the event for its handlers and return at once; await the result to wait for them."""
        if not self.subscribers:
            return _NO_DELIVERY
        lanes = self._routes.get(event.type)
        if lanes is None:
            lanes = self._route(event.type)
        if lanes and any(lane.once for lane in lanes):
            lanes = self._claimed(lanes)
        if not lanes:
            return _NO_DELIVERY
        delivery = Delivery(lanes)
        item = _Item(event, delivery, _inside.get(), _running_loop())
        for lane in lanes:
            lane.put(item)
        return delivery

    def publish_sync(self, event: Event) -> None:
        """Publish and wait for the handlers, for code without a loop; inside a loop it does not wait."""
        delivery = self.publish(event)
        if _running_loop() is None:
            delivery.wait()

    def clear(self) -> None:
        """End all subscriptions."""
        with self._lock:
            lanes = {*self.subscribers, *self._at_work}
            self.subscribers.clear()
            self._routes = {}
        for lane in lanes:
            lane.close()

    def drain(self, timeout: float) -> bool:
        """Wait, blocking, until all events have been handled; False when the timeout passed."""
        until = time.monotonic() + timeout
        return all(lane.wait_idle(until) for lane in tuple(self._at_work))

    def _add(self, lane: _Lane, type: str | None) -> Callable[[], None]:
        with self._lock:
            self.subscribers[lane] = type
            self._routes = {}

        def unsubscribe() -> None:
            with self._lock:
                self.subscribers.pop(lane, None)
                self._routes = {}
            lane.close()

        return unsubscribe

    def _route(self, wanted: str) -> tuple[_Lane, ...]:
        with self._lock:
            if len(self._routes) >= _MANY_TYPES:
                self._routes = {}
            lanes = tuple(lane for lane, type in self.subscribers.items() if type is None or type == wanted)
            self._routes[wanted] = lanes
            return lanes

    def _claimed(self, lanes: tuple[_Lane, ...]) -> tuple[_Lane, ...]:
        """Remove subscriptions of `once` that had their event, and end those that get this one."""
        with self._lock:
            mine = tuple(lane for lane in lanes if not lane.once or self.subscribers.pop(lane, None) is not None)
            self._routes = {}
            return mine

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._loop_thread is None or not self._loop_thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(target=self._loop.run_forever, name="events", daemon=True)
                self._loop_thread.start()
            return self._loop


EventBus = Bus


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _name_of(type: Any) -> str:
    return str(getattr(type, "value", type))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_inside: ContextVar[frozenset[_Lane]] = ContextVar("handlers at work", default=frozenset())
_NO_DELIVERY = Delivery(())

bus = Bus()
"""The bus that carrel publishes on by default."""

# Let the last events of a short program reach their handlers.
atexit.register(bus.drain, 2.0)
