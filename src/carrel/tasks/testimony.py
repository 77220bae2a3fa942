"""Pure: what the witness in a test runner said, and whether the report says the same."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from carrel.tasks.named_tests import Reported
from carrel.tasks.told import Status, Told


@dataclass
class Testimony:
    """One run of the tests as it was seen from inside."""

    __test__ = False

    begun: bool = False
    finished: bool = False
    canary_failed: bool | None = None
    """Whether a test that must fail did; None where that was not tried."""
    problem: str = ""
    cases: list[Told] = field(default_factory=list)


def hear(stderr: str, word: str) -> tuple[str, Testimony]:
    """Standard error without the witness's lines, and what they say."""
    told = Testimony()
    seen: dict[str, Status] = {}

    def take(found: re.Match[str]) -> str:
        try:
            line = json.loads(found[1])
        except ValueError:
            return ""
        match line.get("event"):
            case "begun":
                told.begun = True
            case "test":
                _note(seen, str(line.get("id")), str(line.get("when")), str(line.get("outcome")))
            case "canary":
                told.canary_failed = line.get("failed")
                told.problem = str(line.get("problem", ""))
            case "finished":
                told.finished = True
        return ""

    rest = re.sub(rf"\n{re.escape(word)} (\{{.*\}})\n", take, stderr)
    told.cases = [Told("", node, status) for node, status in seen.items()]
    return rest, told


def _note(seen: dict[str, Status], node: str, when: str, outcome: str) -> None:
    """Passed is what passed its call; what failed once, in any phase, has failed."""
    if outcome == "failed" or seen.get(node) == "failed":
        seen[node] = "failed"
    elif outcome == "skipped":
        seen[node] = "skipped"
    elif outcome == "passed" and when == "call" and seen.get(node) != "skipped":
        seen[node] = "passed"


def doubt(told: Testimony, cases: Sequence[Told], required: Sequence[str] = ()) -> str:
    """Why the report of this run cannot be believed; empty when it can. Of `required` tests, where there are some."""
    if not told.begun:
        return ""
    if not told.finished:
        return "the test runner was ended from inside before it was finished, so its report is not its own"
    if told.canary_failed is False:
        return "a test that must fail passed: somebody has changed the test runner"
    if told.problem:
        return f"the test runner could not be tried with a test that must fail: {told.problem}"
    seen, reported = Reported(told.cases), Reported(cases)
    for case in [case for name in required for case in reported.find(name)] if required else cases:
        if case.status == "passed":
            found = [other.status for other in seen.find(case.whole_name) or _called(case.name, told.cases)]
            if not found or "failed" in found:
                how = "failed" if found else "was not run"
                return f"the report says that {case.whole_name} passed, and it {how}: the report is forged"
    return ""


def _called(name: str, cases: Sequence[Told]) -> list[Told]:
    """By the last part of the name: a runner may be told to put something before the names in its report."""
    return [case for case in cases if case.name.endswith((f"::{name}", f".{name}"))]
