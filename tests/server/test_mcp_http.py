"""The MCP server over HTTP: result sizes, which requests are refused, and the shutdown."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.lazy_module import LazyModule
from tests.support.preloaded_python import ForkedProcess, preloaded_python

mcp = LazyModule("mcp")
types = LazyModule("mcp.types")

ACCEPTED = {"Accept": "application/json, text/event-stream"}
SECONDS = str(1_000_000 + os.getpid())
"""No other program sleeps as long."""
ASLEEP = "name: asleep\ncommand: sleep\nschema: {positional: [{name: seconds, type: integer, required: true}]}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "asleep.yaml").write_text(ASLEEP)
    return folder


class RunningServer:
    """A running `carrel mcp --http`."""

    def __init__(self, process: ForkedProcess, url: str, stderr: Any) -> None:
        self.process = process
        self.url = url
        self._stderr = stderr

    def errors(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 120)


@asynccontextmanager
async def served(base: Path, where: str = "0") -> AsyncIterator[RunningServer]:
    with tempfile.TemporaryFile() as stderr:
        words = ["-m", "carrel", "mcp", "--base", base, "--http", where]
        process = preloaded_python().start(words, os.environ, stderr=stderr)
        assert process.stdout is not None
        with process.stdout:
            try:
                line = await asyncio.to_thread(process.stdout.readline)
                assert line.startswith("Listening on http://"), line
                yield RunningServer(process, line.split()[-1].replace("0.0.0.0", "127.0.0.1"), stderr)
            finally:
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.wait, 120)


def text_of(result: Any) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))


def request(url: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """The first question of a client, as it stands in the older protocol."""
    who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    question = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": who}
    return httpx.post(url, headers={**ACCEPTED, **(headers or {})}, json=question, timeout=60)


# --- what clients can take --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_large_and_odd_results_reach_the_client(base: Path, mode: str) -> None:
    picture = "class P:\n    def _repr_png_(self): return b'x' * 700_000\n"
    async with served(base) as front, mcp.Client(front.url, mode=mode) as client:
        for code, begins in (
            ("'half a \\ud83d pair'", "half a \\ud83d pair"),
            ("list(range(1_000_000))", "[0, 1, 2,"),
            ("{str(i): 'x' * 100 for i in range(100_000)}", "{'0': 'xxx"),
            ("'y' * 30_000_000", "yyy"),
            ("10 ** 5000", ""),
            (picture + "for _ in range(3): display(P())\n'seen'", "seen"),
        ):
            result = await client.call_tool("run_code", {"code": code})
            assert not result.is_error
            assert text_of(result).startswith(begins)
        images = [block for block in result.content if isinstance(block, types.ImageContent)]
        assert len(images) == 1
        assert "a picture of 700 kB was left out" in text_of(result)
        assert isinstance(result.structured_content["duration"], float)
        many = await client.call_tool("run_code", {"code": "list(range(1_000_000))"})
        assert "too many for a result" in many.structured_content["value"]["why"]
        assert many.structured_content["state"] == "kept"


async def test_large_requests_are_accepted(base: Path) -> None:
    data = base64.b64encode(bytes(10_000_000)).decode()
    async with served(base) as front, mcp.Client(front.url) as client:
        saved = await client.call_tool("save_artifact", {"name": "zeros", "data": data, "encoding": "base64"})
        assert not saved.is_error, text_of(saved)
        assert text_of(await client.call_tool("run_code", {"code": "len(artifacts.load('zeros'))"})) == "10000000"


async def test_a_client_that_resumes_gets_a_new_stream(base: Path) -> None:
    async with served(base) as front:
        session = request(front.url).headers["mcp-session-id"]
        headers = {**ACCEPTED, "mcp-session-id": session, "Last-Event-ID": "7"}
        async with httpx.AsyncClient(timeout=60) as http, http.stream("GET", front.url, headers=headers) as stream:
            assert stream.status_code == 200


# --- who is answered --------------------------------------------------------------------------------------------------


async def test_pages_of_other_sites_are_refused(base: Path) -> None:
    async with served(base, "0.0.0.0:0") as front:
        port = front.url.split(":")[2].removesuffix("/mcp")
        here, elsewhere = f"127.0.0.1:{port}", f"pages.example:{port}"
        assert request(front.url).status_code == 200
        # A program behind a proxy; a browser would have named an origin.
        assert request(front.url, {"Host": "carrel.example"}).status_code == 200
        assert request(front.url, {"Origin": f"http://{here}"}).status_code == 200
        for origin, host in (
            ("http://pages.example", here),
            # Its name leads here by now.
            (f"http://{elsewhere}", elsewhere),
            ("http://localhost:3000", here),
            ("null", here),
            ("http://[", here),
        ):
            refused = request(front.url, {"Origin": origin, "Host": host})
            assert (origin, refused.status_code) == (origin, 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]"])
async def test_a_loopback_server_refuses_foreign_host_names(base: Path, host: str) -> None:
    async with served(base, f"{host}:0") as front:
        assert request(front.url).status_code == 200
        assert request(front.url, {"Host": "pages.example"}).status_code == 421
        assert request(front.url, {"Origin": "http://pages.example"}).status_code == 403


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_signal_stops_running_code_and_answers_its_caller(
    base: Path, mode: str, number: signal.Signals
) -> None:
    async with served(base) as front:
        async with mcp.Client(front.url, mode=mode) as client:
            running = asyncio.create_task(client.call_tool("run_code", {"code": f"tools.asleep(seconds={SECONDS})"}))
            while not _runs("sleep", SECONDS):  # noqa: ASYNC110 -- another program's doing
                await asyncio.sleep(0.05)
            front.process.send_signal(number)
            result = await running
            assert result.is_error
            assert "Session is closed" in text_of(result)
            assert await front.ended() == 0
        assert not _runs("sleep", SECONDS)
        assert front.errors() == ""


async def test_an_open_stream_does_not_delay_the_shutdown(base: Path) -> None:
    async with served(base) as front:
        headers = {**ACCEPTED, "mcp-session-id": request(front.url).headers["mcp-session-id"]}
        async with httpx.AsyncClient(timeout=None) as http, http.stream("GET", front.url, headers=headers) as stream:
            front.process.send_signal(signal.SIGTERM)
            assert [piece async for piece in stream.aiter_bytes()] == []
        assert await front.ended() == 0
        assert front.errors() == ""


async def test_a_port_in_use_is_an_error_of_one_line(base: Path) -> None:
    async with served(base) as front:
        port = front.url.split(":")[2].removesuffix("/mcp")
        words = ["-m", "carrel", "mcp", "--base", base, "--http", port]
        second = await asyncio.to_thread(preloaded_python().run, words, os.environ)
        assert second.returncode == 3
        assert second.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: another program uses this port")
        assert len(second.stderr.splitlines()) == 1


def _runs(*words: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and "\0".join(words).encode() in (entry / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False
