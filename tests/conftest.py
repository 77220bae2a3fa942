"""What all tests share: a real Redis, a place to keep things of every kind, and an honest word on what was not run."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from carrel.errors import StorageUnavailable
from carrel.storage.redis.store import RedisStore
from tests.support.missing_parts import SETTING, skip_without
from tests.support.real_docker import NoEngine, shared_engine
from tests.support.real_redis import NoRedis, RealRedis
from tests.support.stores import KINDS, Place, differs

pytest.register_assert_rewrite("tests.storage.suite")

# In the background of a shell SIGINT comes ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about the machine, not about carrel.
settings.register_profile("carrel", deadline=None)
settings.load_profile("carrel")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRedis]:
    """One private server for this test worker; it keeps nothing on disk."""
    try:
        server = RealRedis(tmp_path_factory.mktemp("redis")).start()
    except NoRedis as reason:
        skip_without(f"no Redis: {reason}")
    yield server
    server.kill()


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a private Docker engine, shared by all test workers; it has the image `real_docker.IMAGE`."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with contextlib.ExitStack() as held:
        try:
            address = held.enter_context(shared_engine(folder / "docker"))
        except NoEngine as reason:
            skip_without(f"no container engine: {reason}")
        yield address


@pytest.fixture
def redis_url(redis_server: RealRedis) -> str:
    # On a busy machine many connections at once take longer than a store waits for one by itself.
    return f"{redis_server.url}?socket_connect_timeout=60"


@pytest.fixture
def start_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RealRedis]]:
    """Start another server, with settings of redis.conf: `start_redis(requirepass="x")`."""
    servers: list[RealRedis] = []

    def start(**settings: str) -> RealRedis:
        try:
            server = RealRedis(tmp_path_factory.mktemp("redis"), **settings)
        except NoRedis as reason:
            skip_without(f"no Redis: {reason}")
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
async def open_redis() -> AsyncIterator[Callable[..., RedisStore]]:
    """Open a RedisStore that is closed after the test: `open_redis(url)`."""
    stores: list[RedisStore] = []

    def open_it(url: str, prefix: str = "carrel") -> RedisStore:
        stores.append(RedisStore(url, prefix))
        return stores[-1]

    yield open_it
    for store in stores:
        with contextlib.suppress(StorageUnavailable):  # its server is down, and its locks with it
            await store.close()


@pytest.fixture
async def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """An empty place of each kind to open stores on; a test that asks for it runs once per kind."""
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    place = Place.of_kind(kind, tmp_path / "store", url)
    yield place
    await asyncio.wait_for(place.clear(), 30)


def copy_for_other_users(folder: Path) -> None:
    """Copy what a zygote of another user reads: the clone may lie in a folder that only its owner may enter."""
    here = Path(__file__).parent
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(here.parent / "src" / "carrel" / "guest", folder / "guest", ignore=leave_out)
    shutil.copytree(here / "sandbox" / "program", folder / "program" / "tests_inside", ignore=leave_out)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(SETTING, "") not in ("", "all"):
        raise pytest.UsageError(f"{SETTING}={os.environ[SETTING]} is not known; use {SETTING}=all, or leave it out")
    # One copy for a run: the workers of pytest-xdist and the programs that tests start inherit its name.
    if "CARREL_TESTS_READABLE" not in os.environ:
        readable = tempfile.mkdtemp(prefix="carrel-tests-", dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("CARREL_TESTS_READABLE")))
        os.environ["CARREL_TESTS_READABLE"] = readable
        copy_for_other_users(Path(readable))
    config.addinivalue_line("markers", "promise(name): a promise that some kinds of store give otherwise, see suite.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        promises = [mark.args[0] for mark in metafunc.definition.iter_markers("promise")]
        kinds = [kind for kind in KINDS if not any(differs(kind, promise) for promise in promises)]
        metafunc.parametrize("kind", kinds)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of promises that a module with a store of its own says it does not give."""
    items[:] = [
        item
        for item in items
        if not any(
            mark.args[0] in getattr(getattr(item, "module", None), "DIFFERENCES", ())
            for mark in item.iter_markers("promise")
        )
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"NOT RUN: {len(skipped)} tests", sep="=", yellow=True)
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")
