"""All processes that came of one command, also those that left its process group; and what one run has started."""

from __future__ import annotations

import contextlib
import os
import signal
import time

MARK = "CARREL_COMMAND"
"""The variable by which a process that became a daemon is still known as the command's."""
_BEGINNING = f"{MARK}=".encode()
_PATIENCE = 2.0
_MOMENT = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
Look = tuple[dict[int, tuple[int, int, int]], dict[bytes, set[int]]]


class Family:
    """A command's first process, and all that descend from it."""

    def __init__(self, pid: int, mark: str) -> None:
        self.pid = pid
        self._mark = f"{MARK}={mark}".encode()
        self.over = False
        """Whether its first process has ended and been waited for. Its number may be another's by now, unless somebody
        with the mark is still in its group or session."""

    def members(self, seen: Look | None = None) -> list[int]:
        """Those that live now: by group and session, by parent, and by the mark in their environment."""
        table, marks = seen or look()
        found = set(marks.get(self._mark, ()))
        if not self.over or any(self.pid in table[pid][1:] for pid in found):
            found |= {pid for pid, (_, group, session) in table.items() if self.pid in (pid, group, session)}
        # Children may stand before their parents.
        more = True
        while more:
            more = False
            for pid, (parent, _, _) in table.items():
                if parent in found and pid not in found:
                    found.add(pid)
                    more = True
        return sorted(found)

    def left_in_group(self) -> bool:
        """Right after its first process was waited for: whether others of its group live."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def kill(self) -> None:
        """End them all; a few rounds, since they may make more meanwhile."""
        until = time.monotonic() + _PATIENCE
        while True:
            if not self.over:
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


def now() -> int:
    """In the unit in which the kernel tells when a process began."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


def end_since(moment: int, besides: set[int], gently: bool, session: int | None = None) -> None:
    """End what was started since then and has not been detached on purpose: it is in this process's own session, or
    in the one that is named.

    `gently`: as Ctrl-C in a terminal does, by SIGINT; what is there a moment later is killed.
    """
    if gently and not _signal_all(since(moment, besides, session), signal.SIGINT):
        return
    until = time.monotonic() + (_MOMENT if gently else 0.0)
    while time.monotonic() < until:
        if not since(moment, besides, session):
            return
        time.sleep(0.005)
    until = time.monotonic() + _PATIENCE
    while _signal_all(since(moment, besides, session), signal.SIGKILL) and time.monotonic() < until:
        time.sleep(0.001)


def since(moment: int, besides: set[int], session: int | None = None) -> list[int]:
    """What was started since then in a session, without what others there have started."""
    own, above = _depth(os.getpid()), os.getppid()
    session = os.getsid(0) if session is None else session
    table = {pid: parent for pid, (parent, _, theirs) in _table().items() if theirs == session}
    found = {pid for pid in table if pid not in besides and _began(pid) >= moment and _depth(pid) == own}
    while True:
        others = {pid for pid in found if table[pid] in table and table[pid] not in found and table[pid] != above}
        if not others:
            return sorted(found)
        found -= others


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, and nothing has continued it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def end_others(spared: set[int]) -> None:
    """End all that descends from this process, but those that are spared."""
    until = time.monotonic() + _PATIENCE
    while _signal_all(sorted(_descendants(os.getpid()) - spared), signal.SIGKILL) and time.monotonic() < until:
        time.sleep(0.001)


def _descendants(pid: int) -> set[int]:
    table, found, newest = _table(), set[int](), {pid}
    while newest:
        newest = {child for child, (parent, _, _) in table.items() if parent in newest} - found
        found |= newest
    return found


def begun_since(moment: int, pids: set[int]) -> list[int]:
    return sorted(pid for pid in pids if _began(pid) >= moment)


def _signal_all(pids: list[int], number: int) -> bool:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return bool(pids)


def _began(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


def _depth(pid: int) -> int:
    """In how many namespaces it has a number: those of a fork of this session have one more, and are not ours."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((len(row.split()) for row in file if row.startswith(b"NSpid:")), 0)
    except OSError:
        return -1


def look() -> Look:
    """All processes now, and who of them has which mark."""
    table = _table()
    marks: dict[bytes, set[int]] = {}
    for pid in table:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        for word in words:
            if word.startswith(_BEGINNING):
                marks.setdefault(word, set()).add(pid)
    return table, marks


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
