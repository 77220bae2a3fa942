"""What a tool costs code in a session, against running the same program from here."""

import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from carrel import Session
from measure import Line, Scale, no_more_than

ECHO = "name: echo\ncommand: echo\nrecipes: {say: {description: Say nothing}}\n"
INSIDE = "name: inner\ncommand: echo\nruns: sandbox\n"
SLEEP = "name: wait\ncommand: sleep 0.1\n"

TWENTY = """
import time
taken = []
for _ in range(20):
    start = time.perf_counter()
    tools.echo.say()
    taken.append(time.perf_counter() - start)
taken
"""
IN_THE_PLACE = """
import subprocess, time
def taken(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
def plain():
    subprocess.run(["echo"], check=True, capture_output=True)
[(taken(tools.inner), taken(plain)) for _ in range(20)]
"""
MANY = """
import asyncio, time
start = time.perf_counter()
await asyncio.gather(*(tools.wait.call_async() for _ in range(50)))
time.perf_counter() - start
"""


def _plain() -> list[float]:
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        subprocess.run(["echo"], check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return taken


async def _inside(session: Session, code: str) -> Any:
    result = await session.run(code)
    assert result.error is None, result.error
    return result.value


async def measure(scale: Scale) -> list[Line]:
    repeats = 40 if scale.quick else 400
    base = Path(scale.folder) / "base"
    (base / "tools").mkdir(parents=True)
    (base / "tools" / "echo.yaml").write_text(ECHO)
    (base / "tools" / "wait.yaml").write_text(SLEEP)
    (base / "tools" / "inner.yaml").write_text(INSIDE)
    async with Session.from_base(base) as session:
        ours: list[float] = []
        plain: list[float] = []
        for turn in range(repeats // 20 + 1):
            # In turn, so that a busy machine is busy for both.
            called, ran = await _inside(session, TWENTY), _plain()
            if turn:
                ours += called
                plain += ran
        pairs = [pair for _ in range(repeats // 20) for pair in await _inside(session, IN_THE_PLACE)]
        gathered = [await _inside(session, MANY) for _ in range(3 if scale.quick else 7)]
    # The quickest quarter: what waits for a processor on a busy machine says nothing of either.
    inside, here = (1e3 * statistics.quantiles(some, n=4)[0] for some in (ours, plain))
    medians = " and ".join(f"{1e3 * statistics.median(some):.2f}" for some in (ours, plain))
    how = f"{inside:.2f} ms from inside, {here:.2f} ms by subprocess.run; the quickest quarter, medians {medians} ms"
    inner, itself = (1e3 * statistics.quantiles([pair[n] for pair in pairs], n=4)[0] for n in (0, 1))
    return [
        no_more_than(
            "a program called from inside, over running it", inside - here, 1.0, "ms", repeats=repeats, how=how
        ),
        Line(
            "the same where it runs in the sandbox",
            inner - itself,
            None,
            "ms",
            "(only to know)",
            True,
            repeats=len(pairs),
            how=f"{inner:.2f} ms by the tool, {itself:.2f} ms by subprocess.run in the code itself",
        ),
        no_more_than(
            "50 calls of 100 ms at once",
            statistics.median(gathered),
            0.5,
            "s",
            repeats=len(gathered),
            how="an asyncio.gather of call_async inside",
        ),
    ]
