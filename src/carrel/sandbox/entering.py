"""The worker's side of a live fork: a fork() whose child wakes up in the place that init has prepared."""

from __future__ import annotations

import os
import socket
import sys
from select import poll  # by name: what code sets on the module select does not matter here
from typing import Any, NoReturn

from . import syscalls
from .records import Records

_MOMENT = 50
"""Milliseconds that who stood between waits at most for the child to have begun."""


class ForkRefusedHere(OSError):
    """The fork was not made and nothing has changed; the message says which step failed."""


class Entrance:
    """Given to the worker as settings["enter_fork"]; call it when init has been told to make a place."""

    def __init__(self, init: int) -> None:
        self.init = init
        self._behind = -1
        self.left: list[int] = []
        """Processes that stood between and are ending: for the caller to bury, or for the next call."""

    def __call__(self) -> int:
        """Like os.fork: the child's process number in the parent, 0 in the child. Raises ForkRefusedHere.

        The child is in its own namespaces, without capabilities, with its own init behind the same descriptor.
        Its open files are still the parent's: what is to be written must be opened again by its path.
        """
        for pid in self.left:
            os.waitpid(pid, 0)
        self.left = []
        cwd = os.getcwd()
        heard, said = os.pipe2(os.O_CLOEXEC)
        try:
            between = syscalls.fork_as_it_is()
        except OSError:
            # Left open they would be pipes that no fork can share.
            os.close(heard)
            os.close(said)
            raise
        if between == 0:
            os.close(heard)
            return self._cross(said, cwd)
        self.left.append(between)
        os.close(said)
        try:
            kind, _, rest = os.read(heard, 4096).decode().partition(" ")
        finally:
            os.close(heard)
        if kind != "pid":
            raise ForkRefusedHere(1, rest or "the child between ended without a word")
        return int(rest)

    def arrived(self) -> None:
        """In the child, when its host has heard of it: what it needs before any code runs, and who stood between may
        go."""
        _begin_random_numbers_anew()
        if self._behind >= 0:
            os.close(self._behind)
            self._behind = -1

    def _cross(self, said: int, cwd: str) -> int:
        """In the child between: into the namespaces, then another fork, as only a child is in the new pid namespace."""
        try:
            link = Records(socket.socket(fileno=os.dup(self.init)))
            # Answered when the place is ready, which is built while we were made.
            record, descriptors = link.ask({"op": "enter", "pid": os.getpid()})
            if record.get("op") != "entering" or len(descriptors) < 2:
                raise ForkRefusedHere(1, str(record.get("message", "init has no place ready for a fork")))
            own_init, *place = descriptors
            for number, descriptor in enumerate(place):
                syscalls.setns(descriptor, record["flags"][number])
                os.close(descriptor)
            syscalls.drop_capabilities()
            os.chdir(cwd)
            waits, self._behind = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
            if pid:
                link.send({"op": "crossed", "pid": pid})
                os.write(said, f"pid {pid}".encode())
                os.close(self._behind)
                _go_after(waits)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, this process must not go on as a second worker
            text = error.strerror if isinstance(error, ForkRefusedHere) else str(error)
            os.write(said, f"error {text or type(error).__name__}"[:4000].encode())
            os._exit(1)
        link.close()
        os.close(said)
        os.close(waits)
        self.left = []
        os.dup2(own_init, self.init, inheritable=False)
        os.close(own_init)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        return 0


def _go_after(waits: int) -> NoReturn:
    """End when the child has arrived: to take down memory as large as the session's takes a while, in which it would
    be slow. The parent has the child's number, and hears nothing more."""
    try:
        child = poll()
        child.register(waits)
        child.poll(_MOMENT)
    finally:
        os._exit(0)


def _begin_random_numbers_anew() -> None:
    """OpenSSL sees by its process number that it was forked, and that is the same here as in the parent's place."""
    ssl = sys.modules.get("_ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


def offer(settings: dict[str, Any], init: int) -> dict[str, Any]:
    """The settings that the entry gets, with the way to fork in them."""
    return {**settings, "enter_fork": Entrance(init)}
