"""Read reports: JUnit XML, SARIF, and the JSON of custom graders."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal
from xml.parsers import expat

from junitparser import JUnitXml, JUnitXmlError
from junitparser import TestCase as JUnitTestCase

from carrel.errors import ReportUnreadable
from carrel.tasks.verification.text_reports import cargo_cases, go_cases, looks_like, tap_cases, unittest_cases
from carrel.tasks.verification.verdict import TestCase

REWARDS = "/logs/verifier"
"""Where Harbor's tests write reward.json or reward.txt."""
ReportKind = Literal["junit", "go", "cargo", "tap", "unittest", "sarif", "json", "exit_code"]
MAX_TESTS = 500_000
"""Tests in one JUnit report; the largest known suites have half as many."""
MAX_DEPTH = 64
"""Nested elements; real reports have about five."""
_FAILING_LEVELS = ("error", "warning")


def kind_of_report(text: str, command: str = "") -> ReportKind:
    """Detect the kind of a report; `exit_code` when it is none of them. `command` is the command that printed it."""
    start = text.lstrip("\ufeff \t\r\n")[:2000]
    if start.startswith("<") and re.search(r"<testsuites?\b|<testcase\b", text[:20_000]):
        return "junit"
    if start.startswith("{") and re.search(r'"(runs|\$schema)"', text[:20_000]) and "sarif" in text[:20_000].lower():
        return "sarif"
    return looks_like(text, command)


def cases_in(text: str, kind: ReportKind) -> list[TestCase]:
    """The tests of a report, in its order; ReportUnreadable says what is wrong with it."""
    match kind:
        case "junit":
            return _junit_cases(text)
        case "go":
            return go_cases(text)
        case "cargo":
            return cargo_cases(text)
        case "tap":
            return tap_cases(text)
        case "unittest":
            return unittest_cases(text)
        case "sarif":
            return _findings(text)
        case "json" | "exit_code":
            return []


def _junit_cases(text: str) -> list[TestCase]:
    _refuse_unsafe_xml(text)
    try:
        root: Any = JUnitXml.fromstring(text.encode("utf-8"))
    except JUnitXmlError as problem:
        raise ReportUnreadable(f"this is not a JUnit report: {problem}") from None
    case: Any = JUnitTestCase
    # At all depths: some runners nest suites, and node puts tests next to them.
    return [_junit_case(case.fromelem(element)) for element in root._elem.iter("testcase")]


def _junit_case(case: JUnitTestCase) -> TestCase:
    status: Literal["passed", "failed", "skipped"] = "passed"
    message = ""
    for result in case.result:
        outcome = {"Failure": "failed", "Error": "failed", "Skipped": "skipped"}.get(type(result).__name__)
        if outcome is None or status == "failed":
            continue
        status = "failed" if outcome == "failed" else "skipped"
        message = "\n".join(part for part in (result.message, result.text) if part)
    # Jest's reporter puts a space before the name of a test that is in no group.
    return TestCase(str(case.classname or "").strip(), str(case.name or "").strip(), status, message, _seconds(case))


def _seconds(case: JUnitTestCase) -> float:
    try:
        return float(case.time or 0.0)
    except ValueError:  # Some runners write 1,234.5; the time decides nothing.
        return 0.0


def _refuse_unsafe_xml(text: str) -> None:
    """A report cannot be trusted: refuse entities, and nesting so deep that it could crash this process."""
    depth = tests = 0

    def opened(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth, tests
        depth += 1
        tests += name == "testcase"
        if tests > MAX_TESTS:
            raise ReportUnreadable(f"the JUnit report has more than {MAX_TESTS:,} tests")
        if depth > MAX_DEPTH:
            raise ReportUnreadable(f"the JUnit report is more than {MAX_DEPTH} elements deep")

    def closed(name: str) -> None:
        nonlocal depth
        depth -= 1

    def declared(*about: Any) -> None:
        raise ReportUnreadable("the JUnit report declares a document type, which none needs")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = opened, closed
    parser.StartDoctypeDeclHandler = declared
    try:
        parser.Parse(text.encode("utf-8"), True)
    except expat.ExpatError as problem:
        raise ReportUnreadable(f"the JUnit report is not XML: {problem}") from None


def _findings(text: str) -> list[TestCase]:
    """Read SARIF: findings become failed tests, named by rule and location, and notes become skipped ones."""
    try:
        runs = json.loads(text)["runs"]
        return [_finding(result, _levels(run)) for run in runs for result in run.get("results") or []]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ReportUnreadable(f"the SARIF report cannot be read: {type(problem).__name__}: {problem}") from None


def _levels(run: dict[str, Any]) -> dict[str, str]:
    """The default level of each rule."""
    rules = run.get("tool", {}).get("driver", {}).get("rules") or []
    return {rule["id"]: rule.get("defaultConfiguration", {}).get("level", "warning") for rule in rules if "id" in rule}


def _finding(result: dict[str, Any], levels: dict[str, str]) -> TestCase:
    rule = str(result.get("ruleId") or "finding")
    level = result.get("level") or levels.get(rule, "warning")
    where = ""
    for location in (result.get("locations") or [])[:1]:
        physical = location.get("physicalLocation", {})
        line = physical.get("region", {}).get("startLine")
        where = str(physical.get("artifactLocation", {}).get("uri", "")) + (f":{line}" if line else "")
    counts = level in _FAILING_LEVELS and not result.get("suppressions")
    message = str(result.get("message", {}).get("text", ""))
    return TestCase(where, rule, "failed" if counts else "skipped", message)


@dataclass(frozen=True)
class Grade:
    """The judgement of a sample's own grader."""

    score: float
    is_success: bool
    evidence: Any = None
    message: str = ""


def grade_in(text: str) -> Grade:
    """The last JSON object of the text that has a `score` from 0 to 1; `is_success` and `evidence` beside it."""
    for found in _objects(text):
        score = found.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ReportUnreadable(f"the grader's score must be a number from 0 to 1, not {score!r}")
        success = found.get("is_success", score >= 1)
        if not isinstance(success, bool):
            raise ReportUnreadable(f"the grader's is_success must be true or false, not {success!r}")
        return Grade(float(score), success, found.get("evidence"), str(found.get("message", "")))
    raise ReportUnreadable('the grader printed no JSON object with a "score"')


def grade_of_rewards(text: str) -> Grade:
    """The grade by Harbor's rewards: a number, or JSON of several, of which `reward` or the only one decides."""
    try:
        found = json.loads(text or "null")
        rewards = found if isinstance(found, dict) else {"reward": found}
        numbers = {name: float(value) for name, value in rewards.items() if type(value) in (int, float)}
        if len(numbers) != len(rewards) or not all(map(math.isfinite, numbers.values())):
            raise ValueError
    except (ValueError, OverflowError, RecursionError):
        shown = f"{text.strip()[:200]!r}, which is no number" if text.strip() else "nothing"
        raise ReportUnreadable(f"the tests wrote {shown} as their reward below {REWARDS}") from None
    decisive = numbers.get("reward", next(iter(numbers.values())) if len(numbers) == 1 else None)
    if decisive is None:
        names = ", ".join(sorted(numbers)) or "none"
        raise ReportUnreadable(f"of several rewards, the one called `reward` decides; there is: {names}")
    return Grade(min(max(decisive, 0.0), 1.0), decisive >= 1, numbers, f"reward {decisive:g}")


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects with a score: the whole text, or its lines from the last to the first."""
    found = []
    for piece in (text, *reversed(text.splitlines())):
        if '"score"' not in piece or not piece.strip().startswith("{"):
            continue
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and "score" in value:
            found.append(value)
            break
    return found
