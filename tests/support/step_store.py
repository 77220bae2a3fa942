"""A store that can be cut off at any of its calls, or have somebody else come in between any two of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from carrel.errors import StorageUnavailable
from carrel.storage.base import Lock, Store

WRITES = {"put", "put_pieces", "delete", "copy", "append", "copy_log"}
VERBS = WRITES | {"get", "get_many", "folders", "stamp", "stamps", "scan", "list", "lock"}
BLOCKS = {"pieces", "read", "read_back"}

Step = Callable[[int, str], Awaitable[None]]
"""What happens at a step: its number, and what it is before or after."""


class Stepping:
    """Counts the calls of one user of a store. Before each, and after each that writes, `step` may raise, or do
    something else first."""

    def __init__(self, store: Store, step: Step | None = None) -> None:
        self._store = store
        self._step = step
        self._locks: list[tuple[str, Lock]] = []
        self.steps: list[str] = []
        self.waiting = asyncio.Event()
        """Set once it waits for a lock that somebody else holds."""

    def begin(self, step: Step) -> None:
        """From now on this one, and the steps are counted anew."""
        self.steps.clear()
        self._step = step

    async def _at(self, what: str) -> None:
        self.steps.append(what)
        if self._step is not None:
            await self._step(len(self.steps), what)

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if name in BLOCKS:
            return lambda *words, **more: self._blocks(verb(*words, **more), f"{name} {words[0]}")
        if name not in VERBS:
            return verb

        async def called(*words: Any, **more: Any) -> Any:
            what = f"{name} {words[0] if words else ''}"
            await self._at(f"before {what}")
            answer = await (self._lock(*words, **more) if name == "lock" else verb(*words, **more))
            if name in WRITES:
                await self._at(f"after {what}")
            return answer

        return called

    async def _blocks(self, blocks: AsyncIterator[Any], what: str) -> AsyncIterator[Any]:
        await self._at(f"before {what}")
        async for block in blocks:
            yield block
            await self._at(f"between {what}")

    async def _lock(self, key: str, *, wait: bool = True) -> Lock | None:
        lock = await self._store.lock(key, wait=False)
        if lock is None and wait:
            self.waiting.set()
            lock = await self._store.lock(key)
        if lock is not None:
            self._locks.append((key, lock))
        return lock

    async def die(self) -> None:
        """What the end of a process does for it."""
        for _, lock in self._locks:
            await lock.release()

    async def held(self) -> list[str]:
        """The locks that it took and did not let go of."""
        return [key for key, _ in self._locks if await self._store.lock_owner(key) is not None]


def cut(at: int, how: str, user: "list[asyncio.Task[Any]]") -> Step:
    """Cut its user off at a step: `once`, or for good as one who is `killed`; or `cancelled`."""

    async def step(number: int, what: str) -> None:
        if number == at and how == "cancelled":
            user[0].cancel()
            await asyncio.sleep(0)
        elif number == at or (number > at and how == "killed"):
            raise StorageUnavailable(f"cut off {what}")

    return step


async def until_it_waits(store: Stepping, doing: Awaitable[Any]) -> "asyncio.Future[Any]":
    """Begin it, and go on when it has ended or waits for a lock."""
    task, waiting = asyncio.ensure_future(doing), asyncio.ensure_future(store.waiting.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task


class Another:
    """Somebody else who comes in at one step, and goes as far as nobody holds a lock against it."""

    def __init__(self, store: Store, at: int, *dos: Callable[[Any], Awaitable[Any]]) -> None:
        self._store = store
        self._at = at
        self._dos = dos
        self.doing: list[asyncio.Future[Any]] = []

    async def step(self, number: int, what: str) -> None:
        if number != self._at:
            return
        for do in self._dos:
            stepping = Stepping(self._store)
            self.doing.append(await until_it_waits(stepping, do(stepping)))
