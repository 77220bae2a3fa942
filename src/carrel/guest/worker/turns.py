"""How much may be asked of the host at once; calls beyond that wait inside for their turn."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

MOST = 1000
"""Calls without an answer."""
MOST_BYTES = 96 * 1024 * 1024
"""Of their arguments together; the host itself refuses a little more than this."""


class Turns:
    """The calls of one run that have no answer yet, and those that wait for one of them to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._bytes = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    def taken(self, size: int) -> bool:
        """Take a turn if there is one; a call that is alone has one, however large it is."""
        with self._lock:
            return self._take(size)

    def _take(self, size: int) -> bool:
        if self._calls and (self._calls >= MOST or self._bytes + size > MOST_BYTES):
            return False
        self._calls += 1
        self._bytes += size
        return True

    def over(self, size: int) -> None:
        """A call has its answer, or nobody waits for it any more."""
        with self._lock:
            self._calls -= 1
            self._bytes -= size
            free = MOST - self._calls
        self._wake(free)

    def dissolve(self) -> None:
        """Another run begins: whoever waits asks again, for one of its turns."""
        self._wake(len(self._queue))

    async def wait(self, size: int) -> bool:
        """Take a turn, or wait until there may be one; whether it was taken. Code that does not await may overtake:
        it would keep the loop, and with it those whose turn it is, from going on."""
        with self._lock:
            if self._take(size):
                return True
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            # It may have been woken already: then it is another's turn.
            self._wake(1)
            raise
        return False

    def _wake(self, count: int) -> None:
        """The oldest ones; who finds no room after all waits again."""
        woken: list[asyncio.Future[None]] = []
        with self._lock:
            while self._queue and len(woken) < count:
                first = self._queue.popleft()
                if not first.done():
                    woken.append(first)
        for future in woken:
            try:
                future.get_loop().call_soon_threadsafe(_settle, future)
            except RuntimeError:
                continue  # its loop was closed, so nobody waits


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
