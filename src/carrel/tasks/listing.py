"""Which files of a place are not the sample's: one look at all of them, however many there are."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from carrel.execution.executor import Executor, FileChange
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
