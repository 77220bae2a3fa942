"""A tool call without a result is declared interrupted once no process can answer it any more, and never before."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carrel.conversation.store import SessionStore
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from tests.conversation.conftest import Reopen
from tests.support.messages import call, outline, result, user

PROGRAM = "tests.support.conversation_process"


async def log_of(store: SessionStore) -> list[str]:
    return outline([entry async for _, entry in store.iter_entries("s")])


async def shown(store: SessionStore) -> list[str]:
    data = await store.load_session("s")
    assert data is not None
    return outline(data["messages"])


def program(verb: str, root: Path, prefix: str, *more: str) -> list[str]:
    return [sys.executable, "-m", PROGRAM, verb, str(root), prefix, *more]


@contextmanager
def caller(root: Path, prefix: str, call_id: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that has made a call and waits for its result."""
    process = subprocess.Popen(
        program("call_tool", root, prefix, call_id), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def loaded_elsewhere(root: Path, prefix: str) -> str:
    return subprocess.run(program("load", root, prefix), check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("prefix", ["", "sessions"])
async def test_a_call_of_another_process_is_open_as_long_as_that_lives(tmp_path: Path, prefix: str) -> None:
    async with SessionStore(store=FileStore(tmp_path), prefix=prefix, embedder=False) as store:
        await store.append_message("s", user("go"))
        await store.append_message("s", call("a"))
        with caller(tmp_path, prefix, "b"):
            await store.append_message("s", result("a"))
            assert loaded_elsewhere(tmp_path, prefix) == "['go', 'call:a', 'result:a', 'call:b', 'stand-in:b']"
            assert await log_of(store) == ["go", "call:a", "call:b", "result:a"]
        assert "stand-in:b" in loaded_elsewhere(tmp_path, prefix)
        assert await log_of(store) == ["go", "call:a", "call:b", "result:a", "stand-in:b"]


async def test_one_folder_of_sessions_opened_in_two_ways_has_the_same_open_calls(tmp_path: Path) -> None:
    """As a session of an agent, and by the command line, which opens the folder of the sessions itself."""
    viewer = SessionStore(tmp_path / "sessions", embedder=False)
    with caller(tmp_path, "sessions", "a"):
        assert await shown(viewer) == ["call:a", "stand-in:a"]
        assert await log_of(viewer) == ["call:a"]
    await shown(viewer)
    assert await log_of(viewer) == ["call:a", "stand-in:a"]


async def test_a_call_of_another_task_is_open_as_long_as_that_is_not_done(
    store: SessionStore, reopened: Reopen
) -> None:
    called, go_on = asyncio.Event(), asyncio.Event()

    async def agent() -> None:
        await store.append_message("s", user("go"))
        await store.append_message("s", call("a", "b"))
        called.set()
        await go_on.wait()
        await store.append_message("s", result("a", "b"))

    task = asyncio.create_task(agent())
    await called.wait()
    for viewer in (store, reopened()):
        assert await shown(viewer) == ["go", "call:a call:b", "stand-in:a stand-in:b"]
        assert await log_of(viewer) == ["go", "call:a call:b"]
    go_on.set()
    await task
    assert await shown(reopened()) == ["go", "call:a call:b", "result:a result:b"]
    assert await log_of(store) == ["go", "call:a call:b", "result:a result:b"]


async def test_the_call_of_a_task_that_failed_is_repaired_once(store: SessionStore, reopened: Reopen) -> None:
    async def agent() -> None:
        await store.append_message("s", call("a"))
        raise RuntimeError("the tool broke")

    await asyncio.gather(asyncio.create_task(agent()), return_exceptions=True)
    await asyncio.gather(*[asyncio.create_task(shown(reopened())) for _ in range(5)])
    assert await shown(store) == ["call:a", "stand-in:a"]
    assert await log_of(store) == ["call:a", "stand-in:a"]


async def test_the_task_that_loads_its_session_again_has_given_up_its_call(store: SessionStore) -> None:
    await store.append_message("s", call("a"))
    assert await shown(store) == ["call:a", "stand-in:a"]
    assert await log_of(store) == ["call:a", "stand-in:a"]


async def test_a_viewer_writes_nothing(store: SessionStore) -> None:
    await store.append_message("s", call("a"))
    data = await store.load_session("s", repair=False)
    assert data is not None
    assert outline(data["messages"]) == ["call:a", "stand-in:a"]
    await store.export("s", "markdown")
    assert await log_of(store) == ["call:a"]


def test_programs_without_tasks_of_their_own_are_repaired_too(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, embedder=False)
    asyncio.run(store.append_message("s", call("a")))
    data = store.load_session_sync("s")
    assert data is not None
    assert outline(data["messages"]) == ["call:a", "stand-in:a"]
    assert asyncio.run(log_of(store)) == ["call:a", "stand-in:a"]


IN_A_LOOP = """
import asyncio
from carrel.conversation.store import SessionStore
from carrel.storage.memory import MemoryStore
from tests.support.messages import call, outline

async def main():
    backend = MemoryStore()
    async with SessionStore(store=backend, embedder=False) as store:
        await store.append_message("s", call("a"))
    await backend.delete("s/meta.json")
    await backend.lock("s/life")  # as a task of this loop does that makes, forks or deletes the session
    print(outline(SessionStore(store=backend, embedder=False).load_session_sync("s")["messages"]))

asyncio.run(main())
"""


def test_load_session_sync_in_a_running_loop_waits_for_no_task_of_that_loop() -> None:
    run = subprocess.run([sys.executable, "-c", IN_A_LOOP], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "['call:a', 'stand-in:a']\n"


async def test_load_session_sync_raises_what_load_session_raises() -> None:
    store = SessionStore(store=MemoryStore(), embedder=False)
    with pytest.raises(ValueError, match="session id"):
        store.load_session_sync("../x")


def test_two_processes_with_the_same_number_and_host_name_have_different_names() -> None:
    """As in two containers of the same image."""
    ask = ["unshare", "--pid", "--fork", sys.executable, "-c"]
    words = "import os; from carrel.storage.base import process_name; print(os.getpid(), process_name())"
    runs = [subprocess.run([*ask, words], capture_output=True, text=True, check=False) for _ in range(2)]
    if any(run.returncode for run in runs):
        pytest.skip(f"no process namespace can be made here: {runs[0].stderr.strip()[-200:]}")
    assert [run.stdout.split()[0] for run in runs] == ["1", "1"]
    assert runs[0].stdout != runs[1].stdout
