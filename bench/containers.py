"""Samples in containers: what a session takes beside `docker run` and `docker exec` of the same image."""

import asyncio
import os
import statistics
import subprocess
import sys
from pathlib import Path

from carrel.errors import SandboxUnavailable
from carrel.execution.docker_engine import connect, pack_image
from carrel.server.executor_pool import ExecutorPool
from carrel.tasks.environment import ContainerPool, prepare_sample, sample_executor
from carrel.tasks.sample import Sample, SampleEnvironment
from measure import Line, Scale, Work, in_turn, no_more_than, times_faster

IMAGE = "carrel-bench:python"
HOW = "an image of this Python, without a network; medians, in turn with `docker run -d` and `docker exec true`"


async def measure(scale: Scale) -> list[Line]:
    try:
        await asyncio.to_thread(connect)
    except SandboxUnavailable as problem:
        print(f"nothing is measured in containers: {problem}", file=sys.stderr)
        return []
    await asyncio.to_thread(pack_image, IMAGE)
    files = scale.folder / "containers"
    files.mkdir()
    (files / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    sample = Sample(sample_id="a", files=files, environment=SampleEnvironment(backend="container", image=IMAGE))
    try:
        return await _lines(sample, scale.folder / "cache", max(3, scale(15)))
    finally:
        await asyncio.to_thread(connect()._api.remove_image, IMAGE, force=True)


async def _lines(sample: Sample, cache: Path, repeats: int) -> list[Line]:
    prepared = await prepare_sample(sample, cache)
    opened = []
    pool, sessions = ContainerPool(1), ExecutorPool(1)
    made: list[str] = []

    async def cold() -> None:
        opened.append(sample_executor(sample, cache, prepared=prepared))
        await opened[-1].start()
        await opened[-1].exec("true")

    async def run_alone() -> None:
        made.append(await _docker("run", "-d", "--rm", "--network", "none", IMAGE, "sleep", "600"))

    async def warm() -> None:
        opened.append(sample_executor(sample, cache, prepared=prepared, containers=pool))
        await opened[-1].start()
        await opened[-1].exec("true")

    async def ready() -> None:
        opened.append(await sessions.take(prepared))
        await opened[-1].exec("true")

    async def settled(work: Work, background: set[asyncio.Task[None]]) -> float:
        """Seconds of one from a pool, each begun when the next is ready."""
        taken = []
        for _ in range(repeats + 2):
            while background:
                await asyncio.wait(background)
            begin = asyncio.get_running_loop().time()
            await work()
            taken.append(asyncio.get_running_loop().time() - begin)
        return statistics.median(taken[2:])

    try:
        first = await in_turn(repeats, ours=cold, plain=run_alone)
        more = (statistics.median(first["ours"]) - statistics.median(first["plain"])) * 1e3
        of_image = await settled(warm, pool._background)
        of_sample = await settled(ready, sessions._executors._background)
        commands = await in_turn(
            repeats * 2, ours=lambda: opened[0].exec("true"), plain=lambda: _docker("exec", made[0], "true")
        )
        return [
            no_more_than("create to first command over `docker run`", more, 150, "ms", repeats=repeats, how=HOW),
            no_more_than(
                "create to first command, from the pool",
                of_sample * 1e3,
                40,
                "ms",
                repeats=repeats,
                how="the server's pool: a session of the sample waits, as it was requested before",
            ),
            no_more_than(
                "create to first command, in a waiting container of the image",
                of_image * 1e3,
                150,
                "ms",
                repeats=repeats,
                how="the pool of `task run`: the files of the sample are copied into it, and its worker is started",
            ),
            times_faster("a command in a container", commands, 7.8, unit="ms", how="`docker exec` of `true`"),
        ]
    finally:
        for executor in opened:
            await executor.close()
        await pool.close()
        await sessions.close()
        await _docker("rm", "-f", *made)


async def _docker(*words: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *words, stdout=subprocess.PIPE, env=os.environ)
    answer, _ = await process.communicate()
    assert process.returncode == 0
    return answer.decode().strip()
