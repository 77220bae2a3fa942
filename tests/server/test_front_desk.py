"""The desk without HTTP: full disks, and a server that stops, leave nothing behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from carrel.errors import InteractionNotFound, JobNotFound, SessionNotReady, StorageWriteError
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.server.front_desk import FrontDesk, Rules
from carrel.server.ledger import Ledger
from carrel.server.live_task import Opened
from carrel.session import MemoryStorage, Session
from carrel.tasks.dataset import Datasets
from carrel.wire.requests import CreateSession, ForkSession, RunCommand
from tests.execution.processes import descendants


class FullDisk(MemoryStorage):
    """One whose logs take nothing more, once it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        honest = self.store.append

        async def append(key: str, records: Sequence[bytes], **how: Any) -> int:
            if self.full:
                raise StorageWriteError("the disk is full")
            return await honest(key, records, **how)

        self.store.append = append  # type: ignore[method-assign]


async def test_a_session_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    storage = FullDisk()
    desk = FrontDesk(storage, Datasets(tmp_path), tmp_path / "cache", Rules(max_sessions=1))
    await desk.open()
    try:
        first = await desk.ready(await desk.create("ada", CreateSession()), 30)
        await desk.close_session("ada", first.session_id)
        before = set(descendants(os.getpid()))
        storage.full = True
        for _ in range(2):
            with pytest.raises(StorageWriteError, match="disk is full"):
                await desk.create("ada", CreateSession(), once="0" * 64)
        assert desk.alive == 0
        assert len(desk.sessions_of("ada")) == 1
        storage.full = False
        # One place may have been built ahead meanwhile, its init and its worker; two sessions would be more.
        assert len(set(descendants(os.getpid())) - before) <= 2
        again = await desk.ready(await desk.create("ada", CreateSession(), once="0" * 64), 30)
        assert again.status == "ready"
    finally:
        await desk.close()


async def test_a_command_ends_though_its_log_cannot_be_written(tmp_path: Path) -> None:
    storage = FullDisk()
    desk = FrontDesk(storage, Datasets(tmp_path), tmp_path / "cache", Rules(max_sessions=1))
    await desk.open()
    try:
        session = (await desk.ready(await desk.create("ada", CreateSession()), 30)).session_id
        begun = await desk.live("ada", session).begin_command(RunCommand(command="echo done"))
        storage.full = True
        ended = await desk.interaction(session, begun.interaction_id, 30)
        assert (ended.status, ended.stdout) == ("completed", "done\n")
        storage.full = False
        # The next line takes it along, and another command does not hide it.
        more = await desk.live("ada", session).begin_command(RunCommand(command="true"))
        await desk.interaction(session, more.interaction_id, 30)
        assert await desk.interaction(session, begun.interaction_id) == ended
        again = Ledger(storage.store)
        await again.open()
        assert await again.interaction(session, begun.interaction_id) == ended
    finally:
        storage.full = False
        await desk.close()


class SlowFork:
    """The code of a session whose forks are handed over when `go` is set."""

    def __init__(self, code: Session) -> None:
        self._code = code
        self.made, self.go = asyncio.Event(), asyncio.Event()
        self.fork_made: Session | None = None

    async def fork(self, **how: Any) -> Session:
        self.fork_made = await self._code.fork(**how)
        self.made.set()
        await self.go.wait()
        return self.fork_made

    async def close(self) -> None:
        await self._code.close()


async def test_a_fork_that_is_made_while_the_server_stops_leaves_nothing(tmp_path: Path) -> None:
    desk = FrontDesk(MemoryStorage(), Datasets(tmp_path), tmp_path / "cache", Rules())
    await desk.open()
    origin = (await desk.ready(await desk.create("ada", CreateSession()), 30)).session_id
    task = desk.live("ada", origin)
    slow = SlowFork(task.opened.code)
    task._opened = Opened(task.opened.executor, cast(Session, slow))
    before = set(descendants(os.getpid()))
    forking = asyncio.create_task(desk.fork("ada", origin, ForkSession()))
    await slow.made.wait()
    await desk.close()
    slow.go.set()
    with pytest.raises(SessionNotReady, match="being stopped"):
        await forking
    assert desk.alive == 0
    assert {session.status for session in desk.sessions_of("ada")} <= {"terminated", "error"}
    assert slow.fork_made is not None
    assert not cast(SubprocessExecutor, slow.fork_made.executor).alive
    assert len(set(descendants(os.getpid())) - before) <= 2, "one place may be built ahead"


async def test_questions_about_what_is_not_there_are_not_remembered(tmp_path: Path) -> None:
    desk = FrontDesk(MemoryStorage(), Datasets(tmp_path), tmp_path / "cache", Rules())
    await desk.open()
    try:
        session = (await desk.ready(await desk.create("ada", CreateSession()), 30)).session_id
        task = desk.live("ada", session)
        done = await task.begin_command(RunCommand(command="true"))
        await desk.interaction(session, done.interaction_id)
        for number in range(100):
            with pytest.raises(InteractionNotFound):
                await desk.interaction(session, f"int_{number}")
            with pytest.raises(JobNotFound):
                await desk.job(session, f"job_{number}")
        assert task._asked_for <= {session}
    finally:
        await desk.close()
