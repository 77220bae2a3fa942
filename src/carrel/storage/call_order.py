"""One loop's calls in turn: those about the same key in the order in which they came, others a few at once."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CallOrder:
    """Turns by key; a key that nobody waits for costs nothing."""

    def __init__(self) -> None:
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]]
        self._loops = weakref.WeakKeyDictionary()
        self._waiting: dict[asyncio.Lock, int] = {}

    def idle(self, key: str) -> bool:
        """Whether nobody of this loop has a turn or waits for one: then one may go without."""
        if not self._waiting:
            return True  # nobody of any loop: most of the time, and told at once
        turns = self._loops.get(asyncio.get_running_loop())
        return turns is None or key not in turns

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        turns = self._loops.setdefault(asyncio.get_running_loop(), {})
        lock = turns.setdefault(key, asyncio.Lock())
        self._waiting[lock] = self._waiting.get(lock, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[lock] -= 1
            if not self._waiting[lock]:
                del self._waiting[lock]
                if turns.get(key) is lock:
                    del turns[key]


class FewAtOnce:
    """No more than so many of one loop's calls at a time: a lock is a file that is open, and those are numbered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._loops = weakref.WeakKeyDictionary()

    def turn(self) -> asyncio.Semaphore:
        return self._loops.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most))
