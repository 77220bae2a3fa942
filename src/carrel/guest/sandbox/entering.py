"""The worker's side of a live fork: a fork() whose child wakes up in the sandbox that init has prepared."""

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
    """Given to the worker as settings["enter_fork"]; called when init has been told to prepare a sandbox.

    A process enters a pid namespace only by its children, and a user namespace for good. So there is a process in
    between: it is forked, enters the namespaces, forks the child and ends.
    """

    def __init__(self, init: int) -> None:
        self._init = init

    def __call__(self) -> int:
        """Like os.fork: the child's process number in the parent, 0 in the child. Raises ForkFailed.

        The child is in its own namespaces, without capabilities, with its own init behind the same descriptor.
        Its open files are still the parent's: what is to be written must be opened again by its path.
        """
        child = -1
        _api.PyOS_BeforeFork()
        try:
            with _no_handlers(), _no_collection():
                child = self._fork_twice()
        except BaseException:
            if child == 0:
                os._exit(1)  # Code that catches it would go on as the parent, on the parent's channel.
            raise
        finally:
            (_api.PyOS_AfterFork_Parent if child else _api.PyOS_AfterFork_Child)()
        return child

    def arrived(self) -> None:
        """Called in the child when the host knows of it, before any code runs: OpenSSL notices a fork by its process
        number, which is the same here as the parent's."""
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
                except BaseException:  # noqa: BLE001 - it must not go on as the parent
                    os._exit(1)
                return 0
            answer.close()
            child, _, refusal = answers.read(4096).decode().partition(" ")
            with contextlib.suppress(ChildProcessError):  # Code may have told the kernel to reap its children.
                os.waitpid(middle, 0)
        if not int(child or 0):
            raise ForkFailed(1, refusal or "the process that was to enter the new sandbox was killed")
        return int(child)

    def _enter_and_fork(self, answer: int) -> None:
        """In the process in between. Returns in the child only."""
        link = Channel(socket.socket(fileno=os.dup(self._init)))
        fds: list[int] = []
        try:
            cwd = os.getcwd()
            record, fds = _request_entry(link)
            if record.get("op") != "entering" or len(fds) < 2:
                raise ForkFailed(1, str(record.get("message", "init has no sandbox ready for a fork")))
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
def _no_handlers() -> Iterator[None]:
    """Signal handlers are code of the session: they must not run in the process in between."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collecting garbage runs code of the session too: destructors, callbacks of weak references."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _request_entry(link: Channel) -> tuple[dict[str, Any], list[int]]:
    """Wait until the sandbox is ready. An answer to a process that was killed while it waited may come first."""
    me = os.getpid()
    record, fds = link.request({"op": "enter", "pid": me})
    while record.get("pid") != me:
        for fd in fds:
            os.close(fd)
        record, fds = link.read()
    return record, fds


def offer(settings: dict[str, Any], init: int) -> dict[str, Any]:
    """The settings that the entry gets, with the way to fork in them."""
    return {**settings, "enter_fork": SandboxFork(init)}
