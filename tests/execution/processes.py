"""Looking at real processes: who came from whom, and whether they are gone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path


def started(pid: int) -> str | None:
    """When it began, or None when there is no such process (a zombie is none)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] in "ZX" else words[19]


def descendants(pid: int) -> dict[int, str]:
    """All that came from a process and live, by number, with when they began."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(words[1]), []).append(int(name))
    found: dict[int, str] = {}
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            began = started(child)
            if began is not None:
                found[child] = began
            queue.append(child)
    return found


def alive(processes: dict[int, str]) -> list[int]:
    return [pid for pid, began in processes.items() if started(pid) == began]


def wait_gone(processes: dict[int, str], seconds: float = 60.0) -> list[int]:
    """What of them is left when all are gone, or after so many seconds."""
    end = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(held: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something that sets no event here."""
    async with asyncio.timeout(seconds):
        while not held():  # noqa: ASYNC110 -- as it says
            await asyncio.sleep(0.01)


def mounts() -> list[str]:
    """What is mounted where a session's mounts are made; elsewhere other programs may mount meanwhile."""
    places = [row.split()[4] for row in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place in ("/tmp", "/run", "/var", "/mnt", "/usr") or ".carrel" in place]


def memory(pid: int | str = "self") -> int:
    """Bytes that only this process has."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))


def anonymous(pid: int) -> int:
    """Bytes of memory that is of no file, also where a process that came from this one shares it."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("Anonymous:"))


def groups_of(zygotes: set[int]) -> list[str]:
    """The cgroups that sessions of these zygotes have; other hosts on the machine have theirs."""
    names = [name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders if name.startswith("carrel-")]
    return [name for name in names if int(name.split("-")[1]) in zygotes]
