"""What a session costs over the executor it stands on: to start with a full library, and for each run."""

import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from carrel import Session, SubprocessConfig, SubprocessExecutor
from measure import Line, Scale, no_more_than

TOOLS, WORKFLOWS = 200, 2000

TOOL = """\
name: tool{n}
description: Tool number {n}, which says words back
command: echo
tags: [words, number{n}]
schema:
  options:
    upper: {{type: boolean, description: In capital letters}}
    times: {{type: integer, default: 1, description: How often}}
  positional:
    - {{name: words, type: string, required: true, description: What to say}}
recipes:
  say: {{description: Say it, params: {{words: {{}}}}}}
  shout: {{description: Shout it, preset: {{upper: true}}, params: {{words: {{}}}}}}
"""
WORKFLOW = '''\
"""Workflow number {n}."""

def run(number: int, times: int = 2) -> int:
    """Multiply a number by {n}.

    Args:
        number: The number.
        times: How often.
    """
    return number * times * {n}
'''


def _fill(base: Path) -> None:
    (base / "tools").mkdir(parents=True)
    (base / "workflows").mkdir()
    for n in range(TOOLS):
        (base / "tools" / f"tool{n}.yaml").write_text(TOOL.format(n=n))
    for n in range(WORKFLOWS):
        (base / "workflows" / f"workflow_{n}.py").write_text(WORKFLOW.format(n=n))


async def _starts(base: Path, repeats: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds until a session is ready, until its executor alone is, and of this process's processor for both."""
    whole, alone, cpu = [], [], []
    for turn in range(repeats + 2):
        session = Session.subprocess(base)
        start, start_cpu = time.perf_counter(), time.process_time()
        await session.start()
        taken, taken_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        executor = SubprocessExecutor(SubprocessConfig(base=base))
        start, start_cpu = time.perf_counter(), time.process_time()
        await executor.start()
        if turn > 1:
            whole.append(1e3 * taken)
            alone.append(1e3 * (time.perf_counter() - start))
            cpu.append(1e3 * (taken_cpu - (time.process_time() - start_cpu)))
        await executor.close()
        await session.close()
    return whole, alone, cpu


async def _runs(base: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds of this process's processor for one run, through the session and by its executor."""
    taken: tuple[list[float], list[float]] = [], []
    async with Session.subprocess(base) as session:
        ways: tuple[Callable[[str], Awaitable[object]], ...] = (session.run, session.executor.run)
        for turn in range(rounds + 1):
            for run, samples in zip(ways, taken, strict=True):
                start = time.process_time()
                for _ in range(100):
                    await run("1+1")
                if turn:
                    samples.append(1e4 * (time.process_time() - start))
    return taken


async def measure(scale: Scale) -> list[Line]:
    base = Path(scale.folder) / "base"
    _fill(base)
    whole, alone, cpu = await _starts(base, 10 if scale.quick else 60)
    through, below = await _runs(base, 10 if scale.quick else 60)
    # The quickest quarter: what waits for a processor on a busy machine says nothing of either.
    quick, quick_alone = (statistics.quantiles(some, n=4)[0] for some in (whole, alone))
    run, run_below = (statistics.quantiles(some, n=4)[0] for some in (through, below))
    return [
        no_more_than(
            f"a session's start with {TOOLS} tool files and {WORKFLOWS:,} workflows",
            quick,
            100,
            "ms",
            repeats=len(whole),
            how=f"the quickest quarter, median {statistics.median(whole):.0f}; its executor alone {quick_alone:.0f}; "
            f"{statistics.median(cpu):.1f} ms of the processor for the library",
        ),
        no_more_than(
            "Session.run over its executor's",
            run - run_below,
            20,
            "µs",
            repeats=len(through),
            how=f"of this process's processor: {run:.0f} and {run_below:.0f} µs for `1+1`, the quickest quarter",
        ),
    ]
