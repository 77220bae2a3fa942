"""A session of each kind, on a base with a tool, a workflow and a package to install."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from carrel import (
    Executor,
    FileStorage,
    InProcessConfig,
    InProcessExecutor,
    MemoryStorage,
    RedisStorage,
    Session,
    StorageBackend,
    SubprocessConfig,
    SubprocessExecutor,
)
from carrel.execution.environments import READY
from tests.support.web_server import Answer, WebRequest, WebServer
from tests.support.wheels import build_wheel

KINDS = ("sandboxed", "unconfined", "in-process")
STORAGES = ("file", "memory", "redis")
SANDBOX: dict[str, Literal["required", "off"]] = {"sandboxed": "required", "unconfined": "off"}

ECHO = """\
name: echo
description: Say words back
command: echo
schema:
  positional:
    - {name: words, type: string, required: true, description: What to say}
recipes:
  say: {description: Say it, params: {words: {}}}
"""

DOUBLE = '''\
"""Twice a number."""

def run(number: int, times: int = 2) -> int:
    """Multiply a number.

    Args:
        number: The number.
        times: How often.
    """
    return number * times
'''


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    build_wheel(folder, "carrel_greeting", source="WORD = 'hello'\n")
    return folder


@pytest.fixture(scope="session")
def place_of_bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session") / "base"


@pytest.fixture
def base(place_of_bases: Path) -> Path:
    """A new one at the place of the last, whose virtualenvs it takes over: a session then starts from the zygote of the
    session before."""
    folder = place_of_bases
    for made in folder.glob("*"):
        if made.name != "environments":
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    for environment in folder.glob("environments/*/"):
        if not (environment / READY).exists():
            shutil.rmtree(environment)
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "echo.yaml").write_text(ECHO)
    (folder / "workflows").mkdir()
    (folder / "workflows" / "double.py").write_text(DOUBLE)
    return folder


Open = Callable[..., Awaitable[Session]]


# Without a sandbox it is the same executor, whose own suite runs that way every time.
@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.slow] if kind == "unconfined" else []) for kind in KINDS])
async def open_session(request: pytest.FixtureRequest, base: Path) -> AsyncIterator[Open]:
    """Open a session of the kind under test: `await open_session(timeout=5)`; closed after the test."""
    made: list[Session] = []

    async def open_it(folder: Path = base, **settings: Any) -> Session:
        if request.param == "in-process":
            session = Session.inprocess(folder, **settings)
        else:
            session = Session.subprocess(folder, sandbox=SANDBOX[request.param], **settings)
        made.append(session)
        await session.start()
        return session

    yield open_it
    for session in made:
        await session.close()


@pytest.fixture
async def session(open_session: Open) -> Session:
    return await open_session()


Storage = Callable[[], StorageBackend]


@pytest.fixture(params=STORAGES)
async def storage_again(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Storage]:
    """The same place of the kind under test, opened anew each time; memory is one object, gone when it is closed."""
    monkeypatch.setenv("CARREL_HOME", str(tmp_path / "home"))
    made: list[Any] = []

    def open_it() -> StorageBackend:
        if request.param == "file":
            made.append(FileStorage(tmp_path / "kept"))
        elif request.param == "redis":
            made.append(RedisStorage(request.getfixturevalue("redis_url"), prefix=tmp_path.name))
        elif not made:
            made.append(MemoryStorage())
        return made[-1]

    yield open_it
    for storage in made:
        await storage.close()


@pytest.fixture
def storage(storage_again: Storage) -> StorageBackend:
    return storage_again()


def executor_of(kind: str, **settings: Any) -> Executor:
    if kind == "in-process":
        return InProcessExecutor(InProcessConfig(**settings))
    return SubprocessExecutor(SubprocessConfig(sandbox=SANDBOX[kind], **settings))


@pytest.fixture
def web() -> Iterator[Callable[[Callable[[WebRequest], Answer]], WebServer]]:
    """Serve on loopback: `web(lambda asked: Answer({"x": 1}))`."""
    started: list[WebServer] = []

    def serve(answer: Callable[[WebRequest], Answer]) -> WebServer:
        started.append(WebServer(answer))
        return started[-1]

    yield serve
    for server in started:
        server.close()
