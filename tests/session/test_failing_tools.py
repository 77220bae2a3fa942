"""A tool, MCP server or workflow that hangs, dies or floods costs one call; the session continues."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from carrel import ExecutionResult, Session
from tests.execution.processes import descendants, wait_gone
from tests.library.remote.conftest import SERVERS
from tests.support.web_server import Answer, WebRequest

from .conftest import Open

PATIENCE = 60
"""Seconds a test waits before it calls something a hang; what is awaited takes far less."""


def mcp(behaviour: str, timeout: float = 1, startup: float = 60) -> str:
    server = SERVERS / "unruly.py"
    return (
        f"name: odd\ntype: mcp\ncommand: {sys.executable}\nargs: [{server}, '{behaviour}']\n"
        f"timeout: {timeout}\nstartup_timeout: {startup}\n"
    )


async def goes_on(session: Session) -> None:
    result = await asyncio.wait_for(session.run("(x, tools.echo.say(words='still here'))"), PATIENCE)
    assert result.value == (5, "still here\n"), result.error
    assert "echo" in [tool["name"] for tool in await session.list_tools()]


async def started(open_session: Open, **settings: Any) -> Session:
    session = await open_session(timeout=PATIENCE, **settings)
    assert (await session.run("x = 5")).is_ok
    return session


async def run(session: Session, code: str) -> ExecutionResult:
    return await asyncio.wait_for(session.run(code), PATIENCE)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


# --- programs ---------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "hangs": ("sh -c 'sleep 3613 & sleep 3613'", "timeout: 0.5", "ToolTimeoutError", "0.5"),
    "ignores": ("sh -c 'trap \"\" TERM INT HUP; sleep 3613; sleep 3613'", "timeout: 0.5", "ToolTimeoutError", "0.5"),
    "dies": ("sh -c 'kill -9 $$'", "", "ToolCallError", "exit code 137"),
    "fails": ("sh -c 'echo the reason >&2; exit 4'", "", "ToolCallError", "the reason"),
    "nonsense": ("echo not json {", "output: json", "ToolCallError", "JSON"),
    "nowhere": ("a-program-that-is-nowhere", "", "ToolCallError", "a-program-that-is-nowhere"),
    "complains": ("sh -c 'head -c 50000000 /dev/zero >&2; exit 1'", "", "ToolCallError", "exit code 1"),
}


@pytest.mark.parametrize("kind_of", PROGRAMS)
async def test_a_failing_program(open_session: Open, base: Path, kind_of: str) -> None:
    command, more, error, message = PROGRAMS[kind_of]
    (base / "tools" / "odd.yaml").write_text(f"name: odd\ncommand: {command}\n{more}\n")
    session = await started(open_session)
    result = await run(session, "tools.odd()")
    assert result.error_type == error, result.error
    assert message in (result.error or "")
    assert len(result.error or "") < 100_000
    sleeping = {pid: began for pid, began in descendants(os.getpid()).items() if "3613" in command_of(pid)}
    assert wait_gone(sleeping, 10) == []
    await goes_on(session)


async def test_a_program_that_floods(open_session: Open, base: Path) -> None:
    (base / "tools" / "odd.yaml").write_text("name: odd\ncommand: head -c 60000000 /dev/zero\ntimeout: 30\n")
    (base / "tools" / "endless.yaml").write_text("name: endless\ncommand: yes\ntimeout: 0.5\n")
    session = await started(open_session)
    result = await run(session, "got = tools.odd()\nlen(got)")
    assert result.error is not None or result.value < 20_000_000
    assert (await run(session, "tools.endless()")).error_type in ("ToolTimeoutError", "ToolCallError")
    await goes_on(session)


async def test_one_of_several_calls_hangs(open_session: Open, base: Path) -> None:
    (base / "tools" / "odd.yaml").write_text("name: odd\ncommand: sleep 3600\ntimeout: 0.5\n")
    session = await started(open_session)
    code = """
import asyncio
done = await asyncio.gather(tools.odd.call_async(), *[tools.echo.say.call_async(words=str(i)) for i in range(4)],
    return_exceptions=True)
[type(done[0]).__name__, *done[1:]]
"""
    result = await run(session, code)
    assert result.value == ["ToolTimeoutError", "0\n", "1\n", "2\n", "3\n"], result.error
    await goes_on(session)


# --- functions of the host --------------------------------------------------------------------------------------------


async def test_a_failing_function_of_the_host(open_session: Open) -> None:
    session = await started(open_session)

    async def hangs() -> None:
        await asyncio.sleep(3600)

    def fails() -> None:
        raise RuntimeError("the function's own words")

    def leaves() -> None:
        raise SystemExit(3)

    def odd() -> object:
        return object()

    def flood() -> str:
        return "x" * 30_000_000

    session.register_tool(hangs, timeout=0.3)
    for function in (fails, leaves, odd, flood):
        session.register_tool(function)
    assert (await run(session, "tools.hangs()")).error_type == "ToolTimeoutError"
    failed = await run(session, "tools.fails()")
    assert failed.error_type == "ToolCallError"
    assert "the function's own words" in (failed.error or "")
    assert (await run(session, "tools.leaves()")).error_type == "ToolCallError"
    shown = await run(session, "tools.odd()")
    assert shown.error is not None or "object" in str(shown.value)
    assert (await run(session, "len(tools.flood())")).value in (30_000_000, None)
    await goes_on(session)


# --- MCP servers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["dies", "silent"])
async def test_an_mcp_server_that_does_not_start_loses_only_its_tools(
    open_session: Open, base: Path, behaviour: str
) -> None:
    (base / "tools" / "odd.yaml").write_text(mcp(behaviour, startup=1 if behaviour == "silent" else 60))
    session = await started(open_session)
    result = await run(session, "tools.odd.echo(text='x')")
    assert result.error_type in ("ToolCallError", "ToolTimeoutError"), result.error
    assert "odd" in (result.error or "")
    if behaviour == "dies":
        assert "no licence" in (result.error or "")
    await goes_on(session)
    assert "echo" in await session.describe()


@pytest.mark.parametrize("what", ["hang", "flood", "crash"])
async def test_an_mcp_server_that_fails_in_a_call(open_session: Open, base: Path, what: str) -> None:
    (base / "tools" / "odd.yaml").write_text(mcp("", timeout=1))
    session = await started(open_session)
    result = await run(session, f"tools.odd.do(what={what!r})")
    assert result.error_type in ("ToolCallError", "ToolTimeoutError"), result
    again = await run(session, "tools.odd.echo(text='again')")
    while again.error_type == "ToolTimeoutError":  # until it is found not to answer any more, and started anew
        again = await run(session, "tools.odd.echo(text='again')")
    assert again.value == {"text": "again"}, again.error
    await goes_on(session)


async def test_an_mcp_server_ends_with_the_session(open_session: Open, base: Path) -> None:
    (base / "tools" / "odd.yaml").write_text(mcp("stubborn"))
    session = await started(open_session)
    before = descendants(os.getpid())
    assert (await run(session, "tools.odd.echo(text='x')")).is_ok
    found = descendants(os.getpid())
    servers = {pid: began for pid, began in found.items() if pid not in before and "unruly.py" in command_of(pid)}
    assert servers
    await session.close()
    assert wait_gone(servers, 20) == []


# --- HTTP -------------------------------------------------------------------------------------------------------------


async def test_a_failing_web_service(open_session: Open, base: Path, web: Any) -> None:
    def answer(request: WebRequest) -> Answer:
        if request.path == "/down":
            return Answer("out of order", status=503)
        return Answer({"path": request.path})

    server = web(answer)
    (base / "tools" / "site.yaml").write_text(
        f"name: site\ntype: http\nbase_url: {server.url}\ntimeout: 5\n"
        "endpoints:\n  up: {path: /up}\n  down: {path: /down}\n"
    )
    (base / "tools" / "unreachable.yaml").write_text(
        "name: unreachable\ntype: http\nbase_url: http://127.0.0.1:1\nendpoints:\n  get: {path: /x}\n"
    )
    session = await started(open_session)
    assert (await run(session, "tools.site.up()")).value == {"path": "/up"}
    down = await run(session, "tools.site.down()")
    assert down.error_type == "ToolCallError"
    assert "503" in (down.error or "")
    assert (await run(session, "tools.unreachable.get()")).error_type == "ToolCallError"
    await goes_on(session)


# --- workflows --------------------------------------------------------------------------------------------------------

WORKFLOWS = {
    "imports": ("import a_module_that_is_nowhere\ndef run(): pass\n", "ModuleNotFoundError"),
    "raises": ("def run(): return 1/0\n", "ZeroDivisionError"),
    "recurses": ("def run(): return workflows.recurses()\n", "WorkflowRecursionError"),
    "pings": ("def run(): return workflows.pongs()\n", "WorkflowRecursionError"),
    "overflows": ("def run(): return run()\n", "RecursionError"),
    "exits": ("import sys\ndef run(): sys.exit(3)\n", "SystemExit"),
    "top": ("1/0\ndef run(): pass\n", "ZeroDivisionError"),
    "hangs": ("def run():\n    while True: pass\n", "Timeout"),
    "sleeps": ("import asyncio\nasync def run(): await asyncio.sleep(3600)\n", "Timeout"),
}


@pytest.mark.parametrize("name", WORKFLOWS)
async def test_a_failing_workflow(open_session: Open, base: Path, name: str) -> None:
    for each, (source, _) in WORKFLOWS.items():
        (base / "workflows" / f"{each}.py").write_text(source)
    (base / "workflows" / "pongs.py").write_text("async def run(): return workflows.pings()\n")
    (base / "workflows" / "broken.py").write_text("def run(:\n")
    (base / "workflows" / "bytes.py").write_bytes(b"\xff\xfe\x00 def run")
    session = await started(open_session)
    result = await asyncio.wait_for(
        session.run(f"workflows.{name}()", 1.0 if WORKFLOWS[name][1] == "Timeout" else 30), 60
    )
    assert result.error_type == WORKFLOWS[name][1], result.error
    assert name in (result.error or "") or result.error_type == "Timeout", result.error
    assert (await run(session, "workflows.double(4)")).value == 8
    names = {each["name"] for each in await session.list_workflows()}
    assert {"double", *WORKFLOWS} <= names
    assert (await session.search_workflows("multiply a number"))[0]["name"] == "double"
    await goes_on(session)


@pytest.mark.parametrize("broken", ["broken", "bytes"])
async def test_a_file_that_is_not_a_workflow_fails_when_called(open_session: Open, base: Path, broken: str) -> None:
    (base / "workflows" / "broken.py").write_text("def run(:\n")
    (base / "workflows" / "bytes.py").write_bytes(b"\xff\xfe\x00 def run")
    session = await started(open_session)
    result = await run(session, f"workflows.{broken}()")
    assert result.error is not None
    assert broken in result.error
    assert [each["name"] for each in await session.list_workflows() if each["name"] == "double"] == ["double"]
    await goes_on(session)


async def test_a_workflow_that_kills_its_process(
    open_session: Open, base: Path, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["open_session"] == "in-process":
        return  # that process is this one
    (base / "workflows" / "dies.py").write_text("import os\ndef run(): os._exit(3)\n")
    session = await started(open_session)
    result = await run(session, "workflows.dies()")
    assert (result.error_type, result.state) == ("Crashed", "restored")
    await goes_on(session)
    steps = await session.trace()
    assert [step["name"] for step in steps if step["outcome"] == "error"] != []
