"""Read the changes made in a workspace, and apply them to another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from carrel.errors import CarrelError, PatchRefused
from carrel.execution.executor import CommandResult, Executor, FileChange
from carrel.execution.file_changes import Seen, Tree, Upper, read_plain, seen_at, seen_below
from carrel.execution.subprocess_executor import SubprocessExecutor

_FORMAT = "%y %m %s %T@ %C@ %p\\0"
_END = "carrel-end"
_SAME_MOMENT = 1e-5
"""Seconds; a time that was written in decimals and read again is not always the same float."""


async def changed_files(place: Executor, base: Path | None) -> tuple[list[FileChange], Tree]:
    """As the executor's own, which asks once per folder. Where the workspace is an overlay only its upper layer is
    looked at, and else this asks once in all, where the place has a `find`.

    With how the files look now, where that came with it.
    """
    upper = await place.upper(base) if base is not None and isinstance(place, SubprocessExecutor) else None
    if base is not None and upper is not None:
        return await _changed_in(place, base, upper), upper.seen
    now = None if base is None else await _listed(place)
    if base is None or now is None:
        return await place.changed_files(), {}
    was = samples_tree(base)
    found = [FileChange(path, "deleted") for path in was.keys() - now.keys()]
    found += [FileChange(path, "added", now[path].size) for path in now.keys() - was.keys()]
    for path in was.keys() & now.keys():
        if not _alike(was[path], now[path]) or not await _untouched(place, base, path, was[path], now[path]):
            found.append(FileChange(path, "modified", now[path].size))
    return sorted(found, key=lambda change: change.path), now


async def _changed_in(place: Executor, base: Path, upper: Upper) -> list[FileChange]:
    found = [FileChange(path, "deleted") for path in upper.hidden - upper.seen.keys()]
    for path, new in upper.seen.items():
        old = seen_at(base, path)
        if old is None:
            found.append(FileChange(path, "added", new.size))
        elif not _alike(old, new) or not await _untouched(place, base, path, old, new):
            found.append(FileChange(path, "modified", new.size))
    return sorted(found, key=lambda change: change.path)


@lru_cache(maxsize=64)
def samples_tree(folder: Path) -> Tree:
    """Of a folder that nobody writes to, so it is read once."""
    return seen_below(folder)


async def _listed(place: Executor) -> Tree | None:
    """None where it cannot be told this way: no GNU find, names that are no text, more than one answer holds."""
    words = ["find", ".", "!", "-type", "d", "-printf", _FORMAT]
    done = await place.exec(["sh", "-c", '"$@" && printf %s ' + _END, "sh", *words], timeout=300)
    told = done.stdout.split("\0")
    if not done.success or told.pop() != _END or "\ufffd" in done.stdout:
        return None
    tree: Tree = {}
    for line in told:
        parts = line.split(" ", 5)
        if len(parts) != 6:
            return None  # its middle was left out
        kind, mode, size, modified, changed, path = parts
        runs = kind == "f" and bool(int(mode, 8) & 0o100)
        word = "link" if kind == "l" else "file"
        tree[path.removeprefix("./")] = Seen(word, int(size), float(modified), _nanoseconds(changed), runs)
    return tree


def _nanoseconds(moment: str) -> int:
    """Of a time in seconds with up to ten decimals, exactly."""
    seconds, _, rest = moment.partition(".")
    return int(seconds) * 1_000_000_000 + int(rest[:9].ljust(9, "0"))


def _alike(old: Seen, new: Seen) -> bool:
    return (old.kind, old.size, old.executable) == (new.kind, new.size, new.executable)


async def _untouched(place: Executor, base: Path, path: str, old: Seen, new: Seen) -> bool:
    """Of two that look alike: their times decide, and where one differs their content."""
    if abs(old.modified - new.modified) < _SAME_MOMENT and old.changed == new.changed:
        return True
    try:
        return new.kind == "file" and read_plain(base / path) == await place.read_file(path)
    except (OSError, ValueError):
        return False


LARGEST = 64 * 1024 * 1024
"""Bytes of one file that are carried over."""
MOST = 512 * 1024 * 1024
"""Bytes of all of them."""
MOST_FILES = 20_000
LONGEST_PATH = 3000
"""Bytes; the kernel takes 4096 with the folder that it lies in."""
_AT_ONCE = 60_000
"""Characters of names that one command is given."""
_GIT = {
    # The folder may belong to somebody else than the place's user; and no setting outside it counts.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One file or link that is not as the sample has it."""

    path: str
    kind: Literal["file", "link", "deleted"]
    content: bytes = b""
    """Of a file; for a link, where it leads."""
    executable: bool = False


@dataclass(frozen=True)
class Changes:
    """All that counts as somebody's work."""

    entries: tuple[Change, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """What is not carried over, each with the reason."""


Verdict = Callable[[str], str | None]
"""Why a path is not carried over; None where it is."""


class Base(Protocol):
    """The files that the changes are to."""

    def kind(self, path: str) -> Literal["file", "folder", "link"] | None: ...

    def children(self, path: str) -> Iterable[str]:
        """Every file and link below a folder."""

    def runs(self, path: str) -> bool:
        """Whether it is a file that can be run."""


async def read_changes(place: Executor, why_not: Verdict = lambda path: None, base: Path | None = None) -> Changes:
    """Read once; whatever happens in the place afterwards is in nobody's verdict.

    `base` is the folder that the place began with, where that is known: with it one look at the place is enough.
    What a place says of its files is what somebody in there may have made it say: paths are checked, sizes bounded.
    """
    entries: list[Change] = []
    left_out: list[tuple[str, str]] = []
    found = []
    changed, seen = await changed_files(place, base)
    for change in changed:
        reason = odd_path(change.path) or why_not(change.path)
        if reason is None and change.size > LARGEST:
            reason = f"larger than {LARGEST >> 20} MiB"
        if reason is None:
            found.append(change)
        else:
            left_out.append((change.path, reason))
    for change in found[MOST_FILES:]:
        left_out.append((change.path, f"more than {MOST_FILES} files in all"))
    del found[MOST_FILES:]
    there = [change.path for change in found if change.kind != "deleted"]
    looks = {path: _Look(None, seen[path].executable) for path in there if path in seen and seen[path].kind == "file"}
    looks |= await _looks(place, [path for path in there if path not in looks])
    left = MOST
    for change in found:
        if change.kind == "deleted":
            entries.append(Change(change.path, "deleted"))
        elif (look := looks.get(change.path, _Look())).link is not None:
            entries.append(Change(change.path, "link", look.link.encode()))
        else:
            try:
                content = await place.read_file(change.path)
            except (OSError, ValueError) as problem:
                left_out.append((change.path, f"cannot be read: {problem}"))
                continue
            left -= len(content)
            if left < 0 or len(content) > LARGEST:
                left_out.append((change.path, f"more than {MOST >> 20} MiB in all"))
                continue
            entries.append(Change(change.path, "file", content, look.executable))
    return Changes(tuple(entries), tuple(left_out))


def changes_of_folder(before: Path, folder: Path, why_not: Verdict = lambda path: None) -> Changes:
    """How a folder of the host differs from the sample's files."""
    was, now = seen_below(before), seen_below(folder)
    entries = []
    left_out = []
    for path in sorted(was.keys() | now.keys()):
        reason = odd_path(path) or why_not(path)
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


def odd_path(path: str) -> str | None:
    """Why a path cannot be that of a file in the workspace."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "/".join(parts) != path:
        return "no plain path inside the workspace"
    try:
        return None if len(path.encode("utf-8")) < LONGEST_PATH else "its path is too long"
    except UnicodeEncodeError:
        return "its name is no text"


@dataclass(frozen=True, slots=True)
class _Look:
    link: str | None = None
    executable: bool = False


async def _looks(place: Executor, paths: Sequence[str]) -> dict[str, _Look]:
    """Which are links, and which can be run; without a `find` inside, all are taken for plain files."""
    looks: dict[str, _Look] = {}
    for names in _batches(paths):
        done = await place.exec(["find", *names, "-maxdepth", "0", "-printf", "%y %m %p\\0%l\\0"], timeout=60)
        told = done.stdout.split("\0")
        for about, target in zip(told[::2], told[1::2], strict=False):
            kind, mode, name = about.split(" ", 2)
            runs = kind == "f" and mode.isdigit() and bool(int(mode, 8) & 0o100)
            looks[name.removeprefix("./")] = _Look(target if kind == "l" else None, runs)
    return looks


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """As many names as one command takes, none of which can be taken for an option."""
    batch: list[str] = []
    length = 0
    for path in paths:
        if batch and length + len(path) > _AT_ONCE:
            yield batch
            batch, length = [], 0
        batch.append(f"./{path}")
        length += len(path) + 3
    if batch:
        yield batch


def drop_unsafe(changes: Changes, base: Base) -> Changes:
    """Without those that would reach through a link or a file, or replace a folder that is still in use."""
    final: dict[str, Change] = {change.path: change for change in changes.entries}
    kept: list[Change] = []
    left_out = list(changes.left_out)
    for change in changes.entries:
        reason = _trap(change, final, base)
        if reason is None:
            kept.append(change)
        else:
            left_out.append((change.path, reason))
    return Changes(tuple(kept), tuple(left_out))


def _trap(change: Change, final: dict[str, Change], base: Base) -> str | None:
    for above in list(PurePosixPath(change.path).parents)[:-1]:
        name = str(above)
        changed = final.get(name)
        kind = changed.kind if changed is not None else base.kind(name)
        if kind == "link" or (kind == "file" and change.kind != "deleted"):
            return f"{name} is a {kind}, and no folder"
    if change.kind != "deleted" and base.kind(change.path) == "folder":
        staying = [path for path in base.children(change.path) if path not in final or final[path].kind != "deleted"]
        if staying:
            return f"{staying[0]} is still there"
    return None


async def apply_changes(changes: Changes, place: Executor, base: Base) -> None:
    """Make a fresh place, which is as `base`, as the changes say; they are of `drop_unsafe`."""
    deleted = [change.path for change in changes.entries if change.kind == "deleted"]
    links = [change for change in changes.entries if change.kind == "link"]
    files = [change for change in changes.entries if change.kind == "file"]
    await _do(place, ["rm", "-f", "--"], [*deleted, *(change.path for change in links)])
    folders = sorted({str(PurePosixPath(path).parent) for path in deleted} - {"."})
    await _do(place, ["rmdir", "-p", "--ignore-fail-on-non-empty", "--"], folders, may_fail=True)
    for change in files:
        await place.write_file(change.path, change.content)
    await _do(
        place,
        ["chmod", "u=rwx,go=rx", "--"],
        [change.path for change in files if change.executable and not base.runs(change.path)],
    )
    await _do(
        place,
        ["chmod", "u=rw,go=r", "--"],
        [change.path for change in files if not change.executable and base.runs(change.path)],
    )
    for change in links:
        folder = str(PurePosixPath(change.path).parent)
        await _do(place, ["mkdir", "-p", "--"], [folder])
        target = change.content.decode("utf-8", "surrogateescape")
        await _do(place, ["ln", "-sfn", "--", target], [change.path])


async def _do(place: Executor, words: list[str], paths: Sequence[str], *, may_fail: bool = False) -> None:
    for names in _batches(paths):
        done = await place.exec([*words, *names], timeout=120)
        if not done.success and not may_fail:
            raise CarrelError(f"the changes could not be carried over: {words[0]}: {done.stderr.strip()[-500:]}")


async def apply_patch(place: Executor, patch: str, what: str) -> None:
    """`git apply` in the place; PatchRefused has what git said, and then nothing was changed."""
    if not patch.strip():
        return
    text = patch if patch.endswith("\n") else patch + "\n"
    words = ["git", "apply", "--whitespace=nowarn", "-"]
    done: CommandResult = await place.exec(words, stdin=text, env=_GIT, timeout=120)
    if done.exit_code == 127:
        raise PatchRefused(f"{what} could not be applied: there is no git in the place")
    if not done.success:
        raise PatchRefused(
            f"{what} does not apply: {done.stderr.strip()[-1000:] or f'git ended with {done.exit_code}'}"
        )
