"""Judge changes to a sample: apply them in a fresh workspace and run the sample's tests there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

from carrel.errors import CarrelError, ConfigurationError, ReportUnreadable, WorkerLost, WorkspaceLost
from carrel.execution import temp_dirs
from carrel.execution.config import Mount
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.tasks.environment import PreparedSample, TaskExecutor, open_executor, open_files, prepare_sample
from carrel.tasks.sample import Sample, VerifierKind
from carrel.tasks.verification.changes import (
    Change,
    Changes,
    apply_changes,
    apply_patch,
    drop_unsafe,
    read_changes,
)
from carrel.tasks.verification.command import CommandRun, guard_files, run_command
from carrel.tasks.verification.integrity import find_suspicious_uses
from carrel.tasks.verification.protected_files import Protection, SampleFolder, restore_test_settings
from carrel.tasks.verification.recorder_log import RECORDER_MODULES, recorder_mounts, write_manifest
from carrel.tasks.verification.reports import grade_in, grade_of_rewards
from carrel.tasks.verification.verdict import is_satisfied, make_verdict
from carrel.wire.verification import VerificationResult

SHOWN_OUTPUT = 256 * 1024
"""Characters of each stream that a result holds; the output folder of a `Verifier` has all of it."""
_MAX_LISTED = 200


class Verifier:
    """Judges work on a prepared sample, each run of the tests in a fresh workspace.

    Its methods never raise for what the sample or the work does: the outcome says so."""

    def __init__(self, prepared: PreparedSample, *, output_folder: Path | None = None) -> None:
        """`output_folder` gets the complete output and reports of the runs."""
        self.prepared = prepared
        self.sample = prepared.sample
        self._output_folder = output_folder

    async def verify_workspace(self, executor: TaskExecutor) -> VerificationResult:
        """Judge the changes in the workspace of an executor, as it is now; it is only read."""
        began = time.perf_counter()
        try:
            # After its processes have died, an executor starts again without the work that was done in it.
            if lost := getattr(executor, "lost", ""):
                raise WorkspaceLost(f"there is nothing to judge: {lost}")
            async with executor.still if isinstance(executor, SubprocessExecutor) else nullcontext():
                changes = await read_changes(executor, self._protection.protected_reason)
        except (CarrelError, OSError) as problem:
            return infrastructure_failure(self.sample, problem)
        result = await self.verify_changes(changes)
        result.overhead_seconds = time.perf_counter() - began - result.execution_duration_seconds
        return result

    async def verify_patch(self, patch: str) -> VerificationResult:
        """Judge a patch to the sample's files."""
        try:
            changes = await changes_of_patch(self.prepared, patch)
        except (CarrelError, OSError) as problem:
            return infrastructure_failure(self.sample, problem)
        return await self.verify_changes(changes)

    async def verify_changes(self, changes: Changes) -> VerificationResult:
        """Judge changes to the sample's files; `Changes()` for none."""
        began = time.perf_counter()
        try:
            if not self.sample.verify.command.strip():
                raise ConfigurationError(f"{self.sample.sample_id}: verify has no command, so nothing can be judged")
            source = self._source_changes(changes)
            runs: list[CommandRun] = []
            for _ in range(1 + self.sample.verify.retries):
                runs.append(await self._run_once(source))
                if await asyncio.to_thread(_succeeded, self.sample, runs[-1]):
                    break
        except (CarrelError, OSError) as problem:
            return infrastructure_failure(self.sample, problem)
        result = await asyncio.to_thread(_judge, self.sample, runs)
        if not runs[-1].is_isolated:
            result.evidence.append(
                "no sandbox is in force here, so nothing keeps an agent's processes from the judging"
            )
        if self.sample.verifier == "test_suite":
            changed = [(each, self._base.read(each.path)) for each in source.entries]
            reasons = await asyncio.to_thread(find_suspicious_uses, changed, self.sample)
            result.evidence += reasons
            if reasons:
                result.integrity = "suspicious"
        if self._output_folder is not None:
            _write_outputs(runs, self._output_folder)
        result.stdout, result.stderr = shorten(result.stdout), shorten(result.stderr)
        result.carried_over = [change.path for change in source.entries[:_MAX_LISTED]]
        result.left_out = dict(source.left_out[:_MAX_LISTED])
        result.overhead_seconds = time.perf_counter() - began - result.execution_duration_seconds
        return result

    @cached_property
    def _base(self) -> SampleFolder:
        return SampleFolder(self.prepared.workspace)

    @cached_property
    def _protection(self) -> Protection:
        return protection_for(self.prepared)

    def _source_changes(self, changes: Changes) -> Changes:
        """Of the changes, those to source; files that decide the verdict stay as the sample has them."""
        kept: list[Change] = []
        left_out = list(changes.left_out)
        for change in changes.entries:
            reason = self._protection.protected_reason(change.path)
            reason = reason or self._protection.binary_reason(change.path, change.content)
            if reason is None and self._protection.is_rebuilt(change.path):
                left_out.append((change.path, "built, not written; it is built again"))
                change = Change(change.path, "deleted")
            if reason is None and change.kind == "file":
                content = self._with_test_settings(change)
                if content is None:
                    reason = "its test settings were changed in a way that cannot be reverted"
                elif content != change.content:
                    left_out.append((change.path, "its test settings are the sample's; the rest is judged"))
                    change = replace(change, content=content)
            if reason is None:
                kept.append(change)
            else:
                left_out.append((change.path, reason))
        return drop_unsafe(Changes(tuple(kept), tuple(left_out)), self._base)

    def _with_test_settings(self, change: Change) -> bytes | None:
        return restore_test_settings(
            PurePosixPath(change.path).name,
            self._base.read(change.path),
            change.content,
            linting=self.sample.verifier in ("linter", "static_analysis"),
            command=self.sample.verify.command,
        )

    async def _run_once(self, source: Changes) -> CommandRun:
        """Run the tests in a new sandbox that has nothing of the agent's but these changes to source."""
        files = temp_dirs.new_folder("sample-files")
        executor: TaskExecutor | None = None
        base = self.prepared.workspace
        try:
            files.chmod(0o755)  # In a container the tests run as another user.
            mounts = recorder_mounts(self.sample, files, base)
            if self.sample.verify.tests is not None:
                mounts = (*mounts, Mount(source=self.sample.verify.tests, at="/tests"))
            executor = await open_executor(self.prepared, mounts=mounts)
            try:
                await self._apply(source, executor)
            except WorkerLost as problem:
                raise CarrelError(f"the sandbox ended before the tests started: {problem}") from None
            changed = [change.path for change in source.entries]
            manifest = await write_manifest(executor, self.sample, files, base, changed)
            guard = await guard_files(executor, self.prepared, self._protection)
            return await run_command(executor, self.sample, guard, manifest)
        finally:
            if executor is not None:
                await executor.close()
            await asyncio.to_thread(temp_dirs.remove, files)

    async def _apply(self, source: Changes, executor: TaskExecutor) -> None:
        """Apply the changes and the test patch to a new workspace; an image need not have git."""
        if self.prepared.in_container and self.sample.test_patch.strip():
            files = await open_files(self.prepared)
            try:
                await self._apply_in_place(source, files)
                source = await read_changes(files)
            finally:
                await files.close()
            await apply_changes(source, executor, self._base)
        else:
            await self._apply_in_place(source, executor)

    async def _apply_in_place(self, source: Changes, executor: TaskExecutor) -> None:
        await apply_changes(source, executor, self._base)
        await apply_patch(executor, self.sample.test_patch, "the sample's test_patch")


async def verify(
    sample: Sample,
    executor: TaskExecutor,
    *,
    cache: Path | None = None,
    keep: Path | None = None,
    prepared: PreparedSample | None = None,
) -> VerificationResult:
    """Judge the work in a workspace, as it is now; the workspace is only read.

    Never raises for what the sample or the work does: the outcome says so. `keep` is a folder for the whole output."""
    began = time.perf_counter()
    verifier = await _verifier(sample, cache, keep, prepared)
    if isinstance(verifier, VerificationResult):
        return verifier
    result = await verifier.verify_workspace(executor)
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
    """Judge work that is a patch."""
    verifier = await _verifier(sample, cache, keep, prepared)
    return verifier if isinstance(verifier, VerificationResult) else await verifier.verify_patch(patch)


async def grade(
    sample: Sample,
    changes: Changes,
    *,
    cache: Path | None = None,
    keep: Path | None = None,
    prepared: PreparedSample | None = None,
) -> VerificationResult:
    """Judge these changes to the sample's files; `Changes()` for none."""
    verifier = await _verifier(sample, cache, keep, prepared)
    return verifier if isinstance(verifier, VerificationResult) else await verifier.verify_changes(changes)


async def _verifier(
    sample: Sample, cache: Path | None, keep: Path | None, prepared: PreparedSample | None
) -> Verifier | VerificationResult:
    """A verifier; a result when the sample cannot be prepared."""
    try:
        prepared = prepared or await prepare_sample(sample, cache)
    except (CarrelError, OSError) as problem:
        return infrastructure_failure(sample, problem)
    return Verifier(replace(prepared, sample=sample), output_folder=keep)


async def changes_of_patch(prepared: PreparedSample, patch: str) -> Changes:
    """The changes that a patch makes to the sample's files; PatchRefused when it does not apply."""
    if not patch.strip():
        return Changes()
    executor = await open_files(prepared)
    try:
        await apply_patch(executor, patch, "the patch")
        return await read_changes(executor)
    finally:
        await executor.close()


def infrastructure_failure(sample: Sample, problem: Exception) -> VerificationResult:
    """No verdict on the work: carrel, the machine or the sample failed, and it can be tried again."""
    message = str(problem) or type(problem).__name__
    return VerificationResult(
        tool=sample.verifier, outcome="infrastructure_failed", evidence=[f"{type(problem).__name__}: {message}"]
    )


_NO_MODULES = {"tests", "test", "docs", "scripts"}
"""Folders that some distributions install by mistake."""


def protection_for(prepared: PreparedSample) -> Protection:
    """Which files are the sample's own."""
    modules = _site_modules(prepared.python_folders) | (prepared.image_modules - _NO_MODULES) | RECORDER_MODULES
    return Protection(prepared.sample, SampleFolder(prepared.workspace), modules, SampleFolder(prepared.files.folder))


@lru_cache(maxsize=64)
def _site_modules(folders: tuple[str, ...]) -> frozenset[str]:
    """The top-level modules in the site-packages of some virtualenvs."""
    found = {
        path.name.partition(".")[0] for folder in folders for path in Path(folder).glob("lib/python3*/site-packages/*")
    }
    return frozenset(name for name in found if name.isidentifier()) - _NO_MODULES


def shorten(text: str) -> str:
    """The beginning and the end of a long text, and how much was left out between them."""
    if len(text) <= SHOWN_OUTPUT:
        return text
    half = SHOWN_OUTPUT // 2
    return f"{text[:half]}\n[… {len(text) - SHOWN_OUTPUT} characters left out …]\n{text[-half:]}"


def _write_outputs(runs: list[CommandRun], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(runs, 1):
        for name, text in (("stdout", each.run.stdout), ("stderr", each.run.stderr), ("report", each.report)):
            if text is not None:
                (folder / f"{name}-{number}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")


# --- a judge for each kind of verifier ------------------------------------------------------------------------------

_Judge = Callable[[Sample, Sequence[CommandRun]], VerificationResult]


def _judge(sample: Sample, runs: Sequence[CommandRun]) -> VerificationResult:
    return _JUDGES[sample.verifier](sample, runs)


def _succeeded(sample: Sample, run: CommandRun) -> bool:
    """Whether this run is a success, so that no other run is needed."""
    if sample.verifier == "test_suite":
        return is_satisfied(sample, run.run)
    return _judge(sample, [run]).is_success


def _judge_tests(sample: Sample, runs: Sequence[CommandRun]) -> VerificationResult:
    return make_verdict(sample, [each.run for each in runs])


def _judge_findings(sample: Sample, runs: Sequence[CommandRun]) -> VerificationResult:
    """Judge a linter or an analyzer by its SARIF report; without one, by its exit code."""
    last = runs[-1]
    run = last.run.model_copy()
    if last.kind == "sarif" and not run.problem:
        # Linters exit with 1 when they found something; what they found is judged instead.
        run.exit_code = 0
    result = make_verdict(_without_lists(sample), [*(each.run for each in runs[:-1]), run])
    result.exit_code = last.run.exit_code
    if result.suite_ran and not result.is_success:
        result.outcome, result.score = "not_solved", 0.0
        if result.failed:
            result.evidence.append(f"{result.failed} findings")
    return result


def _without_lists(sample: Sample) -> Sample:
    return sample.model_copy(update={"fail_to_pass": [], "pass_to_pass": []})


def _judge_custom(sample: Sample, runs: Sequence[CommandRun]) -> VerificationResult:
    """Judge by the sample's own grader, which prints JSON with a score."""
    last = runs[-1]
    by_grader = [each.run.model_copy(update={"by_exit_code": False}) for each in runs]
    result = make_verdict(_without_lists(sample), by_grader)
    result.is_success, result.score, result.evidence = False, 0.0, []
    if last.run.problem:
        result.suite_ran, result.outcome = False, "tests_did_not_run"
        result.evidence.append(last.run.problem)
        return result
    try:
        read = grade_of_rewards if sample.verify.report == "reward" else grade_in
        grade = read(last.report or "")
    except ReportUnreadable as problem:
        result.suite_ran, result.outcome = False, "tests_did_not_run"
        result.evidence.append(str(problem))
        return result
    result.suite_ran, result.is_success, result.score = True, grade.is_success, grade.score
    result.details = grade.evidence
    if grade.message:
        result.evidence.append(grade.message)
    if grade.is_success:
        result.outcome = "solved" if len(runs) == 1 else "flaky"
    else:
        result.outcome = "partly" if grade.score > 0 else "not_solved"
    return result


_JUDGES: dict[VerifierKind, _Judge] = {
    "test_suite": _judge_tests,
    "linter": _judge_findings,
    "static_analysis": _judge_findings,
    "custom": _judge_custom,
}
