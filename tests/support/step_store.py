"""A store that can fail at any of its calls, or let another task run between any two of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from carrel.errors import StorageUnavailable
from carrel.storage.base import Lock, Store

WRITES = {"put", "put_pieces", "delete", "copy", "append", "copy_log"}
METHODS = WRITES | {"get", "get_many", "folders", "stamp", "stamps", "scan", "list", "lock"}
ITERATORS = {"pieces", "read", "read_back"}

Step = Callable[[int, str], Awaitable[None]]
"""Called at a step, with its number and what comes next or has just happened."""


class StepStore:
    """Counts the calls to a store. `step` is called before each, and after each that writes; it may raise."""

    def __init__(self, store: Store, step: Step | None = None) -> None:
        self._store = store
        self._step = step
        self._locks: list[tuple[str, Lock]] = []
        self.steps: list[str] = []
        self.is_blocked = asyncio.Event()
        """Set when a call waits for a lock."""

    def restart(self, step: Step) -> None:
        """Call this function from now on, and count the steps again."""
        self.steps.clear()
        self._step = step

    async def _at(self, what: str) -> None:
        self.steps.append(what)
        if self._step is not None:
            await self._step(len(self.steps), what)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ITERATORS:
            return lambda *args, **kwargs: self._iterate(method(*args, **kwargs), f"{name} {args[0]}")
        if name not in METHODS:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            what = f"{name} {args[0] if args else ''}"
            await self._at(f"before {what}")
            answer = await (self._lock(*args, **kwargs) if name == "lock" else method(*args, **kwargs))
            if name in WRITES:
                await self._at(f"after {what}")
            return answer

        return call

    async def _iterate(self, blocks: AsyncIterator[Any], what: str) -> AsyncIterator[Any]:
        await self._at(f"before {what}")
        async for block in blocks:
            yield block
            await self._at(f"between {what}")

    async def _lock(self, key: str, *, wait: bool = True) -> Lock | None:
        lock = await self._store.lock(key, wait=False)
        if lock is None and wait:
            self.is_blocked.set()
            lock = await self._store.lock(key)
        if lock is not None:
            self._locks.append((key, lock))
        return lock

    async def release_locks(self) -> None:
        """Release all locks, as the end of a process does."""
        for _, lock in self._locks:
            await lock.release()

    async def held_locks(self) -> list[str]:
        """Return the keys of the locks that were acquired and not released."""
        return [key for key, _ in self._locks if await self._store.lock_owner(key) is not None]


def fail_at(at: int, how: str, tasks: "list[asyncio.Task[Any]]") -> Step:
    """Return a step that fails `once`, or from there on if `killed`; or cancels the first task if `cancelled`."""

    async def step(number: int, what: str) -> None:
        if number == at and how == "cancelled":
            tasks[0].cancel()
            await asyncio.sleep(0)
        elif number == at or (number > at and how == "killed"):
            raise StorageUnavailable(f"failed {what}")

    return step


async def run_until_blocked(store: StepStore, action: Awaitable[Any]) -> "asyncio.Future[Any]":
    """Start an action, and return when it has ended or waits for a lock."""
    task, blocked = asyncio.ensure_future(action), asyncio.ensure_future(store.is_blocked.wait())
    await asyncio.wait([task, blocked], return_when=asyncio.FIRST_COMPLETED)
    blocked.cancel()
    return task


class OtherUser:
    """Runs actions on the same store at one step, each until it ends or waits for a lock."""

    def __init__(self, store: Store, at: int, *actions: Callable[[Any], Awaitable[Any]]) -> None:
        self._store = store
        self._at = at
        self._actions = actions
        self.tasks: list[asyncio.Future[Any]] = []

    async def step(self, number: int, what: str) -> None:
        if number != self._at:
            return
        for action in self._actions:
            store = StepStore(self._store)
            self.tasks.append(await run_until_blocked(store, action(store)))
