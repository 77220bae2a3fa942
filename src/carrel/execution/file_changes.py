"""Which files of a workspace are not as they were at the start, and how they differ."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from carrel.execution.executor import FileChange

LONGEST = 1024 * 1024
"""Bytes of a file above which its difference is told, not shown."""
KEPT_IN_ALL = 64 * 1024 * 1024
"""Bytes that are remembered of a workspace which the session writes to directly."""

Reader = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One file or link, as a listing shows it."""

    kind: str
    size: int
    modified: float
    changed: int = 0
    """When the kernel last saw it change, in nanoseconds: unlike the time before, nobody can set it."""
    executable: bool = False


Tree = dict[str, Seen]


class Before(Protocol):
    """The workspace as it was."""

    def tree(self) -> Tree:
        """Every file and link, by its path."""

    def read(self, path: str) -> bytes | None:
        """A file's content, or None where it was not remembered."""


class Empty:
    """A workspace that began with nothing in it."""

    def tree(self) -> Tree:
        return {}

    def read(self, path: str) -> bytes | None:
        return None


class Folder:
    """A folder that the session cannot change."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tree(self) -> Tree:
        return seen_below(self._path)

    def read(self, path: str) -> bytes | None:
        return read_plain(self._path / path)


class Copied:
    """A folder that the session has a copy of: the list is of the copy as it was made, the content the folder's."""

    def __init__(self, path: Path, copy: Path) -> None:
        self._path = path
        self._tree = seen_below(copy)

    def tree(self) -> Tree:
        return self._tree

    def read(self, path: str) -> bytes | None:
        return read_plain(self._path / path)


class Remembered:
    """A folder that the session does change: a list of it, and the content of what is not too large."""

    def __init__(self, path: Path) -> None:
        self._tree = seen_below(path)
        self._content: dict[str, bytes] = {}
        left = KEPT_IN_ALL
        for name, seen in self._tree.items():
            if seen.kind == "file" and seen.size <= min(LONGEST, left):
                content = read_plain(path / name)
                if content is not None:
                    self._content[name] = content
                    left -= len(content)

    def tree(self) -> Tree:
        return self._tree

    def read(self, path: str) -> bytes | None:
        return self._content.get(path)


def seen_below(folder: Path) -> Tree:
    """Every file and link below a folder of the host; links are not followed."""
    found: Tree = {}
    for place, folders, files in os.walk(folder):
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]:
            path = os.path.join(place, name)
            try:
                about = os.lstat(path)
            except FileNotFoundError:
                continue
            kind = "link" if stat.S_ISLNK(about.st_mode) else "file"
            runs = kind == "file" and bool(about.st_mode & stat.S_IXUSR)
            found[os.path.relpath(path, folder)] = Seen(kind, about.st_size, about.st_mtime, about.st_ctime_ns, runs)
    return found


def read_plain(path: Path) -> bytes | None:
    """The content of a regular file; a link, a pipe or a device is not opened for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


async def changes(before: Before, now: Tree, read: Reader) -> list[FileChange]:
    """By path. Size and times decide at a glance; where only a time differs, the content does."""
    was = before.tree()
    found = [FileChange(path, "deleted") for path in was.keys() - now.keys()]
    found += [FileChange(path, "added", now[path].size) for path in now.keys() - was.keys()]
    for path in was.keys() & now.keys():
        old, new = was[path], now[path]
        if old == new:
            continue
        if (old.kind, old.size, old.executable) == (new.kind, new.size, new.executable) and old.kind == "file":
            content = before.read(path)
            if content is not None and content == await read(path):
                continue
        found.append(FileChange(path, "modified", new.size))
    return sorted(found, key=lambda change: change.path)


async def unified(before: Before, found: list[FileChange], read: Reader) -> str:
    """The changes as a diff that `patch -p1` and `git apply` take; what is no short text is only named."""
    parts = []
    for change in found:
        old = b"" if change.kind == "added" else before.read(change.path)
        new = b"" if change.kind == "deleted" else await _content(change, read)
        parts.append(_one(change, _lines(old), _lines(new)))
    return "".join(parts)


async def _content(change: FileChange, read: Reader) -> bytes | None:
    if change.size > LONGEST:
        return None
    try:
        return await read(change.path)
    except (OSError, ValueError):
        return None


def _lines(content: bytes | None) -> list[str] | None:
    if content is None or len(content) > LONGEST or b"\0" in content:
        return None
    try:
        return content.decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        return None


def _one(change: FileChange, old: list[str] | None, new: list[str] | None) -> str:
    before = "/dev/null" if change.kind == "added" else f"a/{change.path}"
    after = "/dev/null" if change.kind == "deleted" else f"b/{change.path}"
    if old is None or new is None:
        return f"Binary files {before} and {after} differ\n"
    lines = []
    for line in difflib.unified_diff(old, new, before, after):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)
