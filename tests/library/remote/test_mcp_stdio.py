"""Servers that hang, die, flood or speak nonsense: each ends in a clear error in time, and the next call works."""

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.errors import ConfigurationError, ToolCallError, ToolTimeoutError
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from tests.library.remote.conftest import alive, open_files, until

Make = Callable[..., McpProvider]
ECHO = Tool(name="odd.echo", timeout=60)
DO = Tool(name="odd.do", timeout=100)
HURRIED = Tool(name="odd.do", timeout=0.3)


async def pid_of(server: McpProvider) -> int:
    return int(str(await server.call(DO, {})).removeprefix("pid "))


async def test_python_names_of_tools_and_parameters(unruly: Make) -> None:
    server = unruly()
    tools = {tool.name: tool for tool in await server.definitions()}
    assert list(tools) == ["odd.echo", "odd.do", "odd.odd_names_2", "odd.odd_names"]
    odd = tools["odd.odd_names_2"]
    assert odd.parameters == {"type": "object", "properties": {"user_id": {}, "from_": {}}, "required": ["user_id"]}
    assert await server.call(odd, {"user_id": 1, "from_": "x"}) == {"user-id": 1, "from": "x"}


async def test_a_banner_is_ignored(unruly: Make) -> None:
    assert await unruly("banner").call(ECHO, {"text": "hi"}) == {"text": "hi"}


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies", r"the MCP server odd did not start: it ended; its standard error: cannot start: no licence"),
        ("silent", r"the MCP server odd did not start: it did not start within 1 s"),
        ("babbles", r"the MCP server odd did not start: its output is not MCP: 'Welcome to my server!'"),
        ("endless-list", r"its list of tools has more than 200 pages"),
        ("deep-list", r"odd did not list its tools within 4 s"),
    ],
)
async def test_errors_at_the_start(unruly: Make, behaviour: str, message: str) -> None:
    server = unruly(behaviour, startup_timeout={"silent": 1, "deep-list": 4}.get(behaviour, 60))
    with pytest.raises(ToolCallError, match=message):
        await server.definitions()
    # A call says the same, and is not kept waiting for more than its own time.
    if "list" not in behaviour:
        with pytest.raises(ToolCallError, match=message):
            await server.call(ECHO, {"text": "hi"})


async def test_calls_after_a_start_that_timed_out_fail_at_once(unruly: Make) -> None:
    server = unruly("silent", startup_timeout=2)
    tools = ToolRegistry([server])
    for most in (20.0, 1.0, 1.0):
        async with asyncio.timeout(most):
            with pytest.raises(ToolCallError, match="it did not start within 2 s"):
                await tools.call(f"{server.name}.echo", {"text": "hi"})


async def test_concurrent_calls_share_one_start(unruly: Make, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    server = unruly(command="sh", args=["-c", f"echo start >> {starts}; exit 1"])
    answers = await asyncio.gather(*(server.call(ECHO, {"text": "hi"}) for _ in range(20)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {ToolCallError}
    assert starts.read_text() == "start\n"


async def test_a_missing_program_is_named(unruly: Make, tmp_path: Path) -> None:
    with pytest.raises(ToolCallError, match="there is no program 'no-such-server'"):
        await unruly(command="no-such-server").definitions()
    with pytest.raises(ToolCallError, match=f"there is no folder {tmp_path}/gone"):
        await unruly(cwd=str(tmp_path / "gone")).definitions()
    with pytest.raises(ToolCallError, match=f"there is no folder {Path.home()}/no-such-folder"):
        await unruly(cwd="~/no-such-folder").definitions()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(ToolCallError, match=r"could not be started: .*Permission denied"):
        await unruly(command=str(tmp_path / "text")).definitions()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("exit", r"odd failed in odd\.do: it ended; its standard error: out of ideas\. The next call starts it again"),
        ("crash", r"odd failed in odd\.do: it ended\. The next call starts it again"),
        ("babble", r"odd failed in odd\.do: its output is not MCP: 'y'"),
        ("flood", r"odd failed in odd\.do: it sent 20000 notifications without an answer"),
        ("nonsense", r"odd failed in odd\.do: its answer is not valid MCP: content: Input should be a valid list"),
        ("null", r"odd failed in odd\.do: its answer is not valid MCP: Input should be"),
    ],
)
async def test_a_server_that_ends_in_a_call_is_started_again(unruly: Make, what: str, message: str) -> None:
    server = unruly()
    before = await pid_of(server)
    with pytest.raises(ToolCallError, match=message):
        await server.call(Tool(name="odd.do", timeout=100), {"what": what})
    after = await pid_of(server)
    stays = what in ("nonsense", "null")
    assert (after == before) == stays
    await until(lambda: alive(before) == stays)


@pytest.mark.parametrize("what", ["endless", "deeper"])
async def test_an_unreadable_answer(unruly: Make, what: str) -> None:
    server = unruly()
    await pid_of(server)
    with pytest.raises(ToolTimeoutError):
        await server.call(Tool(name="odd.do", timeout=2), {"what": what})
    assert await pid_of(server)


async def test_a_server_that_hangs_is_ended_and_started_again(unruly: Make) -> None:
    server = unruly()
    before = await pid_of(server)
    with pytest.raises(ToolTimeoutError, match=r"odd\.do took longer than 0\.3 s"):
        await server.call(HURRIED, {"what": "hang"})
    assert await pid_of(server) != before
    await until(lambda: not alive(before))


async def test_a_server_that_does_not_read_blocks_no_other_call(unruly: Make) -> None:
    server = unruly()
    before = await pid_of(server)
    hanging = asyncio.create_task(server.call(DO, {"what": "hang"}))
    await asyncio.sleep(0.1)
    # More than its pipe takes, so that not even the cancelling can be written.
    with pytest.raises(ToolTimeoutError):
        await asyncio.wait_for(server.call(HURRIED, {"what": "x" * 10_000_000}), 60)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(hanging, 60)
    assert await pid_of(server) != before


async def test_a_server_that_does_not_answer_one_call_is_kept(unruly: Make) -> None:
    server = unruly(ping_timeout=60)
    before = await pid_of(server)
    with pytest.raises(ToolTimeoutError):
        await server.call(HURRIED, {"what": "ignore"})
    assert await pid_of(server) == before


async def test_endless_output_ends_the_server(unruly: Make) -> None:
    server = unruly()
    before = await pid_of(server)
    with pytest.raises(ToolTimeoutError):
        await server.call(HURRIED, {"what": "flood"})
    assert await pid_of(server) != before


async def test_a_server_that_hangs_in_a_cancelled_call_is_ended(unruly: Make) -> None:
    server = unruly()
    before = await pid_of(server)
    call = asyncio.create_task(server.call(DO, {"what": "hang"}))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pid_of(server) != before


async def test_a_server_killed_between_two_calls_is_started_again(unruly: Make) -> None:
    server = unruly()
    tools = await server.definitions()
    before = await pid_of(server)
    os.kill(before, 9)
    await until(lambda: not alive(before))
    await asyncio.sleep(0.2)
    assert await pid_of(server) != before
    # It has the same tools, so they need not be listed again.
    assert await server.definitions() is tools


async def test_a_server_that_answers_others_is_not_ended_for_a_slow_call(unruly: Make) -> None:
    server = unruly()
    before = await pid_of(server)
    works = asyncio.create_task(server.call(DO, {"what": "work"}))
    await asyncio.sleep(0.1)
    with pytest.raises(ToolTimeoutError):
        await server.call(HURRIED, {})
    assert await works == f"pid {before}"
    assert await pid_of(server) == before


@pytest.mark.parametrize("behaviour", ["", "stubborn"])
async def test_closing_ends_the_server_and_what_it_started(unruly: Make, behaviour: str) -> None:
    server = unruly(behaviour)
    files = open_files()
    pid, child = await pid_of(server), int(await server.call(DO, {"what": "spawn"}))
    assert alive(pid)
    assert alive(child)
    await server.close()
    await server.close()
    assert not alive(pid)
    await until(lambda: not alive(child))
    await until(lambda: open_files() <= files)
    with pytest.raises(ToolCallError, match="was closed with its session"):
        await server.call(DO, {})


async def test_closing_during_a_start_or_a_call(unruly: Make) -> None:
    starting = unruly("silent", startup_timeout=60)
    waiting = asyncio.create_task(starting.definitions())
    await asyncio.sleep(0.3)
    await starting.close()
    with pytest.raises(ToolCallError, match="was closed with its session"):
        await waiting
    working = unruly()
    pid = await pid_of(working)
    call = asyncio.create_task(working.call(DO, {"what": "hang"}))
    await asyncio.sleep(0.1)
    await working.close()
    with pytest.raises(ToolCallError):
        await call
    assert not alive(pid)


async def test_a_large_answer(unruly: Make) -> None:
    assert len(await unruly().call(DO, {"what": "big"})) == 5_000_000


async def test_environment_of_a_server(unruly: Make) -> None:
    os.environ["CARREL_TEST_UNSEEN"] = "1"
    secrets = Secrets({"TOKEN_HERE": "mellon-mellon"})
    try:
        server = unruly(command="sh", args=["-c", "env >&2; exit 1"], env={"TOKEN": "${TOKEN_HERE}"}, secrets=secrets)
        with pytest.raises(ToolCallError) as failed:
            await server.definitions()
    finally:
        del os.environ["CARREL_TEST_UNSEEN"]
    assert "PATH=" in str(failed.value)
    assert "TOKEN=${TOKEN_HERE}" in str(failed.value)
    assert "UNSEEN" not in str(failed.value)
    assert "mellon" not in str(failed.value)


async def test_secrets_are_substituted_and_redacted(unruly: Make) -> None:
    server = unruly(env={"TOKEN": "${TOKEN_HERE}"}, secrets=Secrets({"TOKEN_HERE": "mellon-mellon"}))
    with pytest.raises(ToolCallError, match=re.escape("odd.do: bad token ${TOKEN_HERE}")):
        await server.call(DO, {"what": "secret"})
    with pytest.raises(ConfigurationError, match="NOT_THERE is not set"):
        await unruly(env={"TOKEN": "${NOT_THERE}"}, secrets=Secrets({})).definitions()


async def test_shortened_errors_have_no_part_of_a_secret(unruly: Make) -> None:
    key = "sk-LIVE-0123456789abcdefXYZ"
    for padding in (4000 - 12, 4096 - 12, 32 * 1024 - 12):
        loud = f"printf %s $TOKEN >&2; head -c {padding} /dev/zero | tr '\\0' '~' >&2; exit 1"
        server = unruly(command="sh", args=["-c", loud], env={"TOKEN": "${KEY}"}, secrets=Secrets({"KEY": key}))
        with pytest.raises(ToolCallError, match="~~~") as failed:
            await server.definitions()
        assert key[-5:] not in str(failed.value)


@pytest.mark.parametrize("what", ["leave", "daemon"])
async def test_processes_that_left_the_group_end_with_the_server(unruly: Make, what: str) -> None:
    server, other = unruly(), unruly()
    gone, stays = int(await server.call(DO, {"what": what})), int(await other.call(DO, {"what": what}))
    assert os.getsid(gone) != os.getsid(await pid_of(server))
    await server.close()
    await until(lambda: not alive(gone))
    assert alive(stays)
    await other.close()
    await until(lambda: not alive(stays))
