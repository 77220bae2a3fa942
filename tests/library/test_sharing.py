"""Two machines with one Redis: what one keeps, the other has at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from carrel.conversation.messages import user_text_message
from carrel.errors import ArtifactWriteError
from carrel.execution.config import SubprocessConfig
from carrel.execution.packages import Packages, subprocess_packages
from carrel.library.artifacts import ArtifactStore
from carrel.library.dependencies import Dependencies
from carrel.library.workflows import WorkflowLibrary
from carrel.session import RedisStorage
from tests.support.lazy_module import LazyModule
from tests.support.real_redis import RealRedis
from tests.support.wheels import build_wheel

redis = LazyModule("redis")


class Machine:
    """A connection and a Python of its own."""

    def __init__(self, storage: RedisStorage, python: Packages) -> None:
        self.workflows = WorkflowLibrary(storage.store)
        self.artifacts = ArtifactStore(storage.store)
        self.deps = Dependencies(storage.store, python)
        self._storage, self._python = storage, python

    async def close(self) -> None:
        await self.workflows.close()
        await self.artifacts.close()
        await self._python.give_back()
        await self._storage.close()


@pytest.fixture
async def machines(redis_url: str, tmp_path: Path) -> AsyncIterator[list[Machine]]:
    for name in ("red", "blue"):
        build_wheel(tmp_path / "wheels", name)
    prefix = f"t-{uuid.uuid4().hex}"
    made = []
    for name in ("one", "two"):
        config = SubprocessConfig(base=tmp_path / name, wheelhouse=tmp_path / "wheels")
        made.append(Machine(RedisStorage(redis_url, prefix), await subprocess_packages(config)))
    yield made
    for machine in made:
        await machine.close()


async def test_workflows_artifacts_and_packages_are_shared_at_once(machines: list[Machine]) -> None:
    one, two = machines
    await one.workflows.list()
    assert await two.workflows.list() == []
    await one.workflows.add("double", "def run(x):\n    return 2 * x\n", "Twice as much")
    assert [found["description"] for found in await two.workflows.list()] == ["Twice as much"]
    await two.workflows.remove("double")
    assert await one.workflows.get("double") is None
    await two.artifacts.save("notes/a", {"n": [1, None]}, description="Numbers")
    assert await one.artifacts.load("notes/a") == {"n": [1, None]}
    assert [found["description"] for found in await one.artifacts.list()] == ["Numbers"]
    await one.deps.add("red")
    assert await two.deps.list() == ["red"]
    assert (await two.deps.sync())["installed"] == ["red"]


async def test_on_a_full_server_what_fills_it_can_be_deleted(start_redis: Callable[..., RealRedis]) -> None:
    server = start_redis(maxmemory="10mb", maxmemory_policy="noeviction")
    async with RedisStorage(server.url) as storage:
        artifacts, sessions = storage.get_artifact_store(), storage.get_session_store()
        await sessions.create_session("Stars", session_id="stars")
        await sessions.append_message("stars", user_text_message("hello"))
        saved: list[str] = []

        async def fill() -> None:
            while True:
                await artifacts.save(f"a{len(saved)}", b"x" * 200_000)
                saved.append(f"a{len(saved)}")

        with pytest.raises(ArtifactWriteError, match="is full"):
            await fill()
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "1mb")
        assert saved
        await artifacts.delete(saved[0])
        assert not await artifacts.exists(saved[0])
        await sessions.delete_session("stars")
        assert await sessions.list_sessions() == []


async def test_the_same_at_once_has_one_winner_and_nothing_torn(machines: list[Machine]) -> None:
    one, two = machines
    sources = [f"def run():\n    return {'x' * size!r}\n" for size in (10, 50_000)]
    data = [b"a" * 10, b"b" * 3_000_000]
    await asyncio.gather(
        *(machine.workflows.add("w", source) for machine, source in zip(machines, sources, strict=True)),
        *(machine.artifacts.save("a", bytes_) for machine, bytes_ in zip(machines, data, strict=True)),
        *(machine.deps.add(name) for machine in machines for name in ("red", "blue")),
    )
    found = await one.workflows.get("w")
    assert found is not None
    assert found["source"] in sources
    assert found == await two.workflows.get("w")
    loaded = await one.artifacts.load("a")
    assert loaded in data
    assert loaded == await two.artifacts.load("a")
    assert sorted(await one.deps.list()) == sorted(await two.deps.list()) == ["blue", "red"]
