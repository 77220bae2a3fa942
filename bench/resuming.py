"""How long saving holds a durable session up, how soon a continued one answers, and what persistence costs a run."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from carrel import FileStorage, Session
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor

WANTED = {
    "save of a million integers: hold-up of code": 0.005,
    "continue 10 MB of state, to the first result": 0.150,
    "a run of x = x + 1, without persistence": None,
    "the same, more with persistence": 0.002,
}


def opened(base: Path, *, durable: bool = True) -> Session:
    executor = SubprocessExecutor(SubprocessConfig(sandbox="required", default_timeout=120))
    return Session(FileStorage(base), executor, session_id="bench" if durable else None, owns_storage=True)


async def hold_up(session: Session) -> float:
    """How much longer a run takes that comes directly after the request to save."""
    plain = statistics.median([await run_once(session) for _ in range(20)])
    saving = asyncio.create_task(session.save())
    await asyncio.sleep(0)
    beside = await run_once(session)
    await saving
    return max(0.0, beside - plain)


async def run_once(session: Session, code: str = "x = 1") -> float:
    began = time.perf_counter()
    result = await session.run(code)
    assert result.is_ok, result.error
    return time.perf_counter() - began


async def first_result(base: Path) -> float:
    """From the constructor to the result of the first run."""
    began = time.perf_counter()
    session = opened(base)
    result = await session.run("len(text), sum(numbers)")
    seconds = time.perf_counter() - began
    assert result.value == (9_000_000, 4_999_950_000), result
    await session.close()
    return seconds


async def resuming_rows(quick: bool) -> dict[str, float]:
    rows: dict[str, float] = {}
    times = 3 if quick else 7
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        async with opened(base / "held") as session:
            await session.run("big = list(range(1_000_000))")
            held = [await hold_up(session) for _ in range(times)]
            rows["save of a million integers: hold-up of code"] = statistics.median(held)
        async with opened(base / "ten") as session:
            await session.run("text = 'x' * 9_000_000; numbers = list(range(100_000))")
        seconds = [await first_result(base / "ten") for _ in range(times)]
        rows["continue 10 MB of state, to the first result"] = statistics.median(seconds)
        runs: dict[bool, list[float]] = {False: [], True: []}
        async with opened(base / "off", durable=False) as off, opened(base / "on") as on:
            for session in (off, on):
                await session.run("x = 1")
            for _ in range(200 if quick else 2000):  # by turns: more than a second, so that it is saved meanwhile
                runs[False].append(await run_once(off, "x = x + 1"))
                runs[True].append(await run_once(on, "x = x + 1"))
        plain = statistics.median(runs[False])
        rows["a run of x = x + 1, without persistence"] = plain
        rows["the same, more with persistence"] = max(0.0, statistics.median(runs[True]) - plain)
    return rows
