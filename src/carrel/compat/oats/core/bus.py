"""The event bus of oats, on that of carrel."""

from collections.abc import Awaitable, Callable
from typing import Any

from carrel import events
from carrel.events import Event, EventType

__all__ = ["Event", "EventBus", "EventHandler", "EventType", "bus"]

EventHandler = Callable[[Event], Awaitable[Any] | Any]


class EventBus:
    """Calls handlers with events; one that raises is logged and does not affect the others."""

    def __init__(self) -> None:
        self._bus = events.Bus()

    def subscribe(self, event_type: EventType | str, handler: EventHandler) -> Callable[[], None]:
        """Call the handler with each event of a type; returns a function that ends this."""
        return self._bus.subscribe(event_type, handler)

    def subscribe_all(self, handler: EventHandler) -> Callable[[], None]:
        return self._bus.subscribe_all(handler)

    def once(self, event_type: EventType | str, handler: EventHandler) -> Callable[[], None]:
        return self._bus.once(event_type, handler)

    async def publish(self, event: Event) -> None:
        """Return when all handlers have finished."""
        await self._bus.publish(event)

    def publish_sync(self, event: Event) -> None:
        """Publish and wait; inside an event loop it does not wait."""
        self._bus.publish_sync(event)

    def clear(self) -> None:
        self._bus.clear()


def _shared_bus() -> EventBus:
    shared = EventBus()
    shared._bus = events.bus
    return shared


bus = _shared_bus()
"""The bus of this process, also for the events of carrel."""
