"""A session whose time is over is ended; a verification that has begun is not. On the desk, where time is any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from carrel.errors import SessionNotReady
from carrel.server.front_desk import FrontDesk, Rules
from carrel.session import FileStorage, MemoryStorage
from carrel.tasks.dataset import Datasets
from carrel.wire.requests import CreateSession, RunCommand
from tests.server.small_datasets import dataset_folder


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[FrontDesk]:
    slow = {"sample_id": "slow", "verify": {"command": "sleep 1"}}
    folder = dataset_folder(tmp_path / "datasets" / "small", [slow]).parent
    desk = FrontDesk(MemoryStorage(), Datasets(folder), tmp_path / "cache", Rules())
    await desk.open()
    yield desk
    await desk.close()


async def soon(desk: FrontDesk, session_id: str) -> None:
    await desk.live("ann", session_id).keep_until(datetime.now(UTC) + timedelta(seconds=0.1), 1)


async def until(so: Callable[[], bool], pause: float = 0.01) -> None:
    for _ in range(6000):
        if so():
            return
        await asyncio.sleep(pause)
    pytest.fail("it did not come to that")


async def test_it_is_ended_when_its_time_is_over(desk: FrontDesk) -> None:
    session = await desk.ready(await desk.create("ann", CreateSession()), 30)
    task = desk.live("ann", session.session_id)
    begun = await task.begin_command(RunCommand(command="sleep 600"))
    await soon(desk, session.session_id)
    ended = await asyncio.wait_for(task.interaction(begun.interaction_id, None), 60)
    assert ended.exit_code == -1000
    assert "its time was over" in (ended.message or "")
    await until(lambda: not desk.alive and desk.under_way(session.session_id) is None)
    after = desk.session("ann", session.session_id)
    assert (after.status, after.error and after.error.message) == ("terminated", "its time was over")
    with pytest.raises(SessionNotReady, match="terminated"):
        desk.live("ann", session.session_id)


async def test_one_that_is_being_ended_is_handed_out_to_nobody(desk: FrontDesk) -> None:
    session = await desk.ready(await desk.create("ann", CreateSession()), 30)
    task = desk.live("ann", session.session_id)
    ending = asyncio.create_task(desk.close_session("ann", session.session_id))
    await until(lambda: task.ending is not None, pause=0)  # not a moment longer: it may be done soon
    assert desk.under_way(session.session_id) is task, "it is still about it"
    with pytest.raises(SessionNotReady, match="closed"):
        desk.live("ann", session.session_id)
    with pytest.raises(SessionNotReady, match="closed"):
        await task.keep_until(datetime.now(UTC) + timedelta(hours=1), 60)
    assert (await ending).expires_at == session.expires_at


async def test_time_that_is_over_is_not_made_longer(desk: FrontDesk) -> None:
    session = await desk.ready(await desk.create("ann", CreateSession(dataset="small", sample_id="slow")), 30)
    task = desk.live("ann", session.session_id)
    await task.begin_verification()
    await soon(desk, session.session_id)
    await until(lambda: task.expired)
    with pytest.raises(SessionNotReady, match="time is over"):
        await task.keep_until(datetime.now(UTC) + timedelta(hours=1), 60)


async def test_a_verification_that_has_begun_goes_on(desk: FrontDesk) -> None:
    session = await desk.ready(await desk.create("ann", CreateSession(dataset="small", sample_id="slow")), 30)
    task = desk.live("ann", session.session_id)
    job = await task.begin_verification()
    await soon(desk, session.session_id)
    await until(lambda: task.expired)
    with pytest.raises(SessionNotReady, match="time is over"):
        await task.begin_command(RunCommand(command="true"))
    finished = await asyncio.wait_for(task.job(job.job_id, None), 60)
    assert finished.status == "completed"
    assert finished.result is not None
    assert finished.result.is_success
    await until(lambda: not desk.alive)
    assert desk.session("ann", session.session_id).status == "terminated"


async def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    async with FileStorage(tmp_path / "data") as storage:
        desk = FrontDesk(storage, Datasets(tmp_path), tmp_path / "cache", Rules())
        await desk.open()
        session = await desk.ready(await desk.create("ann", CreateSession()), 30)
        begun = await desk.live("ann", session.session_id).begin_command(RunCommand(command="echo kept"))
        done = await desk.interaction(session.session_id, begun.interaction_id, 30)
        closed = await desk.close_session("ann", session.session_id)
        await desk.close()
        later = FrontDesk(storage, Datasets(tmp_path), tmp_path / "cache", Rules())
        await later.open()
        assert later.session("ann", session.session_id) == closed
        assert await later.interaction(session.session_id, begun.interaction_id) == done
        await later.close()
