"""Turn the test cases of one or more runs into a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from carrel.tasks.sample import Sample
from carrel.wire.verification import Integrity, Standing, TestReport, VerificationResult

Status = Literal["passed", "failed", "skipped"]
MAX_MESSAGE = 4000
"""Characters of one test's message in a result."""
_MAX_NAMES = 10


# --- test cases and their names -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TestCase:
    """One test in a report."""

    __test__ = False

    classname: str
    """The file, class, package or group of the test; each test runner has its own meaning of it."""
    name: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def whole_name(self) -> str:
        return f"{self.classname}::{self.name}" if self.classname else self.name


class ReportedTests:
    """The tests of a report, found by any of the names that test runners and the API use for them."""

    def __init__(self, cases: Sequence[TestCase]) -> None:
        self._by_name: dict[str, list[TestCase]] = defaultdict(list)
        self._by_bare_name: dict[str, list[TestCase]] = defaultdict(list)
        self._without_parameters: dict[str, list[TestCase]] = defaultdict(list)
        for case in cases:
            for name in _names_of(case):
                self._by_name[name].append(case)
            self._by_bare_name[case.name].append(case)
            head, parameters = _split(case.name)
            if parameters:
                for name in _names_of(TestCase(case.classname, head, case.status)):
                    self._without_parameters[name].append(case)

    def find(self, name: str) -> list[TestCase]:
        """The tests with this name: several when they share it, none when no such test ran.

        Tried in this order: the whole name; the bare name, when only one test has it; the name without parameters,
        which stands for all tests that differ in their parameters only.
        """
        name = name.strip()
        for table in (self._by_name, self._without_parameters):
            found = table.get(name) or table.get(_dotted(name))
            if found:
                return found
            unique = self._by_bare_name.get(name, [])
            if table is self._by_name and len(unique) == 1:
                return unique
        return []


def _names_of(case: TestCase) -> Iterable[str]:
    if not case.classname:
        return {case.name, _dotted(case.name)}
    return {
        f"{case.classname}::{case.name}",
        f"{case.classname}.{case.name}",
        _dotted(f"{case.classname}::{case.name}"),
    }


def _dotted(name: str) -> str:
    """Convert a node id to the form in pytest's report: `tests/test_a.py::TestX::test_y[1]` becomes
    `tests.test_a.TestX.test_y[1]`."""
    head, parameters = _split(name)
    file, *rest = head.split("::")
    if rest:
        file = file.removesuffix(".py").replace("/", ".").lstrip(".")
    return ".".join([file, *rest]) + parameters


def _split(name: str) -> tuple[str, str]:
    """A name and its parameters, which start at the first bracket and may contain anything."""
    cut = name.find("[")
    return (name, "") if cut < 0 or not name.endswith("]") else (name[:cut], name[cut:])


# --- runs -----------------------------------------------------------------------------------------------------------


class TestRun(BaseModel):
    """The outcome of one run of the test command."""

    __test__ = False

    cases: list[TestCase] = []
    exit_code: int = 0
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    """Why this does not count as a run of the tests; empty when it counts."""
    broken: str = ""
    """How the code under test ended the tests before there was a result; empty when it did not."""
    by_exit_code: bool = False
    """Whether the exit code is all there is to judge by."""
    integrity: Integrity = "unknown"
    remarks: list[str] = []
    """The reasons for `integrity`, in words."""


def standing(cases: Sequence[TestCase]) -> Standing:
    """The combined outcome of tests that share a name: passed only when all of them passed."""
    if not cases:
        return "missing"
    found = {case.status for case in cases}
    return "failed" if "failed" in found else "skipped" if "skipped" in found else "passed"


def required_tests(sample: Sample) -> list[str]:
    """The names of the tests that have to pass."""
    return list(dict.fromkeys([*sample.fail_to_pass, *sample.pass_to_pass]))


def is_satisfied(sample: Sample, run: TestRun) -> bool:
    """Whether this run alone is a success."""
    if run.problem:
        return False
    names = required_tests(sample)
    if not names:
        return run.exit_code == 0 and not any(case.status == "failed" for case in run.cases)
    reported = ReportedTests(run.cases)
    return all(standing(reported.find(name)) == "passed" for name in names)


def claims_success(sample: Sample, run: TestRun) -> bool:
    """Whether this run reports any success.

    Only such a run has to be checked for forgery: a run without any success is not solved in either case."""
    names = required_tests(sample)
    if not names:
        return run.exit_code == 0 or any(case.status == "passed" for case in run.cases)
    reported = ReportedTests(run.cases)
    return any(standing(reported.find(name)) == "passed" for name in names)


# --- the verdict ----------------------------------------------------------------------------------------------------


def make_verdict(sample: Sample, runs: Sequence[TestRun]) -> VerificationResult:
    """Judge all runs of the test command together; a test counts as passed when it passed in one of them."""
    result = _with_counts(runs[-1])
    result.attempts = len(runs)
    result.execution_duration_seconds = sum(run.seconds for run in runs)
    result.tool = sample.verifier
    valid = [run for run in runs if not run.problem]
    result.evidence += [f"run {number}: {run.problem}" for number, run in enumerate(runs, 1) if run.problem]
    result.integrity = _combine([run.integrity for run in runs])
    remarks = list(dict.fromkeys(remark for run in runs for remark in run.remarks))
    if not valid:
        result.evidence += remarks
        result.required = dict.fromkeys(required_tests(sample), "missing")
        result.missing = required_tests(sample)
        result.outcome = "tests_did_not_run"
        _judge_broken(runs, result)
        return result
    result.suite_ran = True
    if required_tests(sample):
        _judge_by_lists(sample, valid, result)
    else:
        _judge_by_all(sample, valid, result)
    if result.is_success:
        result.outcome = "solved" if is_satisfied(sample, runs[0]) else "flaky"
        result.score = 1.0
    elif sample.fail_to_pass and all(how == "missing" for how in result.required.values()):
        _judge_without_required(result)
        _judge_broken(runs, result)
    else:
        result.outcome = "partly" if result.score > 0 else "not_solved"
    result.evidence += remarks
    return result


def _combine(found: Sequence[Integrity]) -> Integrity:
    return "suspicious" if "suspicious" in found else "unknown" if "unknown" in found else "clean"


def _judge_by_lists(sample: Sample, runs: list[TestRun], result: VerificationResult) -> None:
    """Judge by the tests that the sample lists."""
    reports = [ReportedTests(run.cases) for run in runs]
    names = required_tests(sample)
    by_run = [{name: standing(report.find(name)) for name in names} for report in reports]
    for name in names:
        outcomes = [each[name] for each in by_run]
        result.required[name] = "passed" if "passed" in outcomes else outcomes[-1]
        if "passed" in outcomes and "failed" in outcomes:
            result.flaky.append(name)
    result.missing = [name for name, how in result.required.items() if how == "missing"]
    result.is_success = all(how == "passed" for how in result.required.values())
    result.score = _passed_part(sample.fail_to_pass, result) * _passed_part(sample.pass_to_pass, result)
    for kind in ("skipped", "missing"):
        found = [name for name, how in result.required.items() if how == kind]
        if found:
            more = " …" if len(found) > _MAX_NAMES else ""
            result.evidence.append(f"{kind}, which counts as failed: {', '.join(found[:_MAX_NAMES])}{more}")


def _judge_without_required(result: VerificationResult) -> None:
    """Judge a report that has none of the listed tests.

    Failures in it, such as a test file that cannot be imported, are the reason; without any, other tests were run."""
    result.evidence.append("the report has none of the sample's tests")
    if result.failures:
        result.outcome = "not_solved"
        result.evidence += [f"{each.name} failed: {_reason(each.message)}" for each in result.failures[:3]]
    else:
        result.outcome, result.suite_ran = "tests_did_not_run", False


def _judge_broken(runs: Sequence[TestRun], result: VerificationResult) -> None:
    """Source that cannot be loaded by the tests, or that killed them by a signal, does not solve the sample."""
    if result.outcome == "tests_did_not_run" and all(run.broken for run in runs):
        result.outcome = "not_solved"
        result.evidence.insert(0, runs[-1].broken)


def _reason(message: str) -> str:
    """The last line of a message, which is the most informative one of a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason was reported")[:300]


def _passed_part(names: list[str], result: VerificationResult) -> float:
    return sum(result.required[name] == "passed" for name in names) / len(names) if names else 1.0


def _judge_by_all(sample: Sample, runs: list[TestRun], result: VerificationResult) -> None:
    """Judge by the exit code and all reported tests, for a sample without lists."""
    result.is_success = any(is_satisfied(sample, run) for run in runs)
    last = runs[-1]
    counted = [case for case in last.cases if case.status != "skipped"]
    passed = sum(case.status == "passed" for case in counted)
    result.score = 1.0 if result.is_success else passed / len(counted) if counted and passed < len(counted) else 0.0
    if last.by_exit_code:
        result.evidence.append(f"there is no report; the command's exit code {last.exit_code} decides")
    elif last.exit_code and passed == len(counted):
        result.evidence.append(f"no test failed, and yet the command ended with {last.exit_code}")


def _with_counts(run: TestRun) -> VerificationResult:
    groups: dict[str, list[TestCase]] = {"passed": [], "failed": [], "skipped": []}
    for case in run.cases:
        groups[case.status].append(case)
    lists = {kind: [_report_of(case) for case in cases] for kind, cases in groups.items()}
    return VerificationResult(
        passed=len(groups["passed"]),
        failed=len(groups["failed"]),
        skipped=len(groups["skipped"]),
        total=len(run.cases),
        passes=lists["passed"],
        failures=lists["failed"],
        skips=lists["skipped"],
        stdout=run.stdout,
        stderr=run.stderr,
        exit_code=run.exit_code,
    )


def _report_of(case: TestCase) -> TestReport:
    message = case.message
    if len(message) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        message = f"{message[:half]}\n[… {len(message) - MAX_MESSAGE} characters left out …]\n{message[-half:]}"
    return TestReport(name=case.whole_name, message=message)
