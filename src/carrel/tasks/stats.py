"""Pass rates with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import get_args

from pydantic import BaseModel

from carrel.wire.verification import Outcome

Z = 1.959964
"""Of a 95 % interval."""


class Summary(BaseModel):
    """A run in numbers."""

    samples: int
    judged: int
    """Those with a verdict: all but the ones whose infrastructure failed."""
    solved: int
    """With those that needed a retry."""
    suspicious: int = 0
    """Of the solved ones, those that may have touched their tests' runner."""
    outcomes: dict[str, int]
    pass_rate: float
    low: float
    """The pass rate lies between this and `high` with a confidence of 95 % (Wilson's interval)."""
    high: float
    mean_score: float
    median_seconds: float
    """From the opening of a place to its verdict."""
    changed_nothing: int = 0
    """On how many the agent left the workspace as it was."""
    could_not_run: int = 0
    """On how many the agent's command ended with 126 or 127, without solving the sample."""


def wilson(solved: int, judged: int, z: float = Z) -> tuple[float, float]:
    """The interval for a rate: right also for few samples, and for none or all of them solved."""
    if judged == 0:
        return 0.0, 1.0
    rate = solved / judged
    middle = rate + z * z / (2 * judged)
    half = z * math.sqrt(rate * (1 - rate) / judged + z * z / (4 * judged * judged))
    scale = 1 + z * z / judged
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def summary(outcomes: Sequence[tuple[Outcome, float, float]], suspicious: int = 0) -> Summary:
    """Of each sample its outcome, score and seconds; and how many of the solved are suspicious."""
    counts = Counter(outcome for outcome, _, _ in outcomes)
    judged = len(outcomes) - counts["infrastructure_failed"]
    solved = counts["solved"] + counts["flaky"]
    low, high = wilson(solved, judged)
    scores = [score for outcome, score, _ in outcomes if outcome != "infrastructure_failed"]
    return Summary(
        samples=len(outcomes),
        judged=judged,
        solved=solved,
        suspicious=suspicious,
        outcomes={outcome: counts[outcome] for outcome in get_args(Outcome) if counts[outcome]},
        pass_rate=solved / judged if judged else 0.0,
        low=low,
        high=high,
        mean_score=sum(scores) / judged if judged else 0.0,
        median_seconds=median(seconds for _, _, seconds in outcomes) if outcomes else 0.0,
    )
