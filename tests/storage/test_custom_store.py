"""The shared suite, run on a custom store, which lets other tasks run before each call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

from carrel.storage.base import Store
from carrel.storage.memory import MemoryStore
from tests.storage.suite import *  # noqa: F403
from tests.support.stores import DIFFERENCES as BY_KIND
from tests.support.stores import Backend

DIFFERENCES = {promise: reason for (kind, promise), reason in BY_KIND.items() if kind == "memory"}


class YieldingStore:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return _yielding(found) if asyncio.iscoroutinefunction(found) else found


def _yielding(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(method)
    async def yielding(*args: Any, **keywords: Any) -> Any:
        if method.__name__ not in ("append", "put", "delete"):  # their order is that of the calls
            await asyncio.sleep(0)
        return await method(*args, **keywords)

    return yielding


class YieldingBackend(Backend):
    def open(self) -> Store:
        store: Any = YieldingStore(self._memory)
        return store

    async def done_with(self, store: Store) -> None:
        pass


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    backend = YieldingBackend()
    yield backend
    await backend.clear()
