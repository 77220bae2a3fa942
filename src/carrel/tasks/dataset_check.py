"""Check a dataset: judge each sample without and with its own patch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from carrel.errors import CarrelError
from carrel.execution.config import Mount
from carrel.tasks.environment import PreparedSample, open_executor, prepare_sample
from carrel.tasks.runner import in_parallel
from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import Changes
from carrel.tasks.verification.verifier import grade, grade_patch, verify
from carrel.wire.verification import VerificationResult

_MOST_NAMES = 5


class CheckResult(BaseModel):
    """What checking one sample has found."""

    sample_id: str
    status: Literal["right", "wrong", "not_checked"]
    """`not_checked`: this machine lacks something that the sample needs."""
    faults: list[str] = []
    before: str = ""
    """The outcome without the patch."""
    after: str = ""
    """The outcome with it."""
    tests: int = 0
    """The number of tests in the report with the patch."""
    seconds: float = 0.0


async def check(
    samples: Sequence[Sample],
    *,
    cache: Path | None = None,
    workers: int = 2,
    on_result: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Check all samples, several at a time; the results are in their order. `on_result` is called after each."""

    async def one(sample: Sample) -> CheckResult:
        result = await check_sample(sample, cache)
        on_result(result)
        return result

    return await in_parallel(one, samples, workers)


async def check_sample(sample: Sample, cache: Path | None = None) -> CheckResult:
    """Check that `fail_to_pass` fail before and pass after the patch, and `pass_to_pass` pass both times.

    Never raises for what a sample does; the result has the faults."""
    began = time.perf_counter()
    result = CheckResult(sample_id=sample.sample_id, status="right")
    missing = sample.environment.missing()
    if missing:
        result.status, result.faults = "not_checked", [f"this machine has no {' and no '.join(missing)}"]
        return result
    try:
        prepared = await prepare_sample(sample, cache)
        before = await grade(sample, Changes(), cache=cache, prepared=prepared)
        after = await _grade_solution(sample, prepared)
    except (CarrelError, OSError) as problem:
        result.status, result.faults = "wrong", [str(problem) or type(problem).__name__]
    else:
        result.before, result.after, result.tests = before.outcome, after.outcome, after.total
        result.faults = faults_of(sample, before, after)
        result.status = "wrong" if result.faults else "right"
    result.seconds = time.perf_counter() - began
    return result


async def _grade_solution(sample: Sample, prepared: PreparedSample) -> VerificationResult:
    """Judge the sample's own patch, or what the command of its solution leaves."""
    if sample.solution is None:
        return await grade_patch(sample, sample.patch, prepared=prepared)
    executor = await open_executor(prepared, mounts=(Mount(source=sample.solution, at="/solution"),))
    try:
        done = await executor.exec(sample.solve, timeout=sample.agent_timeout)
        result = await verify(sample, executor, prepared=prepared)
    finally:
        await executor.close()
    if not done.success:
        last = (done.stderr.strip() or done.stdout.strip())[-300:]
        result.evidence.append(f"the command of the solution ended with {done.exit_code}: {last}")
    return result


def faults_of(sample: Sample, before: VerificationResult, after: VerificationResult) -> list[str]:
    """What is wrong with a sample, by its results without and with its patch."""
    for result in (before, after):
        if result.outcome == "infrastructure_failed":
            return [f"it could not be judged: {'; '.join(result.evidence) or 'the reason is unknown'}"]
    faults = []
    if not sample.patch.strip() and sample.solution is None:
        faults.append("it has no patch, so it is unknown whether it can be solved")
    faults += _of_lists(sample, before, after) if sample.fail_to_pass or sample.pass_to_pass else _of_all(before, after)
    both = sorted(set(sample.fail_to_pass) & set(sample.pass_to_pass))
    if both:
        faults.append(f"in fail_to_pass and in pass_to_pass: {_names(both)}")
    if after.outcome == "flaky":
        faults.append(f"with the patch it passes only sometimes: {_names(after.flaky) or 'see its output'}")
    if faults and after.left_out and not after.is_success:
        kept = [f"{path} ({why})" for path, why in after.left_out.items()]
        faults.append(f"these files of the patch were not judged: {_names(kept)}")
    return faults


def _of_lists(sample: Sample, before: VerificationResult, after: VerificationResult) -> list[str]:
    faults = []
    if not sample.fail_to_pass:
        faults.append("it has no fail_to_pass: it counts as solved without any change")
    if not after.suite_ran:
        return [*faults, f"with the patch the tests do not run: {'; '.join(after.evidence) or 'there is no report'}"]
    for wanted, result, names, words in (
        ("passed", before, sample.fail_to_pass, "in fail_to_pass, and passes without the patch"),
        ("", after, sample.fail_to_pass, "in fail_to_pass, and {how} with the patch"),
        ("", before, sample.pass_to_pass, "in pass_to_pass, and {how} without the patch"),
        ("", after, sample.pass_to_pass, "in pass_to_pass, and {how} with the patch"),
    ):
        for how, verb in (("passed", ""), ("failed", "fails"), ("skipped", "is skipped"), ("missing", "is not run")):
            if (how == "passed") == (wanted == "passed"):
                found = [name for name in names if result.required.get(name, "missing") == how]
                if found:
                    faults.append(f"{words.format(how=verb)}: {_names(found)}")
    return faults


def _of_all(before: VerificationResult, after: VerificationResult) -> list[str]:
    faults = []
    if before.is_success:
        faults.append("it is solved without the patch")
    if not after.is_success:
        failing = _names([test.name for test in after.failures])
        faults.append(f"it is not solved with the patch: {failing or '; '.join(after.evidence) or after.outcome}")
    return faults


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
