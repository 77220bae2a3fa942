"""How fast code runs: carrel's executors beside jupyter_client + ipykernel and, where an engine runs, docker.

All sides are measured in one run, by turns and in several rounds, and shown as medians and ratios: a busy machine slows
all of them down, and what it does in one minute it may not do in the next.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import resuming
from carrel.execution.config import SubprocessConfig
from carrel.execution.docker_engine import pack_image
from carrel.execution.subprocess_executor import SubprocessExecutor

Measure = Callable[[], Awaitable[float]]
Rows = dict[str, float]
ROUNDS = 3
SANDBOXED = SubprocessConfig(sandbox="required", default_timeout=120)
IMAGE = "carrel-bench:python"


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def median(measure: Measure, times: int) -> float:
    return statistics.median([await measure() for _ in range(times)])


def private_memory(pid: int) -> int:
    """Bytes that only this process has; none when it has just ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))


def below(pid: int) -> list[int]:
    """A process and all that came from it."""
    found = [pid]
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        found += below(int(child))
    return found


# --- carrel ---------------------------------------------------------------------------------------------------------


async def start_to_first_result() -> float:
    executor = SubprocessExecutor(SANDBOXED)
    seconds = await timed(lambda: executor.run("1 + 1"))
    await executor.close()
    return seconds


async def cold_start() -> float:
    """A new virtualenv, a new zygote, a session, a result."""
    with tempfile.TemporaryDirectory() as folder:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        config = SubprocessConfig(sandbox="required", base=Path(folder), python_version=version)
        executor = SubprocessExecutor(config)
        seconds = await timed(lambda: executor.run("1 + 1"))
        await executor.close()
        return seconds


async def carrel_rows(quick: bool) -> Rows:
    rows: Rows = {}
    few, many = (3, 200) if quick else (7, 1000)
    await start_to_first_result()
    rows["start to first result"] = await median(start_to_first_result, few * 2)
    rows["cold start, new virtualenv"] = await median(cold_start, 3)

    async def answer(name: str, args: list[Any], kwargs: dict[str, Any]) -> int:
        return 1

    async with SubprocessExecutor(SANDBOXED, handlers={"tools": answer}) as executor:
        await executor.run("1")
        rows["round trip of 1 + 1"] = await median(lambda: timed(lambda: executor.run("1 + 1")), many)
        count = 200
        loop = f"for _ in range({count}): tools.x()"
        rows["call to the host from inside"] = await median(lambda: timed(lambda: executor.run(loop)), few) / count
        rows["command: true"] = await median(lambda: timed(lambda: executor.exec("true")), few * 4)
        flood = "for _ in range(100): print('x' * 999_999)"
        rows["100 MB printed"] = await median(lambda: timed(lambda: executor.run(flood)), 5)

        async def interrupt() -> float:
            running = asyncio.ensure_future(executor.run("while True: pass"))
            await asyncio.sleep(0.1)
            began = time.perf_counter()
            await executor.interrupt()
            await running
            return time.perf_counter() - began

        rows["interrupt of while True: pass"] = await median(interrupt, few)

        async def restore() -> float:
            """From the crash to the answer of the run after it, the wait for the crash itself included."""
            await executor.run("x = 5")
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            await executor.run("import os; os._exit(1)")
            result = await executor.run("x")
            assert result.value == 5, result
            return time.perf_counter() - began

        rows["crash to the next answer, variables restored"] = await median(restore, few)

    async with SubprocessExecutor(SANDBOXED) as executor:
        await executor.run("big = list(range(1_000_000))")

        async def fork() -> float:
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            child = await executor.fork()
            seconds = time.perf_counter() - began
            await child.close()
            return seconds

        rows["live fork with a million-element list"] = await median(fork, few)
        moment = await executor.checkpoint()

        async def rewind() -> float:
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            await executor.rewind(moment)
            return time.perf_counter() - began

        rows["the same, going back to a checkpoint"] = await median(rewind, few)
    return rows


async def carrel_memory() -> float:
    """Of an idle session with its init, worker and snapshot."""
    async with SubprocessExecutor(SANDBOXED) as executor:
        await executor.run("x = 1")
        await asyncio.sleep(0.2)
        assert executor._connection is not None
        return float(sum(private_memory(pid) for pid in below(executor._connection.transport.init.pid)))


async def carrel_twenty() -> tuple[float, float]:
    """Twenty sessions that have numpy and pandas: seconds, and bytes of all with their zygote."""
    config = SubprocessConfig(sandbox="required", preload=("numpy", "pandas"))
    async with SubprocessExecutor(config) as first:
        await first.run("1")
        executors = [SubprocessExecutor(config) for _ in range(20)]
        began = time.perf_counter()
        code = "import numpy, pandas; len(pandas.DataFrame({'a': numpy.arange(3)}))"
        results = await asyncio.gather(*(one.run(code) for one in executors))
        seconds = time.perf_counter() - began
        assert all(result.value == 3 for result in results), results[0]
        await asyncio.sleep(1)
        assert first._connection is not None
        used = sum(private_memory(pid) for pid in below(first._connection.transport.zygote.pid))
        await asyncio.gather(*(one.close() for one in executors))
    return seconds, float(used)


# --- ipykernel ------------------------------------------------------------------------------------------------------


async def jupyter_kernel() -> tuple[Any, Any]:
    from jupyter_client.manager import AsyncKernelManager  # noqa: PLC0415 -- not everybody who measures has it

    manager = AsyncKernelManager(kernel_name="python3")
    await manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    return manager, client


async def jupyter_run(client: Any, code: str) -> None:
    await client.execute_interactive(code, output_hook=lambda message: None, timeout=120)


async def jupyter_close(manager: Any, client: Any) -> None:
    client.stop_channels()
    await manager.shutdown_kernel(now=True)


async def jupyter_rows(quick: bool) -> Rows:
    rows: Rows = {}

    async def start() -> float:
        began = time.perf_counter()
        manager, client = await jupyter_kernel()
        await jupyter_run(client, "1 + 1")
        seconds = time.perf_counter() - began
        await jupyter_close(manager, client)
        return seconds

    rows["start to first result"] = await median(start, 3)
    manager, client = await jupyter_kernel()
    try:
        many = 50 if quick else 200
        rows["round trip of 1 + 1"] = await median(lambda: timed(lambda: jupyter_run(client, "1 + 1")), many)
        flood = "for _ in range(100): print('x' * 999_999)"
        rows["100 MB printed"] = await timed(lambda: jupyter_run(client, flood))

        async def interrupt() -> float:
            running = asyncio.ensure_future(jupyter_run(client, "while True: pass"))
            await asyncio.sleep(0.2)
            began = time.perf_counter()
            await manager.interrupt_kernel()
            await running
            return time.perf_counter() - began

        rows["interrupt of while True: pass"] = await median(interrupt, 3)
        pid = manager.provisioner.pid
        rows["private memory of an idle session"] = float(sum(private_memory(one) for one in below(pid)))
    finally:
        await jupyter_close(manager, client)

    began = time.perf_counter()
    kernels = [await jupyter_kernel() for _ in range(2 if quick else 7)]
    for _, one in kernels:
        await jupyter_run(one, "import numpy, pandas; pandas.DataFrame({'a': numpy.arange(3)})")
    scale = 20 / len(kernels)
    rows["20 sessions with numpy and pandas"] = (time.perf_counter() - began) * scale
    used = sum(private_memory(one) for manager, _ in kernels for one in below(manager.provisioner.pid))
    rows["memory of those 20"] = float(used) * scale
    for manager, one in kernels:
        await jupyter_close(manager, one)
    return rows


# --- docker ---------------------------------------------------------------------------------------------------------


def docker_answers() -> bool:
    """Whether there is a client, and an engine behind it (DOCKER_HOST says which)."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


async def docker(*words: str) -> None:
    process = await asyncio.create_subprocess_exec("docker", *words, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError(f"docker {' '.join(words)} failed")


async def docker_rows() -> Rows:
    """A container for each run, without a network (which costs an engine more), and commands in one that runs."""
    # Of this very Python, packed from here: nothing is fetched, and both sides run the same.
    await asyncio.to_thread(pack_image, IMAGE)
    name = f"carrel-bench-{os.getpid()}"
    start = ("run", "--rm", "--network", "none")
    try:
        rows = {
            "start to first result": await median(
                lambda: timed(lambda: docker(*start, IMAGE, "python3", "-I", "-c", "print(1 + 1)")), 7
            )
        }
        await docker(*start, "-d", "--name", name, IMAGE, "sleep", "600")
        rows["command: true"] = await median(lambda: timed(lambda: docker("exec", name, "true")), 15)
        await docker("kill", name)
        return rows
    finally:
        subprocess.run(["docker", "image", "rm", "-f", IMAGE], capture_output=True, check=False)


# --- the table ------------------------------------------------------------------------------------------------------

WANTED: dict[str, float | None] = {
    "start to first result": 0.025,
    "cold start, new virtualenv": 1.5,
    "round trip of 1 + 1": 0.0005,
    "call to the host from inside": 0.0003,
    "command: true": 0.005,
    "100 MB printed": 1.0,
    "live fork with a million-element list": 0.025,
    "the same, going back to a checkpoint": None,
    "private memory of an idle session": 4e6,
    "20 sessions with numpy and pandas": 1.5,
    "memory of those 20": 200e6,
    "crash to the next answer, variables restored": 0.020,
    "interrupt of while True: pass": 0.050,
    **resuming.WANTED,
}


def amount(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if "memory" in name:
        return f"{value / 1e6:,.1f} MB"
    return f"{value * 1e3:,.2f} ms" if value < 10 else f"{value:,.1f} s"


def print_table(ours: Rows, others: dict[str, Rows]) -> None:
    names = list(others)
    print(f"{'':46}{'carrel':>12}{'wanted':>12}" + "".join(f"{name:>13}{'ratio':>8}" for name in names))
    for row, wanted in WANTED.items():
        if row not in ours:
            continue
        line = f"{row:46}{amount(row, ours[row]):>12}{amount(row, wanted):>12}"
        for name in names:
            theirs = others[name].get(row)
            ratio = f"{theirs / ours[row]:,.1f}" if theirs else ""
            line += f"{amount(row, theirs):>13}{ratio:>8}"
        print(line + ("" if wanted is None or ours[row] <= wanted else "   over"))


async def carrel_side(quick: bool) -> Rows:
    rows = await carrel_rows(quick)
    rows["private memory of an idle session"] = await carrel_memory()
    rows["20 sessions with numpy and pandas"], rows["memory of those 20"] = await carrel_twenty()
    rows |= await resuming.resuming_rows(quick)
    return rows


def in_the_middle(rounds: list[Rows]) -> Rows:
    return {row: statistics.median(rows[row] for rows in rounds) for row in rounds[0]}


async def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--quick", action="store_true", help="fewer repetitions")
    reader.add_argument("--alone", action="store_true", help="carrel only")
    reader.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = reader.parse_args()
    sides: dict[str, Callable[[], Awaitable[Rows]]] = {"carrel": lambda: carrel_side(options.quick)}
    if not options.alone:
        if importlib.util.find_spec("ipykernel") and importlib.util.find_spec("jupyter_client"):
            sides["ipykernel"] = lambda: jupyter_rows(options.quick)
        else:
            print("ipykernel is not measured: it and jupyter_client are not installed", file=sys.stderr)
        if docker_answers():
            sides["docker"] = docker_rows
        else:
            print("docker is not measured: no engine answers here (DOCKER_HOST names one)", file=sys.stderr)
    rounds: dict[str, list[Rows]] = {name: [] for name in sides}
    for _ in range(1 if options.quick else ROUNDS):
        for name, side in sides.items():
            rounds[name].append(await side())
    others = {name: in_the_middle(rows) for name, rows in rounds.items()}
    ours = others.pop("carrel")
    if options.json:
        print(json.dumps({"carrel": ours, **others}, indent=2))
    else:
        print_table(ours, others)


if __name__ == "__main__":
    asyncio.run(main())
