"""The session manager without HTTP: full disks, a server that stops, and the end of a session's time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from carrel.errors import ServerBusy, SessionElsewhere, SessionExists, SessionNotReady, StorageWriteError
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.server.hosted_session import OpenWorkspace
from carrel.server.records import RecordStore, now
from carrel.server.session_manager import SessionManager
from carrel.server.settings import ServerSettings
from carrel.session import FileStorage, MemoryStorage, RedisStorage, Session
from carrel.storage.memory import MemoryStore
from carrel.tasks.dataset import Datasets
from carrel.wire.answers import Interaction, SessionRecord
from carrel.wire.requests import CreateSession, ForkSession, RunCommand
from carrel.wire.verification import Job
from tests.execution.processes import descendants
from tests.support.server_process import write_dataset

SLOW = CreateSession(dataset="small", sample_id="slow")


class FullDisk(MemoryStorage):
    """A storage whose logs refuse to be written while it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        append_really = self.store.append

        async def append(key: str, records: Sequence[bytes], **how: Any) -> int:
            if self.full:
                raise StorageWriteError("the disk is full")
            return await append_really(key, records, **how)

        self.store.append = append  # type: ignore[method-assign]


@pytest.fixture
def datasets(tmp_path: Path) -> Datasets:
    slow = {"sample_id": "slow", "verify": {"command": "sleep 1"}}
    return Datasets(write_dataset(tmp_path / "datasets" / "small", [slow]).parent)


@pytest.fixture
def storage() -> FullDisk:
    return FullDisk()


@pytest.fixture
async def manager(tmp_path: Path, datasets: Datasets, storage: FullDisk) -> AsyncIterator[SessionManager]:
    manager = SessionManager(storage, datasets, ServerSettings(cache=tmp_path / "cache", max_sessions=2))
    await manager.start()
    yield manager
    storage.full = False
    await manager.shutdown()


async def create(manager: SessionManager, request: CreateSession | None = None, **how: Any) -> str:
    """Create a session of Ann's, and return its id when it is ready."""
    record = await manager.create("ann", request or CreateSession(), **how)
    assert (await manager.wait_ready("ann", record.session_id, 30)).status == "ready"
    return record.session_id


async def until(condition: Callable[[], bool], pause: float = 0.01) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(pause)
    pytest.fail("the condition did not become true")


# --- writes that fail -----------------------------------------------------------------------------------------------


async def test_a_session_that_cannot_be_written_is_not_created(manager: SessionManager, storage: FullDisk) -> None:
    await manager.close("ann", await create(manager))
    before = set(descendants(os.getpid()))
    storage.full = True
    for _ in range(2):
        with pytest.raises(StorageWriteError, match="disk is full"):
            await manager.create("ann", CreateSession(), request_id="0" * 64)
    assert manager.live_count == 0
    storage.full = False
    found = await manager.records.list_sessions("ann", None, page=1, page_size=10, cursor=None)
    assert len(found.sessions) == 1
    # One sandbox may have been prepared meanwhile, its init and its worker; two sessions would be more.
    assert len(set(descendants(os.getpid())) - before) <= 2
    await create(manager, request_id="0" * 64)


async def test_a_command_ends_though_its_log_cannot_be_written(manager: SessionManager, storage: FullDisk) -> None:
    session = await create(manager)
    hosted = await manager.hosted("ann", session)
    first = await hosted.start_command(RunCommand(command="echo done"))
    storage.full = True
    ended = await manager.wait("ann", session, Interaction, first.interaction_id, 30)
    assert (ended.status, ended.stdout) == ("completed", "done\n")
    storage.full = False
    # The next event brings it along, and another command does not hide it.
    second = await hosted.start_command(RunCommand(command="true"))
    await manager.wait("ann", session, Interaction, second.interaction_id, 30)
    assert await manager.wait("ann", session, Interaction, first.interaction_id) == ended
    assert await RecordStore(storage.store).get_operation(session, first.interaction_id) == ended


async def test_the_end_of_a_session_is_written_later(manager: SessionManager, storage: FullDisk) -> None:
    session = await create(manager)
    storage.full = True
    assert (await manager.close("ann", session)).status == "closed"
    assert (await manager.get("ann", session)).status == "closed"
    storage.full = False
    await manager.sweep()
    again = RecordStore(storage.store)
    assert [each.session_id for each in await again.sessions_left_live()] == []
    assert (await manager.records.list_sessions("ann", "closed", page=1, page_size=9, cursor=None)).total_count == 1


# --- a server that stops --------------------------------------------------------------------------------------------


class SlowFork:
    """A session whose forks are returned when `go` is set."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.was_forked, self.go = asyncio.Event(), asyncio.Event()
        self.forked: Session | None = None
        self.sample = None

    async def fork(self, **how: Any) -> Session:
        self.forked = await self._session.fork(**how)
        self.was_forked.set()
        await self.go.wait()
        return self.forked

    async def close(self) -> None:
        await self._session.close()


async def test_a_fork_that_is_created_while_the_server_stops_leaves_nothing(manager: SessionManager) -> None:
    origin = await create(manager)
    hosted = await manager.hosted("ann", origin)
    workspace = hosted.workspace()
    slow = SlowFork(workspace.session)
    hosted._workspace = OpenWorkspace(workspace.executor, cast(Session, slow))
    before = set(descendants(os.getpid()))
    forking = asyncio.create_task(manager.fork("ann", origin, ForkSession()))
    await slow.was_forked.wait()
    stopping = asyncio.create_task(manager.shutdown())
    await until(lambda: not manager.live_count or manager._closed)
    slow.go.set()
    with pytest.raises(SessionNotReady, match="being stopped"):
        await forking
    await stopping
    assert manager.live_count == 0
    found = await manager.records.list_sessions("ann", None, page=1, page_size=10, cursor=None)
    assert [session.session_id for session in found.sessions] == [origin]
    assert slow.forked is not None
    assert not cast(SubprocessExecutor, slow.forked.executor).alive
    await until(lambda: len(set(descendants(os.getpid())) - before) <= 2)  # one sandbox may be prepared


async def test_a_second_server_on_one_store_refuses_to_start(
    manager: SessionManager, storage: FullDisk, datasets: Datasets
) -> None:
    second = SessionManager(storage, datasets)
    with pytest.raises(ServerBusy, match=rf"another server \(.*:{os.getpid()}:"):
        await second.start()
    await second.shutdown()


async def test_at_its_start_a_server_ends_only_its_own_sessions(tmp_path: Path, datasets: Datasets) -> None:
    storage = MemoryStorage()
    record = (await _record(storage, datasets, tmp_path)).model_copy(update={"closed_at": None})
    for name, session_id in (("main", "mine"), ("other", "theirs")):
        await RecordStore(storage.store, name).add_session(
            record.model_copy(update={"session_id": session_id, "status": "ready"})
        )
    manager = SessionManager(storage, datasets, ServerSettings(cache=tmp_path))
    await manager.start()
    assert (await manager.get("ann", "mine")).status == "terminated"
    assert (await manager.get("ann", "theirs")).status == "ready"
    await manager.shutdown()


async def _record(storage: MemoryStorage, datasets: Datasets, cache: Path) -> Any:
    manager = SessionManager(storage, datasets, ServerSettings(cache=cache, sandbox="auto"))
    await manager.start()
    session = await create(manager)
    record = await manager.close("ann", session)
    await manager.shutdown()
    return record


async def test_records_are_read_again(tmp_path: Path, datasets: Datasets) -> None:
    async with FileStorage(tmp_path / "data") as storage:
        first = SessionManager(storage, datasets, ServerSettings(cache=tmp_path / "cache"))
        await first.start()
        session = await create(first)
        begun = await first.start_command("ann", session, RunCommand(command="echo kept"), None)
        done = await first.wait("ann", session, Interaction, begun.interaction_id, 30)
        closed = await first.close("ann", session)
        await first.shutdown()
        second = SessionManager(storage, datasets, ServerSettings(cache=tmp_path / "cache"))
        await second.start()
        assert await second.get("ann", session) == closed
        assert await second.wait("ann", session, Interaction, begun.interaction_id) == done
        await second.shutdown()


async def test_an_id_is_given_once(manager: SessionManager) -> None:
    session = await create(manager, CreateSession(session_id="mine"))
    assert session == "mine"
    for user in ("ann", "bob"):
        with pytest.raises(SessionExists):
            await manager.create(user, CreateSession(session_id="mine"))
    await manager.close("ann", session)
    with pytest.raises(SessionExists):
        await manager.create("ann", CreateSession(session_id="mine"))
    assert manager.live_count == 0
    assert (await manager.get("ann", "mine")).status == "closed"


# --- the end of a session's time ------------------------------------------------------------------------------------


async def expire_soon(manager: SessionManager, session: str) -> None:
    await (await manager.hosted("ann", session)).extend(now() + timedelta(seconds=0.1), 1)


async def test_an_expired_session_is_ended(manager: SessionManager) -> None:
    session = await create(manager)
    hosted = await manager.hosted("ann", session)
    begun = await hosted.start_command(RunCommand(command="sleep 600"))
    await expire_soon(manager, session)
    ended = await hosted.wait(Interaction, begun.interaction_id, 60)
    assert ended.exit_code == -1000
    assert "its time was over" in (ended.message or "")
    await until(lambda: not manager.live_count and session not in manager._hosted)
    after = await manager.get("ann", session)
    assert (after.status, after.error and after.error.message) == ("terminated", "its time was over")
    with pytest.raises(SessionNotReady, match="terminated: its time was over"):
        await manager.hosted("ann", session)


async def test_a_session_that_is_being_closed_accepts_nothing_new(manager: SessionManager) -> None:
    session = await create(manager)
    hosted = await manager.hosted("ann", session)
    closing = asyncio.create_task(manager.close("ann", session))
    await until(lambda: hosted.ending is not None, pause=0)  # Not longer than necessary: it may be closed soon.
    with pytest.raises(SessionNotReady, match="closed"):
        await manager.hosted("ann", session)
    with pytest.raises(SessionNotReady, match="closed"):
        await hosted.extend(now() + timedelta(hours=1), 60)
    before = hosted.record.expires_at
    assert (await closing).expires_at == before


async def test_an_expired_session_is_not_extended(manager: SessionManager) -> None:
    session = await create(manager, SLOW)
    hosted = await manager.hosted("ann", session)
    await hosted.start_verification()
    await expire_soon(manager, session)
    await until(lambda: hosted.is_expired)
    with pytest.raises(SessionNotReady, match="time is over"):
        await hosted.extend(now() + timedelta(hours=1), 60)


async def test_a_verification_that_has_begun_is_not_cut_off(manager: SessionManager) -> None:
    session = await create(manager, SLOW)
    hosted = await manager.hosted("ann", session)
    job = await hosted.start_verification()
    await expire_soon(manager, session)
    await until(lambda: hosted.is_expired)
    with pytest.raises(SessionNotReady, match="time is over"):
        await hosted.start_command(RunCommand(command="true"))
    finished = await hosted.wait(Job, job.job_id, 60)
    assert finished.status == "completed"
    assert finished.result is not None
    assert finished.result.is_success
    await until(lambda: not manager.live_count)
    assert (await manager.get("ann", session)).status == "terminated"


async def test_a_command_is_stopped(manager: SessionManager) -> None:
    session = await create(manager)
    hosted = await manager.hosted("ann", session)
    commands = [await hosted.start_command(RunCommand(command="sleep 600")) for _ in range(2)]
    for command in reversed(commands):
        stopped = await manager.cancel("ann", session, Interaction, command.interaction_id)
        assert (stopped.status, stopped.message) == ("error", "the command was stopped")
    done = await hosted.start_command(RunCommand(command="pgrep -c sleep"))
    assert (await hosted.wait(Interaction, done.interaction_id, 30)).stdout == "0\n"
    again = await manager.cancel("ann", session, Interaction, done.interaction_id)
    assert again.status == "completed", "one that has ended stays as it is"


async def test_a_server_on_redis(redis_url: str, datasets: Datasets, tmp_path: Path) -> None:
    """Everything that a folder keeps, and a second process that would be refused."""
    settings = ServerSettings(cache=tmp_path / "cache", retention=timedelta(0))
    async with RedisStorage(redis_url, f"server-{os.urandom(4).hex()}") as storage:
        first = SessionManager(storage, datasets, settings)
        await first.start()
        session = await create(first, request_id="1" * 64)
        assert (await first.create("ann", CreateSession(), "1" * 64)).session_id == session
        begun = await first.start_command("ann", session, RunCommand(command="echo kept; echo > new"), None)
        done = await first.wait("ann", session, Interaction, begun.interaction_id, 30)
        assert (await first.trace("ann", session, 0, 10)).lines[0].model_dump()["name"] == "echo kept; echo > new"
        await first.shutdown()
        second = SessionManager(storage, datasets, replace(settings, retention=None))
        await second.start()
        assert (await second.get("ann", session)).status == "terminated"
        assert await second.wait("ann", session, Interaction, begun.interaction_id) == done
        assert [change.path for change in (await second.diff("ann", session)).changes] == ["new"]
        listed = await second.records.list_sessions("ann", "terminated", page=1, page_size=10, cursor=None)
        assert (listed.total_count, [each.session_id for each in listed.sessions]) == (1, [session])
        await second.shutdown()
        third = SessionManager(storage, datasets, settings)
        await third.start()
        await third.sweep()
        assert await storage.store.list("server") == []
        assert await storage.store.list("sessions") == []
        await third.shutdown()


async def test_a_paused_session_is_opened_on_one_node_only() -> None:
    store = MemoryStore()
    first, second = RecordStore(store, "n1"), RecordStore(store, "n2")
    at = now()
    paused = SessionRecord(
        session_id="s",
        user_id="ann",
        status="creating",
        lifecycle="live",
        requested_at=at,
        expires_at=at,
        ttl_minutes=30,
        node="n1",
        durable=True,
    )
    await first.add_session(paused)
    await first.save_session(paused.model_copy(update={"status": "closed", "lifecycle": "paused"}))
    results = await asyncio.gather(
        *(
            records.reopen_session(paused.model_copy(update={"node": name}))
            for records, name in ((first, "n1"), (second, "n2"))
        ),
        return_exceptions=True,
    )
    assert [type(result) for result in results].count(SessionElsewhere) == 1
    winner = (await first.get_session("s") or paused).node
    assert await store.list("server/live") == [f"server/live/{winner}/s"]
    # The mark of a node that died between two writes ends no session of another one.
    await store.put("server/live/n3/s", b"{}")
    assert await RecordStore(store, "n3").sessions_left_live() == []
    assert await store.list("server/live") == [f"server/live/{winner}/s"]
