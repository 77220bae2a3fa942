"""The zygote's work: load the program once, then fork a session for every spawn record, and bury those that ended.

From the second session of a kind on, the place of the next one is built ahead, while nothing else is to be done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from .. import syscalls
from ..channel import Channel, ChannelError
from . import cgroups, etc_files, filter, namespaces, starting
from .claiming import Child, MountChanges
from .mounts import Tree
from .place import MACHINE_FACTS, Place, host_files, present
from .plan import Plan, PlanRefused, read_plan
from .report import SILENCE, Report
from .zygote import load_folder

PATIENCE = 1.0
QUIET = 0.001
"""Seconds without anything to do, after which the next session's place is built."""


class Zygote:
    def __init__(self, control: Channel) -> None:
        self.control = control
        self.children: dict[int, Child] = {}
        self.outside = namespaces.outer_ids()
        self.owners = namespaces.OwnerMaps(self.outside)
        self.poll = select.poll()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.entries: starting.Entries | None = None
        self.trees = cgroups.trees()
        self.left: list[cgroups.Group] = []
        self.made = 0
        self.moved = False
        self.mounts = MountChanges()
        self.last: tuple[object, ...] = ()
        self.wanted: Plan | None = None
        """Of which kind to build a place ahead."""
        self.ahead: Child | None = None

    def setup(self, record: dict[str, Any]) -> None:
        """Load the program and what sessions will import; from here on memory is shared with every session."""
        for folder in record.get("path_extra", []):
            sys.path.append(folder)
        if "program" in record:
            load_folder(record["program"], record["package"])
        commands = record.get("command_entry")
        self.entries = starting.Entries(_function(record["entry"]), _function(commands) if commands else None)
        if "prepare" in record:
            _function(record["prepare"])(record.get("settings", {}))
        failures = {}
        for wanted in record.get("preload", []):
            try:
                importlib.import_module(wanted)
            except Exception as error:  # noqa: BLE001 -- a package may fail in any way; the host is told which
                failures[wanted] = f"{type(error).__name__}: {error}"
        self.leave_threads_behind()
        cgroups.sweep(self.trees)
        present((*etc_files.BOUND, *MACHINE_FACTS))
        etc_files.copies()
        for fork in (True, False):
            for setuid in (True, False):
                filter.program(fork=fork, setuid=setuid)
        ssl = sys.modules.get("_ssl")
        if ssl is not None:
            # Two milliseconds once, and not in every fork: see `entering`. A session, whose process has another number,
            # begins with other random numbers all the same.
            ssl.RAND_status()
        gc.collect()
        gc.freeze()
        gc.disable()
        self.control.send({"op": "ready", "protocol": 1, "pid": os.getpid(), "preload_failures": failures})

    def leave_threads_behind(self) -> None:
        """A preloaded library may have started threads, which no fork survives: go on in a child that has none.

        An ordinary fork lets the library close its pool properly; what the zygote forks later it could not see.
        """
        if len(os.listdir("/proc/self/task")) == 1:
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.moved = True
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            return
        self.control.socket.detach()
        os.close(3)
        _, status = os.waitpid(pid, 0)
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)

    def serve(self) -> None:
        """Until the host closes its end: then every session is ended, and this process too."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.poll.register(self.control.fileno(), select.POLLIN)
        self.poll.register(self.wake_read, select.POLLIN)
        self.poll.register(self.mounts.descriptor, select.POLLPRI)
        while True:
            events = [source for source, _ in self.poll.poll(QUIET * 1000 if self.wanted else None)]
            if not events:
                self._build_ahead()
            # First: what is asked for in the same moment must not get the old mounts.
            if self.mounts.descriptor in events:
                events.remove(self.mounts.descriptor)
                self._discard()
            # The host last: before it is given a place the dead are buried, whose reports may be in the same list.
            for source in sorted(events, key=lambda source: source == self.control.fileno()):
                if source == self.wake_read:
                    os.read(self.wake_read, 4096)
                elif source == self.control.fileno():
                    if not self._controlled():
                        self.end()
                else:
                    self._heard(source)
            self._bury()

    def _controlled(self) -> bool:
        try:
            for record, descriptors in self.control.receive():
                if record.get("op") == "spawn":
                    self.spawn(record, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
        except ChannelError:
            return False
        return True

    def spawn(self, record: dict[str, Any], descriptors: list[int]) -> None:
        """Fork a session; its answer follows when the worker's entry is about to be called, or the step that failed."""
        step = Report(-1)
        try:
            plan = read_plan(record.get("settings", {}))
            if len(descriptors) != 4 or self.entries is None:
                raise PlanRefused(
                    "a spawn needs a setup before it, and four descriptors: line, control, stdout, stderr"
                )
            place = Place(plan, step.step)
            try:
                # A root with no number but its own is no root of the mounts it sees; the session takes them for itself.
                if plan.confined and os.geteuid() == 0 and self.outside != (0, 0):
                    place.take_given(self.owners.for_path)
                self._claim(plan, step, record, place.given, descriptors)
            finally:
                place.close_given()
        except (OSError, ValueError, TypeError) as error:
            number = error.errno if isinstance(error, OSError) else None
            self._answer(
                {"op": "failed", "id": record.get("id"), "step": step.now, "errno": number, "message": str(error)}
            )

    def _claim(
        self, plan: Plan, step: Report, record: dict[str, Any], trees: dict[str, Tree], descriptors: list[int]
    ) -> None:
        """A place for this session: the one that was built ahead, or another."""
        ahead = self._built_ahead(plan)
        if ahead is not None:
            try:
                ahead.claim(record, trees, descriptors)
                return
            except ChannelError:
                self._end(ahead)  # It has died in this moment.
        child = self._begin(plan, step)
        # One that is gone already says why itself.
        with contextlib.suppress(ChannelError):
            child.claim(record, trees, descriptors)

    def _begin(self, plan: Plan, step: Report) -> Child:
        """A place of this kind, which is being built; a session claims it."""
        step.step("make the cgroup")
        group = self._group(plan)
        step.step("clone into new namespaces")
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        claim, theirs = socket.socketpair()
        try:
            pid = syscalls.fork_with_namespaces(namespaces.flags(plan))
            if pid == 0:
                assert self.entries is not None
                starting.live(plan, starting.Ends([theirs.detach(), go_read, report_write]), self.entries, group)
        except OSError:
            os.close(report_read)
            os.close(go_write)
            claim.close()
            self._drop(group)
            raise
        finally:
            os.close(report_write)
            os.close(go_read)
            theirs.close()
            if group is not None:
                group.close()
        child = self.children[pid] = Child(pid, plan, go_write, report_read, claim, group)
        self.poll.register(report_read, select.POLLIN)
        step.step("write the id maps")
        try:
            if plan.confined:
                namespaces.write_maps(pid, plan.uid, self.outside, namespaces.outer_root(self.outside))
            os.write(go_write, b"g")
        except OSError:
            self._end(child)
            raise
        return child

    def _end(self, child: Child) -> None:
        """Whose end is no news to anybody."""
        child.answered = True
        os.kill(child.pid, signal.SIGKILL)

    def _build_ahead(self) -> None:
        """The next session will find its place there; that there is none yet is no fault."""
        assert self.wanted is not None
        wanted, self.wanted = self.wanted, None
        if self.ahead is not None and self.ahead.plan.common == wanted.common:
            return
        self._discard()
        # Looked at before it is built: what changes meanwhile is found to have changed.
        host = host_files()
        with contextlib.suppress(OSError):
            self.ahead = self._begin(wanted, Report(-1))
            self.ahead.built_of = host

    def _discard(self) -> None:
        if self.ahead is not None:
            self._end(self.ahead)
            self.ahead = None

    def _built_ahead(self, plan: Plan) -> Child | None:
        """A place that fits, if there is one and it lives."""
        self._bury()
        if self.mounts.seen() or (self.ahead is not None and self.ahead.built_of != host_files()):
            self._discard()
        if self.ahead is None or self.ahead.plan.common != plan.common:
            return None
        child, self.ahead = self.ahead, None
        return child

    def _group(self, plan: Plan) -> cgroups.Group | None:
        """Groups for the limits that were asked for, where this machine lets us make them.

        None for the number of processes alone where the session's own limit does as well: to enter a group takes longer
        than all else in a start."""
        if "cgroup" not in plan.parts:
            return None
        limits = plan.limits
        if plan.confined and namespaces.count_processes(self.outside):
            limits = dataclasses.replace(limits, processes=None)
        wanted = cgroups.settings(limits, 2).keys() & self.trees.keys()
        if not wanted:
            return None
        self.made += 1
        group = cgroups.Group(cgroups.name_for(self.made), limits, self.trees)
        plan.held = frozenset(group.controllers)
        return group

    def _drop(self, group: cgroups.Group | None) -> None:
        if group is not None and not group.remove():
            self.left.append(group)

    def _heard(self, report: int, *, buried: bool = False) -> None:
        """A new session says that it is there, or why not; an end without a word is a failure too.

        `buried`: it is gone, nothing more will come, and its number may be another's by now."""
        child = next(child for child in self.children.values() if child.report == report)
        piece = os.read(report, 65536)
        child.said += piece
        if piece and not child.said.endswith(b"\n") and not buried:
            return
        self.poll.unregister(report)
        os.close(report)
        child.report = -1
        if child.answered:
            return
        child.answered = True
        if child is self.ahead:
            # There is nothing to be said before it is claimed but that it could not be built.
            if not buried:
                self._discard()
            return
        # Where both the worker and init have something to say, the first is the cause.
        first, ended, _ = child.said.partition(b"\n")
        said = json.loads(first) if ended else {}
        if said.get("ok"):
            self._answer({"op": "spawned", "id": child.identity, "pid": child.pid})
            if child.plan.confined and child.plan.common == self.last:
                self.wanted = child.plan
            self.last = child.plan.common
            return
        said = said or {**SILENCE, "lost": child.built_of is not None}
        self._answer({"op": "failed", "id": child.identity, **said})
        if not buried:
            os.kill(child.pid, signal.SIGKILL)

    def _answer(self, record: dict[str, Any]) -> None:
        try:
            self.control.send(record)
        except ChannelError:
            self.end()

    def _bury(self) -> None:
        self.left = [group for group in self.left if not group.remove()]
        while self.children:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self.children.get(pid)
            if child is None:
                continue
            if child.report >= 0:
                self._heard(child.report, buried=True)
            child.close()
            del self.children[pid]
            if child is self.ahead:
                self.ahead = None
            self._drop(child.group)

    def end(self) -> None:
        """A confined init takes its session along when killed; one without a pid namespace has to do it itself."""
        for child in self.children.values():
            if child.plan.confined:
                os.kill(child.pid, signal.SIGKILL)
            else:
                os.close(child.go)
        for child in self.children.values():
            _wait(child.pid, PATIENCE)
            self._drop(child.group)
        for _ in range(100):
            self.left = [group for group in self.left if not group.remove()]
            if not self.left:
                break
            time.sleep(0.01)
        os._exit(0)


def _function(name: str) -> Callable[..., Any]:
    """The function of a module that is written as `package.module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _wait(pid: int, seconds: float) -> None:
    """For its end, which is helped along when it takes longer."""
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.001)


def _ignore(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""


def serve(descriptor: int) -> None:
    """The zygote's main: a setup record, then spawns."""
    # As many descriptors as allowed may be in transit between this user's processes. A session lowers it again.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.set_inheritable(descriptor, False)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    zygote = Zygote(Channel(socket.socket(fileno=descriptor)))
    try:
        setup, _ = zygote.control.read()
    except ChannelError:
        return
    zygote.setup(setup)
    # Loading may take long, and who started us may be gone. From here on the end of the socket says it better: the
    # signal comes when the *thread* that started us ends, which a host may do and live on.
    if not zygote.moved:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 0)
    zygote.serve()
