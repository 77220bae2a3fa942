"""The shared suite on a real Postgres, and what only this store does."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files

import psycopg
import pytest

from carrel import PostgresStorage, user_text_message
from carrel.errors import ConfigurationError, GuardLost, KeyMissing, StorageUnavailable, StorageWriteError
from carrel.storage.postgres.store import PostgresStore
from tests.storage.suite import *  # noqa: F403
from tests.support.missing_parts import skip_without
from tests.support.real_postgres import NoPostgres, RealPostgres
from tests.support.stores import Backend, Listener

pytestmark = pytest.mark.real

DIFFERENCES = {"a running append creates nothing": "an append that arrives after a delete looks like a new one"}


def open_postgres(url: str, schema: str) -> PostgresStore:
    return PostgresStore(url, schema)


def new_schema() -> str:
    return f"t-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def server() -> Iterator[RealPostgres]:
    try:
        server = RealPostgres().start()
    except NoPostgres as reason:
        skip_without(f"no Postgres: {reason}")
    yield server
    server.remove()


@pytest.fixture
async def backend(server: RealPostgres) -> AsyncIterator[Backend]:
    backend = Backend(f"{__name__}:open_postgres", server.url, new_schema())
    yield backend
    await asyncio.wait_for(backend.clear(), 30)


async def test_where_no_server_answers_it_is_unavailable() -> None:
    store = PostgresStore("postgresql://carrel:hidden@127.0.0.1:1/postgres")
    with pytest.raises(StorageUnavailable, match=r"127\.0\.0\.1:1 does not answer") as unavailable:
        await store.put("o", b"x")
    assert "hidden" not in f"{unavailable.value} {store!r}"
    await store.close()


@pytest.mark.parametrize("url", ["postgresql://carrel:hid den@host/db", "host=1 hidden", "postgresql://h/d?hidden=1"])
def test_a_url_that_cannot_be_read_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL cannot be read") as wrong:
        PostgresStore(url)
    assert "hidden" not in str(wrong.value)


async def test_many_stores_that_begin_at_once_make_the_tables_once(server: RealPostgres) -> None:
    schema = new_schema()
    stores = [PostgresStore(server.url, schema) for _ in range(8)]
    numbers = await asyncio.gather(*(store.append("log", [b"x"]) for store in stores))
    assert sorted(numbers) == list(range(1, 9))
    assert len([record async for block in stores[0].read("log") for record in block.records]) == 8
    for store in stores:
        await store.close()


async def test_schemas_do_not_see_each_other(server: RealPostgres) -> None:
    one, other = (PostgresStore(server.url, new_schema()) for _ in range(2))
    await one.put("o", b"1")
    assert await other.list() == []
    assert await other.lock("o", wait=False)
    assert await one.lock_owner("o") is None
    await one.close()
    await other.close()


async def test_tables_of_an_earlier_version_are_upgraded(server: RealPostgres) -> None:
    schema = new_schema()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{schema}"')
        connection.execute(f'SET search_path TO "{schema}"')
        connection.execute((files("carrel.storage.postgres") / "schema.sql").read_text())
        connection.execute("CREATE TABLE about AS SELECT 1 AS version")
        connection.execute("SELECT append('log', ARRAY['earlier'::bytea], true, true, NULL, NULL, NULL)")
    stores = [PostgresStore(server.url, schema) for _ in range(4)]
    assert sorted(await asyncio.gather(*(store.append("log", [b"x"]) for store in stores))) == [2, 3, 4, 5]
    for store in stores:
        await store.close()


async def test_many_writers_share_groups_without_a_gap_or_a_mix(server: RealPostgres) -> None:
    """Three stores stand for three processes, whose groups have the same logs in other orders."""
    schema = new_schema()
    stores = [PostgresStore(server.url, schema) for _ in range(3)]

    async def write(number: int) -> list[int]:
        store = stores[number % 3]
        return [
            await store.append(f"log-{(number + turn) % 5}", [b"%d %d" % (number, turn), b"second"], sync=not turn % 7)
            for turn in range(30)
        ]

    numbers = await asyncio.gather(*(write(number) for number in range(24)))
    assert (
        len(
            {
                (key, last)
                for number, each in enumerate(numbers)
                for key, last in ((f"log-{(number + turn) % 5}", last) for turn, last in enumerate(each))
            }
        )
        == 24 * 30
    )
    for log in range(5):
        records = [record async for block in stores[0].read(f"log-{log}") for record in block.records]
        assert records[1::2] == [b"second"] * (len(records) // 2)
        for number in range(24):
            turns = [int(each.split()[1]) for each in records[::2] if each.startswith(b"%d " % number)]
            assert turns == sorted(turns)
            assert len(turns) == 6
    for store in stores:
        await store.close()


async def test_in_one_group_each_append_gets_its_own_answer(server: RealPostgres) -> None:
    store = PostgresStore(server.url, new_schema())
    guard = ("lease", await store.put("lease", b"mine"))
    assert guard[1] is not None
    await store.append("log", [b"1"])
    await store.put("object", b"x")
    await store.put("lease", b"another's")
    # The first two are under way while the others gather.
    answers = await asyncio.gather(
        *(store.append(f"busy-{number}", [b"x"], sync=True) for number in range(2)),
        store.append("log", [b"2"], after=1),
        store.append("log", [b"never"], after=7),
        store.append("log", [b"never"], guard=guard),  # type: ignore[arg-type]
        store.append("object", [b"never"]),
        store.append("none", [b"never"], create=False),
        store.append("log", [b"3", b"4"]),
        store.append("log", [b"5"]),
        return_exceptions=True,
    )
    kinds = [answer if isinstance(answer, int) else type(answer) for answer in answers]
    assert kinds == [1, 1, 2, 0, GuardLost, StorageWriteError, KeyMissing, 4, 5]
    await store.close()


async def test_a_cancelled_append_is_written_before_its_caller_goes_on_or_never(server: RealPostgres) -> None:
    store = PostgresStore(server.url, new_schema())
    await store.append("log", [b"first"])
    for turn in range(40):
        writing = [asyncio.create_task(store.append("log", [b"%d" % turn])) for _ in range(8)]
        await asyncio.sleep(turn / 10_000)
        for each in writing:
            each.cancel()
        await asyncio.wait(writing)
        before = await store.stamp("log")
        await asyncio.sleep(0.005)
        assert await store.stamp("log") == before
    await store.close()


async def test_a_watcher_hears_of_appends_of_another_process(server: RealPostgres) -> None:
    schema = new_schema()
    watching, writing = PostgresStore(server.url, schema), PostgresStore(server.url, schema)
    listener = Listener(watching, "log")
    await writing.append("log", [b"first"])
    assert await listener.next() == (1, b"first")
    # The periodic look alone would need longer than a second for each.
    async with asyncio.timeout(20):
        for number in range(2, 60):
            await writing.append("log", [b"%d" % number])
            assert await listener.next() == (number, b"%d" % number)
    await listener.stop()
    for store in (watching, writing):
        await store.close()


async def test_tables_of_a_newer_version_are_refused(server: RealPostgres) -> None:
    schema = new_schema()
    store = PostgresStore(server.url, schema)
    await store.put("o", b"x")
    await store._client.write("the version", f'UPDATE "{schema}".about SET version = 99 RETURNING version')
    await store.close()
    again = PostgresStore(server.url, schema)
    with pytest.raises(ConfigurationError, match="newer carrel"):
        await again.get("o")
    await again.close()


async def test_a_store_goes_on_when_its_server_was_restarted() -> None:
    try:
        server = RealPostgres().start()
    except NoPostgres as reason:
        skip_without(f"no Postgres: {reason}")
    store = PostgresStore(server.url)
    try:
        assert await store.append("log", [b"1"], sync=True) == 1
        lock = await store.lock("l")
        assert lock is not None
        server.kill()
        with pytest.raises(StorageUnavailable, match="it may have been written"):
            await store.append("log", [b"2"])
        server.start()
        assert await store.append("log", [b"3"]) == 2
        assert await store.get("o") is None
        await lock.release()
        assert await store.lock_owner("l") is None
    finally:
        await store.close()
        server.remove()


async def test_a_lock_that_was_taken_away_is_lost(server: RealPostgres) -> None:
    store = PostgresStore(server.url, new_schema())
    lock = await store.lock("l")
    assert lock is not None
    await store._client.write("a lock", "UPDATE locks SET token = 'another' RETURNING key")
    await asyncio.wait_for(lock.lost.wait(), 30)
    await lock.release()
    assert await store.lock_owner("l") == "another"
    await store.close()


async def test_a_read_only_server_says_so(server: RealPostgres) -> None:
    schema = new_schema()
    store = PostgresStore(server.url, schema)
    await store.put("o", b"x")
    reader = PostgresStore(f"{server.url}?options=-c%20default_transaction_read_only%3Don", schema)
    assert await reader.get("o") == b"x"
    with pytest.raises(StorageWriteError, match="read-only"):
        await reader.put("o", b"y")
    await reader.close()
    await store.close()


async def test_two_machines_share_sessions_workflows_and_artifacts(server: RealPostgres) -> None:
    schema = new_schema()
    async with PostgresStorage(server.url, schema) as one, PostgresStorage(server.url, schema) as other:
        assert server.url not in repr(one)
        sessions, others = one.get_session_store("fsync"), other.get_session_store()
        await sessions.append_many("s", [user_text_message("one"), user_text_message("two")])
        await others.append_rewind("s", 1)
        await sessions.fork_session("s", new_id="fork")
        data = await others.load_session("fork")
        assert data is not None
        assert [message["content"][0]["text"] for message in data["messages"]] == ["one"]
        assert {meta["id"] for meta in await others.list_sessions()} == {"s", "fork"}
        assert [hit.session_id for hit in await others.search("one")] == ["s"]
        await one.get_workflow_library().add("double", "def run(x):\n    return 2 * x\n", "Twice as much")
        assert [found["name"] for found in await other.get_workflow_library().list()] == ["double"]
        await other.get_artifact_store().save("notes/a", {"n": [1, None]})
        assert await one.get_artifact_store().load("notes/a") == {"n": [1, None]}


FORKING = """
import asyncio, os, sys
from carrel.storage.postgres.store import PostgresStore
store = PostgresStore(*sys.argv[1:])
async def append(what):
    return await store.append("log", [what])
assert asyncio.run(append(b"parent")) == 1
child = os.fork()
if not child:
    asyncio.run(append(b"child"))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert asyncio.run(append(b"parent")) == 3
"""


def test_a_forked_child_has_connections_of_its_own(server: RealPostgres) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FORKING, server.url, new_schema()], check=True, timeout=60)
