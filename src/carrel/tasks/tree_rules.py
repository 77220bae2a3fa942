"""What a sample's files may be: so much, and nothing that leads out of their folder."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from carrel.errors import FilesRefused

MIB = 1024 * 1024
MOST_BYTES = 16 * 1024 * MIB
"""All files of a sample together, unpacked."""
MOST_FILES = 2_000_000
ALWAYS_ALLOWED = 256 * MIB
"""What any archive may unpack to, however small it is."""
MOST_TIMES = 100
"""How many times its own size an archive may unpack to beyond that; source code packs to a third or a tenth."""
_MOST_LINKS = 40
"""Links in a row, as the kernel has it."""


@dataclass
class Budget:
    """Counts what is unpacked, and refuses what is too much."""

    what: Path
    """The file that the messages name."""
    most_bytes: int = MOST_BYTES
    most_files: int = MOST_FILES
    bytes: int = 0
    files: int = 0
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set by who does not wait any more; the work ends at the next count."""

    @classmethod
    def for_packed(cls, file: Path) -> Budget:
        """Of an archive: a bomb is known by how much more comes out than went in."""
        return cls(file, min(MOST_BYTES, max(ALWAYS_ALLOWED, MOST_TIMES * file.stat().st_size)))

    def add(self, *, files: int = 0, data: int = 0) -> None:
        self.files += files
        self.bytes += data
        if self.given_up.is_set():
            raise FilesRefused(f"{self.what}: nobody waits for it any more")
        if self.bytes > self.most_bytes:
            raise FilesRefused(
                f"{self.what} unpacks to more than {self.most_bytes // MIB:,} MiB, more than a sample may have "
                f"({MOST_TIMES} times its packed size, {MOST_BYTES // MIB:,} MiB at most)"
            )
        if self.files > self.most_files:
            raise FilesRefused(
                f"{self.what} has more than {self.most_files:,} files, which is more than a sample may have"
            )


def inner_path(name: str, what: Path) -> str:
    """A name in an archive as a plain relative path; empty for the top itself. FilesRefused for one that leads out."""
    if name.startswith("/"):
        raise FilesRefused(f"{what}: {name!r} is an absolute path; files of a sample lie in its own folder")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise FilesRefused(f"{what}: {name!r} leads out of the sample's folder")
    return "/".join(parts)


def every_entry(tree: Path, without: str | None = None) -> Iterator[os.DirEntry[str]]:
    """All below a folder but what has the name `without`, by name; links not followed, a folder before its own."""
    folders = [str(tree)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name == without:
                    continue
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def refuse_unfit(tree: Path, what: Path) -> None:
    """FilesRefused for a device, a pipe, a socket, or a link that leads out of the tree, by whatever way."""
    for entry in every_entry(tree):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            refuse_link_out(tree, os.path.relpath(entry.path, tree), what)
        elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise FilesRefused(f"{what}: {os.path.relpath(entry.path, tree)} is {kind_of(mode)}, and no file or folder")


def kind_of(mode: int) -> str:
    """What is no file, folder or link, in words."""
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def refuse_link_out(tree: Path, path: str, what: Path) -> None:
    """Follow a link step by step as the kernel would, other links on the way too; it may lead to nothing, not out."""
    place: list[str] = path.split("/")[:-1]
    target = os.readlink(tree / path)
    ahead, links = _steps(target), 1
    problem = FilesRefused(f"{what}: the link {path} leads out of the sample's folder, to {target}")
    if target.startswith("/"):
        raise problem
    while ahead:
        step = ahead.pop(0)
        if step == "..":
            if not place:
                raise problem
            place.pop()
            continue
        here = tree.joinpath(*place, step)
        if here.is_symlink():
            links += 1
            onward = os.readlink(here)
            if onward.startswith("/"):
                raise problem
            if links > _MOST_LINKS:
                return  # The kernel gives up here as well: it leads nowhere.
            ahead[:0] = _steps(onward)
        else:
            place.append(step)


def _steps(target: str) -> list[str]:
    return [step for step in target.split("/") if step not in ("", ".")]
