"""Tools that code calls: by name, many at once, with approval, and until the run is stopped."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from carrel.execution.in_process import InProcessExecutor
from carrel.library.tools.approval import ApprovalRequest
from carrel.library.tools.registry import ToolRegistry
from tests.library.tools.test_cli import gone, until_there
from tests.support.tools import catalog

ECHO = "name: echo\ncommand: echo\nschema: {positional: [{name: text, required: true}]}\n"
ASK = ECHO.replace("name: echo", "name: ask", 1) + "approval: ask\n"
SHELL = "name: sh\ncommand: [sh, -c]\nschema: {positional: [{name: script, required: true}]}\n"


@pytest.fixture
async def session() -> AsyncIterator[Callable[[ToolRegistry], InProcessExecutor]]:
    """An executor whose code has these tools."""
    executor = InProcessExecutor()

    def with_tools(tools: ToolRegistry) -> InProcessExecutor:
        executor.handlers["tools"] = tools.handle
        return executor

    yield with_tools
    await executor.close()


Open = Callable[[ToolRegistry], InProcessExecutor]


async def value(executor: InProcessExecutor, code: str) -> Any:
    result = await executor.run(code, timeout=60)
    assert result.error is None, result.error
    return result.value


async def test_code_calls_tools(session: Open) -> None:
    executor = session(catalog(ECHO))
    assert await value(executor, "tools.echo('hi')") == "hi\n"
    assert await value(executor, "await tools.echo.call_async(text='hi')") == "hi\n"
    assert await value(executor, "[tool['name'] for tool in tools.list()]") == ["echo"]
    code = "try:\n    tools.echo()\nexcept ToolCallError as problem:\n    output = str(problem)\noutput"
    assert await value(executor, code) == "echo: text is missing"
    assert await value(
        executor, "try:\n    tools.eco('')\nexcept KeyError as problem:\n    output = str(problem)\noutput"
    ) == ("there is no tool eco; did you mean echo?")


async def test_other_calls_continue_while_one_waits_for_approval(session: Open) -> None:
    others_done = asyncio.Event()

    async def approve(request: ApprovalRequest) -> Any:
        if request.arguments["text"] == "last":
            # Says yes only when the other calls of the same gather have come back.
            await others_done.wait()
            return True
        return "not that one"

    executor = session(catalog(ECHO, ASK, approve=approve))

    async def done(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        others_done.set()

    executor.handlers["done"] = done
    code = """
import asyncio

async def others():
    output = await asyncio.gather(*(tools.echo.call_async(text=str(n)) for n in range(5)))
    done()
    return output

waiting, refused, output = await asyncio.gather(
    tools.ask.call_async(text='last'), tools.ask.call_async(text='no'), others(), return_exceptions=True
)
[waiting, type(refused).__name__, str(refused), output]
"""
    assert await value(executor, code) == [
        "last\n",
        "ToolRefusedError",
        "the call of ask was refused: not that one",
        [f"{n}\n" for n in range(5)],
    ]


async def test_stopping_a_run_ends_its_program(session: Open, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    executor = session(catalog(SHELL))
    run = asyncio.create_task(executor.run(f"tools.sh('sleep 60 & echo $! > {pid}; wait')", timeout=60))
    await until_there(pid)
    await executor.interrupt()
    assert (await run).error_type == "KeyboardInterrupt"
    assert await gone(pid)
    assert await value(executor, "1 + 1") == 2
