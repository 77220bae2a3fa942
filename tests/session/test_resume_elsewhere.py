"""Sessions that continue on another machine: files and variables in a store that several machines share.

A machine is a folder of its own here; the store is a real Redis."""

from __future__ import annotations

import asyncio
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from carrel import PostgresStorage, RedisStorage, Session, SessionBusy
from carrel.errors import StateNotSaved
from carrel.execution.config import SubprocessConfig
from carrel.execution.packed_state import StateImport, pack_files
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.session.durable import delete_state
from carrel.storage.server_parts import RenewedLock
from tests.support.missing_parts import skip_without
from tests.support.real_postgres import NoPostgres, RealPostgres

Open = Callable[..., Session]


@pytest.fixture(scope="module")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        server = RealPostgres().start()
    except NoPostgres as reason:
        skip_without(f"no Postgres: {reason}")
    yield server.url
    server.remove()


@pytest.fixture(params=["redis", pytest.param("postgres", marks=pytest.mark.real)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    kind = request.param
    url = request.getfixturevalue(f"{kind}_url")
    name = re.sub(r"\W", "_", tmp_path.name)

    def open_on(machine: str, **settings: Any) -> Session:
        storage = RedisStorage(url, prefix=name) if kind == "redis" else PostgresStorage(url, schema=name)
        storage.base = storage.state_base = tmp_path / machine
        executor = SubprocessExecutor(SubprocessConfig(base=storage.base, **settings))
        return Session(storage, executor, session_id="report", owns_storage=True)

    return open_on


WRITE = """
import os, pathlib
for name in ("folder/inner", "empty", "replaced"):
    os.makedirs(name, exist_ok=True)
pathlib.Path("folder/inner/é.txt").write_text("text")
pathlib.Path("large").write_bytes(os.urandom(3_000_000))
os.symlink("/etc/passwd", "link"); os.link("large", "hard"); os.mkfifo("fifo")
os.chmod("folder/inner/é.txt", 0o755)
(pathlib.Path.home() / "h").write_text("home")
class Box: pass
x = Box(); x.large = open("large", "rb").read()
"""
LOOK = (
    "sorted(os.listdir()), open('folder/inner/é.txt').read(), os.stat('folder/inner/é.txt').st_mode & 0o777, "
    "x.large == open('large', 'rb').read(), os.stat('hard').st_nlink, os.readlink('link'), "
    "(pathlib.Path.home() / 'h').read_text(), sorted(os.listdir('replaced'))"
)


async def test_files_and_variables_move_with_the_session(opened: Open, tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    (workspace / "replaced").mkdir(parents=True)
    (workspace / "replaced" / "old").write_text("given")
    (workspace / "deleted").write_text("given")
    async with opened("one", workspace=workspace) as session:
        code = "import os, shutil; os.remove('deleted'); shutil.rmtree('replaced')\n" + WRITE
        assert (await session.run(code)).is_ok
        here = (await session.run(LOOK)).value
    elsewhere = tmp_path / "same"
    (elsewhere / "replaced").mkdir(parents=True)
    (elsewhere / "replaced" / "old").write_text("given")
    (elsewhere / "deleted").write_text("given")
    async with opened("two", workspace=elsewhere) as session:
        assert session.resumed is not None
        assert (session.resumed.files, session.resumed.reason, session.resumed.missing) == (True, "", {})
        result = await session.run(LOOK)
        assert result.value == here, result.error
        assert here[0] == ["empty", "fifo", "folder", "hard", "large", "link", "replaced"]
        assert here[1:] == ("text", 0o755, True, 2, "/etc/passwd", "home", [])
        await session.run("open('two', 'w').write('2'); x = 2")
    async with opened("one", workspace=workspace) as session:
        assert (await session.run("x, open('two').read()")).value == (2, "2")


async def test_what_has_not_changed_is_not_sent_again(opened: Open) -> None:
    async with opened("one") as session:
        await session.run(WRITE)
        await session.save()
        store, prefix = session.storage.store, "sessions/report/workspace-state/blobs"
        before = await store.scan(prefix)
        await session.run("open('small', 'w').write('1'); del x")
        await session.save()
        after = await store.scan(prefix)
    sent = [stamp.size for key, stamp in after.items() if before.get(key) != stamp]
    assert 0 < sum(sent) < 100_000
    assert sum(stamp.size for stamp in after.values()) < sum(stamp.size for stamp in before.values()) - 2_000_000


async def test_a_session_that_was_not_stored_says_where_its_files_are(opened: Open) -> None:
    session = opened("one")
    await session.run("x = 1; open('f', 'w').write('1')")
    assert session._durable is not None
    await session._durable.release()  # as if its machine had gone
    async with opened("two") as other:
        assert other.resumed is not None
        assert not other.resumed.files
        assert "where it was not saved" in other.resumed.reason
        result = await other.run("__import__('os').listdir()")
        assert (result.value, result.state) == ([], "restored")
    await session.close()


async def test_one_machine_at_a_time(opened: Open) -> None:
    async with opened("one") as session:
        await session.run("x = 1")
        with pytest.raises(SessionBusy, match=str(os.getpid())):
            await opened("two").start()
        await session.save()
        durable = session._durable
        assert durable is not None
        assert durable._lock is not None
        await durable._lock.release()  # as if its lease had run out
        async with opened("two") as other:
            assert (await other.run("x = x + 1; x")).value == 2
            with pytest.raises(SessionBusy):
                await session.save()
    async with opened("three") as other:
        assert (await other.run("x")).value == 2


async def test_a_lock_that_ran_out_is_taken_again_unless_another_process_has_the_session(opened: Open) -> None:
    async with opened("one") as session:
        await session.run("x = 1")
        durable = session._durable
        assert durable is not None
        lock = durable._lock
        assert isinstance(lock, RenewedLock)
        await lock._leases.release(lock._key, lock._token)  # as if the store had been away for long
        async with asyncio.timeout(60):
            while durable._lock is lock:  # noqa: ASYNC110 -- no event says it
                await asyncio.sleep(0.05)
        with pytest.raises(SessionBusy):
            await opened("two").start()
        await session.run("x = 2")
    async with opened("two") as other:
        assert (await other.run("x")).value == 2


async def test_what_a_killed_process_had_open_can_be_deleted_soon(opened: Open) -> None:
    async with opened("one") as session:
        await session.run("x = 1")
    other = opened("two")
    lock = await other.storage.store.lock("sessions/report/workspace-state/open")
    assert isinstance(lock, RenewedLock)
    assert lock._renewing is not None
    lock._renewing.cancel()  # as if its process had been killed
    with pytest.raises(SessionBusy):
        await delete_state(other.storage, "report")
    await delete_state(other.storage, "report", seconds=60)
    assert await other.storage.store.list("sessions/report/workspace-state") == []
    await other.close()


async def test_a_damaged_store_costs_files_and_variables_but_opens(opened: Open) -> None:
    async with opened("one") as session:
        await session.run("x = 1; open('f', 'w').write('1')")
    session = opened("one")
    store = session.storage.store
    keys = await store.list("sessions/report/workspace-state/blobs")
    await store.put(keys[0], b"damaged")
    await session.close()
    async with opened("two") as session:
        assert session.resumed is not None
        assert "damaged" in session.resumed.reason
        assert (await session.run("1")).value == 1


def test_an_archive_cannot_write_outside_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    names = ["../outside/f", "/outside/f", "upper/../../outside/f", "other/f", "upper/link/f", "upper//f"]
    for number, name in enumerate(names):
        archive = tmp_path / "archive"
        with tarfile.open(archive, "w:gz") as tar:
            folder = tarfile.TarInfo("upper")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            link = tarfile.TarInfo("upper/link")
            link.type, link.linkname = tarfile.SYMTYPE, str(outside)
            tar.addfile(link)
            tar.addfile(tarfile.TarInfo(name))
        importing = StateImport(tmp_path / f"state{number}", {}, None)
        with pytest.raises(StateNotSaved, match="unexpected entry"):
            importing.add(archive)
        importing.close()
    assert list(outside.iterdir()) == []


def test_packing_follows_no_link_and_has_a_limit(tmp_path: Path) -> None:
    generation = "0" * 32
    upper = tmp_path / "state" / "files" / generation / "upper"
    upper.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (upper / "folder").symlink_to(tmp_path)
    (upper / "file").symlink_to(tmp_path / "secret")
    packed = b""
    for _, archive in pack_files(tmp_path / "state", generation, None):
        with tarfile.open(archive) as tar:
            packed += b"".join(member.name.encode() + member.type for member in tar)
    assert packed == b"upper5upper/file2upper/folder2"
    with (upper / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StateNotSaved, match="more than"):
        list(pack_files(tmp_path / "state", generation, 1 << 30))
