"""Read the changes made in a workspace, and apply them to another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from carrel.errors import CarrelError, PatchRefused
from carrel.execution.executor import CommandResult
from carrel.execution.file_changes import Seen, read_plain, seen_below
from carrel.tasks.environment import TaskExecutor

# --- reading the changes --------------------------------------------------------------------------------------------

MAX_FILE_SIZE = 64 * 1024 * 1024
"""Bytes of one changed file."""
MAX_TOTAL_SIZE = 512 * 1024 * 1024
"""Bytes of all changed files."""
MAX_FILES = 20_000
MAX_PATH = 3000
"""Bytes; the kernel accepts 4096, including the path of the workspace."""
_BATCH = 60_000
"""Characters of file names in one command."""
_GIT = {
    # The folder may have another owner. Git reads no settings from outside it.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One file or link that differs from the sample's."""

    path: str
    kind: Literal["file", "link", "deleted"]
    content: bytes = b""
    """The content of a file, or the target of a link."""
    executable: bool = False


@dataclass(frozen=True)
class Changes:
    """The work that is judged: how a workspace differs from the sample's files."""

    entries: tuple[Change, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """Changes that are not judged, each with the reason."""


Exclude = Callable[[str], str | None]
"""Why the change of a path is not judged; None when it is."""


class Base(Protocol):
    """The files that changes apply to."""

    def kind(self, path: str) -> Literal["file", "folder", "link"] | None: ...

    def children(self, path: str) -> Iterable[str]:
        """All files and links below a folder."""

    def runs(self, path: str) -> bool:
        """Whether it is an executable file."""


async def read_changes(executor: TaskExecutor, exclude: Exclude = lambda path: None) -> Changes:
    """Read the changes in a workspace once; what happens in it afterwards is not judged.

    The listing may come from the sandbox and cannot be trusted, so paths are checked and sizes bounded."""
    entries: list[Change] = []
    left_out: list[tuple[str, str]] = []
    size = 0
    changes, tree = await executor.changes_and_tree()
    for change in changes:
        path = change.path
        read: Change | str | None = invalid_path(path) or exclude(path)
        if read is None and len(entries) == MAX_FILES:
            read = f"more than {MAX_FILES} files in all"
        read = read or await _read_change(executor, path, tree.get(path))
        if isinstance(read, Change) and read.kind == "file":
            size += len(read.content)
            if size > MAX_TOTAL_SIZE:
                read = f"more than {MAX_TOTAL_SIZE >> 20} MiB in all"
        if isinstance(read, Change):
            entries.append(read)
        else:
            left_out.append((path, read))
    return Changes(tuple(entries), tuple(left_out))


async def _read_change(executor: TaskExecutor, path: str, now: Seen | None) -> Change | str:
    """A changed file as it is now; a text says why it is not judged."""
    if now is None:
        return Change(path, "deleted")
    if now.kind == "link":
        return Change(path, "link", now.target.encode("utf-8", "surrogateescape"))
    try:
        content = await executor.read_file(path) if now.size <= MAX_FILE_SIZE else b""
    except (OSError, ValueError) as problem:
        return f"cannot be read: {problem}"
    if max(now.size, len(content)) > MAX_FILE_SIZE:
        return f"larger than {MAX_FILE_SIZE >> 20} MiB"
    return Change(path, "file", content, now.executable)


def changes_of_folder(before: Path, folder: Path, exclude: Exclude = lambda path: None) -> Changes:
    """How a folder on the host differs from `before`."""
    was, now = seen_below(before), seen_below(folder)
    entries = []
    left_out = []
    for path in sorted(was.keys() | now.keys()):
        reason = invalid_path(path) or exclude(path)
        change = None if reason else _difference(before, folder, path, was.get(path), now.get(path))
        if reason and was.get(path) != now.get(path):
            left_out.append((path, reason))
        elif change is not None:
            entries.append(change)
    return Changes(tuple(entries), tuple(left_out))


def _difference(before: Path, folder: Path, path: str, old: Seen | None, new: Seen | None) -> Change | None:
    if new is None:
        return Change(path, "deleted")
    if new.kind == "link":
        target = os.readlink(folder / path)
        same = old is not None and old.kind == "link" and os.readlink(before / path) == target
        return None if same else Change(path, "link", target.encode())
    content = read_plain(folder / path)
    if content is None:
        return None
    same = old is not None and old.kind == "file" and old.executable == new.executable
    return None if same and read_plain(before / path) == content else Change(path, "file", content, new.executable)


def invalid_path(path: str) -> str | None:
    """Why a path cannot be that of a file in the workspace; None when it can."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "/".join(parts) != path:
        return "not a plain path inside the workspace"
    try:
        return None if len(path.encode("utf-8")) < MAX_PATH else "its path is too long"
    except UnicodeEncodeError:
        return "its name is not text"


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """As many paths as fit into one command, each written so that it cannot be read as an option."""
    batch: list[str] = []
    length = 0
    for path in paths:
        if batch and length + len(path) > _BATCH:
            yield batch
            batch, length = [], 0
        batch.append(f"./{path}")
        length += len(path) + 3
    if batch:
        yield batch


def drop_unsafe(changes: Changes, base: Base) -> Changes:
    """Leave out changes that would write through a link or a file, or replace a folder that is still in use."""
    final: dict[str, Change] = {change.path: change for change in changes.entries}
    kept: list[Change] = []
    left_out = list(changes.left_out)
    for change in changes.entries:
        reason = _unsafe_reason(change, final, base)
        if reason is None:
            kept.append(change)
        else:
            left_out.append((change.path, reason))
    return Changes(tuple(kept), tuple(left_out))


def _unsafe_reason(change: Change, final: dict[str, Change], base: Base) -> str | None:
    for above in list(PurePosixPath(change.path).parents)[:-1]:
        name = str(above)
        changed = final.get(name)
        kind = changed.kind if changed is not None else base.kind(name)
        if kind == "link" or (kind == "file" and change.kind != "deleted"):
            return f"{name} is a {kind}, not a folder"
    if change.kind != "deleted" and base.kind(change.path) == "folder":
        remaining = [path for path in base.children(change.path) if path not in final or final[path].kind != "deleted"]
        if remaining:
            return f"{remaining[0]} still exists"
    return None


# --- applying them --------------------------------------------------------------------------------------------------


async def apply_changes(changes: Changes, executor: TaskExecutor, base: Base) -> None:
    """Apply changes, which must come from `drop_unsafe`, to a new workspace that equals `base`."""
    deleted = [change.path for change in changes.entries if change.kind == "deleted"]
    links = [change for change in changes.entries if change.kind == "link"]
    files = [change for change in changes.entries if change.kind == "file"]
    await _exec_all(executor, ["rm", "-f", "--"], [*deleted, *(change.path for change in links)])
    folders = sorted({str(PurePosixPath(path).parent) for path in deleted} - {"."})
    await _exec_all(executor, ["rmdir", "-p", "--ignore-fail-on-non-empty", "--"], folders, may_fail=True)
    for change in files:
        await executor.write_file(change.path, change.content)
    await _exec_all(
        executor,
        ["chmod", "u=rwx,go=rx", "--"],
        [change.path for change in files if change.executable and not base.runs(change.path)],
    )
    await _exec_all(
        executor,
        ["chmod", "u=rw,go=r", "--"],
        [change.path for change in files if not change.executable and base.runs(change.path)],
    )
    for change in links:
        folder = str(PurePosixPath(change.path).parent)
        await _exec_all(executor, ["mkdir", "-p", "--"], [folder])
        target = change.content.decode("utf-8", "surrogateescape")
        await _exec_all(executor, ["ln", "-sfn", "--", target], [change.path])


async def _exec_all(executor: TaskExecutor, words: list[str], paths: Sequence[str], *, may_fail: bool = False) -> None:
    for names in _batches(paths):
        done = await executor.exec([*words, *names], timeout=120)
        if done.exit_code and not may_fail:
            raise CarrelError(f"the changes could not be applied: {words[0]}: {done.stderr.strip()[-500:]}")


async def apply_patch(executor: TaskExecutor, patch: str, what: str) -> None:
    """Run `git apply` in the workspace. PatchRefused has the message of git, and then nothing was changed."""
    if not patch.strip():
        return
    text = patch if patch.endswith("\n") else patch + "\n"
    words = ["git", "apply", "--whitespace=nowarn", "-"]
    try:
        done: CommandResult = await executor.exec(words, stdin=text, env=_GIT, timeout=120)
    except FileNotFoundError:
        raise PatchRefused(f"{what} could not be applied: there is no git in the sandbox") from None
    if done.exit_code:
        raise PatchRefused(
            f"{what} does not apply: {done.stderr.strip()[-1000:] or f'git ended with {done.exit_code}'}"
        )
