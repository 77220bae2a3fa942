"""Rebuild a sample's git repository so that it ends at the base commit, with a receipt of what was removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from carrel.errors import FilesRefused, ProgramMissing
from carrel.tasks.unpack import UnpackLimits
from carrel.wire.verification import GitReceipt

SECONDS = 900
"""Time limit of one git command."""
_PAUSE = 0.2
"""Seconds between two checks for cancellation."""
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.commitGraph=false",  # It could name other parents than the commits do.
    "core.bigFileThreshold=64m",
    "pack.windowMemory=256m",
    "gc.auto=0",
    "protocol.allow=never",
)
_SAFE = tuple(word for setting in _SETTINGS for word in ("-c", setting))


class GitFailed(FilesRefused):
    """A git command failed; the message has its error output."""


class Git:
    """Git commands on one repository, without any settings or hooks of the user, the machine or the files."""

    def __init__(
        self,
        folder: Path,
        *,
        worktree: Path | None = None,
        env: Mapping[str, str] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """When `cancelled` is set, a running command is killed."""
        self._env = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "GIT_DIR": str(folder),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "HOME": "/nonexistent",
            "LC_ALL": "C",
        } | dict(env or {})
        if worktree is not None:
            self._env["GIT_WORK_TREE"] = str(worktree)
        self._folder = folder
        self._cancelled = cancelled
        self._where = worktree or folder.parent

    def __call__(self, *words: str, stdin: bytes = b"", fine: tuple[int, ...] = (0,)) -> bytes:
        """The output; GitFailed when the exit code is not one of `fine`."""
        process = self.start(*words, stdin=subprocess.PIPE)
        try:
            out, errors = self._ended(process, stdin, words[0])
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode not in fine:
            message = errors.decode("utf-8", "replace").strip().removeprefix("fatal: ").removeprefix("error: ")
            raise GitFailed(f"git {words[0]}: {message[-1000:] or f'ended with {process.returncode}'}")
        return out

    def _ended(self, process: subprocess.Popen[bytes], stdin: bytes, word: str) -> tuple[bytes, bytes]:
        until = time.monotonic() + SECONDS
        unsent: bytes | None = stdin
        while True:
            try:
                return process.communicate(unsent, timeout=_PAUSE)
            except subprocess.TimeoutExpired:
                unsent = None  # communicate() continues to send the rest.
                if self._cancelled is not None and self._cancelled.is_set():
                    raise GitFailed(f"git {word} was cancelled") from None
                if time.monotonic() > until:
                    raise GitFailed(f"git {word} did not end within {SECONDS} seconds") from None

    def lines(self, *words: str, stdin: bytes = b"") -> list[str]:
        return self(*words, stdin=stdin).decode("utf-8", "surrogateescape").splitlines()

    def with_literal_paths(self, *words: str) -> bytes:
        """Run with paths that are plain names, without wildcards."""
        return Git(self._folder, env={"GIT_LITERAL_PATHSPECS": "1"})(*words)

    def path(self, inside: str) -> Path:
        """A path that git printed relative to where it runs."""
        return self._where / inside

    def start(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a command whose output is read while it runs."""
        try:
            return subprocess.Popen(
                ["git", *_SAFE, *words],
                env=self._env,
                cwd=self._where,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise ProgramMissing("git is not installed; samples with a git history need it") from None


_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_BRANCH = re.compile(r"[A-Za-z0-9][\w./+@-]*")
_MOST_BYTES = 64 * 1024 * 1024


@dataclass
class RepositoryFacts:
    """What a repository contains, before anything is removed."""

    objects: Path
    refs: dict[str, str] = field(default_factory=dict)
    """Hashes by name: `refs/heads/main`, `refs/tags/v1`."""
    head: str | None = None
    """The commit that is checked out."""
    branch: str = "main"
    sha256: bool = False
    shallow: list[str] = field(default_factory=list)
    """Commits of a shallow clone, whose parents are not in the repository."""
    reflogs: int = 0
    stashes: int = 0
    remotes: int = 0
    borrowed: bool = False
    """Whether it uses objects of another repository, which is not read."""

    def named(self, name: str) -> str | None:
        """The hash of a tag, a branch, or a full name."""
        for full in (name, f"refs/{name}", f"refs/tags/{name}", f"refs/heads/{name}", f"refs/remotes/{name}"):
            if full in self.refs:
                return self.refs[full]
        return None


def read_repository(folder: Path) -> RepositoryFacts | None:
    """Read a `.git` folder without starting git; None when it is not a repository. Links in it are not followed."""
    objects = folder / "objects"
    if not objects.is_dir() or objects.is_symlink():
        return None
    facts = RepositoryFacts(objects, refs=_packed_refs(folder) | _loose_refs(folder))
    head = _text(folder / "HEAD").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ").strip()
        facts.head = facts.refs.get(name)
        facts.branch = plain_branch(name)
    elif _HASH.fullmatch(head):
        facts.head = head
    config = _text(folder / "config")
    facts.sha256 = re.search(r"(?im)^\s*objectformat\s*=\s*sha256\s*$", config) is not None
    facts.remotes = len(re.findall(r'(?im)^\s*\[\s*remote\s+"', config))
    facts.shallow = [line for line in _text(folder / "shallow").split() if _HASH.fullmatch(line)]
    stashes = _text(folder / "logs" / "refs" / "stash")
    facts.stashes = stashes.count("\n") or int("refs/stash" in facts.refs)
    facts.reflogs = sum(_text(file).count("\n") for file in _files(folder / "logs"))
    facts.borrowed = any((objects / "info" / name).exists() for name in ("alternates", "http-alternates"))
    return facts


def plain_branch(name: str) -> str:
    """The branch's name, or `main` instead of a name with unusual characters."""
    short = name.removeprefix("refs/heads/")
    unusual = ".." in short or "//" in short or short.endswith((".lock", "/", ".")) or "@{" in short or "/." in short
    return short if _BRANCH.fullmatch(short) and not unusual else "main"


def _packed_refs(folder: Path) -> dict[str, str]:
    found = {}
    for line in _text(folder / "packed-refs").splitlines():
        hash_, _, name = line.partition(" ")
        if _HASH.fullmatch(hash_) and name.startswith("refs/"):
            found[name] = hash_
    return found


def _loose_refs(folder: Path) -> dict[str, str]:
    found = {}
    for file in _files(folder / "refs"):
        content = _text(file).strip()
        if _HASH.fullmatch(content):
            found[os.path.relpath(file, folder)] = content
    return found


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def _text(file: Path) -> str:
    """The text of a regular file; empty for anything else."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return ""
    return file.read_text(encoding="utf-8", errors="surrogateescape")


def read_bundle(bundle: Path, scratch: Path, limits: UnpackLimits) -> RepositoryFacts:
    """The history of a git bundle, with its objects unpacked in the folder `scratch`."""
    with bundle.open("rb") as file:
        head = file.read(4096)
    sha256 = b"@object-format=sha256" in head
    git = _new_repository(scratch / "bundle.git", "main", sha256, limits)
    try:
        listed = [line.partition(" ")[::2] for line in git.lines("bundle", "list-heads", str(bundle))]
        git("bundle", "unbundle", str(bundle))
    except GitFailed as problem:
        raise FilesRefused(f"{bundle} is not a complete git bundle: {problem}") from None
    refs = {name: hash_ for hash_, name in listed}
    head_commit = refs.pop("HEAD", None)
    branches = [name for name in refs if name.startswith("refs/heads/")]
    here = [name for name in branches if refs[name] == head_commit] or branches
    if head_commit is None and len(refs) == 1:
        head_commit = next(iter(refs.values()))
    branch = plain_branch(here[0]) if len(here) == 1 else "main"
    return RepositoryFacts(
        scratch / "bundle.git" / "objects", refs=refs, head=head_commit, branch=branch, sha256=sha256
    )


def truncate_history(
    tree: Path, base_commit: str, scratch: Path, limits: UnpackLimits, bundled: RepositoryFacts | None = None
) -> GitReceipt | None:
    """Replace `.git` in `tree` by one that ends at the base commit; None when the files have no git history.

    With the history of a bundle, the files of the base commit are written into the tree as well. `scratch` is an empty
    folder on the same disk."""
    nested = _remove_nested(tree)
    facts, old = bundled, tree / ".git"
    if facts is None and not os.path.lexists(old):
        return None
    if facts is None:
        moved = scratch / "old.git"
        os.rename(old, moved)
        facts = None if moved.is_symlink() or not moved.is_dir() else read_repository(moved)
        if facts is None:
            # A pointer to another repository (a worktree, a submodule), or no repository.
            return _empty_receipt([*nested, ".git"])
        for name in ("alternates", "http-alternates"):
            (facts.objects / "info" / name).unlink(missing_ok=True)
    receipt = _rebuild(tree, facts, base_commit, scratch, limits, write_files=bundled is not None)
    receipt.nested_removed = nested
    return receipt


def _rebuild(
    tree: Path, facts: RepositoryFacts, base_commit: str, scratch: Path, limits: UnpackLimits, *, write_files: bool
) -> GitReceipt:
    folder = scratch / "new.git"
    new = _new_repository(folder, facts.branch, facts.sha256, limits)
    if facts.shallow:
        (folder / "shallow").write_text("".join(f"{line}\n" for line in facts.shallow))
    objects = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(facts.objects)}
    both = Git(folder, worktree=tree, env=objects, cancelled=limits.cancelled)
    base = _resolved(both, facts, base_commit, limits.what)
    tags = _earlier_tags(both, facts, base)
    wanted = "".join(f"{hash_}\n" for hash_ in dict.fromkeys([base, *tags.values()]))
    try:
        # Existing deltas are used again; computing new ones would take longer than everything else.
        words = ("--revs", "-q", "--delta-base-offset", "--window=0")
        both("pack-objects", *words, str(folder / "objects/pack/pack"), stdin=wanted.encode())
    except GitFailed as problem:
        why = "; it uses objects of another repository, which are missing here" if facts.borrowed else ""
        raise FilesRefused(
            f"{limits.what}: the history of {base[:12]} is not complete{why}; a git bundle has all of it ({problem})"
        ) from None
    moved = None if write_files or facts.head in (None, base) else facts.head
    if write_files or moved:
        _write_files(both, moved, base, limits)
    before = _kinds(Git(folder, env={"GIT_OBJECT_DIRECTORY": str(facts.objects)}))
    if not (write_files or moved):
        both("read-tree", base)
    both("update-index", "-q", "--refresh", fine=(0, 1))
    receipt = _finish(new, facts, base, tags)
    receipt.commits_removed = before.get("commit", 0) - receipt.commits_kept
    receipt.objects_removed = sum(before.values()) - sum(_kinds(new).values())
    receipt.moved_from = moved
    os.rename(folder, tree / ".git")
    return receipt


def _new_repository(folder: Path, branch: str, sha256: bool, limits: UnpackLimits) -> Git:
    folder.mkdir()
    git = Git(folder, cancelled=limits.cancelled)
    shape = "sha256" if sha256 else "sha1"
    git("init", "--quiet", "--bare", "--template=", f"--object-format={shape}", f"--initial-branch={branch}")
    return git


def _resolved(git: Git, facts: RepositoryFacts, base_commit: str, what: Path) -> str:
    wanted = facts.named(base_commit) or base_commit if base_commit else facts.head
    if wanted is None:
        raise FilesRefused(f"{what}: no commit is checked out; name one in the sample's base_commit")
    if wanted.startswith("-"):
        raise FilesRefused(f"{what}: {wanted!r} is not a commit")
    try:
        return git.lines("rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")[-1]
    except GitFailed:
        raise FilesRefused(f"{what}: the base commit {wanted} is not in it") from None


def _earlier_tags(git: Git, facts: RepositoryFacts, base: str) -> dict[str, str]:
    """The tags that existed at the base commit: programs derive their version from tags.

    A tag made later is left out, even if it names an old commit."""
    named = {name: hash_ for name, hash_ in facts.refs.items() if name.startswith("refs/tags/")}
    if not named:
        return {}
    history = set(git.lines("rev-list", base))
    made = int(git.lines("show", "--no-patch", "--format=%ct", base)[-1])
    kept = {}
    for name, hash_ in named.items():
        try:
            kind = git.lines("cat-file", "-t", hash_)[0]
            commit = git.lines("rev-parse", "--verify", "--quiet", f"{hash_}^{{commit}}")[0]
            if commit in history and (kind == "commit" or _tagged_at(git, hash_) <= made):
                git("check-ref-format", name)
                kept[name] = hash_
        except GitFailed:
            continue  # It names no commit, or one that is not in this history.
    return kept


def _tagged_at(git: Git, tag: str) -> int:
    for line in git.lines("cat-file", "tag", tag):
        if line.startswith("tagger "):
            moment = line.rsplit(" ", 2)[-2]
            return int(moment) if moment.isdigit() else 1 << 62
        if not line:
            break
    return 1 << 62


def _write_files(git: Git, moved_from: str | None, base: str, limits: UnpackLimits) -> None:
    """Write the base commit's files into the tree, and remove those of the commit that was checked out."""
    _count(git, base, limits)
    if moved_from is not None:
        git("read-tree", moved_from)
        git("update-index", "-q", "--refresh", fine=(0, 1))
    git("read-tree", "--reset", "-u", base)


def _count(git: Git, base: str, limits: UnpackLimits) -> None:
    """Count the files before they are written: a tree of few objects can have an astronomical number of files."""
    process = git.start("ls-tree", "-r", "-t", "-l", "--full-tree", base)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            size = line.split(b"\t", 1)[0].split()[-1]
            limits.add(files=1, data=int(size) if size.isdigit() else 0)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def _finish(new: Git, facts: RepositoryFacts, base: str, tags: dict[str, str]) -> GitReceipt:
    new("update-ref", "--no-deref", f"refs/heads/{facts.branch}", base)
    new("update-ref", "--stdin", stdin="".join(f"create {name} {hash_}\n" for name, hash_ in tags.items()).encode())
    new("pack-refs", "--all")
    # In the overlay of a session unchanged files have other inode numbers and change times.
    for name, value in (
        ("bare", "false"),
        ("logAllRefUpdates", "true"),
        ("checkStat", "minimal"),
        ("trustctime", "false"),
    ):
        new("config", f"core.{name}", value)
    every = set(new.lines("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered"))
    reachable = set(new.lines("rev-list", "--objects", "--no-object-names", "--all"))
    if every != reachable:
        raise FilesRefused(f"{len(every - reachable):,} objects of the history belong to no commit up to {base[:12]}")
    return GitReceipt(
        base_commit=base,
        commits_kept=int(new.lines("rev-list", "--count", "--all")[0]),
        commits_removed=0,
        objects_removed=0,
        tags_kept=len(tags),
        refs_removed=len(facts.refs) - len(tags) - int(facts.refs.get(f"refs/heads/{facts.branch}") == base),
        remotes_removed=facts.remotes,
        stashes_removed=facts.stashes,
        reflog_entries_removed=facts.reflogs,
        verified=True,
    )


def _kinds(git: Git) -> Counter[str]:
    return Counter(git.lines("cat-file", "--batch-all-objects", "--batch-check=%(objecttype)", "--unordered"))


def _remove_nested(tree: Path) -> list[str]:
    """Remove repositories within the files: they can contain later commits, too, and their base commit is unknown."""
    found = []
    for parent, folders, files in os.walk(tree):
        if ".git" not in (*folders, *files) or parent == str(tree):
            continue
        found.append(os.path.relpath(os.path.join(parent, ".git"), tree))
        if ".git" in folders and not (tree / found[-1]).is_symlink():
            folders.remove(".git")
            shutil.rmtree(tree / found[-1])
        else:
            os.unlink(tree / found[-1])
    return found


def _empty_receipt(removed: list[str]) -> GitReceipt:
    return GitReceipt(
        base_commit="",
        commits_kept=0,
        commits_removed=0,
        objects_removed=0,
        tags_kept=0,
        refs_removed=0,
        remotes_removed=0,
        stashes_removed=0,
        reflog_entries_removed=0,
        nested_removed=removed,
        verified=True,
    )
