"""The processes of a session: which there are, which belong together, how to end them, and how to become one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from . import syscalls

MARK = "CARREL_COMMAND"
"""The environment variable by which a process that became a daemon is still recognized as a command's."""
TITLE = "carrel"
_MARK_PREFIX = f"{MARK}=".encode()
_ENVIRONMENT_READS = 3
_KILL_TIME = 2.0
"""Seconds to go on killing, since processes may start others meanwhile."""
_INTERRUPT_TIME = 0.1
"""Seconds that a process has to end after SIGINT, before it is killed."""


class Process(NamedTuple):
    """One row of the process table."""

    parent: int
    group: int
    session: int


ProcessTable = dict[int, Process]
Marks = dict[bytes, set[int]]


def scan() -> ProcessTable:
    """Every process that can be seen, but this one and those that have ended and wait to be reaped."""
    found = {}
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        fields = _stat_fields(int(name))
        if fields and fields[0] not in (b"Z", b"X"):
            found[int(name)] = Process(int(fields[1]), int(fields[2]), int(fields[3]))
    return found


def _stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; none when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def scan_with_marks() -> tuple[ProcessTable, Marks]:
    """The process table, and which of the processes carry which command's mark in their environment."""
    table = scan()
    marks: Marks = {}
    # In the middle of execve a process has no environment. Kernel threads, children of process 2, never have one.
    unread = {pid for pid, process in table.items() if process.parent != 2}
    for _ in range(_ENVIRONMENT_READS):
        unread = {pid for pid in unread if not _read_marks(pid, marks)}
        if not unread:
            break
        time.sleep(0.001)
    return table, marks


def _read_marks(pid: int, marks: Marks) -> bool:
    """Whether the process has an environment, or is none that can be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            content = file.read()
    except OSError:
        return True
    for variable in content.split(b"\0"):
        if variable.startswith(_MARK_PREFIX):
            marks.setdefault(variable, set()).add(pid)
    return bool(content)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, and nothing has continued it."""
    return _stat_fields(pid)[:1] in ([b"T"], [b"t"])


def numbers_of(pidfd: int) -> list[int]:
    """The numbers of the process behind a pidfd: in this process's pid namespace, then in each one below it that the
    process is in. Empty when it is gone, or not visible from here."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        row = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
    return [int(number) for number in row if int(number) > 0]


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether a process is a child of another, or a child of such a child, and so on."""
    while pid > 1:
        fields = _stat_fields(pid)
        if not fields:
            return False
        pid = int(fields[1])
        if pid == ancestor:
            return True
    return False


def descendants(pids: Iterable[int], table: ProcessTable) -> set[int]:
    """The children of these processes, their children, and so on."""
    found: set[int] = set()
    newest = set(pids)
    while newest:
        newest = {child for child, process in table.items() if process.parent in newest} - found
        found |= newest
    return found


class ProcessTree:
    """A command's first process, and all that descend from it, also those that left its process group."""

    def __init__(self, pid: int, mark: str) -> None:
        self.pid = pid
        self.reaped = False
        """Whether its first process has ended and been waited for. Its number may be another's by now, unless a process
        with the mark is still in its group or session."""
        self._mark = f"{MARK}={mark}".encode()

    def members(self, scanned: tuple[ProcessTable, Marks] | None = None) -> list[int]:
        """Those that live now: by group and session, by parent, and by the mark in their environment."""
        table, marks = scanned or scan_with_marks()
        found = set(marks.get(self._mark, ()))
        if not self.reaped or any(self.pid in (table[pid].group, table[pid].session) for pid in found):
            found |= {pid for pid, process in table.items() if self.pid in (pid, process.group, process.session)}
        return sorted(found | descendants(found, table))

    def kill(self) -> None:
        """Kill them all."""
        if not self.reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # no descriptor is left to look for those that are in no such group
            _kill_until_none(self.members)


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark in their environment."""
    _kill_until_none(lambda: scan_with_marks()[1].get(f"{MARK}={mark}".encode(), ()))


def started_in_session(session: int | None = None, exclude: Iterable[int] = (), trees: Iterable[int] = ()) -> list[int]:
    """The processes of a kernel session (by default this process's own) but `exclude`, and the `trees` with all that
    descend from them. Processes in a live fork's pid namespace belong to the fork, and do not count."""
    own_depth = _namespace_depth(os.getpid())
    session = os.getsid(0) if session is None else session
    table = scan()
    trees = set(trees)
    excluded = {*exclude, *trees, *descendants(trees, table)}
    members = (pid for pid, process in table.items() if process.session == session and pid not in excluded)
    return sorted(pid for pid in members if _namespace_depth(pid) == own_depth)


def end_started_in_session(
    session: int | None = None,
    exclude: Iterable[int] = (),
    trees: Iterable[int] = (),
    *,
    interrupt_first: bool = False,
) -> None:
    """End what `started_in_session` finds: at once, or first by SIGINT, as Ctrl-C in a terminal does."""
    exclude, trees = list(exclude), list(trees)

    def find() -> list[int]:
        return started_in_session(session, exclude, trees)

    if interrupt_first:
        if not _signal_all(find(), signal.SIGINT):
            return
        end = time.monotonic() + _INTERRUPT_TIME
        while time.monotonic() < end:
            if not find():
                return
            time.sleep(0.005)
    _kill_until_none(find)


def kill_descendants(exclude: Set[int] = frozenset(), *, patience: float = _KILL_TIME) -> None:
    """Kill what descends from this process."""
    _kill_until_none(lambda: descendants([os.getpid()], scan()) - exclude, patience)


def kill_namespace(exclude: Set[int] = frozenset(), *, patience: float = _KILL_TIME) -> None:
    """In the first process of a pid namespace: kill all others in it, but none in the namespaces of forks below it."""
    own_depth = _namespace_depth(os.getpid())
    _kill_until_none(
        lambda: [pid for pid in scan() if pid not in exclude and _namespace_depth(pid) == own_depth], patience
    )


class StopGuard:
    """Continues processes that others of their session stop; when those do it again and again, kills the others."""

    TOO_OFTEN = 3

    def __init__(self, kill_others: Callable[[Set[int]], None]) -> None:
        self._kill_others = kill_others
        """Called with the processes that are to be left alone."""
        self._times_stopped: dict[int, int] = {}
        """How many checks in a row have found a process stopped."""

    def check(self, process: int, exclude: Set[int], *, kill: bool) -> None:
        """With `kill`, others than these may be killed."""
        if not is_stopped(process):
            self._times_stopped.pop(process, None)
            return
        times = self._times_stopped.get(process, 0) + 1
        if kill and times >= self.TOO_OFTEN:
            self._kill_others({process, *exclude})
            times = 1
        self._times_stopped[process] = times
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def _namespace_depth(pid: int) -> int:
    """In how many pid namespaces a process has a number; those of a fork of this session have one more."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((len(row.split()) for row in file if row.startswith(b"NSpid:")), 0)
    except OSError:
        return -1


def _signal_all(pids: Iterable[int], number: int) -> bool:
    """Whether there was a process to signal."""
    some = False
    for pid in pids:
        some = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return some


def _kill_until_none(find: Callable[[], Iterable[int]], patience: float = _KILL_TIME) -> None:
    end = time.monotonic() + patience
    while _signal_all(find(), signal.SIGKILL) and time.monotonic() < end:
        time.sleep(0.001)


def set_title(title: str = TITLE) -> None:
    """Name this process, and what is forked from it, in lists of processes. `pkill python`, run by the session's code
    to end its own programs, then does not end the session."""
    syscalls.libc.prctl(syscalls.PR_SET_NAME, title.encode(), 0, 0, 0)
    fields = _stat_fields(os.getpid())
    if len(fields) < 47:
        return
    # Where its arguments are in memory (fields 48 and 49 of proc(5)); 0 where the kernel does not show it.
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end - len(title):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title.encode(), len(title))


# --- becoming a process of a session ----------------------------------------------------------------------------------


def close_others(kept: set[int]) -> None:
    """Close every descriptor but these and the first three."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            try:
                os.close(number)
            except OSError as error:
                if error.errno != 9:  # The listing's own descriptor is closed already.
                    raise


def reset_signals() -> None:
    """Handle signals as a Python program does at its start, without those of the process that it was forked from."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def set_standard_streams(stdout: int, stderr: int) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, number in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, number, inheritable=True)
    for source in {nothing, stdout, stderr} - {0, 1, 2}:
        os.close(source)


def become_killable() -> None:
    """When memory runs out, the kernel ends this process, and what it starts, before the session's first process."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")  # gVisor refuses it
