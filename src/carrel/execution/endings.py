"""How a worker ended, in words: by itself, by a signal, or because memory ran out."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from carrel.guest.sandbox.cgroups import trees

_FAULTS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error",
    signal.SIGFPE: "an arithmetic fault",
    signal.SIGILL: "an illegal instruction",
    signal.SIGABRT: "an abort",
    signal.SIGSYS: "a system call that the sandbox refuses",
    signal.SIGXFSZ: "a file that grew beyond the limit",
    signal.SIGXCPU: "the limit on processor time",
}


class WorkerDied(Exception):
    """The worker ended before it answered."""


@dataclass(frozen=True)
class Ending:
    """What a result says of it."""

    error_type: str
    text: str


def told_ending(status: int | None, broke: str, *, out_of_memory: bool = False) -> Ending:
    """From the wait status, where it is known; `out_of_memory` when the kernel ended something of it just now."""
    if broke:
        return Ending("Crashed", f"the session's Python was ended: {broke}")
    if status is None:
        return Ending("Crashed", "the session's Python ended")
    if os.WIFEXITED(status):
        return Ending("Crashed", f"the code ended the session's Python, with exit code {os.WEXITSTATUS(status)}")
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and out_of_memory:
        return Ending("OutOfMemory", "the session used more memory than it may, and the kernel ended its Python")
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    reason = next((text for fault, text in _FAULTS.items() if fault == number), "it was killed")
    return Ending("Crashed", f"the session's Python ended by {name}: {reason}")


class MemoryKills:
    """How often the kernel has ended something in a session's cgroup for want of memory; it counts on for ever.

    So the count is taken when a request begins, and what matters is whether it has grown since. A session and its
    forks have one cgroup.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._before = 0

    @classmethod
    def of(cls, init: int) -> MemoryKills:
        """Of the session with this first process; one that counts nothing where there is no memory cgroup."""
        tree = trees().get("memory")
        try:
            rows = Path(f"/proc/{init}/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            rows = []
        for row in rows if tree is not None else []:
            _, controllers, path = row.split(":", 2)
            if tree is None or not (controllers == "" or "memory" in controllers.split(",")):
                continue
            for name in ("memory.events", "memory.oom_control"):
                file = Path(tree.folder) / Path(path).name / name
                if file.exists():
                    return cls(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        return cls()

    def shared(self) -> MemoryKills:
        """For a fork."""
        return MemoryKills(os.dup(self._file) if self._file >= 0 else -1)

    def begin(self) -> None:
        self._before = self._count()

    def has_grown(self) -> bool:
        return self._count() > self._before

    def _count(self) -> int:
        if self._file < 0:
            return 0
        try:
            rows = [line.split() for line in os.pread(self._file, 4096, 0).splitlines()]
        except OSError:
            return 0  # the cgroup is gone
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == b"oom_kill"), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
