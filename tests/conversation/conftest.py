"""The same store on every backend; `reopened()` is what another process, or this one after a restart, would see."""

import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.store import SessionStore
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from carrel.storage.redis.store import RedisStore

Reopen = Callable[..., SessionStore]


@pytest.fixture(params=["memory", "file", "redis"])
async def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    made: list[SessionStore] = []
    memory = MemoryStore()
    prefix = uuid.uuid4().hex
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""

    def reopen(**settings: Any) -> SessionStore:
        backends: dict[str, Callable[[], Store]] = {
            "memory": lambda: memory,
            "file": lambda: FileStore(tmp_path / "sessions"),
            "redis": lambda: RedisStore(url, prefix),
        }
        made.append(SessionStore(store=backends[request.param](), **({"embedder": False} | settings)))
        return made[-1]

    yield reopen
    for store in made:
        await store.close()


@pytest.fixture
def store(reopened: Reopen) -> SessionStore:
    return reopened()
