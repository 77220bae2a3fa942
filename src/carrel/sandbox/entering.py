"""The worker's side of a live fork: a fork() whose child wakes up in the place that init has prepared."""

from __future__ import annotations

import os
import socket
from typing import Any

from . import syscalls
from .records import Records


class ForkRefusedHere(OSError):
    """The fork was not made and nothing has changed; the message says which step failed."""


class Entrance:
    """Given to the worker as settings["enter_fork"]; call it when init has said that a place is ready."""

    def __init__(self, init: int) -> None:
        self.init = init

    def __call__(self) -> int:
        """Like os.fork: the child's process number in the parent, 0 in the child. Raises ForkRefusedHere.

        The child is in its own namespaces, without capabilities, with its own init behind the same descriptor.
        Its open files are still the parent's: what is to be written must be opened again by its path.
        """
        link = Records(socket.socket(fileno=os.dup(self.init)))
        try:
            record, descriptors = link.ask({"op": "enter"})
            if record.get("op") != "entering" or len(descriptors) < 2:
                raise ForkRefusedHere(1, str(record.get("message", "init has no place ready for a fork")))
            return self._fork(link, descriptors[0], descriptors[1:], record["flags"])
        finally:
            link.close()

    def _fork(self, link: Records, own_init: int, place: list[int], flags: list[int]) -> int:
        cwd = os.getcwd()
        heard, said = os.pipe2(os.O_CLOEXEC)
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        between = os.fork()
        if between == 0:
            os.close(go_write)
            return self._cross(go_read, heard, said, own_init, place, flags, cwd)
        for descriptor in (said, go_read, own_init, *place):
            os.close(descriptor)
        try:
            link.ask({"op": "crossing", "pid": between})
            os.write(go_write, b"g")
            answer = os.read(heard, 4096).decode()
        finally:
            os.close(go_write)
            os.close(heard)
            os.waitpid(between, 0)
        kind, _, rest = answer.partition(" ")
        if kind != "pid":
            raise ForkRefusedHere(1, rest or "the child between ended without a word")
        link.send({"op": "crossed", "pid": int(rest)})
        return int(rest)

    def _cross(
        self, go: int, heard: int, said: int, own_init: int, place: list[int], flags: list[int], cwd: str
    ) -> int:
        """In the child between: into the namespaces, then another fork, as only a child is in the new pid namespace."""
        os.close(heard)
        try:
            if os.read(go, 1) != b"g":
                os._exit(1)
            for number, descriptor in enumerate(place):
                syscalls.setns(descriptor, flags[number])
                os.close(descriptor)
            syscalls.drop_capabilities()
            os.chdir(cwd)
            pid = os.fork()
        except OSError as error:
            os.write(said, f"error {error}".encode())
            os._exit(1)
        if pid:
            os.write(said, f"pid {pid}".encode())
            os._exit(0)
        os.close(said)
        os.close(go)
        os.dup2(own_init, self.init, inheritable=False)
        os.close(own_init)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        return 0


def offer(settings: dict[str, Any], init: int) -> dict[str, Any]:
    """The settings that the entry gets, with the way to fork in them."""
    return {**settings, "enter_fork": Entrance(init)}
