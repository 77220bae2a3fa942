"""All processes that came of one command, also those that left its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import time

MARK = "CARREL_COMMAND"
"""The variable by which a process that became a daemon is still known as the command's."""
_PATIENCE = 2.0


class Family:
    """A command's first process, and all that descend from it."""

    def __init__(self, pid: int, mark: str) -> None:
        self.pid = pid
        self._mark = f"{MARK}={mark}".encode()

    def members(self) -> list[int]:
        """Those that live now: by group and session, by parent, and by the mark in their environment."""
        table = _table()
        found: set[int] = set()
        for pid, (parent, group, session) in table.items():
            if self.pid in (pid, group, session) or parent in found or self._marked(pid):
                found.add(pid)
        # Children may stand before their parents.
        more = True
        while more:
            more = False
            for pid, (parent, _, _) in table.items():
                if parent in found and pid not in found:
                    found.add(pid)
                    more = True
        return sorted(found)

    def _marked(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._mark in file.read().split(b"\0")
        except OSError:
            return False

    def kill(self) -> None:
        """End them all; a few rounds, since they may make more meanwhile."""
        until = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            found = self.members()
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
            if not found or time.monotonic() > until:
                return
            time.sleep(0.001)


def _table() -> dict[int, tuple[int, int, int]]:
    """Parent, group and session of every process that is not dead."""
    found = {}
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, group, session = file.read().rpartition(b")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state not in (b"Z", b"X"):
            found[int(name)] = (int(parent), int(group), int(session))
    return found
