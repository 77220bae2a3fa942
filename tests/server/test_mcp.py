"""The MCP server, used by the official client: its tools on standard input and output, and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from carrel import ForkRefused, Session
from tests.support.lazy_module import LazyModule
from tests.support.ports import free_port
from tests.support.preloaded_python import preloaded_python

if TYPE_CHECKING:
    from mcp.types import CallToolResult

mcp = LazyModule("mcp")
types = LazyModule("mcp.types")
stdio = LazyModule("mcp.client.stdio")
mcp_server = LazyModule("carrel.server.mcp")

NAMES = {
    "run_code",
    "execute_command",
    "list_tools",
    "search_tools",
    "list_workflows",
    "search_workflows",
    "get_workflow",
    "create_workflow",
    "delete_workflow",
    "list_artifacts",
    "save_artifact",
    "load_artifact",
    "list_deps",
    "add_dep",
    "remove_dep",
    "fork",
    "rewind",
}

ECHO = "name: echo\ndescription: Say words back\ncommand: echo\nschema:\n  positional: [{name: words, type: string}]\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "echo.yaml").write_text(ECHO)
    return folder


def front(base: Path, *more: str, python: Sequence[str] | None = None, name: str = "mcp") -> Any:
    words = [*(python or preloaded_python().python), "-m", "carrel", "mcp", "--base", str(base), *more]
    given = mcp.StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
    # By itself it would write to what sys.stderr was when it was imported: perhaps in a test that is over.
    info = types.Implementation(name=name, version="1")
    return mcp.Client(stdio.stdio_client(given, errlog=sys.__stderr__), client_info=info)


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))


async def test_the_tools_are_those_of_the_contract(base: Path) -> None:
    async with front(base) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == NAMES
        assert all(tool.description for tool in (await client.list_tools()).tools)


def test_importing_the_server_needs_neither_fastapi_nor_uvicorn() -> None:
    script = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('fastapi', 'uvicorn'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import carrel.server.mcp\n"
        "from carrel.server import serve_mcp_stdio\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


async def test_runtime_deps_can_be_left_out(base: Path) -> None:
    async with front(base, "--no-runtime-deps") as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == NAMES - {"add_dep", "remove_dep"}
        refused = await client.call_tool("run_code", {"code": "deps.add('numpy')"})
        assert refused.is_error
        assert "RuntimeDepsDisabledError" in text_of(refused)


async def test_code_keeps_its_state_and_calls_tools(base: Path) -> None:
    async with front(base) as client:
        await client.call_tool("run_code", {"code": "x = 20"})
        result = await client.call_tool("run_code", {"code": "print('hello')\nx + len(tools.echo(words='a'))"})
        assert not result.is_error
        assert text_of(result) == "hello\n\n22"
        assert result.structured_content is not None
        assert result.structured_content["value"] == 22


async def test_fork_and_rewind(base: Path) -> None:
    async with front(base) as client:
        assert "fork was not called yet" in text_of(await client.call_tool("rewind", {}))
        await client.call_tool("run_code", {"code": "x = 1\nopen('f', 'w').write('good')"})
        kept = await client.call_tool("fork", {"name": "good"})
        assert text_of(kept) == "saved as good"
        await client.call_tool("run_code", {"code": "x = 2\nopen('f', 'w').write('bad')"})
        await client.call_tool("fork", {})
        for to in ({"to": "good"}, {}, {"to": "good"}):
            back = await client.call_tool("rewind", to)
            assert not back.is_error
            wanted = "(1, 'good')" if to else "(2, 'bad')"
            assert text_of(await client.call_tool("run_code", {"code": "x, open('f').read()"})) == wanted
        refused = await client.call_tool("rewind", {"to": "nowhere"})
        assert refused.is_error
        assert "there is no checkpoint nowhere; there are: 'good'" in text_of(refused)


async def test_a_new_fork_removes_the_oldest_and_a_refused_one_does_not(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("server.mcp.server", "session.checkpoints"):
        monkeypatch.setattr(f"carrel.{module}.MAX_CHECKPOINTS", 3)
    async with Session.from_base(base) as session:
        tools = mcp_server.SessionTools(session)
        for name in ("a", "b"):
            await tools.fork(name)
        await session.run("import os\nends = os.pipe()")
        with pytest.raises(ForkRefused):
            await tools.fork("refused")
        assert "at a" in text_of(await tools.rewind("a"))
        kept = await tools.fork("c")
        assert text_of(kept) == "saved as c; the oldest one, a, was removed: there are at most 2"
        assert kept.structured_content is not None
        assert kept.structured_content["forks"] == ["b", "c"]
        assert "at c" in text_of(await tools.rewind(""))


async def test_fork_is_absent_where_sessions_cannot_be_forked(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_SANDBOX", "off")
    async with front(base) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == NAMES - {"fork", "rewind"}


async def test_code_that_raises_is_an_error_and_the_session_continues(base: Path) -> None:
    async with front(base) as client:
        failed = await client.call_tool("run_code", {"code": "y = 1\n1/0"})
        assert failed.is_error
        assert "ZeroDivisionError" in text_of(failed)
        slow = await client.call_tool("run_code", {"code": "while True: pass", "timeout": 0.5})
        assert slow.is_error
        assert slow.structured_content is not None
        assert slow.structured_content["error_type"] == "Timeout"
        assert text_of(await client.call_tool("run_code", {"code": "y"})) == "1"


async def test_progress_is_reported_while_code_runs(base: Path) -> None:
    heard: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    code = "import time\nfor i in range(4):\n    print('step', i, flush=True)\n    time.sleep(0.5)"
    async with front(base) as client:
        await client.call_tool("run_code", {"code": code}, progress_callback=hear)
    assert heard
    assert [progress for progress, _ in heard] == sorted(progress for progress, _ in heard)
    assert any(message and message.startswith("step") for _, message in heard)


async def test_pictures_are_images(base: Path) -> None:
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\nnot much").decode()
    code = f"""
import base64
class Picture:
    def _repr_png_(self):
        return base64.b64decode({picture!r})
Picture()
"""
    async with front(base) as client:
        result = await client.call_tool("run_code", {"code": code})
        images = [block for block in result.content if isinstance(block, types.ImageContent)]
        assert [(image.mime_type, image.data) for image in images] == [("image/png", picture)]


async def test_workflows_and_artifacts(base: Path) -> None:
    async with front(base) as client:
        source = "def run(n: int) -> int:\n    return n + 1\n"
        made = await client.call_tool(
            "create_workflow", {"name": "next_one", "source": source, "description": "The number after"}
        )
        assert not made.is_error, text_of(made)
        assert text_of(await client.call_tool("run_code", {"code": "workflows.next_one(1)"})) == "2"
        found = await client.call_tool("get_workflow", {"name": "next_one"})
        assert "return n + 1" in text_of(found)
        unknown = await client.call_tool("get_workflow", {"name": "missing"})
        assert unknown.is_error
        wrong = await client.call_tool("create_workflow", {"name": "no name", "source": source})
        assert wrong.is_error
        await client.call_tool("save_artifact", {"name": "a/b.json", "data": {"k": [1, None]}, "description": "Data"})
        loaded = await client.call_tool("load_artifact", {"name": "a/b.json"})
        assert loaded.structured_content == {"data": {"k": [1, None]}}
        raw = base64.b64encode(b"\x00\x01").decode()
        await client.call_tool("save_artifact", {"name": "raw", "data": raw, "encoding": "base64"})
        assert text_of(await client.call_tool("run_code", {"code": "artifacts.load('raw')"})) == r"b'\x00\x01'"
        assert (await client.call_tool("load_artifact", {"name": "missing"})).is_error


async def test_lists_have_a_line_per_item_and_structured_content(base: Path) -> None:
    async with front(base) as client:
        assert text_of(await client.call_tool("list_workflows", {})) == "(no workflows)"
        source = "def run(n: int, by: int = 1) -> int:\n    return n + by\n"
        await client.call_tool("create_workflow", {"name": "add", "source": source, "description": "Add up"})
        await client.call_tool("save_artifact", {"name": "a/b.json", "data": 1, "description": "Data"})
        for tool, arguments, line in (
            ("list_tools", {}, "tools.echo(words: str = None) -> str  # Say words back"),
            ("search_tools", {"query": "say words"}, "tools.echo(words: str = None) -> str\nSay words back\n"),
            ("list_workflows", {}, "workflows.add(n: int, by: int = 1)  # Add up"),
            ("search_workflows", {"query": "add"}, "workflows.add(n: int, by: int = 1)  # Add up"),
            ("list_artifacts", {}, "a/b.json: Data"),
        ):
            answer = await client.call_tool(tool, arguments)
            assert text_of(answer) == line
            assert answer.structured_content is not None
            assert [each["name"] for each in answer.structured_content["result"]] in (["echo"], ["add"], ["a/b.json"])


async def test_a_mistake_is_an_error_result_with_the_reason(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("create_workflow", {"name": "w", "source": "def run(:\n    pass"}, "line 1"),
        ("create_workflow", {"name": "a b", "source": "def run(): pass"}, "a b"),
        ("get_workflow", {"name": "zz"}, "there is no workflow zz; list_workflows shows what there is"),
        ("load_artifact", {"name": "../x"}, "../x"),
        ("load_artifact", {"name": "missing"}, "missing"),
        (
            "save_artifact",
            {"name": "raw", "data": "not base64!", "encoding": "base64"},
            "the data of raw is not valid base64",
        ),
        ("add_dep", {"package": "-r x"}, "-r x"),
        ("add_dep", {"package": "carrel-not-there-at-all"}, "carrel-not-there-at-all could not be installed"),
    ]
    async with front(base) as client:
        for tool, arguments, reason in mistakes:
            result = await client.call_tool(tool, arguments)
            assert result.is_error
            assert reason in text_of(result).removeprefix(f"Error executing tool {tool}")
    assert "Traceback" not in capfd.readouterr().err


async def test_unknown_and_missing_arguments_are_named_on_one_line(base: Path) -> None:
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        (
            "execute_command",
            {"cmd": "ls"},
            "execute_command: it has no argument cmd; command is missing. Its arguments: command, timeout, cwd",
        ),
        (
            "execute_command",
            {"command": "touch made", "workdir": "/"},
            "execute_command: it has no argument workdir. Its arguments: command, timeout, cwd",
        ),
        ("list_tools", {"limit": 3}, "list_tools: it has no argument limit. Its arguments: none"),
        ("run_code", {"code": "1", "timeout": -1}, "run_code: timeout: Input should be greater than 0"),
    ]
    async with front(base) as client:
        for tool, arguments, reason in mistakes:
            result = await client.call_tool(tool, arguments)
            assert result.is_error
            assert text_of(result) == reason
        assert text_of(await client.call_tool("run_code", {"code": "import os; os.path.exists('made')"})) == "False"
        for tool_info in (await client.list_tools()).tools:
            assert tool_info.input_schema["additionalProperties"] is False


async def test_clients_that_hide_text_get_no_structured_content(base: Path) -> None:
    code = "class P:\n    def _repr_png_(self): return b'picture'\nprint('seen')\nP()"
    async with front(base, name="claude-code") as client:
        result = await client.call_tool("run_code", {"code": code})
        assert result.structured_content is None
        assert [block.type for block in result.content] == ["text", "text", "image"]
        assert (await client.call_tool("list_tools", {})).structured_content is None
        # These have said what data they give.
        assert (await client.call_tool("list_deps", {})).structured_content == {"result": []}


async def test_values_that_utf8_cannot_express(base: Path) -> None:
    async with front(base) as client:
        result = await client.call_tool("run_code", {"code": "'half a \\ud83d pair'"})
        assert text_of(result) == "half a \\ud83d pair"
        result = await client.call_tool("run_code", {"code": "10 ** 5000"})
        assert not result.is_error
        assert (await client.call_tool("get_workflow", {"name": "no \u2028 such"})).is_error
        assert text_of(await client.call_tool("list_deps", {})) == "(none)"


async def test_long_results_are_cut(base: Path) -> None:
    async with front(base) as client:
        await client.call_tool(
            "run_code", {"code": "artifacts.save('t', 'x' * 10**6); artifacts.save('b', bytes(10**6))"}
        )
        for tool, arguments in (
            ("run_code", {"code": "print('x' * 10**6)"}),
            ("run_code", {"code": "'x' * 10**6"}),
            ("execute_command", {"command": "yes | head -c 1000000"}),
            ("load_artifact", {"name": "t"}),
            ("load_artifact", {"name": "b"}),
        ):
            result = await client.call_tool(tool, arguments)
            assert not result.is_error
            assert len(text_of(result)) < 41_000
            assert "left out" in text_of(result) or "artifacts.load('b')" in text_of(result)


async def test_a_command(base: Path) -> None:
    async with front(base) as client:
        assert text_of(await client.call_tool("execute_command", {"command": "echo hi"})) == "hi\n"
        failed = await client.call_tool("execute_command", {"command": "exit 3"})
        assert failed.is_error
        assert failed.structured_content is not None
        assert failed.structured_content["exit_code"] == 3


async def test_tools_of_an_mcp_server_work_through_ours(base: Path, tmp_path: Path) -> None:
    program = tmp_path / "adding.py"
    program.write_text(
        "from mcp.server import MCPServer\nserver = MCPServer('adding')\n"
        "@server.tool()\ndef add(a: int, b: int) -> int:\n    return a + b\nserver.run()\n"
    )
    (base / "tools" / "adding.yaml").write_text(
        f"name: adding\ntype: mcp\ntransport: stdio\ncommand: {sys.executable}\nargs: [{program}]\n"
    )
    (base / "tools" / "broken.yaml").write_text(
        f"name: broken\ntype: mcp\ntransport: stdio\ncommand: {sys.executable}\nargs: [-c, 'raise SystemExit(3)']\n"
    )
    async with front(base) as client:
        result = await client.call_tool("run_code", {"code": "tools.adding.add(a=2, b=3)"})
        assert result.structured_content is not None
        assert "5" in text_of(result), text_of(result)
        broken = await client.call_tool("run_code", {"code": "tools.broken.anything()"})
        assert broken.is_error
        assert text_of(await client.call_tool("run_code", {"code": "'still here'"})) == "still here"


@asynccontextmanager
async def served(base: Path) -> AsyncIterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "carrel", "mcp", "--base", str(base), "--http", str(port)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        for _ in range(1200):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()


async def test_over_http(base: Path) -> None:
    async with served(base) as url, mcp.Client(url) as client:
        result = await client.call_tool("run_code", {"code": "6 * 7"})
        assert text_of(result) == "42"


async def test_nothing_is_left_when_the_client_goes(base: Path) -> None:
    async with front(base, python=[sys.executable]) as client:
        data: dict[str, Any] = (await client.call_tool("run_code", {"code": "1"})).structured_content or {}
        assert data["value"] == 1
    for _ in range(1200):
        if not _processes_of(base):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(_processes_of(base))


def _processes_of(base: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(base) in line:
                found.append(line)
    return found
