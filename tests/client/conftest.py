"""A real server for the tests of one worker, and a client of each kind."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from carrel.client import AsyncClient, Client
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = ServerProcess(tmp_path_factory.mktemp("served") / "server").start()
    yield running
    running.stop()


@pytest.fixture
def blocking_client(server: ServerProcess) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.key) as client:
        yield client


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(base_url=server.url, api_key=server.key) as client:
        yield client


@pytest.fixture(params=["blocking", "async"])
def client(request: pytest.FixtureRequest) -> Any:
    """A client of each kind; `await got(…)` has the answer of both."""
    return request.getfixturevalue(f"{request.param}_client")


async def got(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


async def all_of(stream: Any) -> list[Any]:
    return [piece async for piece in stream] if hasattr(stream, "__aiter__") else list(stream)


@pytest.fixture
async def session(client: Any) -> AsyncIterator[Any]:
    """A session of the demo's first sample."""
    made = await got(client.sessions.create(dataset="demo", sample_id="calc-1"))
    yield made
    await got(made.close())
