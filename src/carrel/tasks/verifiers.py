"""The kinds of verifier: runs of a sample's command in, a result out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carrel.errors import ReportUnreadable
from carrel.tasks.command_run import Ran
from carrel.tasks.reports import grade_in
from carrel.tasks.sample import Sample, Verifier
from carrel.tasks.verdict import Run, VerificationResult, satisfied, verdict

Judge = Callable[[Sample, Sequence[Ran]], VerificationResult]


def judge(sample: Sample, ran: Sequence[Ran]) -> VerificationResult:
    """The result of these runs, the last of which may have been a success."""
    return JUDGES[sample.verifier](sample, ran)


def succeeded(sample: Sample, ran: Ran) -> bool:
    """Whether another run would change nothing for the better."""
    if sample.verifier == "test_suite":
        return satisfied(sample, ran.run)
    return judge(sample, [ran]).is_success


def _test_suite(sample: Sample, ran: Sequence[Ran]) -> VerificationResult:
    return verdict(sample, [each.run for each in ran])


def _findings(sample: Sample, ran: Sequence[Ran]) -> VerificationResult:
    """A linter or an analyzer: its SARIF decides where it writes one, else its exit code."""
    last = ran[-1]
    run = last.run.model_copy()
    if last.kind == "sarif" and not run.problem:
        # Linters end with 1 when they found something; what they found is the verdict.
        run.exit_code = 0
    result = verdict(_without_lists(sample), [*(each.run for each in ran[:-1]), run])
    result.exit_code = last.run.exit_code
    if result.suite_ran and not result.is_success:
        result.outcome, result.score = "not_solved", 0.0
        if result.failed:
            result.evidence.append(f"{result.failed} findings")
    return result


def _without_lists(sample: Sample) -> Sample:
    return sample.model_copy(update={"fail_to_pass": [], "pass_to_pass": []})


def _custom(sample: Sample, ran: Sequence[Ran]) -> VerificationResult:
    """A grader of the sample's own, which prints JSON with a score."""
    last = ran[-1]
    result = verdict(_without_lists(sample), [_bare(each.run) for each in ran])
    result.is_success, result.score, result.evidence = False, 0.0, []
    if last.run.problem:
        result.suite_ran, result.outcome = False, "tests_did_not_run"
        result.evidence.append(last.run.problem)
        return result
    try:
        grade = grade_in(last.report or "")
    except ReportUnreadable as problem:
        result.suite_ran, result.outcome = False, "tests_did_not_run"
        result.evidence.append(str(problem))
        return result
    result.suite_ran, result.is_success, result.score = True, grade.is_success, grade.score
    result.details = grade.evidence
    if grade.message:
        result.evidence.append(grade.message)
    if grade.is_success:
        result.outcome = "solved" if len(ran) == 1 else "flaky"
    else:
        result.outcome = "partly" if grade.score > 0 else "not_solved"
    return result


def _bare(run: Run) -> Run:
    return run.model_copy(update={"by_exit_code": False})


JUDGES: dict[Verifier, Judge] = {
    "test_suite": _test_suite,
    "linter": _findings,
    "static_analysis": _findings,
    "custom": _custom,
}
