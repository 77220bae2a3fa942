"""Tool calls that wait for their results: each holds a lock, so that no reader declares a live call interrupted."""

import asyncio
import hashlib
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from carrel.storage.base import Lock, Store, process_name

_tasks: "weakref.WeakValueDictionary[str, asyncio.Task[object]]" = weakref.WeakValueDictionary()
"""The task of this process that appended each open call, by the key of its lock."""


class OpenCalls:
    """The calls of one session that were appended here and have no result yet."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._locks: dict[str, Lock | None] = {}
        """By call; None where another holds the lock, which serves the same purpose."""

    def __bool__(self) -> bool:
        return bool(self._locks)

    async def begin(self, calls: Iterable[str]) -> None:
        """To be called before the calls are written."""
        for call in calls:
            key = call_key(self._folder, call)
            task = asyncio.current_task()
            if task is not None:
                _tasks[key] = task
            if self._locks.get(call) is None:
                lock = await self._store.lock(key, wait=False)
                if lock is not None and self._locks.get(call) is not None:
                    await lock.release()
                else:
                    self._locks[call] = lock

    async def end(self, calls: Iterable[str]) -> None:
        """They have their results, or were not written."""
        for call in calls:
            if call in self._locks:
                lock = self._locks.pop(call)
                _tasks.pop(call_key(self._folder, call), None)
                if lock is not None:
                    await lock.release()

    async def end_all(self) -> None:
        await self.end(list(self._locks))


def call_key(folder: str, call: str) -> str:
    """The lock of one call: several programs may wait for calls of the same session, and settle at different times."""
    digest = hashlib.sha256(call.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{folder}/tool-call-{digest}"


async def any_open(store: Store, folder: str, calls: Sequence[str]) -> bool:
    """Whether any process or task still holds one of these calls."""
    for call in calls:
        if await store.lock_owner(call_key(folder, call)) is not None:
            return True
    return False


@asynccontextmanager
async def claimed(store: Store, folder: str, calls: Sequence[str]) -> AsyncIterator[bool]:
    """Hold the calls to declare them interrupted; False when one of them is still in use.

    In use is a call of another process that is alive, and one of this process as long as the task that appended it
    is not done and is not the one that asks here: it would not load the session while it waits for the result."""
    locks: list[Lock] = []
    try:
        for call in calls:
            key = call_key(folder, call)
            lock = await store.lock(key, wait=False)
            if lock is not None:
                locks.append(lock)
            elif await _is_in_use(store, key):
                yield False
                return
        yield True
    finally:
        for lock in locks:
            await lock.release()


async def _is_in_use(store: Store, key: str) -> bool:
    holder = await store.lock_owner(key)
    task = _tasks.get(key)
    if holder is None or holder != process_name():
        return True  # None: released in this moment, so its result is being written
    if task is None or task.done() or task.get_loop().is_closed():
        return False
    return task is not asyncio.current_task()
