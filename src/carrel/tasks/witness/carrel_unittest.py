"""Tells the host what unittest's own results say of each test, before the project's code is imported."""

import unittest
from typing import Any
from unittest.result import TestResult

from carrel_speaking import speaker

_WORDS = {
    "addSuccess": "passed",
    "addExpectedFailure": "passed",
    "addFailure": "failed",
    "addError": "failed",
    "addUnexpectedSuccess": "failed",
    "addSkip": "skipped",
}


class _Canary(unittest.TestCase):
    """A test that cannot pass; where it is said to, somebody has changed what passing means."""

    def runTest(self) -> None:
        raise AssertionError("as it should")


def attend() -> None:
    """Listen to every result of this process, where the host wants to know."""
    say = speaker()
    if say is None:
        return
    say(event="begun")
    trying: list[bool] = []

    def heard(name: str, outcome: str) -> None:
        honest: Any = getattr(TestResult, name)

        def add(self: Any, test: Any, *more: Any) -> Any:
            if not trying:
                say(event="test", id=test.id(), when="call", outcome=outcome)
            return honest(self, test, *more)

        setattr(TestResult, name, add)

    for name, outcome in _WORDS.items():
        heard(name, outcome)
    honest_part: Any = TestResult.addSubTest
    honest_stop: Any = TestResult.stopTestRun

    def add_part(self: Any, test: Any, subtest: Any, error: Any) -> Any:
        if error is not None and not trying:
            say(event="test", id=test.id(), when="call", outcome="failed")
        return honest_part(self, test, subtest, error)

    def stop(self: Any) -> Any:
        trying.append(True)
        result = TestResult()
        _Canary().run(result)
        trying.clear()
        say(event="canary", failed=len(result.failures) == 1)
        say(event="finished")
        return honest_stop(self)

    patched: Any = TestResult
    patched.addSubTest, patched.stopTestRun = add_part, stop
