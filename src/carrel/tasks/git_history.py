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
"""What one git command may take."""
_PAUSE = 0.2
"""Seconds between two looks at whether anybody still waits for it."""
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.commitGraph=false",  # it could tell of other parents than the commits do
    "core.bigFileThreshold=64m",
    "pack.windowMemory=256m",
    "gc.auto=0",
    "protocol.allow=never",
)
_SAFE = tuple(word for setting in _SETTINGS for word in ("-c", setting))


class GitFailed(FilesRefused):
    """A git command ended with an error; the message has what it said."""


class Git:
    """Commands on one repository. No git settings of the user, the machine or the files are read."""

    def __init__(
        self,
        folder: Path,
        *,
        worktree: Path | None = None,
        env: Mapping[str, str] | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """When `given_up` is set, a command that runs is ended."""
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
        self._given_up = given_up
        self._where = worktree or folder.parent

    def __call__(self, *words: str, stdin: bytes = b"", fine: tuple[int, ...] = (0,)) -> bytes:
        """What it prints; GitFailed when it ends with a code that is not among the expected."""
        process = self.start(*words, stdin=subprocess.PIPE)
        try:
            out, errors = self._ended(process, stdin, words[0])
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode not in fine:
            said = errors.decode("utf-8", "replace").strip().removeprefix("fatal: ").removeprefix("error: ")
            raise GitFailed(f"git {words[0]}: {said[-1000:] or f'ended with {process.returncode}'}")
        return out

    def _ended(self, process: subprocess.Popen[bytes], stdin: bytes, word: str) -> tuple[bytes, bytes]:
        until = time.monotonic() + SECONDS
        given: bytes | None = stdin
        while True:
            try:
                return process.communicate(given, timeout=_PAUSE)
            except subprocess.TimeoutExpired:
                given = None  # What was not yet taken of it is still sent.
                if self._given_up is not None and self._given_up.is_set():
                    raise GitFailed(f"git {word}: nobody waits for it any more") from None
                if time.monotonic() > until:
                    raise GitFailed(f"git {word} did not end within {SECONDS} seconds") from None

    def lines(self, *words: str, stdin: bytes = b"") -> list[str]:
        return self(*words, stdin=stdin).decode("utf-8", "surrogateescape").splitlines()

    def literally(self, *words: str) -> bytes:
        """With paths that are names, whatever signs are in them."""
        return Git(self._folder, env={"GIT_LITERAL_PATHSPECS": "1"})(*words)

    def path(self, inside: str) -> Path:
        """What git names relative to where it runs."""
        return self._where / inside

    def start(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """For output that is read as it comes."""
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
    """Everything that a repository holds, before anything is left out."""

    objects: Path
    refs: dict[str, str] = field(default_factory=dict)
    """Names to hashes: `refs/heads/main`, `refs/tags/v1`."""
    head: str | None = None
    """The commit that is checked out."""
    branch: str = "main"
    sha256: bool = False
    shallow: list[str] = field(default_factory=list)
    """Commits whose parents were never there."""
    reflogs: int = 0
    stashes: int = 0
    remotes: int = 0
    borrowed: bool = False
    """Whether it took objects from a repository elsewhere, which is not followed."""

    def named(self, name: str) -> str | None:
        """The hash under a name as a person writes it: a tag, a branch, or the whole name."""
        for full in (name, f"refs/{name}", f"refs/tags/{name}", f"refs/heads/{name}", f"refs/remotes/{name}"):
            if full in self.refs:
                return self.refs[full]
        return None


def read_repository(folder: Path) -> RepositoryFacts | None:
    """Of a `.git` folder; None where it is none. Links in it are not followed."""
    objects = folder / "objects"
    if not objects.is_dir() or objects.is_symlink():
        return None
    past = RepositoryFacts(objects, refs=_packed_refs(folder) | _loose_refs(folder))
    head = _text(folder / "HEAD").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ").strip()
        past.head = past.refs.get(name)
        past.branch = plain_branch(name)
    elif _HASH.fullmatch(head):
        past.head = head
    config = _text(folder / "config")
    past.sha256 = re.search(r"(?im)^\s*objectformat\s*=\s*sha256\s*$", config) is not None
    past.remotes = len(re.findall(r'(?im)^\s*\[\s*remote\s+"', config))
    past.shallow = [line for line in _text(folder / "shallow").split() if _HASH.fullmatch(line)]
    stashes = _text(folder / "logs" / "refs" / "stash")
    past.stashes = stashes.count("\n") or int("refs/stash" in past.refs)
    past.reflogs = sum(_text(file).count("\n") for file in _files(folder / "logs"))
    past.borrowed = any((objects / "info" / name).exists() for name in ("alternates", "http-alternates"))
    return past


def plain_branch(name: str) -> str:
    """The branch's name, or `main` where it has one that is better not used."""
    short = name.removeprefix("refs/heads/")
    strange = ".." in short or "//" in short or short.endswith((".lock", "/", ".")) or "@{" in short or "/." in short
    return short if _BRANCH.fullmatch(short) and not strange else "main"


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
    for place, _, names in os.walk(folder):
        for name in names:
            yield Path(place, name)


def _text(file: Path) -> str:
    """Empty where there is none, or something that is not to be read."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return ""
    return file.read_text(encoding="utf-8", errors="surrogateescape")


def read_bundle(bundle: Path, room: Path, budget: UnpackLimits) -> RepositoryFacts:
    """A git bundle's history, its objects unpacked in `room`."""
    with bundle.open("rb") as file:
        head = file.read(4096)
    sha256 = b"@object-format=sha256" in head
    git = _new_repository(room / "bundle.git", "main", sha256, budget)
    try:
        listed = [line.partition(" ")[::2] for line in git.lines("bundle", "list-heads", str(bundle))]
        git("bundle", "unbundle", str(bundle))
    except GitFailed as problem:
        raise FilesRefused(f"{bundle} is no whole git bundle: {problem}") from None
    refs = {name: hash_ for hash_, name in listed}
    head_commit = refs.pop("HEAD", None)
    branches = [name for name in refs if name.startswith("refs/heads/")]
    here = [name for name in branches if refs[name] == head_commit] or branches
    if head_commit is None and len(refs) == 1:
        head_commit = next(iter(refs.values()))
    branch = plain_branch(here[0]) if len(here) == 1 else "main"
    return RepositoryFacts(room / "bundle.git" / "objects", refs=refs, head=head_commit, branch=branch, sha256=sha256)


def truncate_history(
    tree: Path, base_commit: str, room: Path, budget: UnpackLimits, bundled: RepositoryFacts | None = None
) -> GitReceipt | None:
    """Give `tree` a `.git` that ends at the base commit; None where the files have no git history at all.

    With a bundle's history the base commit's files are written into the tree as well. `room` is an empty folder
    on the same disk."""
    nested = _without_nested(tree)
    past, old = bundled, tree / ".git"
    if past is None and not os.path.lexists(old):
        return None
    if past is None:
        moved = room / "past.git"
        os.rename(old, moved)
        past = None if moved.is_symlink() or not moved.is_dir() else read_repository(moved)
        if past is None:
            # A pointer to a repository elsewhere (a worktree, a submodule), or no repository.
            return _nothing_left([*nested, ".git"])
        for name in ("alternates", "http-alternates"):
            (past.objects / "info" / name).unlink(missing_ok=True)
    receipt = _made_anew(tree, past, base_commit, room, budget, write_files=bundled is not None)
    receipt.nested_removed = nested
    return receipt


def _made_anew(
    tree: Path, past: RepositoryFacts, base_commit: str, room: Path, budget: UnpackLimits, *, write_files: bool
) -> GitReceipt:
    folder = room / "new.git"
    new = _new_repository(folder, past.branch, past.sha256, budget)
    if past.shallow:
        (folder / "shallow").write_text("".join(f"{line}\n" for line in past.shallow))
    objects = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(past.objects)}
    both = Git(folder, worktree=tree, env=objects, given_up=budget.given_up)
    base = _resolved(both, past, base_commit, budget.what)
    tags = _tags_of_the_past(both, past, base)
    wanted = "".join(f"{hash_}\n" for hash_ in dict.fromkeys([base, *tags.values()]))
    try:
        # Differences that are there are used again; looking for new ones would take longer than all the rest.
        words = ("--revs", "-q", "--delta-base-offset", "--window=0")
        both("pack-objects", *words, str(folder / "objects/pack/pack"), stdin=wanted.encode())
    except GitFailed as problem:
        why = "; it borrowed objects from another repository, which are not here" if past.borrowed else ""
        raise FilesRefused(
            f"{budget.what}: the history of {base[:12]} is not whole{why}; a git bundle has all of it ({problem})"
        ) from None
    moved = None if write_files or past.head in (None, base) else past.head
    if write_files or moved:
        _write_files(both, moved, base, budget)
    before = _kinds(Git(folder, env={"GIT_OBJECT_DIRECTORY": str(past.objects)}))
    if not (write_files or moved):
        both("read-tree", base)
    both("update-index", "-q", "--refresh", fine=(0, 1))
    receipt = _settled(new, past, base, tags)
    receipt.commits_removed = before.get("commit", 0) - receipt.commits_kept
    receipt.objects_removed = sum(before.values()) - sum(_kinds(new).values())
    receipt.moved_from = moved
    os.rename(folder, tree / ".git")
    return receipt


def _new_repository(folder: Path, branch: str, sha256: bool, budget: UnpackLimits) -> Git:
    folder.mkdir()
    git = Git(folder, given_up=budget.given_up)
    shape = "sha256" if sha256 else "sha1"
    git("init", "--quiet", "--bare", "--template=", f"--object-format={shape}", f"--initial-branch={branch}")
    return git


def _resolved(git: Git, past: RepositoryFacts, base_commit: str, what: Path) -> str:
    wanted = past.named(base_commit) or base_commit if base_commit else past.head
    if wanted is None:
        raise FilesRefused(f"{what}: it does not say which commit is checked out; the sample's base_commit should")
    if wanted.startswith("-"):
        raise FilesRefused(f"{what}: {wanted!r} is no commit")
    try:
        return git.lines("rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")[-1]
    except GitFailed:
        raise FilesRefused(f"{what}: the base commit {wanted} is not in it") from None


def _tags_of_the_past(git: Git, past: RepositoryFacts, base: str) -> dict[str, str]:
    """Versions are told by tags. One made after the base commit is left out, also where it names an old commit."""
    named = {name: hash_ for name, hash_ in past.refs.items() if name.startswith("refs/tags/")}
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
            continue  # It names no commit, or one that is not here: not of this past.
    return kept


def _tagged_at(git: Git, tag: str) -> int:
    for line in git.lines("cat-file", "tag", tag):
        if line.startswith("tagger "):
            moment = line.rsplit(" ", 2)[-2]
            return int(moment) if moment.isdigit() else 1 << 62
        if not line:
            break
    return 1 << 62


def _write_files(git: Git, moved_from: str | None, base: str, budget: UnpackLimits) -> None:
    """The base commit's files into the tree; what another commit had put there goes."""
    _count(git, base, budget)
    if moved_from is not None:
        git("read-tree", moved_from)
        git("update-index", "-q", "--refresh", fine=(0, 1))
    git("read-tree", "--reset", "-u", base)


def _count(git: Git, base: str, budget: UnpackLimits) -> None:
    """A tree of few objects can have more files than there are atoms; it is counted before it is written."""
    process = git.start("ls-tree", "-r", "-t", "-l", "--full-tree", base)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            size = line.split(b"\t", 1)[0].split()[-1]
            budget.add(files=1, data=int(size) if size.isdigit() else 0)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def _settled(new: Git, past: RepositoryFacts, base: str, tags: dict[str, str]) -> GitReceipt:
    new("update-ref", "--no-deref", f"refs/heads/{past.branch}", base)
    new("update-ref", "--stdin", stdin="".join(f"create {name} {hash_}\n" for name, hash_ in tags.items()).encode())
    new("pack-refs", "--all")
    # Under the overlay of a session a file has another number and time of change, and is the same all the same.
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
        raise FilesRefused(f"{len(every - reachable):,} objects of the history are of no commit up to {base[:12]}")
    return GitReceipt(
        base_commit=base,
        commits_kept=int(new.lines("rev-list", "--count", "--all")[0]),
        commits_removed=0,
        objects_removed=0,
        tags_kept=len(tags),
        refs_removed=len(past.refs) - len(tags) - int(past.refs.get(f"refs/heads/{past.branch}") == base),
        remotes_removed=past.remotes,
        stashes_removed=past.stashes,
        reflog_entries_removed=past.reflogs,
        verified=True,
    )


def _kinds(git: Git) -> Counter[str]:
    return Counter(git.lines("cat-file", "--batch-all-objects", "--batch-check=%(objecttype)", "--unordered"))


def _without_nested(tree: Path) -> list[str]:
    """Histories of repositories within the files can tell of the future too, and nobody knows their base."""
    found = []
    for place, folders, files in os.walk(tree):
        if ".git" not in (*folders, *files) or place == str(tree):
            continue
        found.append(os.path.relpath(os.path.join(place, ".git"), tree))
        if ".git" in folders and not (tree / found[-1]).is_symlink():
            folders.remove(".git")
            shutil.rmtree(tree / found[-1])
        else:
            os.unlink(tree / found[-1])
    return found


def _nothing_left(removed: list[str]) -> GitReceipt:
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
