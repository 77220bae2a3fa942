"""Queueing, cancelling and closing a session."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from carrel import ExecutorClosed, MemoryStorage, Session, SessionClosed, SessionNotFound
from carrel.errors import StorageUnavailable
from carrel.library.workflows import WorkflowLibrary

from .conftest import Open

ENDLESS = "while True: pass"


@pytest.fixture
async def complaints() -> AsyncIterator[None]:
    """At the end there are none: the loop had no exception that was never retrieved."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert found == []


async def test_calls_queue_up_in_order(session: Session) -> None:
    await session.run("seen = []")
    results = await asyncio.gather(*[session.run(f"seen.append({n})\nlen(seen)") for n in range(30)])
    assert [result.value for result in results] == list(range(1, 31))
    assert (await session.run("seen")).value == list(range(30))


async def test_a_cancelled_run_stops_and_the_variables_stay(session: Session) -> None:
    await session.run("x = 5")
    task = asyncio.create_task(session.run(ENDLESS, timeout=60))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await session.run("x")).value == 5


async def test_a_queued_run_can_be_cancelled(session: Session) -> None:
    called, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        called.set()
        await go_on.wait()
        return "first"

    session.register_tool(wait)
    first = asyncio.create_task(session.run("tools.wait()"))
    await asyncio.wait_for(called.wait(), 60)
    second = asyncio.create_task(session.run("never = 1"))
    await asyncio.sleep(0)
    second.cancel()
    go_on.set()
    assert (await first).value == "first"
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (await session.run("never")).error_type == "NameError"


async def test_leaving_a_stream_stops_its_code(session: Session) -> None:
    await session.run("x = 5")
    pieces = session.stream(f"print('on', flush=True)\n{ENDLESS}", timeout=60)
    assert (await anext(pieces)).text.startswith("on")  # type: ignore[union-attr]
    await pieces.aclose()
    assert (await session.run("x")).value == 5


async def test_closing_while_code_runs(complaints: None, session: Session) -> None:
    running = asyncio.create_task(session.run(ENDLESS, timeout=60))
    waiting = asyncio.create_task(session.run("1"))
    await asyncio.sleep(0.3)
    await session.close()
    for task in (running, waiting):
        assert (await task).error == "Session is closed"


async def test_wrong_calls_leave_nothing_behind(complaints: None, session: Session) -> None:
    for code in (None, 5, b"1", ["1"]):
        assert (await session.run(code)).error_type == "TypeError"  # type: ignore[arg-type]
    assert (await session.run("1", timeout="soon")).error_type == "TypeError"  # type: ignore[arg-type]
    assert (await session.run("1 + 1")).value == 2
    await session.close()


async def test_a_relative_base_does_not_follow_chdir(open_session: Open, tmp_path: Path) -> None:
    before = os.getcwd()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    try:
        os.chdir(tmp_path / "one")
        session = await open_session(Path("base né here"))
        os.chdir(tmp_path / "two")
        await session.save_artifact("a", 1)
        await session.add_workflow("w", "def run(): return artifacts.load('a')")
        assert (await session.run("workflows.w()")).value == 1
        await session.close()
    finally:
        os.chdir(before)
    assert os.listdir(tmp_path / "two") == []
    assert (tmp_path / "one" / "base né here" / "workflows" / "w.py").exists()


async def test_close_waits_for_the_end_also_when_another_close_was_cancelled(base: Path) -> None:
    session = Session.inprocess(base)
    ended: list[str] = []

    class Slow:
        name = "slow"

        async def definitions(self) -> list[Any]:
            return []

        async def call(self, tool: Any, arguments: Any, stream: Any = None) -> Any:
            return None

        async def close(self) -> None:
            await asyncio.sleep(0.2)
            ended.append("slow")

    session._library.add(Slow())
    await session.start()
    first = asyncio.create_task(session.close())
    await asyncio.sleep(0.05)
    first.cancel()
    await session.close()
    assert ended == ["slow"]


async def test_close_cancels_tool_calls_of_the_host(base: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    (base / "tools" / "nap.yaml").write_text("name: nap\ncommand: sh -c 'echo begun; exec sleep 600'\nstream: true\n")
    session = Session.inprocess(base)
    session.register_tool(endless, timeout=None)
    calls = [asyncio.create_task(session.call_tool(name)) for name in ("endless", "nap")]
    await begun.wait()
    await session.close()
    assert ended.is_set()
    for call in calls:
        with pytest.raises(ExecutorClosed, match="Session is closed"):
            await call
    assert [step["outcome"] for step in await session.trace()] == ["cancelled", "cancelled"]


async def test_cancelling_the_caller_cancels_its_tool_call(base: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Session.inprocess(base) as session:
        session.register_tool(endless, timeout=None)
        call = asyncio.create_task(session.call_tool("endless"))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended.is_set()


class Unclosed(WorkflowLibrary):
    """One that cannot be closed well."""

    async def close(self) -> None:
        raise StorageUnavailable("not now")


async def test_closing_a_storage_closes_all_parts_although_one_fails() -> None:
    storage = MemoryStorage()
    storage._workflows = Unclosed(storage.store)
    uploads = storage.get_artifact_store()._uploads
    uploads.begin(name="x", kind="text")
    assert await storage.store.lock("held")
    with pytest.raises(StorageUnavailable, match="not now"):
        await storage.close()
    assert await storage.store.lock_owner("held") is None
    assert uploads._open == {}


async def test_attach_finds_the_open_session_with_an_id(base: Path) -> None:
    async with Session.inprocess(base, session_id="report") as session:
        assert Session.attach("report") is session
        assert repr(session).startswith("<Session 'report' (InProcessExecutor, FileStorage(")
        assert "<caption>Session report</caption>" in session._repr_html_()
    with pytest.raises(SessionNotFound, match="'report' is open in this process"):
        Session.attach("report")


async def test_a_closed_session_refuses_register_tool(session: Session) -> None:
    await session.close()
    with pytest.raises(SessionClosed, match="Session is closed"):
        session.register_tool(lambda: 1, name="late")
