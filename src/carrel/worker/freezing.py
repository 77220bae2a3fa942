"""A frozen fork: the session as it was after the last cell, ready to go on when the worker dies."""

from __future__ import annotations

import os
import signal
import socket
import sys

from .line import Line


def foreign_threads() -> str | None:
    """Why this process cannot be forked safely, or None: only the forking thread lives on in the child."""
    try:
        count = len(os.listdir("/proc/self/task"))
    except OSError:
        return "the threads of this process cannot be counted"
    if count > 1:
        return "%d other threads are running in the session's Python" % (count - 1)
    return None


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as table:
            return int(table.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Frozen:
    """The one frozen fork that is kept; making the next ends the one before."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._pid = 0

    def refusal(self) -> str | None:
        """Why none can be made now, or None."""
        size = resident_bytes()
        if size > self._ceiling:
            return "the session's Python uses %d MiB, more than is kept twice" % (size >> 20)
        return foreign_threads()

    def make(self, line: Line) -> Line | None:
        """Fork. In the parent: hand the host the fork's line, None. In the fork: its own line, once it is woken."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            here.close()
            line.socket.close()
            return self._sleep(Line(there))
        there.close()
        self.drop()
        self._pid = pid
        watched = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        fds = (here.fileno(),) if watched < 0 else (here.fileno(), watched)
        try:
            line.send({"op": "frozen", "pid": pid}, fds)
        finally:
            here.close()
            if watched >= 0:
                os.close(watched)
        return None

    def _sleep(self, line: Line) -> Line:
        self._pid = 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        record, _ = line.read()
        if record.get("op") != "wake":
            os._exit(0)
        return line

    def drop(self) -> None:
        """End the frozen fork that is there."""
        pid, self._pid = self._pid, 0
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # it is gone already

    def forget(self) -> None:
        """In a fork: the frozen one belongs to the parent."""
        self._pid = 0
