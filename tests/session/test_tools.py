"""Tools that run in the sandbox, approval of calls, and reloading of tool files."""

import asyncio
from pathlib import Path

import pytest

from carrel import ApprovalRequest, ConfigurationError, Session

from .conftest import Open

SHELL = """\
name: shell
command: sh -c
runs: sandbox
timeout: 20
schema: {positional: [{name: script, required: true}]}
recipes:
  quick: {params: {script: {}}, timeout: 0.5}
  aloud: {params: {script: {}}, stream: true}
"""
MISSING = "name: missing\ncommand: no-such-program\nruns: sandbox\n"
DATA = "name: data\ncommand: sh -c\nruns: sandbox\noutput: json\nschema: {positional: [{name: script}]}\n"
ASKED = """\
name: requested
command: echo
approval: ask
timeout: 5
schema: {positional: [{name: words, required: true}]}
"""


@pytest.fixture
def base(base: Path) -> Path:
    for name, text in (("shell", SHELL), ("missing", MISSING), ("data", DATA), ("requested", ASKED)):
        (base / "tools" / f"{name}.yaml").write_text(text)
    return base


async def test_a_sandbox_tool_sees_files_of_the_code(session: Session) -> None:
    await session.write_file("word.txt", "hello\n")
    result = await session.run("tools.shell('cat word.txt; echo more > made.txt')")
    assert (result.error, result.value) == (None, "hello\n")
    assert await session.read_file("made.txt") == b"more\n"
    # From outside, when no code runs, too.
    assert await session.call_tool("shell", script="cat made.txt") == "more\n"


async def test_five_at_once(session: Session) -> None:
    meet = "touch here-{n}; while [ $(ls | grep -c here-) -lt 5 ]; do sleep 0.01; done; echo {n}"
    code = (
        f"import asyncio\nmeet = {meet!r}\n"
        "await asyncio.gather(*[tools.shell.call_async(meet.format(n=n)) for n in range(5)])"
    )
    result = await session.run(code)
    assert result.value == [f"{n}\n" for n in range(5)], result.error


async def test_a_sandbox_tool_in_a_workflow(session: Session) -> None:
    await session.add_workflow("count", "def run(word):\n    return len(tools.shell(f'printf {word}'))\n")
    result = await session.run("workflows.count('four')")
    assert result.value == 4, result.error


async def test_a_slow_sandbox_tool_times_out(session: Session) -> None:
    code = "try:\n    tools.shell.quick('sleep 60')\nexcept ToolTimeoutError as e:\n    said = str(e)\nsaid"
    result = await session.run(code)
    assert "shell.quick took longer than 0.5 s" in result.value, result.error
    assert (await session.run("tools.shell('echo on')")).value == "on\n"


async def test_a_sandbox_tool_that_cannot_be_started(session: Session) -> None:
    result = await session.run("tools.missing()")
    assert result.error_type == "ToolCallError"
    assert "there is no program no-such-program" in (result.error or "")


async def test_data_and_exit_codes(session: Session) -> None:
    assert (await session.run("""tools.data('echo "[1, 2]"')""")).value == [1, 2]
    result = await session.run("tools.shell('echo wrong >&2; exit 4')")
    assert "exit code 4: wrong" in (result.error or "")


async def test_the_output_of_a_sandbox_tool_is_streamed(session: Session) -> None:
    result = await session.run(
        "print('before')\nx = tools.shell.aloud('echo one; sleep 0.1; echo two')\nprint('after')"
    )
    assert (result.error, result.stdout) == (None, "before\none\ntwo\nafter\n")


async def test_the_output_of_a_sandbox_tool_is_bounded(session: Session) -> None:
    result = await session.run("len(tools.shell('head -c 50000000 /dev/zero'))")
    assert result.error is None
    assert result.value < 11 * 1024 * 1024


async def test_the_time_limit_pauses_while_approval_is_pending(open_session: Open) -> None:
    async def approve(request: ApprovalRequest) -> bool:
        await asyncio.sleep(2.5)
        return True

    session = await open_session(timeout=2.0, approve=approve)
    result = await session.run("tools.requested('after a while')")
    assert (result.error, result.value) == (None, "after a while\n")
    # It goes on where it stood: what is left of the two seconds is the code's.
    slow = await session.run("import time\ntools.requested('x')\ntime.sleep(30)")
    assert slow.error_type == "Timeout"


async def test_two_pending_approvals_pause_the_time_limit_together(open_session: Open) -> None:
    async def approve(request: ApprovalRequest) -> bool:
        await asyncio.sleep(0.1 if request.arguments["words"] == "short" else 2.5)
        return True

    session = await open_session(timeout=2.0, approve=approve)
    code = "import asyncio\nawait asyncio.gather(*[tools.requested.call_async(w) for w in ('short', 'long')])"
    result = await session.run(code)
    assert (result.error, result.value) == (None, ["short\n", "long\n"])


async def test_a_blocking_function_can_approve(open_session: Open) -> None:
    answer = asyncio.Event()
    loop = asyncio.get_running_loop()

    def approve(request: ApprovalRequest) -> bool:
        return asyncio.run_coroutine_threadsafe(answer.wait(), loop).result(60)

    session = await open_session(timeout=2.0, approve=approve)
    run = asyncio.create_task(session.run("tools.requested('now')"))
    await asyncio.sleep(2.5)
    assert not run.done()
    answer.set()
    assert (await run).value == "now\n"


async def test_a_run_that_waits_for_approval_can_still_be_stopped(open_session: Open) -> None:
    requested = asyncio.Event()

    async def approve(request: ApprovalRequest) -> bool:
        requested.set()
        await asyncio.sleep(3600)
        return True

    session = await open_session(timeout=30, approve=approve)
    run = asyncio.create_task(session.run("x = 1\ntools.requested('never')"))
    await asyncio.wait_for(requested.wait(), 60)
    assert await session.interrupt()
    assert (await run).error_type == "KeyboardInterrupt"
    cancelled = asyncio.create_task(session.run("tools.requested('never')"))
    await asyncio.sleep(0.3)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await session.run("x")).value == 1


async def test_a_tool_that_calls_its_own_session_is_refused(session: Session) -> None:
    async def peek() -> bytes:
        return await session.read_file("notes.txt")

    async def again() -> str:
        result = await session.run("1")
        return f"{result.error_type}: {result.error}"

    async def streamed() -> str:
        return [piece async for piece in session.stream("1")][-1].error  # type: ignore[union-attr, return-value]

    async def command() -> str:
        return (await session.execute_command("true")).stdout

    async def library() -> int:
        return len(await session.list_tools())

    for tool in (peek, again, streamed, command, library):
        session.register_tool(tool)
    for name in ("peek", "command"):
        result = await session.run(f"tools.{name}()", timeout=20)
        assert result.error_type == "ToolCallError"
        assert "would wait for that code in turn" in (result.error or "")
    assert (
        "ToolCallError: a tool that the session's code is waiting for"
        in (await session.run("tools.again()", timeout=20)).value
    )
    assert "would wait" in (await session.run("tools.streamed()", timeout=20)).value
    # The library does not wait, and neither does work of a tool outside of a run.
    assert (await session.run("tools.library()", timeout=20)).value > 4
    assert await session.call_tool("command") == ""


async def test_a_tool_may_use_the_session_after_the_run(session: Session) -> None:
    later: list[asyncio.Task[None]] = []

    async def note() -> None:
        async def write() -> None:
            await asyncio.sleep(0.2)
            await session.write_file("notes.txt", "later")

        later.append(asyncio.create_task(write()))

    session.register_tool(note)
    assert (await session.run("import time\ntools.note()\ntime.sleep(0.5)")).is_ok
    await asyncio.wait_for(later[0], 60)
    assert await session.read_file("notes.txt") == b"later"


ECHO_TOOL = "name: echo\ncommand: echo -n {text}\napproval: {approval}\n"


async def test_changed_files_are_used_after_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "tools" / "echo.yaml"
    file.parent.mkdir()
    file.write_text(ECHO_TOOL.format(text="one", approval="never"))
    async with Session.inprocess(tmp_path) as session:
        assert (await session.run("tools.echo()")).value == "one"
        file.write_text(ECHO_TOOL.format(text="two", approval="never"))
        assert (await session.run("tools.echo()")).value == "one"
        await session.reload_tools()
        assert (await session.run("tools.echo()")).value == "two"
        file.write_text("name: echo\n")
        with pytest.raises(ConfigurationError, match="command: is missing"):
            await session.reload_tools()
        assert await session.call_tool("echo") == "two"
        file.unlink()
        await session.reload_tools()
        assert (await session.run("tools.echo()")).error_type == "ToolNotFoundError"


async def test_an_approval_request_names_the_session(tmp_path: Path) -> None:
    requests: list[ApprovalRequest] = []

    def approve(request: ApprovalRequest) -> bool:
        requests.append(request)
        return True

    file = tmp_path / "tools" / "echo.yaml"
    file.parent.mkdir()
    file.write_text(ECHO_TOOL.format(text="one", approval="ask"))
    async with Session.inprocess(tmp_path, approve=approve) as session:
        for _ in range(2):
            assert (await session.run("tools.echo()")).value == "one"
        assert [request.session_id for request in requests] == [session.id] * 2
    assert len({request.id for request in requests}) == 2
