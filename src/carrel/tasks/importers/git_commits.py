"""Make a dataset from the commits of a repository that change both source and tests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from carrel.errors import CarrelError, DatasetInvalid, NoSamplesMade, ProgramMissing
from carrel.tasks.environment import prepare_sample
from carrel.tasks.git_history import Git, GitFailed
from carrel.tasks.importers.layout import CommitFiles, can_solve, proposal, split, with_layout
from carrel.tasks.importers.write import (
    ImportResult,
    SkippedItem,
    new_dataset,
    refuse_wrong,
    write_samples,
    write_settings,
)
from carrel.tasks.runner import in_parallel
from carrel.tasks.sample import Sample, SampleEnvironment, VerifySettings
from carrel.tasks.verification.changes import Changes
from carrel.tasks.verification.verifier import changes_of_patch, grade
from carrel.wire.verification import Standing, TestReport, VerificationResult

RUNS = 3
"""How often each state is judged."""
_SHOWN = 300
"""Characters of one error."""
_NAMED = r"(\w[\w.]*(?:Error|Exception|NotFound)\b.*"
_ERRORS = (
    re.compile(rf"^E +{_NAMED})$", re.MULTILINE),  # as pytest shows what was raised
    re.compile(r"^# (\w*Error(?: \[\w+\])?: .*)$", re.MULTILINE),  # as node does, above the report of a file
    re.compile(rf"^\s*{_NAMED}|\S*: error: .*|error: .*|Error: .*)$", re.MULTILINE | re.IGNORECASE),
)
_OF_A_FILE = "error: 'test failed'"
"""All that node's report has of a file that ended with an error."""


@dataclass
class Lists:
    """The lists of tests of one commit, as its runs have shown them."""

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
        prepared = await prepare_sample(sample, cache)
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
    kinds: list[tuple[list[TestReport], Standing]] = [
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
    evidence = result.evidence[0].removeprefix("run 1: ") if result.evidence else result.outcome
    return brief(evidence) + (f"; the first error: {error}" if error and error not in evidence else "")


def _failing(result: VerificationResult) -> str:
    if not result.failures:
        return ""
    first = result.failures[0]
    count = f"{result.failed} {'test fails' if result.failed == 1 else 'tests fail'} with it too"
    reason = first_error(first.message) or brief(first.message)
    if reason == _OF_A_FILE:
        reason = first_error(f"{result.stderr}\n{result.stdout}") or reason
    return f"; {count}, the first: {first.name}: {reason}"


def first_error(text: str) -> str:
    """The first line of an output that names an exception or an error."""
    found = next(filter(None, (error.search(text) for error in _ERRORS)), None)
    return found[1].strip()[:_SHOWN] if found else ""


def brief(text: str) -> str:
    """The first and the last line, which say most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(line[:_SHOWN] for line in (lines if len(lines) < 3 else [lines[0], lines[-1]]))


class Journal:
    """The results so far, in a file next to the new dataset until that is complete.

    An import with other settings does not continue it."""

    def __init__(self, into: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.file = into.with_name(f".{into.name}.import.jsonl")
        self.judged: dict[str, Lists] = {}
        """By commit."""
        facts = json.dumps(settings, sort_keys=True, default=str)
        head = json.dumps({"settings": hashlib.sha256(facts.encode()).hexdigest()})
        if resume and self.file.is_file():
            first, _, rest = self.file.read_text(encoding="utf-8").partition("\n")
            if first == head:
                self._read(rest)
                return
        self.file.write_text(f"{head}\n", encoding="utf-8")

    def _read(self, text: str) -> None:
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                commit = entry.pop("commit")
                self.judged[commit] = Lists(**entry)
            except (ValueError, TypeError, KeyError):
                continue  # a line that was cut when the program was ended; its commit is judged again

    def add(self, commit: str, lists: Lists) -> None:
        if not lists.may_change:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'commit': commit, **asdict(lists)})}\n")

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)


BUNDLE = Path("files/repository.bundle")
MAX_FILES = 500
"""Files in one commit; a larger commit is a move or a release rather than a task."""
_TRAILER = re.compile(
    r"^(?:[A-Z][a-z]+(?:-[a-z]+)*-by|Change-Id|Closes|Fixes|Refs?|PR-URL|Reviewed-on): .*$", re.MULTILINE
)

OnCommit = Callable[[str, str], None]
"""Called with a commit and the outcome for it."""
_MAX_NAMES = 5
"""Unstable tests of a commit that are shown."""
_HOW_TO_NAME_TESTS = "; name its test files with --test-pattern GLOB if they have unusual names or places"


@dataclass(frozen=True)
class Candidate:
    """A commit that could be a task."""

    commit: str
    parent: str
    message: str
    moment: str
    parts: CommitFiles


async def import_history(
    repo: Path,
    commits: str,
    into: Path,
    settings: dict[str, Any],
    *,
    test_patterns: Sequence[str] = (),
    limit: int = 0,
    workers: int = 2,
    cache: Path | None = None,
    resume: bool = False,
    on_found: Callable[[int, int], None] = lambda commits, judged: None,
    on_commit: OnCommit = lambda commit, outcome: None,
) -> ImportResult:
    """`commits` is a range like `v1.0..main`; `settings` (with `verify.command`) is for `dataset.yaml`.

    A commit becomes a sample when some of its tests fail without its source and pass with it, in each of three runs.
    `on_found` is called once, with the number of commits to judge and the number that a stopped import has judged
    before; with `resume` their results are used.
    """
    refuse_wrong(settings)
    git = await asyncio.to_thread(_repository, repo)
    done = ImportResult(into)
    candidates = await asyncio.to_thread(_candidates, git, commits, test_patterns, done)
    candidates = candidates[-limit:] if limit else candidates
    if not candidates:
        raise NoSamplesMade(
            f"no commit in {commits} of {repo} touches both source and tests{_HOW_TO_NAME_TESTS}", done.left_out
        )
    newest = candidates[-1]
    tests = [path for candidate in candidates for path in candidate.parts.tests]
    settings = await asyncio.to_thread(with_layout, settings, git, newest.commit, tests)
    with new_dataset(into) as folder:
        (folder / "files").mkdir()
        await asyncio.to_thread(_write_bundle, git, candidates, folder / BUNDLE)
        journal = Journal(into, {"settings": settings, "tests": list(test_patterns)}, resume=resume)
        on_found(len(candidates), sum(candidate.commit in journal.judged for candidate in candidates))
        reasons: list[str] = []

        async def one(candidate: Candidate) -> Sample | None:
            commit = candidate.commit
            try:
                sample = await asyncio.to_thread(_sample, git, candidate, repo.resolve().name, folder, settings)
            except UnicodeDecodeError:
                lists = Lists(why="its changes are not text in UTF-8")
            else:
                lists = journal.judged.get(commit) or await find_lists(sample, cache)
                if commit not in journal.judged:
                    journal.add(commit, lists)
            on_commit(commit, lists.why or f"{len(lists.fail_to_pass)} fail to pass, {len(lists.pass_to_pass)} pass")
            if lists.unstable:
                done.left_out.append(SkippedItem(commit[:12], _unstable(lists.unstable)))
            if lists.why:
                done.left_out.append(SkippedItem(commit[:12], lists.why))
                reasons.append(lists.why)
                return None
            sample.fail_to_pass, sample.pass_to_pass = lists.fail_to_pass, lists.pass_to_pass
            sample.fail_to_fail = lists.fail_to_fail
            return sample

        made = [sample for sample in await in_parallel(one, candidates, workers) if sample is not None]
        done.proposal = await asyncio.to_thread(proposal, git, newest.commit, reasons, tests, settings)
        journal.remove()
        if not made:
            hint = f"; try {done.proposal}" if done.proposal else ""
            raise NoSamplesMade(
                f"none of {len(candidates)} commits became a sample; {newest_reason(candidates, done)}{hint}",
                done.left_out,
            )
        for sample in made:
            sample.files, sample.environment, sample.verify = BUNDLE, SampleEnvironment(), VerifySettings()
        write_settings(folder, {"name": into.name, **settings})
        write_samples(folder, made)
        done.samples = [sample.sample_id for sample in made]
    return done


def newest_reason(candidates: Sequence[Candidate], done: ImportResult) -> str:
    """Why the newest commit was left out."""
    # The last entry of a commit, because its unstable tests are listed before the reason.
    left = next(left for left in reversed(done.left_out) if left.what == candidates[-1].commit[:12])
    return f"{left.what}: {left.why}"


def _unstable(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    count = "1 test" if len(names) == 1 else f"{len(names)} tests"
    return f"{count} left out of its lists for differing from run to run: {', '.join(names[:_MAX_NAMES])}{more}"


def _repository(repo: Path) -> Git:
    if not repo.is_dir():
        raise DatasetInvalid(f"there is no folder {repo}")
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), "rev-parse", "--absolute-git-dir"], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        raise ProgramMissing("git is not installed; a repository's history needs it") from None
    if done.returncode:
        raise DatasetInvalid(f"{repo} is not a git repository: {done.stderr.strip().removeprefix('fatal: ')}")
    return Git(Path(done.stdout.strip()))


def _candidates(git: Git, commits: str, patterns: Sequence[str], done: ImportResult) -> list[Candidate]:
    if commits.startswith("-") or ".." not in commits:
        raise DatasetInvalid(f"{commits!r} is not a range of commits, like v1.0..main")
    try:
        listed = git.lines("rev-list", "--reverse", "--topo-order", "--parents", "--end-of-options", commits)
    except GitFailed as problem:
        raise DatasetInvalid(f"{commits!r} is not a range of commits here: {problem}") from None
    histories = [line.split() for line in listed]
    changed = _changed(git, [commit for commit, *parents in histories if len(parents) == 1])
    found = []
    for commit, *parents in histories:
        why = "a merge" if len(parents) > 1 else "the first commit" if not parents else ""
        if not why:
            parts = split(changed[commit], patterns)
            why = _unfit(parts, len(changed[commit]))
        if why:
            done.left_out.append(SkippedItem(commit[:12], why))
            continue
        message = git("show", "--no-patch", "--format=%cI%n%B", commit).decode("utf-8", "replace")
        moment, _, text = message.partition("\n")
        found.append(Candidate(commit, parents[0], text.strip(), moment, parts))
    return found


def _changed(git: Git, commits: Sequence[str]) -> dict[str, list[str]]:
    """Return the files that each of these commits changes, from one process: a long history has thousands."""
    stdin = "".join(f"{commit}\n" for commit in commits).encode()
    output = git("diff-tree", "--stdin", "-r", "-z", "--name-only", "--no-renames", stdin=stdin)
    found: dict[str, list[str]] = {commit: [] for commit in commits}
    paths: list[str] = []
    for name in output.decode("utf-8", "surrogateescape").split("\0"):
        if name in found:
            paths = found[name]
        elif name:
            paths.append(name)
    return found


def _unfit(parts: CommitFiles, count: int) -> str:
    if count > MAX_FILES:
        return f"it changes {count} files"
    if not parts.tests:
        return "it touches no tests"
    if not any(map(can_solve, parts.source)):
        return "it touches no source" + (" but settings" if parts.source else "")
    return ""


def _write_bundle(git: Git, candidates: Sequence[Candidate], file: Path) -> None:
    """Write the histories of all parents, with their tags, to one bundle; commits after a base are removed later."""
    objects = git.lines("rev-parse", "--git-path", "objects")[0]
    shape = git.lines("rev-parse", "--show-object-format")[0]
    with tempfile.TemporaryDirectory(prefix="carrel-bundle-") as temporary:
        folder = Path(temporary) / "all.git"
        folder.mkdir()
        new = Git(folder, env={"GIT_ALTERNATE_OBJECT_DIRECTORIES": os.path.abspath(git.path(objects))})
        new("init", "--quiet", "--bare", "--template=", f"--object-format={shape}", "--initial-branch=main")
        refs = {f"refs/bases/{candidate.parent}": candidate.parent for candidate in candidates}
        for candidate in candidates[-1:]:
            for line in git.lines(
                "for-each-ref", "--format=%(objectname) %(refname)", f"--merged={candidate.parent}", "refs/tags"
            ):
                hash_, _, name = line.partition(" ")
                refs[name] = hash_
        new("update-ref", "--stdin", stdin="".join(f"create {name} {hash_}\n" for name, hash_ in refs.items()).encode())
        new("bundle", "create", "--quiet", str(file), "--all")


def _sample(git: Git, candidate: Candidate, name: str, folder: Path, settings: dict[str, Any]) -> Sample:
    parts = {part: _patch(git, candidate, getattr(candidate.parts, part)) for part in ("source", "tests", "no_code")}
    return Sample.model_validate(
        {
            "sample_id": f"{re.sub(r'[^A-Za-z0-9._+@-]+', '-', name).strip('-.') or 'commit'}-{candidate.commit[:10]}",
            "repo": name,
            "base_commit": candidate.parent,
            "problem_statement": re.sub(r"\n{3,}", "\n\n", _TRAILER.sub("", candidate.message)).strip() + "\n",
            "patch": parts["source"],
            "test_patch": parts["tests"],
            "non_code_patch": parts["no_code"],
            "created_at": candidate.moment,
            "files": folder / BUNDLE,
            "environment": settings.get("environment") or {},
            "verify": settings.get("verify") or {},
        }
    )


def _patch(git: Git, candidate: Candidate, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    words = ("--no-color", "--no-ext-diff", "--no-textconv", "--binary", "--full-index", "--no-renames")
    patch = git.with_literal_paths("diff-tree", "-p", *words, candidate.parent, candidate.commit, "--", *paths)
    return patch.decode("utf-8")
