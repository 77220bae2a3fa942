"""A hundred sessions at once on one server: all answers right, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from carrel.client import AsyncClient, AsyncRemoteSession
from carrel.errors import CommandNotRun, SessionNotReady, TooMany
from tests.execution.processes import descendants, wait_gone
from tests.support.server_process import ServerProcess

SESSIONS = 100
COMMANDS = 10


def left_of(server: ServerProcess) -> tuple[int, int, int]:
    """Processes, mounts and open files that a server has; of the logs, it keeps the newest open on purpose."""
    mounts = Path(f"/proc/{server.pid}/mounts").read_text().count("carrel")
    names = [_name_of(file) for file in Path(f"/proc/{server.pid}/fd").iterdir()]
    return len(descendants(server.pid)), mounts, sum(not name.endswith(".jsonl") for name in names)


def _name_of(file: Path) -> str:
    try:
        return os.readlink(file)
    except FileNotFoundError:
        return "closed meanwhile"


async def as_it_was(server: ServerProcess, before: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is left, once it is no more than before or does not get less."""
    for _ in range(600):
        after = left_of(server)
        if all(now <= then for now, then in zip(after, before, strict=True)):
            break
        await asyncio.sleep(0.1)
    return after


async def work_in(session: AsyncRemoteSession, number: int) -> list[str | None]:
    """Ten commands that build on each other, so that an answer of another session would show."""
    answers = []
    for turn in range(COMMANDS):
        done = await session.execute_command(f"echo {number}-{turn} >> log; tr '\\n' ' ' < log")
        answers.append(done.stdout)
    return answers


def expected(number: int) -> list[str]:
    lines = [f"{number}-{turn} " for turn in range(COMMANDS)]
    return ["".join(lines[: turn + 1]) for turn in range(COMMANDS)]


@pytest.mark.timeout(300)
async def test_a_hundred_sessions_with_ten_commands_each(tmp_path: Path) -> None:
    # What is kept open for the next one to come would be counted as left.
    server = ServerProcess(tmp_path / "server", "--prewarmed", "0").start()
    try:
        async with AsyncClient(base_url=server.url, api_key=server.key) as client:
            # From the third on there is a place built ahead, afterwards as before.
            for _ in range(3):
                async with await client.sessions.create(dataset="demo", sample_id="calc-1") as warm:
                    await warm.execute_command("true")
            before = left_of(server)
            makes = [client.sessions.create(dataset="demo", sample_id="calc-1") for _ in range(SESSIONS)]
            sessions = await asyncio.gather(*makes)
            assert {session.status for session in sessions} == {"ready"}
            assert len({session.session_id for session in sessions}) == SESSIONS
            answers = await asyncio.gather(*(work_in(session, number) for number, session in enumerate(sessions)))
            assert answers == [expected(number) for number in range(SESSIONS)]
            await asyncio.gather(*(session.close() for session in sessions))
            found = await client.sessions.list()
            assert {session.status for session in found.sessions} == {"closed"}
        after = await as_it_was(server, before)
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    finally:
        living = descendants(server.pid)
        assert server.stop() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert wait_gone(living) == []


@pytest.mark.timeout(300)
async def test_misbehaving_clients_side_by_side(tmp_path: Path) -> None:
    """Readers that leave, large outputs, a command that ignores signals, sessions closed under their commands."""
    server = ServerProcess(tmp_path / "server").start()
    try:
        async with AsyncClient(base_url=server.url, api_key=server.key) as client:

            async def leaves() -> None:
                async with await client.sessions.create() as session:
                    stream = session.stream_command("yes | head -c 20000000; sleep 100")
                    await anext(stream)
                    await stream.aclose()

            async def reads_much() -> None:
                async with await client.sessions.create() as session:
                    done = await session.execute_command("yes | head -c 5000000")
                    assert done.stdout == "y\n" * 2_500_000

            async def ignores_signals() -> None:
                async with await client.sessions.create() as session:
                    done = await session.execute_command(
                        "trap '' INT TERM HUP; echo on; sleep 100; sleep 100", timeout=4
                    )
                    assert (done.timed_out, done.stdout) == (True, "on\n")
                    assert (await session.execute_command("echo next")).stdout == "next\n"

            async def is_closed_under_it() -> None:
                session = await client.sessions.create()
                command = asyncio.ensure_future(session.execute_command("sleep 100"))
                await asyncio.sleep(0.5)
                await session.close()
                with pytest.raises((CommandNotRun, SessionNotReady)):
                    await command

            kinds = (leaves, reads_much, ignores_signals, is_closed_under_it)
            await asyncio.gather(*(kind() for kind in kinds for _ in range(3)))
            assert {session.status for session in (await client.sessions.list()).sessions} == {"closed"}
    finally:
        living = descendants(server.pid)
        server.stop()
    assert wait_gone(living) == []


async def test_more_sessions_than_allowed(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server", "--max-sessions", "2").start()
    try:
        async with AsyncClient(base_url=server.url, api_key=server.key, max_retries=0) as client:
            first, second = [await client.sessions.create() for _ in range(2)]
            with pytest.raises(TooMany) as problem:
                await client.sessions.create()
            assert problem.value.retry_after is not None
            await first.close()
            async with await client.sessions.create() as third:
                assert (await third.execute_command("true")).success
            await second.close()
    finally:
        server.stop()
