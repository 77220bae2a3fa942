"""How a worker ended, in words: by itself, by a signal, or because memory ran out."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from carrel.sandbox.cgroups import trees

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


def told_ending(status: int | None, broke: str, init: int) -> Ending:
    """From the wait status, where it is known; `init` is the session's first process, while it lives."""
    if broke:
        return Ending("Crashed", f"the session's Python was ended: {broke}")
    if status is None:
        return Ending("Crashed", "the session's Python ended")
    if os.WIFEXITED(status):
        return Ending("Crashed", f"the code ended the session's Python, with exit code {os.WEXITSTATUS(status)}")
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and init and ran_out_of_memory(init):
        return Ending("OutOfMemory", "the session used more memory than it may, and the kernel ended its Python")
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    reason = next((text for fault, text in _FAULTS.items() if fault == number), "it was killed")
    return Ending("Crashed", f"the session's Python ended by {name}: {reason}")


def ran_out_of_memory(pid: int) -> bool:
    """Whether the kernel has ended something in this process's cgroup for want of memory."""
    tree = trees().get("memory")
    if tree is None:
        return False
    try:
        rows = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for row in rows:
        _, controllers, path = row.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            folder = Path(tree.folder) / Path(path).name
            for name in ("memory.events", "memory.oom_control"):
                if _count(folder / name, "oom_kill") > 0:
                    return True
    return False


def _count(file: Path, word: str) -> int:
    try:
        rows = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == word), 0)
