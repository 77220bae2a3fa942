"""A server for the tests of one file, and one's own for those that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import ServerProcess

NewServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that all tests of a file share."""
    serving = ServerProcess(tmp_path_factory.mktemp("server")).start()
    yield serving
    assert serving.stop() == 0


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[NewServer]:
    """`new_server("--max-sessions", 2)`: one of the test's own."""
    made: list[ServerProcess] = []

    def make(*words: object, env: dict[str, str] | None = None) -> ServerProcess:
        made.append(ServerProcess(tmp_path / f"server-{len(made)}", *words, env=env))
        return made[-1].start()

    yield make
    for serving in made:
        serving.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
