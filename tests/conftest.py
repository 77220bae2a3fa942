"""Fixtures for all tests: a real Redis, a real Docker, storage backends; and a list of the tests that were skipped."""

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
from tests.support.stores import KINDS, Backend, differs

pytest.register_assert_rewrite("tests.storage.suite")

# A shell starts background jobs with SIGINT ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on the machine, not on carrel.
settings.register_profile("carrel", deadline=None)
settings.load_profile("carrel")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRedis]:
    """A private server for this test worker; it stores nothing on disk."""
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
    """Start another server with settings of redis.conf: `start_redis(requirepass="x")`."""
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

    def open_store(url: str, prefix: str = "carrel") -> RedisStore:
        stores.append(RedisStore(url, prefix))
        return stores[-1]

    yield open_store
    for store in stores:
        with contextlib.suppress(StorageUnavailable):  # its server is down, so its locks are gone
            await store.close()


@pytest.fixture
async def backend(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """An empty backend; a test with this fixture runs once for each kind of store."""
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    backend = Backend.of_kind(kind, tmp_path / "store", url)
    yield backend
    await asyncio.wait_for(backend.clear(), 30)


def copy_for_other_users(folder: Path) -> None:
    """Copy what a zygote of another user reads, because only the owner may be able to read the clone."""
    here = Path(__file__).parent
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(here.parent / "src" / "carrel" / "guest", folder / "guest", ignore=leave_out)
    shutil.copytree(here / "sandbox" / "program", folder / "program" / "tests_inside", ignore=leave_out)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(SETTING, "") not in ("", "all"):
        raise pytest.UsageError(f"{SETTING}={os.environ[SETTING]} is not known; use {SETTING}=all, or do not set it")
    # One copy per run: the workers of pytest-xdist and the programs that tests start inherit its name.
    if "CARREL_TESTS_READABLE" not in os.environ:
        readable = tempfile.mkdtemp(prefix="carrel-tests-", dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("CARREL_TESTS_READABLE")))
        os.environ["CARREL_TESTS_READABLE"] = readable
        copy_for_other_users(Path(readable))
    config.addinivalue_line("markers", "promise(name): some kinds of store do not keep it, see tests/support/stores.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        promises = [mark.args[0] for mark in metafunc.definition.iter_markers("promise")]
        kinds = [kind for kind in KINDS if not any(differs(kind, promise) for promise in promises)]
        metafunc.parametrize("kind", kinds)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of promises that a module lists in its DIFFERENCES; mark those that need a container engine."""
    items[:] = [
        item
        for item in items
        if not any(
            mark.args[0] in getattr(getattr(item, "module", None), "DIFFERENCES", ())
            for mark in item.iter_markers("promise")
        )
    ]
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "docker_engine" in getattr(item, "fixturenames", ()) or parameters.get("executor_kind") == "container":
            item.add_marker(pytest.mark.real)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"NOT RUN: {len(skipped)} tests", sep="=", yellow=True)
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")
