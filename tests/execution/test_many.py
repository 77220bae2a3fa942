"""Many sessions: at once, and one after the other, with nothing left of any."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys

import pytest

from carrel.execution import temp_dirs
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.execution.processes import anonymous, descendants, descriptors, groups_of, memory, until


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("mode", ["off", "required"])
async def test_many_started_at_once_in_one_loop(count: int, mode: str) -> None:
    executors = [SubprocessExecutor(SubprocessConfig(sandbox=mode)) for _ in range(count)]  # type: ignore[arg-type]
    try:
        results = await asyncio.gather(*(one.run(f"x = {n}\nprint({n})\nx") for n, one in enumerate(executors)))
        assert [(r.value, r.stdout) for r in results] == [(n, f"{n}\n") for n in range(count)]
        again = await asyncio.gather(*(one.run("x") for one in executors))
        assert [r.value for r in again] == list(range(count))
    finally:
        await asyncio.gather(*(one.close() for one in executors))


async def in_a_row(count: int) -> None:
    config = SubprocessConfig(sandbox="required")

    async def one() -> None:
        async with SubprocessExecutor(config) as executor:
            assert (await executor.run("open('f', 'w').write('x' * 10000); 1")).value == 1

    for _ in range(20):
        await one()
    gc.collect()
    zygote = SubprocessExecutor(config)
    await zygote.start()
    assert zygote._connection is not None
    assert zygote._connection.transport.zygote is not None
    pid = zygote._connection.transport.zygote.pid
    await zygote.close()
    # The next place, an init and a worker, may still be in the making: counted half, it would be one more afterwards.
    await until(lambda: len(descendants(pid)) == 2)
    before = descriptors(), len(descendants(os.getpid())), left_on_disk(), len(groups_of({pid}))
    inside = len(os.listdir(f"/proc/{pid}/fd"))
    ours, theirs = memory(), anonymous(pid)
    for _ in range(count):
        await one()
    gc.collect()
    await until(lambda: descriptors() <= before[0])
    await until(lambda: len(descendants(os.getpid())) <= before[1])
    await until(lambda: left_on_disk() <= before[2])
    await until(lambda: len(groups_of({pid})) <= before[3])
    await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= inside)
    assert memory() - ours < 4 << 20
    assert anonymous(pid) - theirs < 4 << 20


def left_on_disk() -> int:
    return len(list(temp_dirs._folder.iterdir())) if temp_dirs._folder is not None else 0


@pytest.mark.timeout(400)
async def test_many_sessions_in_a_row_leave_nothing() -> None:
    await in_a_row(100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_thousand_sessions_in_a_row_leave_nothing() -> None:
    await in_a_row(10_000)


NO_MORE_THAN_ALLOWED = """
import asyncio, os, resource
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor
limits = (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
def made(): return SubprocessExecutor(SubprocessConfig(sandbox="required"))
async def main():
    async with made() as first:
        await first.run("1")
        before = len(os.listdir("/proc/self/fd"))
        executors = [made() for _ in range(30)]
        results = []
        for start in range(0, 30, 5):
            results += await asyncio.gather(*(one.run("x = 7") for one in executors[start : start + 5]))
        kept = [one for one, result in zip(executors, results) if result.is_ok]
        refused = [result for result in results if not result.is_ok]
        print(len(kept) > 5, {(r.error_type, "ulimit -n" in r.error, r.state) for r in refused})
        print({(await one.run("x")).value for one in kept})
        await asyncio.gather(*(one.close() for one in executors))
        print(len(os.listdir("/proc/self/fd")) < before + 8)
    async with made() as again:
        print((await again.run("8")).value)
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == limits)
asyncio.run(main())
"""


def test_a_session_beyond_the_limit_of_open_files_is_refused_and_the_limit_stays() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MORE_THAN_ALLOWED], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True {('OSError', True, 'kept')}", "{7}", "True", "8", "True"]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_hundred_live_sessions_each_answer() -> None:
    executors = [SubprocessExecutor(SubprocessConfig(sandbox="required")) for _ in range(200)]
    try:
        await asyncio.gather(*(one.start() for one in executors))
        for _ in range(3):
            results = await asyncio.gather(*(one.run(f"x = {n}\nx * 2") for n, one in enumerate(executors)))
            assert [r.value for r in results] == [n * 2 for n in range(200)]
    finally:
        await asyncio.gather(*(one.close() for one in executors))


async def test_carrels_errors_are_made_once_for_all_sessions() -> None:
    """Before the zygote forks: what a session makes itself is young to its garbage collector, and its own memory."""
    async with SubprocessExecutor(SubprocessConfig(sandbox="off")) as executor:
        made_here = "import gc\n[kind for kind in gc.get_objects() if kind is ToolCallError or kind is Own]"
        await executor.run("class Own: pass")
        assert (await executor.run(made_here)).value == ["<class '__main__.Own'>"]
