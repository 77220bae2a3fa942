"""A frozen fork: the session as it was after the last cell, ready to go on when the worker dies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import threading
import warnings
from collections.abc import Callable

from .. import syscalls
from ..channel import Channel, ChannelError, TooManyDescriptors
from .apart import connections
from .native import holders, owners

_NEVER_SHARED = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_BEAR_A_FORK = ("jemalloc_bg_thd",)
"""Housekeeping of memory (pyarrow brings it, and so does pandas), which ends and begins again around a fork."""
_CHANNELS = ("socket:", "pipe:", "anon_inode:")


def quiet_fork(fork: Callable[[], int] = os.fork) -> int:
    """Fork, without Python's word on threads: they are counted here, before and after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fork()


class _Poll(ctypes.Structure):
    """struct pollfd of poll.h."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


_fork, _poll, _close = syscalls.locked_libc.fork, syscalls.locked_libc.poll, syscalls.locked_libc.close
_api = ctypes.pythonapi
_before, _in_parent, _in_child = _api.PyOS_BeforeFork, _api.PyOS_AfterFork_Parent, _api.PyOS_AfterFork_Child


def fork_asleep(until: int, without: tuple[int, ...]) -> int:
    """A fork whose child does nothing, and so shares all its memory, until something comes on a descriptor.

    It runs no line of Python before: each would write to the counts of what it uses, and a page that is written to
    is a page of its own. What Python does after a fork is done when it wakes up; `without` is closed at once.
    """
    waits = ctypes.byref(_Poll(until, select.POLLIN, 0))
    _before()
    pid: int = _fork()
    if pid == 0:
        for fd in without:
            _close(fd)
        while _poll(waits, 1, -1) < 0 and ctypes.get_errno() == errno.EINTR:
            continue
        _in_child()
        return 0
    _in_parent()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def hide() -> bool:
    """Nobody of the session may look into this process, or write to its memory; returns what was before."""
    return syscalls.set_dumpable(False)


def show(before: bool | None) -> None:
    """As it was before it was hidden; None where it was not."""
    if before is not None:
        syscalls.set_dumpable(before)


def threads() -> set[int]:
    """The threads of this process that are not this one, Python's and others', but for those that bear a fork."""
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {threading.get_native_id()}
    return {task for task in tasks if not _bears_a_fork(task)}


def _bears_a_fork(task: int) -> bool:
    try:
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() in _BEAR_A_FORK
    except OSError:
        return True  # it has ended


def python_threads() -> str | None:
    """Why Python's own threads forbid a fork, or None: only the forking thread lives on in the child."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not others:
        return None
    shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
    return f"{len(others)} other thread{'s' * (len(others) > 1)} running in the session's Python ({shown})"


def native_threads(left: set[int]) -> str:
    return f"{len(left)} native thread{'s' * (len(left) > 1)} of {owners(left)}, which no fork survives"


def devices(opened: dict[int, str]) -> str | None:
    """Why an open device forbids a fork, or None."""
    for target in opened.values():
        if target.startswith(_NEVER_SHARED):
            return f"a GPU is in use ({target})"
    return None


def channels(opened: dict[int, str], own: set[int]) -> str | None:
    """Why two processes cannot both have what is open here, or None: both would read and write one connection."""
    found = [fd for fd, target in opened.items() if fd > 2 and fd not in own and target.startswith(_CHANNELS)]
    found += connections(opened, own)
    if not found:
        return None
    kinds = sorted({opened[fd].partition(":")[0] for fd in found})
    shown = f"{', '.join(kinds)} (descriptors {', '.join(map(str, found[:5]))})"
    return f"open connections cannot be shared: {shown}{holders(found)}"


def descriptors() -> dict[int, str]:
    """What this process has open, by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own, closed by now
    return found


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as table:
        return int(table.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Frozen:
    """The one frozen fork that is kept; making the next ends the one before."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._pid = 0
        self._dying: list[int] = []
        self._foreign: set[int] = set()

    def refusal(self) -> str | None:
        """Why none can be made now, or None."""
        try:
            size = resident_bytes()
            if size > self._ceiling:
                return (
                    f"the session's Python uses {size >> 20} MiB, more than is kept twice ({self._ceiling >> 20} MiB)"
                )
            still = self._foreign & threads() if self._foreign else None
            return python_threads() or devices(descriptors()) or (native_threads(still) if still else None)
        except (OSError, ValueError, IndexError) as problem:
            return f"the session's Python cannot be looked at: {problem}"

    def make(self, line: Channel, covers: object) -> Channel | str | None:
        """Fork. In the parent: hand the host the fork's line, None; or the reason why it could not be.

        In the fork: its own line, once it is woken.
        """
        # Where one run follows the other nothing else does: they would count as processes of the session.
        self.bury()
        try:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as problem:
            return f"no line to it could be made: {problem}"
        try:
            pid = fork_asleep(there.fileno(), (here.fileno(), line.fileno()))
        except OSError as problem:
            here.close()
            there.close()
            return f"no process could be made: {problem}"
        if pid == 0:
            here.detach()
            line.socket.detach()
            return self._woken(Channel(there))
        there.close()
        # Some libraries end their threads before a fork and make them again after it; whatever is left does not.
        self._foreign = threads()
        if self._foreign:
            self._end(pid)
            here.close()
            return native_threads(self._foreign)
        watched = _watched(pid)
        try:
            line.send({"op": "frozen", "pid": pid, "covers": covers}, (here.fileno(), *watched))
        except TooManyDescriptors as problem:
            self._end(pid)
            return f"the host could not be given one: {problem.strerror}"
        finally:
            here.close()
            for fd in watched:
                os.close(fd)
        # Only now: whoever is killed in between leaves the older one.
        self.drop()
        self._pid = pid
        return None

    def _woken(self, line: Channel) -> Channel:
        try:
            record, _ = line.read()
        except ChannelError:
            os._exit(0)
        if record.get("op") != "wake":
            os._exit(0)
        return line

    def drop(self) -> None:
        """End the frozen fork that is there, without waiting for its end."""
        pid, self._pid = self._pid, 0
        if pid:
            self._end(pid)

    def _end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._dying.append(pid)

    def processes(self) -> set[int]:
        """All of its own that live."""
        return {self._pid, *self._dying}

    def bury(self) -> bool:
        """Bury those that have ended; whether there are others that will soon."""
        self._dying = [pid for pid in self._dying if not _buried(pid)]
        return bool(self._dying)

    def forget(self) -> None:
        """In a fork: the frozen ones belong to the parent."""
        self._pid = 0
        self._dying = []


def _watched(pid: int) -> tuple[int, ...]:
    """A pidfd, for whoever is not told of its end otherwise; none where the kernel has none, as gVisor's."""
    try:
        return (os.pidfd_open(pid),)
    except OSError:
        return ()


def _buried(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # code has waited for it
