"""Lines that break and servers that are killed while a client waits."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from carrel.client import AsyncClient, Client
from carrel.errors import CommandNotRun, RemoteError, ServerUnreachable
from carrel.wire.answers import OutputPiece
from tests.support.faulty_server import Relay
from tests.support.server_process import ServerProcess


@pytest.fixture
def relay(server: ServerProcess) -> Iterator[Relay]:
    with Relay(server.port) as line:
        yield line


async def cut_after(relay: Relay, seconds: float) -> None:
    await asyncio.sleep(seconds)
    relay.cut()


async def test_a_command_is_run_once_if_the_connection_breaks(server: ServerProcess, relay: Relay) -> None:
    async with AsyncClient(base_url=relay.url, api_key=server.key) as client, await client.sessions.create() as session:
        command = session.execute_command("echo x >> times; sleep 1; wc -l < times")
        done, _ = await asyncio.gather(command, cut_after(relay, 0.5))
        assert done.stdout is not None
        assert done.stdout.strip() == "1"


async def test_streamed_output_over_a_broken_connection_is_completed(server: ServerProcess, relay: Relay) -> None:
    async with AsyncClient(base_url=relay.url, api_key=server.key) as client, await client.sessions.create() as session:
        heard: list[str] = []

        def hear(piece: OutputPiece) -> None:
            heard.append(piece.text)
            relay.cut()

        command = "echo x >> times; echo one; sleep 1; echo two; wc -l < times"
        done = await session.execute_command(command, on_output=hear)
        assert heard == ["one\n"]
        assert done.stdout is not None
        assert done.stdout.split() == ["one", "two", "1"]


async def test_a_session_is_created_once(server: ServerProcess, relay: Relay) -> None:
    async with AsyncClient(base_url=relay.url, api_key=server.key) as client:
        before = (await client.sessions.list()).total_count
        making = asyncio.ensure_future(client.sessions.create(dataset="demo", sample_id="slug-1"))
        await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0.005)
            relay.cut()
        session = await making
        assert session.status == "ready"
        assert (await client.sessions.list()).total_count == before + 1
        await session.close()


async def test_code_is_stopped_if_the_connection_breaks(server: ServerProcess, relay: Relay) -> None:
    async with (
        AsyncClient(base_url=server.url, api_key=server.key) as direct,
        await direct.sessions.create() as session,
    ):
        async with AsyncClient(base_url=relay.url, api_key=server.key) as client:
            code = "x = 5\nprint('begun', flush=True)\nimport time\ntime.sleep(100)"
            run = client.sessions.run(session.session_id, code=code)
            with pytest.raises(ServerUnreachable, match="the connection was lost"):
                await asyncio.gather(run, relay.cut_after(b"begun"))
        assert (await session.run("x")).value == 5


async def test_events_continue_without_a_gap(server: ServerProcess, relay: Relay) -> None:
    async with (
        AsyncClient(base_url=server.url, api_key=server.key) as direct,
        await direct.sessions.create() as session,
    ):

        async def follow() -> list[int]:
            async with AsyncClient(base_url=relay.url, api_key=server.key) as client:
                return [event.seq async for event in client.sessions.events(session.session_id)]

        following = asyncio.ensure_future(follow())
        for _ in range(5):
            await session.execute_command("true")
            await asyncio.sleep(0.1)
            relay.cut()
        await session.close()
        seen = await following
        assert seen == list(range(1, len(seen) + 1))
        assert seen == [event.seq async for event in session.events()]


def test_events_of_the_synchronous_client_continue_too(server: ServerProcess, relay: Relay) -> None:
    with Client(base_url=relay.url, api_key=server.key) as client, client.sessions.create() as session:
        cutting = threading.Timer(0.5, relay.cut)
        cutting.start()
        done = session.execute_command("echo x >> times; sleep 1; wc -l < times")
        cutting.join()
        assert done.stdout is not None
        assert done.stdout.strip() == "1"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_ends_while_a_command_runs(tmp_path: Path, how: signal.Signals) -> None:
    server = ServerProcess(tmp_path / "server").start()
    try:
        async with AsyncClient(base_url=server.url, api_key=server.key) as client:
            session = await client.sessions.create()
            command = asyncio.ensure_future(session.execute_command("sleep 100"))
            run = asyncio.ensure_future((await client.sessions.create()).run("import time\ntime.sleep(100)"))
            await asyncio.sleep(2)
            await asyncio.to_thread(server.stop, how)
            await asyncio.to_thread(server.start)
            with pytest.raises(RemoteError) as problem:
                await command
            assert isinstance(problem.value, CommandNotRun | RemoteError)
            with pytest.raises(RemoteError) if how == signal.SIGKILL else nullcontext():
                result = await run
                assert result.error_type == "Closed"
            assert (await session.refresh()).status in ("terminated", "error")
            async with await client.sessions.create() as after:
                assert (await after.execute_command("echo alive")).stdout == "alive\n"
    finally:
        server.stop()


async def test_requests_wait_for_a_server_that_is_starting(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server").start()
    server.stop()
    later = threading.Timer(0.5, server.start)
    async with AsyncClient(base_url=server.url, api_key=server.key, max_retries=10) as client:
        began = time.monotonic()
        later.start()
        assert (await client.health.check()).service == "carrel"
        assert time.monotonic() - began > 0.5
    later.join()
    server.stop()
