"""A live fork on the worker's side: a fork() whose child wakes up in the sandbox that init has prepared.

See `live_fork` for the whole sequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from .. import syscalls
from ..channel import Channel

_api = ctypes.pythonapi


class ForkFailed(OSError):
    """The fork was not made and nothing has changed; the message says why."""


class SandboxFork:
    """The worker's settings["enter_fork"]: an os.fork whose child is in the fork that init was asked to prepare.

    Only the children of a process enter a pid namespace, and a process enters a user namespace for good. Therefore a
    middle process is forked, which enters the namespaces, forks the child and exits.
    """

    def __init__(self, init: int) -> None:
        self._init = init

    def __call__(self) -> int:
        """Like os.fork: the child's process number in the parent, 0 in the child. Raises ForkFailed.

        The child is in its own namespaces, without capabilities, with its own init behind the same descriptor.
        Its open files are still the parent's: files for writing must be opened again by their paths.
        """
        child = -1
        _api.PyOS_BeforeFork()
        try:
            with _signals_blocked(), _garbage_collection_off():
                child = self._fork_twice()
        except BaseException:
            if child == 0:
                os._exit(1)  # Otherwise the child would continue as the parent, on the parent's channel.
            raise
        finally:
            (_api.PyOS_AfterFork_Parent if child else _api.PyOS_AfterFork_Child)()
        return child

    def reseed(self) -> None:
        """Called in the child before any code runs: OpenSSL detects a fork by the process number, which is the same
        here as the parent's."""
        ssl = sys.modules.get("_ssl")
        if ssl is not None:
            ssl.RAND_add(os.urandom(32), 32.0)

    def _fork_twice(self) -> int:
        dumpable = syscalls.prctl(syscalls.PR_GET_DUMPABLE)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        with open(read_end, "rb", 0) as answers, open(write_end, "wb", 0) as answer:
            middle = syscalls.fork_without_python_hooks()
            if middle == 0:
                try:
                    self._enter_and_fork(answer.fileno())
                    # Entering another user namespace has made it undumpable.
                    syscalls.prctl(syscalls.PR_SET_DUMPABLE, dumpable)
                except BaseException:  # noqa: BLE001 - it must not continue as the parent
                    os._exit(1)
                return 0
            answer.close()
            child, _, refusal = answers.read(4096).decode().partition(" ")
            with contextlib.suppress(ChildProcessError):  # Code may have set SIGCHLD to be ignored.
                os.waitpid(middle, 0)
        if not int(child or 0):
            raise ForkFailed(1, refusal or "the process that was to enter the new sandbox was killed")
        return int(child)

    def _enter_and_fork(self, answer: int) -> None:
        """In the middle process. Returns in the child only."""
        link = Channel(socket.socket(fileno=os.dup(self._init)))
        fds: list[int] = []
        try:
            cwd = os.getcwd()
            record, fds = _request_entry(link)
            if record.get("op") != "entering" or len(fds) < 2:
                raise ForkFailed(1, str(record.get("message", "init has not prepared a fork")))
            for number, namespace in enumerate(fds[1:]):
                syscalls.setns(namespace, record["flags"][number])
            syscalls.drop_capabilities()
            os.chdir(cwd)
            child = syscalls.fork_without_python_hooks()
            if child:
                link.send({"op": "entered", "pid": child})
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            os.write(answer, f"0 {text}"[:4000].encode())
            os._exit(1)
        if child:
            os.write(answer, f"{child} ".encode())
            os._exit(0)
        os.dup2(fds[0], self._init, inheritable=False)
        for fd in fds:
            os.close(fd)
        link.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Signal handlers are code of the session, and must not run in the middle process."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Collecting garbage runs code of the session too: destructors, callbacks of weak references."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _request_entry(link: Channel) -> tuple[dict[str, Any], list[int]]:
    """Wait until the fork is ready. An answer to a process that was killed while it waited may come first."""
    own = os.getpid()
    record, fds = link.request({"op": "enter", "pid": own})
    while record.get("pid") != own:
        for fd in fds:
            os.close(fd)
        record, fds = link.read()
    return record, fds
