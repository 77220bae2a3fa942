"""The snapshot: a paused fork of the session's Python, from which the session continues when the worker dies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import warnings
from collections.abc import Callable

from .. import syscalls
from ..channel import Channel, ChannelError, TooManyDescriptors
from .fork_checks import devices_reason, native_threads, native_threads_reason, open_descriptors, python_threads_reason


def quiet_fork(fork: Callable[[], int] = os.fork) -> int:
    """Fork without Python's warning about threads, which are counted here before and after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fork()


class _Poll(ctypes.Structure):
    """struct pollfd of poll.h."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


_fork, _poll, _close = syscalls.locked_libc.fork, syscalls.locked_libc.poll, syscalls.locked_libc.close
_api = ctypes.pythonapi
_before_fork, _after_in_parent, _after_in_child = (
    _api.PyOS_BeforeFork,
    _api.PyOS_AfterFork_Parent,
    _api.PyOS_AfterFork_Child,
)


def fork_paused(until: int, close: tuple[int, ...]) -> int:
    """A fork whose child does nothing, and so shares all its memory, until it can read from the descriptor `until`.

    It runs no Python code before: that would write to reference counts, and each page that is written to is copied.
    What Python does in a child after a fork is done when it continues; the descriptors `close` are closed at once.
    """
    polled = ctypes.byref(_Poll(until, select.POLLIN, 0))
    _before_fork()
    pid: int = _fork()
    if pid == 0:
        for fd in close:
            _close(fd)
        while _poll(polled, 1, -1) < 0 and ctypes.get_errno() == errno.EINTR:
            continue
        _after_in_child()
        return 0
    _after_in_parent()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as table:
        return int(table.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Snapshot:
    """The one paused fork that is kept; making the next ends the one before."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._pid = 0
        self._ended: list[int] = []
        """Earlier ones, which were killed and not reaped yet."""
        self._unsafe_threads: set[int] = set()

    def refusal(self) -> str | None:
        """Why none can be made now, or None."""
        try:
            size = _resident_bytes()
            if size > self._max_size:
                return (
                    f"the session's Python uses {size >> 20} MiB, more than is kept twice ({self._max_size >> 20} MiB)"
                )
            left = self._unsafe_threads & native_threads() if self._unsafe_threads else None
            reason = python_threads_reason() or devices_reason(open_descriptors())
            return reason or (native_threads_reason(left) if left else None)
        except (OSError, ValueError, IndexError) as problem:
            return f"the session's Python cannot be examined: {problem}"

    def make(self, channel: Channel, covers: object) -> Channel | str | None:
        """Fork. In the parent: give the host the fork's channel, and return None or the reason why it failed.

        In the fork: its own channel, once the host has restored it.
        """
        self.reap()  # where one run follows the other, nothing else reaps them
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as problem:
            return f"no channel to it could be made: {problem}"
        try:
            pid = fork_paused(theirs.fileno(), (ours.fileno(), channel.fileno()))
        except OSError as problem:
            ours.close()
            theirs.close()
            return f"no process could be made: {problem}"
        if pid == 0:
            ours.detach()
            channel.socket.detach()
            return self._continue(Channel(theirs))
        theirs.close()
        # Some libraries end their threads before a fork and start them again after it; any other thread is lost.
        self._unsafe_threads = native_threads()
        if self._unsafe_threads:
            self._end(pid)
            ours.close()
            return native_threads_reason(self._unsafe_threads)
        pidfd = _open_pidfd(pid)
        try:
            channel.send({"op": "snapshot", "pid": pid, "covers": covers}, (ours.fileno(), *pidfd))
        except TooManyDescriptors as problem:
            self._end(pid)
            return f"it could not be passed to the host: {problem.strerror}"
        finally:
            ours.close()
            for fd in pidfd:
                os.close(fd)
        # Only now: a worker that is killed in between leaves the older one.
        self.drop()
        self._pid = pid
        return None

    def _continue(self, channel: Channel) -> Channel:
        try:
            record, _ = channel.read()
        except ChannelError:
            os._exit(0)
        if record.get("op") != "restore":
            os._exit(0)
        return channel

    def drop(self) -> None:
        """End the one that is there, without waiting for its end."""
        pid, self._pid = self._pid, 0
        if pid:
            self._end(pid)

    def _end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._ended.append(pid)

    def reap_later(self, pid: int) -> None:
        """Reap another fork of the worker when it has ended."""
        self._ended.append(pid)

    def processes(self) -> set[int]:
        return {self._pid, *self._ended}

    def reap(self) -> bool:
        """Reap those that have ended; whether there are others that will end soon."""
        self._ended = [pid for pid in self._ended if not _is_reaped(pid)]
        return bool(self._ended)

    def forget(self) -> None:
        """In a fork: the snapshot belongs to the parent."""
        self._pid = 0
        self._ended = []


def _open_pidfd(pid: int) -> tuple[int, ...]:
    """None where the kernel has no pidfd (gVisor)."""
    try:
        return (os.pidfd_open(pid),)
    except OSError:
        return ()


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # the session's code has waited for it
