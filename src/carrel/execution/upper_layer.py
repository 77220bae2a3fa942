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


def _read(folder: int, path: str, base: Path | None, found: Upper, depth: int) -> None:
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


def _note(
    folder: int, name: str, path: str, about: os.stat_result, base: Path | None, found: Upper, depth: int
) -> None:
    """`base` is None below a folder that the base does not have, or that hides the base's."""
    if stat.S_ISDIR(about.st_mode):
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if base is not None and (_is_opaque(inside) or not _is_folder(base / path)):
                found.hidden.update(_below(base, path))
                base = None
            _read(inside, path, base, found, depth + 1)
        finally:
            os.close(inside)
        return
    if base is not None:
        found.hidden.update(_below(base, path))
    if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
        return
    kind = "link" if stat.S_ISLNK(about.st_mode) else "file"
    # As a listing from inside has it, which looks at more than regular files.
    runs = kind == "file" and bool(about.st_mode & stat.S_IXUSR)
    target = os.readlink(name, dir_fd=folder) if kind == "link" else ""
    found.seen[path] = Seen(kind, about.st_size, about.st_mtime, about.st_ctime_ns, runs, target)


def _is_folder(path: Path) -> bool:
    """And no link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def _below(base: Path, path: str) -> list[str]:
    """What the base has at a path: the file or link itself, or all that is in the folder."""
    full = base / path
    if not _is_folder(full):
        return [path] if os.path.lexists(full) else []
    found = []
    for place, folders, files in os.walk(full):
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]:
            found.append(os.path.relpath(os.path.join(place, name), base))
    return found
