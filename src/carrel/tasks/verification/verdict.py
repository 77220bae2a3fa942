"""Turn the test cases of one or more runs into a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from carrel.tasks.sample import Sample
from carrel.tasks.verification.test_cases import ReportedTests, TestCase
from carrel.wire.verification import Integrity, Standing, TestReport, VerificationResult

LONGEST_MESSAGE = 4000
"""Characters of one test's message in a result."""


class TestRun(BaseModel):
    """What one run of the test command came to."""

    __test__ = False

    cases: list[TestCase] = []
    exit_code: int = 0
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    """Why this was no run of the tests; empty when it was one."""
    broken: str = ""
    """How the code under test ended the tests before there was a result; empty when it did not."""
    by_exit_code: bool = False
    """Whether there is nothing to go by but the exit code."""
    integrity: Integrity = "unknown"
    remarks: list[str] = []
    """What supports `integrity`, in words."""


def standing(cases: Sequence[TestCase]) -> Standing:
    """Of the tests that share a name: passed only when all of them did."""
    if not cases:
        return "missing"
    found = {case.status for case in cases}
    return "failed" if "failed" in found else "skipped" if "skipped" in found else "passed"


def required_of(sample: Sample) -> list[str]:
    return list(dict.fromkeys([*sample.fail_to_pass, *sample.pass_to_pass]))


def satisfied(sample: Sample, run: TestRun) -> bool:
    """Whether this run alone is a success."""
    if run.problem:
        return False
    wanted = required_of(sample)
    if not wanted:
        return run.exit_code == 0 and not any(case.status == "failed" for case in run.cases)
    reported = ReportedTests(run.cases)
    return all(standing(reported.find(name)) == "passed" for name in wanted)


def claims_something(sample: Sample, run: TestRun) -> bool:
    """Whether this run speaks for who is judged. Where it does not, whether it is to be believed is no question: source
    that cannot be imported stops a test runner as well as somebody who wants to stop it."""
    wanted = required_of(sample)
    if not wanted:
        return run.exit_code == 0 or any(case.status == "passed" for case in run.cases)
    reported = ReportedTests(run.cases)
    return any(standing(reported.find(name)) == "passed" for name in wanted)


def verdict(sample: Sample, runs: Sequence[TestRun]) -> VerificationResult:
    """Of all runs of the test command; a test counts as passed when it passed in one of them."""
    told = _counts(runs[-1])
    told.attempts = len(runs)
    told.execution_duration_seconds = sum(run.seconds for run in runs)
    told.tool = sample.verifier
    real = [run for run in runs if not run.problem]
    told.evidence += [f"run {number}: {run.problem}" for number, run in enumerate(runs, 1) if run.problem]
    told.integrity = _integrity([run.integrity for run in runs])
    remarks = list(dict.fromkeys(remark for run in runs for remark in run.remarks))
    if not real:
        told.evidence += remarks
        told.required = dict.fromkeys(required_of(sample), "missing")
        told.missing = required_of(sample)
        told.outcome = "tests_did_not_run"
        _judge_broken(runs, told)
        return told
    told.suite_ran = True
    if required_of(sample):
        _judge_by_lists(sample, real, told)
    else:
        _judge_by_all(sample, real, told)
    if told.is_success:
        told.outcome = "solved" if satisfied(sample, runs[0]) else "flaky"
        told.score = 1.0
    elif sample.fail_to_pass and not any(how != "missing" for how in told.required.values()):
        _judge_by_strangers(told)
        _judge_broken(runs, told)
    else:
        told.outcome = "partly" if told.score > 0 else "not_solved"
    told.evidence += remarks
    return told


def _integrity(found: Sequence[Integrity]) -> Integrity:
    return "suspicious" if "suspicious" in found else "unknown" if "unknown" in found else "clean"


def _judge_by_lists(sample: Sample, runs: list[TestRun], told: VerificationResult) -> None:
    each = [{name: standing(report.find(name)) for name in required_of(sample)} for report in map(_reported, runs)]
    for name in required_of(sample):
        seen = [run[name] for run in each]
        told.required[name] = "passed" if "passed" in seen else seen[-1]
        if "passed" in seen and "failed" in seen:
            told.flaky.append(name)
    told.missing = [name for name, how in told.required.items() if how == "missing"]
    told.is_success = all(how == "passed" for how in told.required.values())
    told.score = _part(sample.fail_to_pass, told) * _part(sample.pass_to_pass, told)
    for kind in ("skipped", "missing"):
        names = [name for name, how in told.required.items() if how == kind]
        if names:
            told.evidence.append(f"{kind}, which counts as failed: {', '.join(names[:10])}{' …' * (len(names) > 10)}")


def _judge_by_strangers(told: VerificationResult) -> None:
    """None of the sample's tests was seen. What failed instead, as a file that cannot be imported, is why; without
    anything that failed, something else was run."""
    told.evidence.append("the report tells of none of the sample's tests")
    if told.failures:
        told.outcome = "not_solved"
        told.evidence += [f"{each.name} failed: {_reason(each.message)}" for each in told.failures[:3]]
    else:
        told.outcome, told.suite_ran = "tests_did_not_run", False


def _judge_broken(runs: Sequence[TestRun], told: VerificationResult) -> None:
    """Source that its tests cannot load, or that ended them by a signal, does not solve the sample."""
    if told.outcome == "tests_did_not_run" and all(run.broken for run in runs):
        told.outcome = "not_solved"
        told.evidence.insert(0, runs[-1].broken)


def _reason(message: str) -> str:
    """The line of a message that says most: the last one of a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "nothing is said why")[:300]


def _reported(run: TestRun) -> ReportedTests:
    return ReportedTests(run.cases)


def _part(names: list[str], told: VerificationResult) -> float:
    return sum(told.required[name] == "passed" for name in names) / len(names) if names else 1.0


def _judge_by_all(sample: Sample, runs: list[TestRun], told: VerificationResult) -> None:
    told.is_success = any(satisfied(sample, run) for run in runs)
    last = runs[-1]
    counted = [case for case in last.cases if case.status != "skipped"]
    passed = sum(case.status == "passed" for case in counted)
    told.score = 1.0 if told.is_success else passed / len(counted) if counted and passed < len(counted) else 0.0
    if last.by_exit_code:
        told.evidence.append(f"there is no report; the command's exit code {last.exit_code} decides")
    elif last.exit_code and passed == len(counted):
        told.evidence.append(f"no test failed, and yet the command ended with {last.exit_code}")


def _counts(run: TestRun) -> VerificationResult:
    groups: dict[str, list[TestCase]] = {"passed": [], "failed": [], "skipped": []}
    for case in run.cases:
        groups[case.status].append(case)
    lists = {kind: [_told(case) for case in cases] for kind, cases in groups.items()}
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


def _told(case: TestCase) -> TestReport:
    message = case.message
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]}\n[… {len(message) - LONGEST_MESSAGE} characters left out …]\n"
        message += case.message[-LONGEST_MESSAGE // 2 :]
    return TestReport(name=case.whole_name, message=message)
