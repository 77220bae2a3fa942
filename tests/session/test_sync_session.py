"""SyncSession: the methods of Session without `await`."""

import gc
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from carrel import (
    ExecutionResult,
    MemoryStorage,
    Output,
    Session,
    SessionNotFound,
    SyncSession,
)

RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
PROGRAM = """
import os
from pathlib import Path
from carrel import MemoryStorage, SyncSession

def descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for number in child.read_text().split():
            found += [int(number), *descendants(number)]
    return found

session = SyncSession(MemoryStorage())
session.run("x = 6")
"""


@pytest.fixture
def session() -> Iterator[SyncSession]:
    with SyncSession(MemoryStorage()) as session:
        yield session


def run_program(source: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM + source], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def methods_of(cls: type) -> dict[str, inspect.Signature]:
    return {
        RENAMED.get(name, name): inspect.signature(value)
        for name in dir(cls)
        if (not name.startswith("_") or name in ("__init__", *RENAMED, *RENAMED.values()))
        and callable(value := getattr(cls, name))
    }


def test_it_has_the_methods_of_a_session() -> None:
    originals, methods = methods_of(Session), methods_of(SyncSession)
    assert set(methods) - set(originals) == {"wait"}
    for name, original in originals.items():
        assert list(methods[name].parameters.values()) == list(original.parameters.values()), name
        assert not inspect.iscoroutinefunction(getattr(SyncSession, name)), name
        original_doc = inspect.getdoc(
            getattr(Session, {"__enter__": "__aenter__", "__exit__": "__aexit__"}.get(name, name))
        )
        assert inspect.getdoc(getattr(SyncSession, name)) == (original_doc and original_doc.replace("await ", ""))
    properties = {name for name in dir(Session) if isinstance(getattr(Session, name), property)}
    assert properties <= {name for name in dir(SyncSession) if isinstance(getattr(SyncSession, name), property)}


def test_code_commands_and_files(tmp_path: Path) -> None:
    with SyncSession.from_base(tmp_path / "base", session_id="sync") as session:
        assert session.run("x = 1\nx + 1").value == 2
        session.write_file("a.txt", "one\n")
        pieces: list[Output] = []
        done = session.execute_command("cat a.txt; echo two", on_output=pieces.append)
        assert done.stdout == "".join(piece.text for piece in pieces) == "one\ntwo\n"
        assert [entry.name for entry in session.list_files()] == ["a.txt"]
        assert session.id == "sync"
        assert SyncSession.attach("sync") is session
        assert repr(session).startswith("<SyncSession 'sync' (")
        assert "<caption>Session sync</caption>" in session._repr_html_()
    assert session.run("x").error == "Session is closed"
    with pytest.raises(SessionNotFound):
        SyncSession.attach("sync")


def test_output_arrives_while_the_code_runs(session: SyncSession) -> None:
    stream = session.stream("print('first', flush=True)\ninput_file = open('go')\n")
    assert next(stream) == Output("stdout", "first\n")
    session.write_file("go2", "")  # The session answers other calls meanwhile.
    *_, last = stream
    assert isinstance(last, ExecutionResult)
    assert last.error_type == "FileNotFoundError"


def test_closing_a_stream_stops_the_code(session: SyncSession) -> None:
    stream = session.stream("x = 5\nprint('started', flush=True)\nwhile True: pass")
    next(stream)
    stream.close()
    assert session.run("x").value == 5


def test_branching(session: SyncSession) -> None:
    session.run("seen = ['Vega']")
    point = session.checkpoint("before")
    with session.fork() as branch:
        branch.run("seen.append('Moon')")
        assert isinstance(branch, SyncSession)
        assert branch.run("seen").value == ["Vega", "Moon"]
    session.run("seen.clear()")
    assert session.rewind("before") == point == session.checkpoints()[0]
    assert session.run("seen").value == ["Vega"]


def test_a_sample(tmp_path: Path) -> None:
    with SyncSession.for_sample("demo", "calc-1", cache=tmp_path) as session:
        assert session.sample is not None
        session.execute_command("git apply -", stdin=session.sample.patch)
        assert session.verify().is_success


def test_a_conversation(session: SyncSession) -> None:
    conversation = session.converse("Stars")
    session.wait(conversation.update_title("Moons"))
    assert session.conversation is conversation
    stored = session.wait(session.storage.get_session_store().list_sessions())
    assert [meta["title"] for meta in stored] == ["Moons"]


async def test_inside_a_running_event_loop(session: SyncSession) -> None:
    assert session.run("6 * 7").value == 42
    *_, last = session.stream("1")
    assert isinstance(last, ExecutionResult)
    assert last.value == 1


def test_from_several_threads(session: SyncSession) -> None:
    session.run("numbers = []")
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: session.run(f"numbers.append({number})").error, range(24)))
    assert results == [None] * 24
    assert sorted(session.run("numbers").value) == list(range(24))


def test_ctrl_c_interrupts_the_code(session: SyncSession) -> None:
    session.register_tool(lambda: os.kill(os.getpid(), signal.SIGINT), name="press_ctrl_c")
    session.run("x = 5")
    with pytest.raises(KeyboardInterrupt):
        session.run("tools.press_ctrl_c()\nwhile True: pass")
    result = session.run("x")
    assert (result.value, result.state) == (5, "kept")


def test_ctrl_c_while_waiting_for_output(session: SyncSession) -> None:
    session.register_tool(lambda: os.kill(os.getpid(), signal.SIGINT), name="press_ctrl_c")
    with pytest.raises(KeyboardInterrupt):
        list(session.stream("x = 5\ntools.press_ctrl_c()\nwhile True: pass"))
    assert session.run("x").value == 5


def test_a_tool_that_exits_does_not_end_the_loop(session: SyncSession) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        session.wait(leave())
    assert session.run("1").value == 1


def test_a_call_that_would_wait_for_itself_is_refused(session: SyncSession) -> None:
    session.register_tool(lambda: session.run("1").error, name="again")
    assert "would wait for that code" in session.run("tools.again()").value
    problems: list[Exception] = []

    def call_back(_: Output) -> None:
        try:
            session.interrupt()
        except RuntimeError as problem:
            problems.append(problem)

    session.execute_command("echo hello", on_output=call_back)
    assert "its own event loop" in str(problems)


async def test_a_session_of_the_event_loop_is_not_attached() -> None:
    async with Session(MemoryStorage(), session_id="asynchronous") as session:
        assert Session.attach("asynchronous") is session
        with pytest.raises(SessionNotFound, match=r"use Session\.attach"):
            SyncSession.attach("asynchronous")


def test_a_session_without_references_is_closed() -> None:
    session = SyncSession(MemoryStorage())
    inner = session._session
    session.run("1")
    del session
    gc.collect()
    wait_until(lambda: repr(inner).endswith("closed)>"))


def test_a_failed_start_closes_the_session(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bad.yaml").write_text("name: [")
    session = SyncSession.from_base(tmp_path)
    with pytest.raises(ValueError, match=r"bad\.yaml"), session:
        pass
    assert repr(session).endswith("closed)>")


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit", "import threading; threading.Thread(target=session.run, args=['1']).start()"]
)
def test_the_end_of_the_interpreter_closes_sessions(ending: str) -> None:
    pids = run_program(f"print(*descendants(os.getpid()), flush=True)\n{ending}").split()
    assert pids
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids))


def test_a_session_is_not_usable_in_a_fork_of_the_process() -> None:
    source = """
if pid := os.fork():
    os.waitpid(pid, 0)
    print(session.run("x").value)
else:
    try:
        session.run("x")
    except Exception as problem:
        print(type(problem).__name__)
    with SyncSession(MemoryStorage()) as another:
        print(another.run("7").value, flush=True)
"""
    assert run_program(source).split() == ["SessionClosed", "7", "6"]


@pytest.fixture(scope="module")
def run_cell() -> Iterator[Callable[..., str]]:
    """Run a cell in a real Jupyter kernel; return what it prints, or the name of its error."""
    manager, client = start_new_kernel()

    def run(code: str, interrupt_at: str = "") -> str:
        printed: list[str] = []

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            printed.append(
                content.get("text") or content.get("ename") or "".join(dict(content.get("data", {})).values())
            )
            if interrupt_at and interrupt_at in printed[-1]:
                manager.interrupt_kernel()

        client.execute_interactive(code, timeout=60, output_hook=note)
        return "".join(printed)

    yield run
    client.stop_channels()
    manager.shutdown_kernel()


def test_in_a_notebook(run_cell: Callable[..., str]) -> None:
    assert (
        run_cell("from carrel import MemoryStorage, SyncSession\ns = SyncSession(MemoryStorage())\ns.run('x = 1')")
        != ""
    )
    assert (
        run_cell("import asyncio\nprint(asyncio.get_running_loop().is_running(), s.run('x + 1').value)") == "True 2\n"
    )
    assert run_cell("for piece in s.stream('print(1)'): print(type(piece).__name__)") == "Output\nExecutionResult\n"
    code = "for piece in s.stream('x = 2\\nprint(\"ready\", flush=True)\\nwhile True: pass'): print(piece.text)"
    assert "KeyboardInterrupt" in run_cell(code, interrupt_at="ready")
    assert run_cell("print(s.run('x').value)") == "2\n"
    assert "<table>" in run_cell("s")
    assert run_cell("await asyncio.sleep(0); s.close(); print(s.run('x').error)") == "Session is closed\n"
