"""Removes from the cache what was not used for a while: unpacked files, what set-ups left, archives for download."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from carrel.execution import temp_dirs
from carrel.tasks.holding import alone, last_used

_GONE = ".gone"


@dataclass(frozen=True)
class Pruned:
    """One folder or archive of the cache that was removed, or would be."""

    name: str
    bytes: int
    last_used: float


@dataclass
class Pruning:
    """What came of it."""

    removed: list[Pruned] = field(default_factory=list)
    in_use: int = 0
    """Folders old enough that somebody uses all the same."""
    kept: int = 0

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.removed)


def prune(cache: Path, before: float, *, dry_run: bool = False) -> Pruning:
    """Remove what was last used before that moment, in seconds since the epoch, and is used by no process now.

    A folder is renamed before it is removed, so that whoever comes meanwhile makes it anew; what a killed prune left
    is removed by the next."""
    done = Pruning()
    for kind in ("files", "layers"):
        for folder in _folders(cache / kind):
            try:
                used = last_used(folder)
                if used >= before:
                    done.kept += 1
                    continue
                found = Pruned(f"{kind}/{folder.name}", sum(_size(part) for part in _parts(folder)), used)
            except FileNotFoundError:
                continue  # another prune was faster
            with alone(folder) as free:
                if not folder.exists():
                    continue
                if not free:
                    done.in_use += 1
                    continue
                done.removed.append(found)
                if not dry_run:
                    _take_away(folder)
        if not dry_run:
            for leftover in (cache / kind).glob(f"*{_GONE}"):
                temp_dirs.remove(leftover)
    for archive in sorted((cache / "downloads").glob("*.tar.gz")):
        try:
            about = archive.stat()
        except FileNotFoundError:
            continue  # another prune was faster
        if about.st_mtime >= before:
            done.kept += 1
            continue
        done.removed.append(Pruned(f"downloads/{archive.name}", about.st_size, about.st_mtime))
        if not dry_run:
            # A download that is under way has it open, and ends well.
            archive.unlink(missing_ok=True)
            archive.with_suffix(".lock").unlink(missing_ok=True)
    return done


def _folders(place: Path) -> Iterator[Path]:
    if place.is_dir():
        for folder in sorted(place.iterdir()):
            if folder.is_dir() and not folder.suffix and folder.name != "digests":
                yield folder


def _parts(folder: Path) -> list[Path]:
    return [part for part in (folder, folder.with_suffix(".home")) if part.exists()]


def _take_away(folder: Path) -> None:
    """Its mark first: without one it is nothing that anybody would take for whole."""
    folder.with_suffix(".json").unlink(missing_ok=True)
    for part in _parts(folder):
        part.rename(part.with_name(f"{part.name}.{os.getpid()}{_GONE}"))


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            about = os.lstat(os.path.join(place, name))
            total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return total
