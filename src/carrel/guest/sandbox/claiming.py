"""How a place that was built ahead becomes a session's: the zygote tells its init which, past all that is common."""

from __future__ import annotations

import os
import select
import socket
from typing import Any

from ..channel import MAX_FDS, Channel, ChannelError
from . import cgroups
from .mounts import Tree
from .plan import Plan, read_plan


class Child:
    """A session's init as the zygote knows it, or one that waits to become a session's."""

    def __init__(self, pid: int, plan: Plan, go: int, report: int, claim: socket.socket, group: cgroups.Group | None):
        self.pid, self.plan, self.go, self.report, self.group = pid, plan, go, report, group
        self.identity: object = None
        self.said = b""
        self.answered = False
        self.built_of: object = None
        """The host's files as they were, where it was built ahead of its session."""
        self._claim = Channel(claim)

    def claim(self, record: dict[str, Any], trees: dict[str, Tree], descriptors: list[int]) -> None:
        """Give it to the session of this spawn record; the descriptors are line, control, stdout and stderr."""
        self.identity = record.get("id")
        named = list(trees.items())
        for first in range(0, len(named), MAX_FDS):
            some = named[first : first + MAX_FDS]
            given = [[name, tree.path] for name, tree in some]
            self._claim.send({"op": "given", "trees": given}, tuple(tree.descriptor for _, tree in some))
        self._claim.send({"op": "claim", "settings": record.get("settings", {})}, tuple(descriptors))
        self._claim.close()

    def close(self) -> None:
        """The zygote's ends, when it has ended."""
        os.close(self.go)
        self._claim.close()


class Claim:
    """What init is told: whose place this is, and the descriptors of that session."""

    def __init__(self, plan: Plan, trees: dict[str, Tree], descriptors: list[int]) -> None:
        self.plan, self.trees = plan, trees
        self.line, self.control, self.stdout, self.stderr = descriptors

    @staticmethod
    def wait(descriptor: int, held: frozenset[str], worker: socket.socket | None) -> Claim | None:
        """As long as it takes; None when the zygote has ended, or the worker at the other end of this."""
        line = Channel(socket.socket(fileno=descriptor))
        look = select.poll()
        look.register(line.fileno(), select.POLLIN)
        if worker is not None:
            look.register(worker.fileno(), 0)
            if any(source == worker.fileno() for source, _ in look.poll()):
                return None
        trees: dict[str, Tree] = {}
        while True:
            try:
                record, descriptors = line.read()
            except ChannelError:
                return None
            if record.get("op") == "claim":
                line.close()
                plan = read_plan(record["settings"])
                plan.held = held
                return Claim(plan, trees, descriptors)
            for name, path in record["trees"]:
                trees[name] = Tree.received(path, descriptors.pop(0))


class MountChanges:
    """Whether the host's mounts are other ones than before: a place that was built ahead has a copy of the old ones."""

    def __init__(self) -> None:
        self.descriptor = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLPRI)

    def seen(self) -> bool:
        """Since the last time that anybody asked."""
        return bool(self._poll.poll(0))
