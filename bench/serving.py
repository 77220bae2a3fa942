"""A server and its client: what a session, a command and a verdict take over HTTP."""

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from carrel.client import AsyncClient, AsyncRemoteSession
from carrel.execution.docker_engine import pack_image
from measure import Line, Scale, in_turn, no_more_than, times_faster

FILES = 2000
SIZE = 100 * 1024
"""2,000 files of 100 KiB: 200 MB."""
IMAGE = "carrel-bench:python"
TEST = "import unittest\n\n\nclass Big(unittest.TestCase):\n    def test_it(self):\n        self.assertTrue(True)\n"
HOW = "one server process and one client over HTTP on loopback; a sample whose repository of {:,.0f} MB is cached"


async def measure(scale: Scale) -> list[Line]:
    files = scale(FILES)
    _dataset(scale.folder / "datasets" / "bench", files)
    how = HOW.format(files * SIZE / 1e6)
    async with _served(scale.folder) as client:
        await _one(client)  # unpacks the files and starts the zygote
        first = await _taken(scale(100), lambda: _one(client))
        async with await _session(client) as session:
            for _ in range(20):
                await session.execute_command("true")
            command = await _taken(scale(400), lambda: session.execute_command("true"))
            code = await _taken(scale(400), lambda: session.run("1 + 1"))
        count = 100
        many = await _at_once(client, count)
        lines = [
            no_more_than("create to the first command's answer, over HTTP", _ms(first), 40, "ms", how=how),
            no_more_than("a command, over HTTP", _ms(command), 8, "ms", how="`true` in a session that is there"),
            no_more_than("a run of code, over HTTP", _ms(code), 8, "ms", how="`1 + 1`, as server-sent events"),
            no_more_than(f"{count} sessions made at once", many, 3, "s", how=how),
        ]
        overhead = await _verdict(client)
        lines.append(no_more_than("a verdict over HTTP, without the tests", overhead, 100, "ms", how=how))
        if _engine_runs():
            lines.append(await _against_docker(client, scale))
        else:
            print("no Docker engine runs here, so nothing is compared with one", file=sys.stderr)
    return lines


@asynccontextmanager
async def _served(folder: Path) -> AsyncIterator[AsyncClient]:
    words = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--json", "--data", str(folder / "data")]
    words += ["--datasets", str(folder / "datasets"), "--max-sessions", "500"]
    server = await asyncio.create_subprocess_exec(
        *words, env=os.environ | {"CARREL_HOME": str(folder / "home")}, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        answer = json.loads(await server.stdout.readline())
        async with AsyncClient(base_url=answer["url"], api_key=answer["key"]) as client:
            yield client
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


async def _session(client: AsyncClient) -> AsyncRemoteSession:
    return await client.sessions.create(dataset="bench", sample_id="big")


async def _one(client: AsyncClient) -> float:
    """Seconds from asking for a session to the answer of its first command."""
    start = time.perf_counter()
    session = await _session(client)
    done = await session.execute_command("true")
    took = time.perf_counter() - start
    assert done.success, done
    await session.close()
    return took


async def _taken(repeats: int, work: Callable[[], Awaitable[object]]) -> list[float]:
    """Seconds of each; what the work itself returns as a number counts instead."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        answer = await work()
        taken.append(answer if isinstance(answer, float) else time.perf_counter() - start)
    return taken


async def _at_once(client: AsyncClient, count: int) -> float:
    start = time.perf_counter()
    sessions = await asyncio.gather(*(_session(client) for _ in range(count)))
    took = time.perf_counter() - start
    assert all(session.status == "ready" for session in sessions)
    await asyncio.gather(*(session.close() for session in sessions))
    return took


async def _verdict(client: AsyncClient) -> float:
    """Milliseconds of a verification that are not the test command's."""
    taken = []
    async with await _session(client) as session:
        await session.write_file("part0/file0", "changed")
        for turn in range(12):
            start = time.perf_counter()
            job = await session.verify()
            took = time.perf_counter() - start
            assert job.result is not None, job
            assert job.result.is_success, job.result
            if turn > 1:
                taken.append(took - job.result.execution_duration_seconds)
    return _ms(taken)


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def _dataset(folder: Path, count: int) -> None:
    files = folder / "files"
    (files / "tests").mkdir(parents=True)
    (files / "tests" / "__init__.py").write_text("")
    (files / "tests" / "test_big.py").write_text(TEST)
    for number in range(count):
        file = files / f"part{number // 100}" / f"file{number}"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(os.urandom(SIZE))
    sample = {"sample_id": "big", "files": "files", "fail_to_pass": ["tests.test_big.Big.test_it"]}
    (folder / "dataset.yaml").write_text(
        "name: bench\nverify: {command: python -m unittest -v, report: unittest, timeout: 60}\n"
    )
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")


def _engine_runs() -> bool:
    """Whether there is a client, and an engine behind it (DOCKER_HOST says which)."""
    return (
        shutil.which("docker") is not None and not subprocess.run(["docker", "version"], capture_output=True).returncode
    )


async def _against_docker(client: AsyncClient, scale: Scale) -> Line:
    """A container with the same files, and one command in it: of this very Python, without a network, which is less."""
    await asyncio.to_thread(pack_image, IMAGE)
    files = scale.folder / "datasets" / "bench" / "files"

    sessions: list[AsyncRemoteSession] = []
    containers: list[str] = []

    async def ours() -> None:
        sessions.append(await _session(client))
        await sessions[-1].execute_command("true")

    async def container() -> None:
        words = ("run", "-d", "--rm", "--network", "none", "-v", f"{files}:/workspace:ro")
        containers.append(await _docker(*words, IMAGE, "sleep", "600"))
        await _docker("exec", containers[-1], "true")

    # Their ends are not measured, and come when all has been.
    samples = await in_turn(scale(20), ours=ours, plain=container)
    for session in sessions:
        await session.close()
    await _docker("rm", "-f", *containers)
    await _docker("image", "rm", "-f", IMAGE)
    how = "`docker run` of an image of this Python with the same files mounted, then `docker exec` of `true`"
    return times_faster(
        "create to the first command's answer, against docker run + exec", samples, 8, unit="ms", how=how
    )


async def _docker(*words: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *words, stdout=subprocess.PIPE)
    answer, _ = await process.communicate()
    assert process.returncode == 0
    return answer.decode().strip()
