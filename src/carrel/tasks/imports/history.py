"""Commits that touch both source and tests, made into samples; the lists of tests are found by running them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.errors import DatasetInvalid, ProgramMissing
from carrel.tasks.git_command import Git, GitFailed
from carrel.tasks.imports.advice import proposal, with_layout
from carrel.tasks.imports.journal import Journal
from carrel.tasks.imports.judging import Lists, find_lists
from carrel.tasks.imports.parts import Parts, can_solve, split
from carrel.tasks.imports.writing import Imported, LeftOut, new_dataset, refuse_wrong, write_samples, write_settings
from carrel.tasks.sample import Environment, Sample, Verify
from carrel.tasks.workers import in_parallel

BUNDLE = Path("files/repository.bundle")
MOST_FILES = 500
"""Files of one commit; a larger one is a move or a release, and no task."""
_TRAILER = re.compile(
    r"^(?:[A-Z][a-z]+(?:-[a-z]+)*-by|Change-Id|Closes|Fixes|Refs?|PR-URL|Reviewed-on): .*$", re.MULTILINE
)

Heard = Callable[[str, str], None]
"""Called with a commit and what became of it."""
_MOST_NAMES = 5
"""Unstable tests of a commit that are named."""
_HOW_TO_NAME_TESTS = "; name its test files with --test-pattern GLOB if they have unusual names or places"


@dataclass(frozen=True)
class Candidate:
    """A commit that could be a task."""

    commit: str
    parent: str
    message: str
    moment: str
    parts: Parts


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
    found: Callable[[int, int], None] = lambda commits, judged: None,
    heard: Heard = lambda commit, what: None,
) -> Imported:
    """`commits` is a range like `v1.0..main`; `settings` (with `verify.command`) is for `dataset.yaml`.

    A commit becomes a sample when with its tests something fails without its source and passes with it, each time of
    three. `found` is called once, with how many commits are tried and how many of them an import that was stopped has
    judged before: with `resume` their results are used.
    """
    refuse_wrong(settings)
    git = await asyncio.to_thread(_repository, repo)
    done = Imported(into)
    candidates = await asyncio.to_thread(_candidates, git, commits, test_patterns, done)
    candidates = candidates[-limit:] if limit else candidates
    if not candidates:
        raise DatasetInvalid(f"no commit in {commits} of {repo} touches both source and tests{_HOW_TO_NAME_TESTS}")
    newest = candidates[-1]
    tests = [path for candidate in candidates for path in candidate.parts.tests]
    settings = await asyncio.to_thread(with_layout, settings, git, newest.commit, tests)
    with new_dataset(into) as folder:
        (folder / "files").mkdir()
        await asyncio.to_thread(_write_bundle, git, candidates, folder / BUNDLE)
        journal = Journal(into, {"settings": settings, "tests": list(test_patterns)}, resume=resume)
        found(len(candidates), sum(candidate.commit in journal.judged for candidate in candidates))
        reasons: list[str] = []

        async def one(candidate: Candidate) -> Sample | None:
            commit = candidate.commit
            try:
                sample = await asyncio.to_thread(_sample, git, candidate, repo.resolve().name, folder, settings)
            except UnicodeDecodeError:
                lists = Lists(why="its changes are no text in UTF-8")
            else:
                lists = journal.judged.get(commit) or await find_lists(sample, cache)
                if commit not in journal.judged:
                    journal.add(commit, lists)
            heard(commit, lists.why or f"{len(lists.fail_to_pass)} fail to pass, {len(lists.pass_to_pass)} pass")
            if lists.unstable:
                done.left_out.append(LeftOut(commit[:12], _unstable(lists.unstable)))
            if lists.why:
                done.left_out.append(LeftOut(commit[:12], lists.why))
                reasons.append(lists.why)
                return None
            sample.fail_to_pass, sample.pass_to_pass = lists.fail_to_pass, lists.pass_to_pass
            sample.fail_to_fail = lists.fail_to_fail
            return sample

        made = [sample for sample in await in_parallel(one, candidates, workers) if sample is not None]
        done.proposal = await asyncio.to_thread(proposal, git, newest.commit, reasons)
        journal.remove()
        if not made:
            hint = f"; try {done.proposal}" if done.proposal else ""
            raise DatasetInvalid(
                f"none of {len(candidates)} commits became a sample; {newest_reason(candidates, done)}{hint}"
            )
        for sample in made:
            sample.files, sample.environment, sample.verify = BUNDLE, Environment(), Verify()
        write_settings(folder, {"name": into.name, **settings})
        write_samples(folder, made)
        done.samples = [sample.sample_id for sample in made]
    return done


def newest_reason(candidates: Sequence[Candidate], done: Imported) -> str:
    """Why the newest commit was left out."""
    left = next(left for left in done.left_out if left.what == candidates[-1].commit[:12])
    return f"{left.what}: {left.why}"


def _unstable(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    count = "1 test" if len(names) == 1 else f"{len(names)} tests"
    return f"{count} left out of its lists for differing from run to run: {', '.join(names[:_MOST_NAMES])}{more}"


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
        raise DatasetInvalid(f"{repo} is no git repository: {done.stderr.strip().removeprefix('fatal: ')}")
    return Git(Path(done.stdout.strip()))


def _candidates(git: Git, commits: str, patterns: Sequence[str], done: Imported) -> list[Candidate]:
    if commits.startswith("-") or ".." not in commits:
        raise DatasetInvalid(f"{commits!r} is no range of commits, like v1.0..main")
    try:
        listed = git.lines("rev-list", "--reverse", "--topo-order", "--parents", "--end-of-options", commits)
    except GitFailed as problem:
        raise DatasetInvalid(f"{commits!r} is no range of commits here: {problem}") from None
    found = []
    for line in listed:
        commit, *parents = line.split()
        why = "a merge" if len(parents) > 1 else "the first of all" if not parents else ""
        if not why:
            paths = [path for path in _changed(git, parents[0], commit) if path]
            parts = split(paths, patterns)
            why = _unfit(parts, len(paths))
        if why:
            done.left_out.append(LeftOut(commit[:12], why))
            continue
        message = git("show", "--no-patch", "--format=%cI%n%B", commit).decode("utf-8", "replace")
        moment, _, text = message.partition("\n")
        found.append(Candidate(commit, parents[0], text.strip(), moment, parts))
    return found


def _changed(git: Git, parent: str, commit: str) -> list[str]:
    said = git("diff-tree", "-r", "-z", "--name-only", "--no-renames", parent, commit)
    return said.decode("utf-8", "surrogateescape").split("\0")


def _unfit(parts: Parts, count: int) -> str:
    if count > MOST_FILES:
        return f"it changes {count} files"
    if not parts.tests:
        return "it touches no tests"
    if not any(map(can_solve, parts.source)):
        return "it touches no source" + (" but settings" if parts.source else "")
    return ""


def _write_bundle(git: Git, candidates: Sequence[Candidate], file: Path) -> None:
    """The histories of all parents in one file, with the tags in them; what comes after a base is left out later."""
    objects = git.lines("rev-parse", "--git-path", "objects")[0]
    shape = git.lines("rev-parse", "--show-object-format")[0]
    with tempfile.TemporaryDirectory(prefix="carrel-bundle-") as room:
        folder = Path(room) / "all.git"
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
    said = git.literally("diff-tree", "-p", *words, candidate.parent, candidate.commit, "--", *paths)
    return said.decode("utf-8")
