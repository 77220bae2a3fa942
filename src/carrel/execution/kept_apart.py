"""Folders of the host that code inside may write to, and those it must never reach."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from carrel.errors import ConfigurationError


def refuse_writable(writable: Iterable[tuple[str, Path]], kept: Mapping[str, Path | None]) -> None:
    """`ConfigurationError` when code inside could write what the host itself reads and runs.

    `writable` are the folders that it changes, and what each is called; `kept` are those it may not."""
    for what, folder in writable:
        for name, place in kept.items():
            if place is not None and (within(place, folder) or within(folder, place)):
                where = "the same folder" if within(place, folder) and within(folder, place) else "one inside the other"
                raise ConfigurationError(
                    f"{what} {folder} can be written by code inside, and {name} {place} is read and run by the host: "
                    f"they are {where}. Keep {name} elsewhere, or use workspace_mode='overlay' (or 'ro'), which leaves "
                    "the folder as it is"
                )


def within(place: Path, folder: Path) -> bool:
    """Whether it lies in the folder or is it: by its name, or where links lead."""
    real = os.path.realpath(folder)
    # By name too: a link that lies in the folder could be made to lead elsewhere.
    return any(_below(found, real) for found in (os.path.realpath(place), *_names(place)))


def _names(place: Path) -> list[str]:
    """Each link on the way to it, where that link itself lies."""
    parts = Path(os.path.abspath(place)).parts
    ways = [os.path.join(*parts[:count]) for count in range(1, len(parts) + 1)]
    return [
        os.path.join(os.path.realpath(os.path.dirname(way)), os.path.basename(way))
        for way in ways
        if os.path.islink(way)
    ]


def _below(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder
