"""Pass rates of a run with confidence intervals, and the comparison of two runs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

from pydantic import BaseModel

from carrel.wire.verification import Outcome

Z = 1.959964
"""The quantile of a 95 % interval."""


class Rate(BaseModel):
    """A rate and its 95 % interval (Wilson's)."""

    rate: float
    low: float
    high: float


class Summary(BaseModel):
    """A run in numbers."""

    samples: int
    attempts: int
    """All attempts at all samples."""
    judged: int
    """Attempts with a verdict: all except those whose infrastructure failed."""
    solved: int
    """Solved attempts, including those that needed a retry of the tests."""
    suspicious: int = 0
    """Solved attempts whose integrity is suspicious."""
    outcomes: dict[str, int]
    pass_at: dict[int, Rate]
    """pass@k: the probability that at least one of k attempts at a sample solves it; for 1 and the attempts per sample.

    The intervals count samples, not attempts: attempts at one sample are not independent."""
    mean_score: float
    median_seconds: float
    """From the opening of a session to its verdict."""
    changed_nothing: int = 0
    """Attempts after which the workspace was as before."""
    could_not_run: int = 0
    """Attempts in which the agent's command could not be run (exit code 126 or 127) and the sample is not solved."""

    @property
    def pass_rate(self) -> float:
        """pass@1."""
        return self.pass_at[1].rate


@dataclass(frozen=True)
class Attempt:
    """What the statistics need of one attempt."""

    sample: str
    outcome: Outcome
    score: float = 0.0
    seconds: float = 0.0

    @property
    def is_judged(self) -> bool:
        return self.outcome != "infrastructure_failed"

    @property
    def is_solved(self) -> bool:
        return self.outcome in ("solved", "flaky")


def wilson(solved: float, judged: int, z: float = Z) -> tuple[float, float]:
    """The interval of a rate; also correct for few samples, and when none or all of them are solved."""
    if judged == 0:
        return 0.0, 1.0
    rate = solved / judged
    middle = rate + z * z / (2 * judged)
    half = z * math.sqrt(rate * (1 - rate) / judged + z * z / (4 * judged * judged))
    scale = 1 + z * z / judged
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The chance that k of these attempts, chosen at random, contain a solved one (the unbiased estimate of pass@k)."""
    k = min(k, attempts)
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_rate(attempts: Sequence[Attempt], k: int) -> Rate:
    """pass@k over all samples that have a verdict."""
    counts = _solved_by_sample(attempts)
    total = sum(pass_at_k(judged, solved, k) for judged, solved in counts.values())
    low, high = wilson(total, len(counts))
    return Rate(rate=total / len(counts) if counts else 0.0, low=low, high=high)


def _solved_by_sample(attempts: Sequence[Attempt]) -> dict[str, tuple[int, int]]:
    """Judged and solved attempts of each sample that has a verdict."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for attempt in attempts:
        if attempt.is_judged:
            counts[attempt.sample].append(attempt.is_solved)
    return {sample: (len(solved), sum(solved)) for sample, solved in counts.items()}


def summarize(attempts: Sequence[Attempt], attempts_per_sample: int = 1) -> Summary:
    """The numbers of a run; the caller adds what concerns its agent."""
    counts = Counter(attempt.outcome for attempt in attempts)
    judged = [attempt for attempt in attempts if attempt.is_judged]
    return Summary(
        samples=len({attempt.sample for attempt in attempts}),
        attempts=len(attempts),
        judged=len(judged),
        solved=sum(attempt.is_solved for attempt in judged),
        outcomes={outcome: counts[outcome] for outcome in get_args(Outcome) if counts[outcome]},
        pass_at={k: pass_rate(attempts, k) for k in sorted({1, attempts_per_sample})},
        mean_score=sum(attempt.score for attempt in judged) / len(judged) if judged else 0.0,
        median_seconds=median(attempt.seconds for attempt in attempts) if attempts else 0.0,
    )


class Comparison(BaseModel):
    """Two runs on the samples that both have judged."""

    samples: int
    first: Rate
    """pass@1 of the first run on these samples."""
    second: Rate
    better: list[str]
    """Samples that the second run solves more often than the first."""
    worse: list[str]
    p_value: float
    """The chance of a difference at least as large if both agents were equally good (an exact sign test)."""


def compare(first: Sequence[Attempt], second: Sequence[Attempt]) -> Comparison:
    """Compare two runs sample by sample."""
    one, two = _solved_by_sample(first), _solved_by_sample(second)
    both = [sample for sample in one if sample in two]
    rates = {sample: (_rate(one, sample), _rate(two, sample)) for sample in both}
    better = [sample for sample, (before, after) in rates.items() if after > before]
    worse = [sample for sample, (before, after) in rates.items() if after < before]
    return Comparison(
        samples=len(both),
        first=pass_rate([attempt for attempt in first if attempt.sample in rates], 1),
        second=pass_rate([attempt for attempt in second if attempt.sample in rates], 1),
        better=better,
        worse=worse,
        p_value=_sign_test(len(better), len(worse)),
    )


def _rate(counts: Mapping[str, tuple[int, int]], sample: str) -> float:
    judged, solved = counts[sample]
    return solved / judged


def _sign_test(better: int, worse: int) -> float:
    """Two-sided: how likely so uneven a split is when each sample is as likely to become better as worse."""
    total = better + worse
    tail: float = sum(math.comb(total, count) for count in range(min(better, worse) + 1)) / 2**total
    return min(1.0, 2 * tail)
