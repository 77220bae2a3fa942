"""What the upper layer of an overlay says was changed: as much work as there are changes, however large the rest."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from carrel.execution.file_changes import Seen, Tree

DEEPEST = 200
"""Folders in folders; who makes more is looked at in another way."""
_OPAQUE = "user.overlay.opaque"


class Unreadable(Exception):
    """A layer that cannot be told of: too deep, or with names that are no text."""


@dataclass
class Upper:
    """One layer, read once."""

    seen: Tree = field(default_factory=dict)
    """The files and links in it: made, written to, or only looked at in a way that copies them."""
    hidden: set[str] = field(default_factory=set)
    """Files and links of the base that are not to be seen any more, unless they are in `seen` again."""


def read_upper(folder: int, base: Path) -> Upper:
    """By its descriptor, and no link followed: whoever works in the place may move things while this reads."""
    found = Upper()
    _read(folder, "", base, found, 0)
    return found


def _read(folder: int, path: str, base: Path, found: Upper, depth: int) -> None:
    if depth > DEEPEST:
        raise Unreadable(f"more than {DEEPEST} folders deep")
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise Unreadable("a name is no text")
        inner = f"{path}/{name}" if path else name
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            _note(folder, name, inner, about, base, found, depth)
        except (FileNotFoundError, NotADirectoryError):
            continue  # It was moved meanwhile.
        except OSError as problem:
            raise Unreadable(str(problem)) from None


def _note(folder: int, name: str, path: str, about: os.stat_result, base: Path, found: Upper, depth: int) -> None:
    if stat.S_ISDIR(about.st_mode):
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if _is_opaque(inside) or not os.path.isdir(base / path):
                found.hidden.update(_below(base, path))
            _read(inside, path, base, found, depth + 1)
        finally:
            os.close(inside)
        return
    if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
        found.hidden.update(_below(base, path))
        return
    found.hidden.update(_below(base, path))
    kind = "link" if stat.S_ISLNK(about.st_mode) else "file"
    runs = stat.S_ISREG(about.st_mode) and bool(about.st_mode & stat.S_IXUSR)
    found.seen[path] = Seen(kind, about.st_size, about.st_mtime, about.st_ctime_ns, runs)


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def _below(base: Path, path: str) -> list[str]:
    """What the base has at a path: the file or link itself, or all that is in the folder."""
    full = base / path
    if os.path.islink(full) or not os.path.isdir(full):
        return [path] if os.path.lexists(full) else []
    found = []
    for place, folders, files in os.walk(full):
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]:
            found.append(os.path.relpath(os.path.join(place, name), base))
    return found
