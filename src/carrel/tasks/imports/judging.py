"""The lists of tests of a commit, found by running its tests without and with its source, three times each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carrel.errors import CarrelError
from carrel.tasks.changes import Changes
from carrel.tasks.grading import changes_of_patch, grade
from carrel.tasks.place import make_ready
from carrel.tasks.sample import Sample
from carrel.tasks.verdict import Standing, TestTold, VerificationResult

RUNS = 3
"""How often each state is judged."""
_SHOWN = 300
"""Characters of one error."""
_NAMED = r"(\w[\w.]*(?:Error|Exception|NotFound)\b.*"
_ERRORS = (
    re.compile(rf"^E +{_NAMED})$", re.MULTILINE),  # as pytest shows what was raised
    re.compile(rf"^\s*{_NAMED}|\S*: error: .*|error: .*|Error: .*)$", re.MULTILINE | re.IGNORECASE),
)


@dataclass
class Lists:
    """What the runs of one commit came to."""

    fail_to_pass: list[str] = field(default_factory=list)
    pass_to_pass: list[str] = field(default_factory=list)
    fail_to_fail: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    """Tests that came out differently in two runs of the same files; they are in none of the other lists."""
    why: str = ""
    """Why the commit makes no sample; empty when it makes one."""
    may_change: bool = False
    """Whether the reason lies with the machine or the set-up, so that another attempt may come out differently."""


async def find_lists(sample: Sample, cache: Path | None) -> Lists:
    """Run the tests of a commit. One run is enough where they do not run at all, and two where nothing fails."""
    sample = sample.model_copy(deep=True)
    sample.verify.retries = 0
    try:
        prepared = await make_ready(sample, cache)
        solved = await changes_of_patch(prepared, sample.patch)
    except (CarrelError, OSError) as problem:
        return Lists(why=f"it could not be run: {brief(str(problem))}", may_change=True)
    before: list[VerificationResult] = []
    after: list[VerificationResult] = []
    for _ in range(RUNS):
        for results, changes in ((after, solved), (before, Changes())):
            results.append(await grade(sample, changes, cache=cache, prepared=prepared))
            if results[-1].outcome == "infrastructure_failed":
                return Lists(why=f"it could not be run: {brief('; '.join(results[-1].evidence))}", may_change=True)
            if len(after) == 1 and not after[0].suite_ran:
                return Lists(why=f"its tests do not run: {_not_run(after[0])}")
        lists = lists_of(list(map(standings, before)), list(map(standings, after)))
        if not lists.fail_to_pass:
            lists.why = f"no test fails without its source and passes with it{_failing(after[0])}"
            break
    return lists


def lists_of(before: Sequence[Mapping[str, Standing]], after: Sequence[Mapping[str, Standing]]) -> Lists:
    """The lists that hold in every run."""
    lists = Lists()
    for name in dict.fromkeys(name for run in (*after, *before) for name in run):
        was, became = ({run.get(name, "missing") for run in runs} for runs in (before, after))
        if len(was) > 1 or len(became) > 1:
            lists.unstable.append(name)
        elif became == {"passed"}:
            (lists.pass_to_pass if was == {"passed"} else lists.fail_to_pass).append(name)
        elif was == became == {"failed"}:
            lists.fail_to_fail.append(name)
    return lists


def standings(result: VerificationResult) -> dict[str, Standing]:
    """Each name in a report; of the tests that share one, a failed or skipped one counts."""
    found: dict[str, Standing] = {}
    kinds: list[tuple[list[TestTold], Standing]] = [
        (result.passes, "passed"),
        (result.skips, "skipped"),
        (result.failures, "failed"),
    ]
    for tests, standing in kinds:
        found |= dict.fromkeys((test.name for test in tests), standing)
    return found


def _not_run(result: VerificationResult) -> str:
    """The evidence, and the first error that the run printed."""
    error = first_error(f"{result.stderr}\n{result.stdout}")
    evidence = "; ".join(line.removeprefix("run 1: ") for line in result.evidence) or result.outcome
    return brief(evidence) + (f"; the first error: {error}" if error and error not in evidence else "")


def _failing(result: VerificationResult) -> str:
    if not result.failures:
        return ""
    first = result.failures[0]
    count = f"{result.failed} {'test fails' if result.failed == 1 else 'tests fail'} with it too"
    return f"; {count}, the first: {first.name}: {first_error(first.message) or brief(first.message)}"


def first_error(text: str) -> str:
    """The first line of an output that names an exception or an error."""
    found = next(filter(None, (error.search(text) for error in _ERRORS)), None)
    return found[1].strip()[:_SHOWN] if found else ""


def brief(text: str) -> str:
    """The first and the last line, which say most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(line[:_SHOWN] for line in (lines if len(lines) < 3 else [lines[0], lines[-1]]))
