"""Pass rates, their intervals, and the comparison of two runs."""

from __future__ import annotations

import pytest

from carrel.tasks.stats import Attempt, compare, pass_at_k, pass_rate, summarize, wilson
from carrel.wire.verification import Outcome


def attempts(**outcomes: str) -> list[Attempt]:
    """`a="+-!"`: sample a was solved, not solved, and could not be judged."""
    words: dict[str, Outcome] = {"+": "solved", "-": "not_solved", "!": "infrastructure_failed", "~": "flaky"}
    return [Attempt(sample, words[sign]) for sample, signs in outcomes.items() for sign in signs]


@pytest.mark.parametrize(
    ("solved", "judged", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 2, 0.0, 0.658), (2, 2, 0.342, 1.0), (5, 10, 0.237, 0.763), (1, 1000, 0.0002, 0.0056)],
)
def test_wilson_intervals(solved: int, judged: int, low: float, high: float) -> None:
    assert wilson(solved, judged) == pytest.approx((low, high), abs=0.001)


@pytest.mark.parametrize(
    ("made", "solved", "k", "expected"),
    [(1, 1, 1, 1.0), (4, 1, 1, 0.25), (4, 1, 4, 1.0), (4, 0, 4, 0.0), (4, 2, 2, 5 / 6), (2, 1, 5, 1.0)],
)
def test_pass_at_k_of_one_sample(made: int, solved: int, k: int, expected: float) -> None:
    assert pass_at_k(made, solved, k) == pytest.approx(expected)


def test_intervals_count_samples_and_not_attempts() -> None:
    once = pass_rate(attempts(a="+", b="-"), 1)
    often = pass_rate(attempts(a="+" * 50, b="-" * 50), 1)
    assert once == often
    assert (once.rate, round(once.low, 2), round(once.high, 2)) == (0.5, 0.09, 0.91)


def test_attempts_without_a_verdict_count_for_nothing() -> None:
    total = summarize(attempts(a="+!", b="!!", c="-~"), 2)
    assert (total.samples, total.attempts, total.judged, total.solved) == (3, 6, 3, 2)
    assert {k: rate.rate for k, rate in total.pass_at.items()} == {1: 0.75, 2: 1.0}


def test_two_runs_are_compared_on_the_samples_of_both() -> None:
    found = compare(attempts(a="-", b="+", c="+-", d="+", e="-"), attempts(a="+", b="-", c="++", e="-", f="+"))
    assert (found.samples, found.better, found.worse) == (4, ["a", "c"], ["b"])
    assert (found.first.rate, found.second.rate, found.p_value) == (0.375, 0.5, 1.0)


def test_an_uneven_split_is_unlikely_to_be_chance() -> None:
    before = attempts(**{f"s{number}": "-" for number in range(10)})
    after = attempts(**{f"s{number}": "+" for number in range(10)})
    assert compare(before, after).p_value == pytest.approx(2 / 1024)
    assert compare(before, before).p_value == 1.0
