"""The sandbox prepared in advance for the next session.

Most of a start is the same for all sessions of one kind: mounting the system, forking the worker, dropping its
privileges. From the second session of a kind on, the zygote does that for the next one while it is idle. The session
then only brings its own mounts, descriptors and variables, and starts in 10 ms instead of 15 to 30.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from ..channel import MAX_FDS, Channel, ChannelError
from . import cgroups
from .root_fs import MountTree, host_files_state
from .spec import SandboxSpec, read_spec


class SessionProcess:
    """A session's init as the zygote knows it; one prepared in advance has no session yet."""

    def __init__(
        self,
        pid: int,
        spec: SandboxSpec,
        lifeline: int,
        report: int,
        assignment: socket.socket,
        group: cgroups.CgroupSet | None,
    ) -> None:
        self.pid, self.spec, self.report, self.group = pid, spec, report, group
        self.lifeline = lifeline
        """A pipe by whose end init notices that the zygote is gone."""
        self.spawn_id: object = None
        self.reported = b""
        self.answered = False
        """Whether the host has its answer, or does not need one."""
        self.host_files: object = None
        """The state of the host's files when it was built, if in advance."""
        self._assignment = Channel(assignment)

    def assign(self, record: dict[str, Any], mounts: dict[str, MountTree], descriptors: list[int]) -> None:
        """Give it to the session of this spawn record; the descriptors are channel, control, stdout and stderr."""
        self.spawn_id = record.get("id")
        named = list(mounts.items())
        for first in range(0, len(named), MAX_FDS):
            some = named[first : first + MAX_FDS]
            paths = [[name, tree.path] for name, tree in some]
            self._assignment.send({"op": "mounts", "mounts": paths}, tuple(tree.descriptor for _, tree in some))
        self._assignment.send({"op": "assign", "settings": record.get("settings", {})}, tuple(descriptors))
        self._assignment.close()

    def kill(self) -> None:
        """The host does not hear of its end."""
        self.answered = True
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the zygote's descriptors when it has ended."""
        os.close(self.lifeline)
        self._assignment.close()


class Assignment:
    """What init learns of its session: the spec, the mounts and the descriptors."""

    def __init__(self, spec: SandboxSpec, mounts: dict[str, MountTree], descriptors: list[int]) -> None:
        self.spec, self.mounts = spec, mounts
        self.channel, self.control, self.stdout, self.stderr = descriptors

    @classmethod
    def wait(cls, descriptor: int, controllers: frozenset[str], worker: socket.socket | None) -> Assignment | None:
        """Wait as long as it takes; None when the zygote has ended, or the worker at the other end of this socket."""
        channel = Channel(socket.socket(fileno=descriptor))
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        if worker is not None:
            poll.register(worker.fileno(), 0)
            if any(source == worker.fileno() for source, _ in poll.poll()):
                return None
        mounts: dict[str, MountTree] = {}
        while True:
            try:
                record, descriptors = channel.read()
            except ChannelError:
                return None
            if record.get("op") == "assign":
                channel.close()
                spec = read_spec(record["settings"])
                spec.cgroup_controllers = controllers
                return cls(spec, mounts, descriptors)
            for name, path in record["mounts"]:
                mounts[name] = MountTree.from_descriptor(path, descriptors.pop(0))


class SandboxPool:
    """At most one prepared sandbox, of the kind that was last wanted twice in a row."""

    def __init__(self, build: Callable[[SandboxSpec], SessionProcess]) -> None:
        self._build = build
        self._last_kind: tuple[object, ...] = ()
        self._wanted: SandboxSpec | None = None
        self.prepared: SessionProcess | None = None
        # A prepared sandbox has copies of the host's mounts; the kernel reports on this file when they change.
        self.mounts_fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._mount_changes = select.poll()
        self._mount_changes.register(self.mounts_fd, select.POLLPRI)

    @property
    def has_work(self) -> bool:
        """Whether a sandbox is to be prepared as soon as the zygote is idle."""
        return self._wanted is not None

    def session_started(self, spec: SandboxSpec) -> None:
        """The second session of a kind in a row makes it likely that a third follows."""
        if spec.confined and spec.kind == self._last_kind:
            self._wanted = spec
        self._last_kind = spec.kind

    def prepare(self) -> None:
        """Build the sandbox that is wanted; without one the next session builds its own, and reports what is wrong."""
        wanted, self._wanted = self._wanted, None
        if wanted is None or (self.prepared is not None and self.prepared.spec.kind == wanted.kind):
            return
        self.discard()
        # Read before it is built: what changes meanwhile then counts as changed.
        host_files = host_files_state()
        try:
            self.prepared = self._build(wanted)
        except OSError:
            return
        self.prepared.host_files = host_files

    def take(self, spec: SandboxSpec) -> SessionProcess | None:
        """The prepared sandbox, if it fits and nothing of the host has changed since it was built."""
        prepared = self.prepared
        if prepared is not None and (self._mount_changes.poll(0) or prepared.host_files != host_files_state()):
            self.discard()
            return None
        if prepared is None or prepared.spec.kind != spec.kind:
            return None
        self.prepared = None
        return prepared

    def discard(self) -> None:
        if self.prepared is not None:
            self.prepared.kill()
            self.prepared = None

    def forget(self, process: SessionProcess) -> None:
        """It has ended."""
        if process is self.prepared:
            self.prepared = None
