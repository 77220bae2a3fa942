"""The processes that a program started, also those that left its group: known by a mark in their environment."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MARK = "CARREL_STARTED_FOR"
_PROC = Path("/proc")


def end_marked(mark: str) -> int:
    """Kill all that have the mark, until there are none; how many there were.

    One that takes the mark out of its environment when it starts another program, or belongs to another user, is not
    found."""
    ended: set[int] = set()
    for _ in range(10):
        found = set()
        for pid in _marked(mark):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    # Again, now that the number cannot become another's.
                    if _has(pid, mark):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                        found.add(pid)
                finally:
                    os.close(handle)
        if not found - ended:
            break
        ended |= found
    return len(ended)


def _marked(mark: str) -> Iterator[int]:
    if not _PROC.is_dir():
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _has(int(entry.name), mark):
            yield int(entry.name)


def _has(pid: int, mark: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        # Gone meanwhile, or somebody else's.
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")
