"""Init's ways to end processes: all of its own, all that descend from it, or what one run has started."""

from __future__ import annotations

import contextlib
import os
import signal
import time

_PATIENCE = 2.0
STOPPED_TOO_OFTEN = 3


def kill_own_processes() -> None:
    """All of this pid namespace but init, and none of the namespaces below it."""
    while True:
        found = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1" and _depth(name) == 1:
                found += 1
                # Whoever made it may have buried it by now: for a fork's worker that is the init above.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.001)


def _depth(name: str) -> int:
    """How many pid namespaces, from ours downwards, a process has a number in; 0 when it is gone or a zombie."""
    try:
        with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
            text = file.read()
        if "\nState:\tZ" in text:
            return 0
        return next((len(line.split()) - 1 for line in text.splitlines() if line.startswith("NSpid:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def kill_descendants() -> None:
    """Without a pid namespace: kill children, and theirs as they come to us, until there are none."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            children = []
        for child in children:
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class Tending:
    """Continues a worker that other processes of its session stop."""

    def __init__(self) -> None:
        self._stopped = 0
        """How many looks in a row have found it stopped."""

    def look(self, worker: int, spared: set[int], end: bool) -> None:
        """With `end`, all others are killed where it is stopped time and again, but those that are spared."""
        self._stopped = self._stopped + 1 if _is_stopped(worker) else 0
        if end and self._stopped >= STOPPED_TOO_OFTEN:
            kill_others({worker, *spared})
            self._stopped = 1
        if self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_others(spared: set[int]) -> None:
    """All that descend from this process, but those that are spared and those of the namespaces below."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        parents = {int(name): _parent(name) for name in os.listdir("/proc") if name.isdigit()}
        ours, found = {os.getpid()}, 1
        while found:
            more = {pid for pid, parent in parents.items() if parent in ours} - ours
            ours, found = ours | more, len(more)
        others = [pid for pid in ours - spared - {os.getpid()} if _depth(str(pid)) == 1]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not others:
            return
        time.sleep(0.001)


def _parent(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def kill_since(moment: int, session: int, besides: set[int]) -> None:
    """What was started in a session since then, by the kernel's clock, and not by something older in it; `besides`
    were started just before."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        found = _since(moment, session, besides)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.001)


def _since(moment: int, session: int, besides: set[int]) -> set[int]:
    parents, young = {}, set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _depth(name) == 1:
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(words[3]) == session:
                parents[int(name)] = int(words[1])
                if int(words[19]) >= moment and int(name) not in besides:
                    young.add(int(name))
    while True:
        others = {pid for pid in young if parents[pid] in parents and parents[pid] not in young}
        if not others:
            return young
        young -= others
