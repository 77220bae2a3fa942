"""Judge changes to a sample: apply them in a fresh workspace and run the sample's tests there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from carrel.errors import CarrelError, ConfigurationError, PlaceLost, ReportUnreadable, WorkerLost
from carrel.execution import temp_dirs
from carrel.execution.executor import Executor
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.tasks.environment import PreparedSample, open_executor, prepare_sample
from carrel.tasks.sample import Sample, Verifier
from carrel.tasks.verification import recorder_log
from carrel.tasks.verification.changes import Change, Changes, apply_changes, apply_patch, drop_unsafe, read_changes
from carrel.tasks.verification.command import CommandRun, run_command, watch
from carrel.tasks.verification.integrity import reasons_in
from carrel.tasks.verification.protected_files import Folder, Protection, restore_test_settings
from carrel.tasks.verification.reports import grade_in
from carrel.tasks.verification.verdict import TestRun, satisfied, verdict
from carrel.wire.verification import VerificationResult

Judge = Callable[[Sample, Sequence[CommandRun]], VerificationResult]


def judge(sample: Sample, ran: Sequence[CommandRun]) -> VerificationResult:
    """The result of these runs, the last of which may have been a success."""
    return JUDGES[sample.verifier](sample, ran)


def succeeded(sample: Sample, ran: CommandRun) -> bool:
    """Whether another run would change nothing for the better."""
    if sample.verifier == "test_suite":
        return satisfied(sample, ran.run)
    return judge(sample, [ran]).is_success


def _test_suite(sample: Sample, ran: Sequence[CommandRun]) -> VerificationResult:
    return verdict(sample, [each.run for each in ran])


def _findings(sample: Sample, ran: Sequence[CommandRun]) -> VerificationResult:
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


def _custom(sample: Sample, ran: Sequence[CommandRun]) -> VerificationResult:
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


def _bare(run: TestRun) -> TestRun:
    return run.model_copy(update={"by_exit_code": False})


JUDGES: dict[Verifier, Judge] = {
    "test_suite": _test_suite,
    "linter": _findings,
    "static_analysis": _findings,
    "custom": _custom,
}


SHOWN_OUTPUT = 256 * 1024
"""Characters of each stream that a result holds; `keep` has all of it."""
MOST_LISTED = 200


async def verify(
    sample: Sample,
    place: Executor,
    *,
    cache: Path | None = None,
    keep: Path | None = None,
    prepared: PreparedSample | None = None,
) -> VerificationResult:
    """Judge what was done in a place, as it is now; the place itself is only read.

    Never raises for what the sample or the place did: the outcome says so. `keep` is a folder for the whole output.
    """
    began = time.perf_counter()
    try:
        # A place that died was opened anew, without what was done in it.
        if lost := getattr(place, "lost", ""):
            raise PlaceLost(f"there is nothing to judge: {lost}")
        ready = prepared or await prepare_sample(sample, cache)
        async with place.still if isinstance(place, SubprocessExecutor) else nullcontext():
            work = await read_changes(place, protection_for(ready).why, ready.workspace)
    except (CarrelError, OSError) as problem:
        return failed(sample, problem)
    result = await grade(sample, work, cache=cache, keep=keep, prepared=ready)
    result.overhead_seconds = time.perf_counter() - began - result.execution_duration_seconds
    return result


async def grade_patch(
    sample: Sample,
    patch: str,
    *,
    cache: Path | None = None,
    keep: Path | None = None,
    prepared: PreparedSample | None = None,
) -> VerificationResult:
    """The same for somebody's work that is a patch."""
    try:
        ready = prepared or await prepare_sample(sample, cache)
        work = await changes_of_patch(ready, patch)
    except (CarrelError, OSError) as problem:
        return failed(sample, problem)
    return await grade(sample, work, cache=cache, keep=keep, prepared=ready)


async def changes_of_patch(prepared: PreparedSample, patch: str) -> Changes:
    """What a patch changes in the sample's files; PatchRefused when it does not apply."""
    if not patch.strip():
        return Changes()
    place = await open_executor(prepared, network=False)
    try:
        await apply_patch(place, patch, "the patch")
        return await read_changes(place, base=prepared.workspace)
    finally:
        await place.close()


async def grade(
    sample: Sample,
    changes: Changes,
    *,
    cache: Path | None = None,
    keep: Path | None = None,
    prepared: PreparedSample | None = None,
) -> VerificationResult:
    """Judge these changes to the sample's files; no changes at all are judged too."""
    began = time.perf_counter()
    try:
        ready = prepared or await prepare_sample(sample, cache)
        if not sample.verify.command.strip():
            raise ConfigurationError(f"{sample.sample_id}: verify has no command, so nothing can be judged")
        work = protected(ready, changes)
        ran: list[CommandRun] = []
        for _ in range(1 + sample.verify.retries):
            ran.append(await _one_run(ready, work))
            if await asyncio.to_thread(succeeded, sample, ran[-1]):
                break
    except (CarrelError, OSError) as problem:
        return failed(sample, problem)
    result = await asyncio.to_thread(judge, sample, ran)
    if "filesystem_isolation" not in SubprocessExecutor(ready.config).supported_capabilities():
        result.evidence.append("no sandbox is in force here, so nothing keeps an agent's processes from the judging")
    if sample.verifier == "test_suite":
        base = Folder(ready.workspace)
        reasons = await asyncio.to_thread(reasons_in, [(each, base.read(each.path)) for each in work.entries], sample)
        result.evidence += reasons
        if reasons:
            result.integrity = "suspicious"
    if keep is not None:
        _keep(ran, keep)
    result.stdout, result.stderr = shortened(result.stdout), shortened(result.stderr)
    result.carried_over = [change.path for change in work.entries[:MOST_LISTED]]
    result.left_out = dict(work.left_out[:MOST_LISTED])
    result.overhead_seconds = time.perf_counter() - began - result.execution_duration_seconds
    return result


def failed(sample: Sample, problem: Exception) -> VerificationResult:
    """No verdict on the work: carrel, the machine or the sample is to blame, and it may be tried again."""
    told = str(problem) or type(problem).__name__
    return VerificationResult(
        tool=sample.verifier, outcome="infrastructure_failed", evidence=[f"{type(problem).__name__}: {told}"]
    )


def protection_for(prepared: PreparedSample) -> Protection:
    folders = prepared.python_folders
    modules = _site_modules(folders) | recorder_log.MODULES
    return Protection(prepared.sample, Folder(prepared.workspace), modules, Folder(prepared.files.folder))


def protected(prepared: PreparedSample, changes: Changes) -> Changes:
    """Of the changes, those to source; what decides the verdict stays as the sample has it."""
    guard, base = protection_for(prepared), Folder(prepared.workspace)
    linting = prepared.sample.verifier in ("linter", "static_analysis")
    kept: list[Change] = []
    left_out = list(changes.left_out)
    for change in changes.entries:
        reason = guard.why(change.path) or guard.why_content(change.path, change.content)
        name = PurePosixPath(change.path).name
        if reason is None and guard.is_rebuilt(change.path):
            left_out.append((change.path, "built, not written; it is built again"))
            change = Change(change.path, "deleted")
        if reason is None and change.kind == "file":
            command = prepared.sample.verify.command
            content = restore_test_settings(
                name, base.read(change.path), change.content, linting=linting, command=command
            )
            if content is None:
                reason = "its test settings were changed in a way that cannot be taken out"
            elif content != change.content:
                left_out.append((change.path, "its test settings are the sample's; the rest is carried over"))
                change = replace(change, content=content)
        if reason is None:
            kept.append(change)
        else:
            left_out.append((change.path, reason))
    return drop_unsafe(Changes(tuple(kept), tuple(left_out)), base)


async def _one_run(prepared: PreparedSample, work: Changes) -> CommandRun:
    """In a place of its own: no process, variable or file of whoever worked on it but their source."""
    sample = prepared.sample
    files = temp_dirs.new_folder("sample-files")
    place: Executor | None = None
    try:
        place = await open_executor(prepared, mounts=recorder_log.mounts(sample, files, prepared.workspace))
        try:
            await apply_changes(work, place, Folder(prepared.workspace))
            await apply_patch(place, sample.test_patch, "the sample's test_patch")
        except WorkerLost as problem:
            raise CarrelError(f"the place was lost before the tests began: {problem}") from None
        theirs = [change.path for change in work.entries]
        shown = await recorder_log.show_files(place, sample, files, prepared.workspace, theirs)
        return await run_command(place, sample, await watch(place, prepared, protection_for(prepared)), shown)
    finally:
        if place is not None:
            await place.close()
        await asyncio.to_thread(temp_dirs.remove, files)


@lru_cache(maxsize=64)
def _site_modules(folders: tuple[str, ...]) -> frozenset[str]:
    """What can be imported from an environment's site-packages, by its first name."""
    found = {
        path.name.partition(".")[0] for folder in folders for path in Path(folder).glob("lib/python3*/site-packages/*")
    }
    return frozenset(name for name in found if name.isidentifier() and name not in ("tests", "test", "docs", "scripts"))


def shortened(text: str) -> str:
    """Its beginning and its end, and how much was left out between them."""
    if len(text) <= SHOWN_OUTPUT:
        return text
    half = SHOWN_OUTPUT // 2
    return f"{text[:half]}\n[… {len(text) - SHOWN_OUTPUT} characters left out …]\n{text[-half:]}"


def _keep(ran: list[CommandRun], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(ran, 1):
        for name, text in (("stdout", each.run.stdout), ("stderr", each.run.stderr), ("report", each.report)):
            if text is not None:
                (folder / f"{name}-{number}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
