"""Read the changes made in a workspace, and apply them to another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, runtime_checkable

from carrel.errors import CarrelError, PatchRefused
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.executor import CommandResult, Executor, FileChange
from carrel.execution.file_changes import Seen, Tree, Upper, read_plain, seen_at, seen_below

_SAME_TIME = 1e-5
"""Seconds; file systems keep times with different precision."""


# --- finding the changed files --------------------------------------------------------------------------------------


@runtime_checkable
class OverlayExecutor(Protocol):
    """An executor whose workspace may be an overlay, which lists the changes to it."""

    still: AbstractAsyncContextManager[Any]
    """Keeps the executor from rewinding while it is held."""

    async def upper(self, base: Path) -> Upper | None:
        """The changes to a workspace that began as `base`; None when they are unknown."""


async def changed_files(executor: Executor, base: Path | None) -> tuple[list[FileChange], Tree]:
    """The changes in the workspace, and the new state of the files where it was listed on the way.

    Faster than the executor's own method: it reads the upper layer of an overlay, or lists the workspace by a single
    `find`, where that is possible."""
    upper = await executor.upper(base) if base is not None and isinstance(executor, OverlayExecutor) else None
    if base is not None and upper is not None:
        return await _overlay_changes(executor, base, upper), upper.seen
    now = None if base is None else await list_workspace(executor)
    if base is None or now is None:
        return await executor.changed_files(), {}
    before = sample_tree(base)
    found = [FileChange(path, "deleted") for path in before.keys() - now.keys()]
    found += [FileChange(path, "added", now[path].size) for path in now.keys() - before.keys()]
    for path in before.keys() & now.keys():
        if not _is_alike(before[path], now[path]) or not await _is_same(executor, base, path, before[path], now[path]):
            found.append(FileChange(path, "modified", now[path].size))
    return sorted(found, key=lambda change: change.path), now


async def _overlay_changes(executor: Executor, base: Path, upper: Upper) -> list[FileChange]:
    found = [FileChange(path, "deleted") for path in upper.hidden - upper.seen.keys()]
    for path, new in upper.seen.items():
        old = seen_at(base, path)
        if old is None:
            found.append(FileChange(path, "added", new.size))
        elif not _is_alike(old, new) or not await _is_same(executor, base, path, old, new):
            found.append(FileChange(path, "modified", new.size))
    return sorted(found, key=lambda change: change.path)


@lru_cache(maxsize=64)
def sample_tree(folder: Path) -> Tree:
    """The files of a folder that never changes, so they are listed once."""
    return seen_below(folder)


async def list_workspace(executor: Executor) -> Tree | None:
    """The files and links in the workspace; None when it cannot be listed."""
    if not isinstance(executor, CommandsAndFiles):
        return None
    try:
        return await executor.list_tree()
    except (OSError, ValueError):
        return None


def _is_alike(old: Seen, new: Seen) -> bool:
    return (old.kind, old.size, old.executable) == (new.kind, new.size, new.executable)


async def _is_same(executor: Executor, base: Path, path: str, old: Seen, new: Seen) -> bool:
    """Whether two files that look alike are equal: by their times, and by their content when the times differ."""
    if abs(old.modified - new.modified) < _SAME_TIME and old.changed == new.changed:
        return True
    try:
        return new.kind == "file" and read_plain(base / path) == await executor.read_file(path)
    except (OSError, ValueError):
        return False


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


async def read_changes(executor: Executor, exclude: Exclude = lambda path: None, base: Path | None = None) -> Changes:
    """Read the changes in a workspace once; what happens in it afterwards is not judged.

    `base` is the folder that the workspace started as, if known; it makes reading faster. The listing comes from the
    sandbox and cannot be trusted, so paths are checked and sizes bounded.
    """
    entries: list[Change] = []
    left_out: list[tuple[str, str]] = []
    found = []
    changed, seen = await changed_files(executor, base)
    for change in changed:
        reason = invalid_path(change.path) or exclude(change.path)
        if reason is None and change.size > MAX_FILE_SIZE:
            reason = f"larger than {MAX_FILE_SIZE >> 20} MiB"
        if reason is None:
            found.append(change)
        else:
            left_out.append((change.path, reason))
    for change in found[MAX_FILES:]:
        left_out.append((change.path, f"more than {MAX_FILES} files in all"))
    del found[MAX_FILES:]
    existing = [change.path for change in found if change.kind != "deleted"]
    types = {path: _FileType(None, seen[path].executable) for path in existing if _is_known_file(seen.get(path))}
    types |= await _file_types(executor, [path for path in existing if path not in types])
    left = MAX_TOTAL_SIZE
    for change in found:
        if change.kind == "deleted":
            entries.append(Change(change.path, "deleted"))
        elif (type_ := types.get(change.path, _FileType())).target is not None:
            entries.append(Change(change.path, "link", type_.target.encode()))
        else:
            try:
                content = await executor.read_file(change.path)
            except (OSError, ValueError) as problem:
                left_out.append((change.path, f"cannot be read: {problem}"))
                continue
            left -= len(content)
            if left < 0 or len(content) > MAX_FILE_SIZE:
                left_out.append((change.path, f"more than {MAX_TOTAL_SIZE >> 20} MiB in all"))
                continue
            entries.append(Change(change.path, "file", content, type_.executable))
    return Changes(tuple(entries), tuple(left_out))


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


@dataclass(frozen=True, slots=True)
class _FileType:
    target: str | None = None
    """Of a link; None for a file."""
    executable: bool = False


def _is_known_file(seen: Seen | None) -> bool:
    return seen is not None and seen.kind == "file"


async def _file_types(executor: Executor, paths: Sequence[str]) -> dict[str, _FileType]:
    """Which paths are links, and which are executable; without `find`, all are treated as plain files."""
    types: dict[str, _FileType] = {}
    for names in _batches(paths):
        try:
            done = await executor.exec(["find", *names, "-maxdepth", "0", "-printf", "%y %m %p\\0%l\\0"], timeout=60)
        except FileNotFoundError:
            return {}
        parts = done.stdout.split("\0")
        for facts, target in zip(parts[::2], parts[1::2], strict=False):
            letter, mode, name = facts.split(" ", 2)
            is_executable = letter == "f" and mode.isdigit() and bool(int(mode, 8) & 0o100)
            types[name.removeprefix("./")] = _FileType(target if letter == "l" else None, is_executable)
    return types


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


async def apply_changes(changes: Changes, executor: Executor, base: Base) -> None:
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


async def _exec_all(executor: Executor, words: list[str], paths: Sequence[str], *, may_fail: bool = False) -> None:
    for names in _batches(paths):
        done = await executor.exec([*words, *names], timeout=120)
        if done.exit_code and not may_fail:
            raise CarrelError(f"the changes could not be applied: {words[0]}: {done.stderr.strip()[-500:]}")


async def apply_patch(executor: Executor, patch: str, what: str) -> None:
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
