"""MCP and HTTP servers, each closed after its test."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from carrel.library.tools.definitions import McpDefinition
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.secrets import Secrets
from tests.support.ports import free_port
from tests.support.web_server import Answer, WebRequest, WebServer

SERVERS = Path(__file__).parent / "servers"


async def answers(port: int) -> None:
    """Wait until a server listens on this port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
            continue
        writer.close()
        await writer.wait_closed()
        return


async def until(happened: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    while True:
        if happened():
            return
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process of that number runs; one that ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def unruly() -> AsyncIterator[Callable[..., McpProvider]]:
    """A provider of the unruly server: `unruly("banner", timeout=1)`."""
    made: list[McpProvider] = []

    def make(
        behaviour: str = "", secrets: Secrets | None = None, ping_timeout: float = 1, **fields: Any
    ) -> McpProvider:
        words = [str(SERVERS / "unruly.py"), behaviour]
        fields = {"command": sys.executable, "args": words, "timeout": 20, "startup_timeout": 60} | fields
        definition = McpDefinition(name="odd", type="mcp", **fields)
        made.append(McpProvider(definition, secrets or Secrets(), ping_timeout=ping_timeout))
        return made[-1]

    yield make
    for server in made:
        await server.close()


@pytest.fixture
async def start_official() -> AsyncIterator[Callable[[str, int], Awaitable[asyncio.subprocess.Process]]]:
    """The official server by HTTP: `await start_official("http", port)`."""
    started: list[asyncio.subprocess.Process] = []

    async def start(kind: str, port: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVERS / "official.py"), kind, str(port), stderr=asyncio.subprocess.DEVNULL
        )
        started.append(process)
        await asyncio.wait_for(answers(port), 60)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def official(request: pytest.FixtureRequest, start_official: Any) -> AsyncIterator[McpProvider]:
    """A provider of the official server, over the transport that the test's parameter names."""
    kind = getattr(request, "param", "stdio")
    fields: dict[str, Any] = {"name": "kind", "type": "mcp", "transport": kind, "startup_timeout": 60}
    if kind == "stdio":
        fields |= {"command": sys.executable, "args": [str(SERVERS / "official.py"), "stdio"]}
    else:
        port = free_port()
        await start_official(kind, port)
        fields["url"] = f"http://127.0.0.1:{port}/{'sse' if kind == 'sse' else 'mcp'}"
    server = McpProvider(McpDefinition(**fields), Secrets({"HIDDEN": "mellon-mellon"}))
    yield server
    await server.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def web() -> Iterator[Callable[[Callable[[WebRequest], Answer]], WebServer]]:
    """Serve on loopback: `web(lambda request: Answer({"x": 1}))`."""
    started: list[WebServer] = []

    def serve(answer: Callable[[WebRequest], Answer]) -> WebServer:
        started.append(WebServer(answer))
        return started[-1]

    yield serve
    for server in started:
        server.close()
