"""How a thing is measured: ours and the plain way in turn, so that a busy machine is busy for both."""

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Work = Callable[[], Awaitable[object]]


@dataclass
class Line:
    """One line of the table."""

    what: str
    ours: float
    plain: float | None
    """What the same takes the plain way, in the same unit."""
    unit: str
    target: str
    met: bool
    times: float | None = None
    """How many times better ours is."""
    times_cpu: float | None = None
    """The same in time of the processor, which a busy machine changes less."""
    repeats: int = 1
    how: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """How much work is measured; `quick` is a twentieth of it, for a first look."""

    quick: bool
    folder: Path

    def __call__(self, amount: int) -> int:
        return max(1, amount // 20) if self.quick else amount


async def in_turn(repeats: int, **works: Work) -> dict[str, list[float]]:
    """Seconds of each work, one after the other and again, after one round that does not count. What a work gives
    back is let go after the clock has stopped.

    Under `NAME cpu`, the time that this process had the processor for it, all its threads together."""
    taken: dict[str, list[float]] = {name: [] for work in works for name in (work, f"{work} cpu")}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            given = await work()
            seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
            del given
            if turn:
                taken[name].append(seconds)
                taken[f"{name} cpu"].append(cpu)
    return taken


def times_faster(
    what: str, samples: dict[str, list[float]], at_least: float, *, unit: str = "s", per: float = 1.0, how: str = ""
) -> Line:
    """A line that compares `ours` with `plain`; `per` is how many pieces of work one sample has."""
    ours, plain = statistics.median(samples["ours"]), statistics.median(samples["plain"])
    factor = {"s": 1.0, "ms": 1e3, "µs": 1e6}[unit] / per
    return Line(
        what,
        ours * factor,
        plain * factor,
        unit,
        f"≥ {at_least:g} times" if at_least != 1 else "no slower",
        plain / ours >= at_least,
        plain / ours,
        statistics.median(samples["plain cpu"]) / max(statistics.median(samples["ours cpu"]), 1e-9),
        len(samples["ours"]),
        how,
        samples,
    )


def no_more_than(
    what: str, value: float, limit: float, unit: str, *, repeats: int = 1, how: str = "", **more: Any
) -> Line:
    """A line that is measured against a number."""
    return Line(what, value, None, unit, f"≤ {limit:g} {unit}", value <= limit, repeats=repeats, how=how, **more)
