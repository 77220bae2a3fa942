"""The worker's side of a live fork: a fork() whose child wakes up in the place that init has prepared."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import closing
from typing import Any

from . import between, syscalls
from .records import Records


class ForkRefusedHere(OSError):
    """The fork was not made and nothing has changed; the message says which step failed."""


class Entrance:
    """Given to the worker as settings["enter_fork"]; call it when init has been told to make a place."""

    def __init__(self, init: int) -> None:
        self.init = init

    def __call__(self) -> int:
        """Like os.fork: the child's process number in the parent, 0 in the child. Raises ForkRefusedHere.

        The child is in its own namespaces, without capabilities, with its own init behind the same descriptor.
        Its open files are still the parent's: what is to be written must be opened again by its path.
        """
        crossing = _Crossing(self.init)
        try:
            if between.way().fork(crossing) == 0:
                return 0
        except BaseException:
            if crossing.arrived:
                os._exit(1)  # Who catches it goes on as the parent does, on the parent's line.
            raise
        if crossing.child is None:
            raise ForkRefusedHere(1, crossing.refusal)
        return crossing.child

    def arrived(self) -> None:
        """In the child, when its host has heard of it: what it needs before any code runs."""
        _begin_random_numbers_anew()


class _Crossing:
    """Called by who stands between: into the namespaces, then a fork, as only a child is in the new pid namespace."""

    def __init__(self, init: int) -> None:
        self.init = init
        self.arrived = False
        """Whether this is the child."""
        self.child: int | None = None
        self.refusal = "the process between ended without a word"

    def __call__(self) -> bool:
        try:
            with closing(Records(socket.socket(fileno=os.dup(self.init)))) as link:
                return self._cross(link)
        except BaseException as error:  # noqa: BLE001 -- told by the parent, whose memory this is
            text = error.strerror if isinstance(error, ForkRefusedHere) else str(error)
            self.refusal = text or type(error).__name__
            return False

    def _cross(self, link: Records) -> bool:
        cwd = os.getcwd()
        record, descriptors = _ask(link)
        try:
            if record.get("op") != "entering" or len(descriptors) < 2:
                raise ForkRefusedHere(1, str(record.get("message", "init has no place ready for a fork")))
            own_init, *place = descriptors
            for number, descriptor in enumerate(place):
                syscalls.setns(descriptor, record["flags"][number])
            syscalls.drop_capabilities()
            os.chdir(cwd)
            child = syscalls.fork_as_it_is()
            if child == 0:
                self.arrived = True
                os.dup2(own_init, self.init, inheritable=False)
                return True
            self.child = child
            link.send({"op": "crossed", "pid": child})
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _ask(link: Records) -> tuple[dict[str, Any], list[int]]:
    """Answered when the place is ready, which is being built. Who was killed while it waited has left its own answer
    on the line."""
    me = os.getpid()
    record, descriptors = link.ask({"op": "enter", "pid": me})
    while record.get("pid") != me:
        for descriptor in descriptors:
            os.close(descriptor)
        found = link.receive()
        if found is None:
            raise ConnectionError("the other end is gone")
        record, descriptors = found
    return record, descriptors


def _begin_random_numbers_anew() -> None:
    """OpenSSL sees by its process number that it was forked, and that is the same here as in the parent's place."""
    ssl = sys.modules.get("_ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


def offer(settings: dict[str, Any], init: int) -> dict[str, Any]:
    """The settings that the entry gets, with the way to fork in them."""
    return {**settings, "enter_fork": Entrance(init)}
