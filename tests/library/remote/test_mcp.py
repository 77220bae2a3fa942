"""A server of the official SDK over all three transports: what it has, what it answers, and how it is stopped."""

import asyncio
from pathlib import Path

import pytest

from carrel.errors import ToolCallError, ToolTimeoutError
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.tool import Tool, ToolProvider
from tests.library.remote.conftest import until

EVERY_TRANSPORT = pytest.mark.parametrize("official", ["stdio", "http", "sse"], indirect=True)


async def make_tools(server: McpProvider) -> dict[str, Tool]:
    return {tool.name.partition(".")[2]: tool for tool in await server.definitions()}


@EVERY_TRANSPORT
async def test_results_are_data(official: McpProvider, tmp_path: Path) -> None:
    assert isinstance(official, ToolProvider)
    tools = await make_tools(official)
    assert tools["moved"].description == "Move a point."
    assert tools["moved"].parameters["required"] == ["point"]
    assert tools["moved"].returns is not None
    assert await official.call(tools["moved"], {"point": {"x": 1, "y": 2}, "by": 3}) == {"x": 4, "y": 5}
    assert await official.call(tools["say_hello"], {"name": "Ada"}) == "hello Ada"
    assert await official.call(tools["table"], {}) == {"rows": [1, 2], "none": None}
    picture = await official.call(tools["picture"], {})
    assert picture == {"type": "image", "mime_type": "image/png", "data": b"\x89PNG not really"}
    assert await official.call(tools["letter"], {}) == [
        "see below",
        {"type": "resource", "uri": "memo://1", "mime_type": "text/plain", "text": "dear reader"},
    ]
    with pytest.raises(ToolCallError, match=r"kind\.broken: .*this tool is broken"):
        await official.call(tools["broken"], {})

    together = await asyncio.gather(*(official.call(tools["say_hello"], {"name": str(n)}) for n in range(20)))
    assert together == [f"hello {n}" for n in range(20)]

    expected: list[str] = []
    assert await official.call(tools["count"], {"to": 3}, expected.append) == "counted"
    assert expected == ["1/3 at 1\n", "2/3 at 2\n", "3/3 at 3\n"]

    mark = tmp_path / "mark"
    slow = asyncio.create_task(official.call(tools["wait"], {"seconds": 3600, "mark": str(mark)}))
    await until(tmp_path.joinpath("mark.begun").exists)
    assert not mark.exists()
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    await until(mark.exists)

    assert await official.call(tools["say_hello"], {"name": "again"}) == "hello again"


@EVERY_TRANSPORT
async def test_a_call_that_takes_too_long_is_cancelled_at_the_server(official: McpProvider, tmp_path: Path) -> None:
    tools = await make_tools(official)
    mark = tmp_path / "mark"
    hurried = Tool(name="kind.wait", timeout=2)
    with pytest.raises(ToolTimeoutError, match=r"kind\.wait took longer than 2 s"):
        await official.call(hurried, {"seconds": 3600, "mark": str(mark)})
    await until(mark.exists)
    assert await official.call(tools["say_hello"], {"name": "Ada"}) == "hello Ada"


async def test_changed_tools_are_listed_again(official: McpProvider) -> None:
    before = await official.definitions()
    assert await official.definitions() is before
    assert await official.call((await make_tools(official))["grow"], {}) == "grown"
    now = await make_tools(official)
    while "grown" not in now:
        await asyncio.sleep(0.01)
        now = await make_tools(official)
    assert await official.call(now["grown"], {}) == {"result": "new"}
