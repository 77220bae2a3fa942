"""The zygote: loads the worker once, then forks a session for every spawn record, and reaps those that ended.

It has one thread, and one per Python environment runs beside the host. See `session_start` for what a new session does,
and `sandbox_pool` for the sandbox that is prepared in advance for the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
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
from . import cgroups, namespaces, root_fs, seccomp, session_start
from .root_fs import MountTree
from .sandbox_pool import SandboxPool, SessionProcess
from .spec import SandboxSpec, SpecError, StartReport, parse_report, read_spec

_EXIT_TIME = 1.0
"""Seconds that a session has to exit when the zygote does, before it is killed."""
_IDLE = 0.001
"""Seconds without an event, after which the next session's sandbox is prepared."""


class Zygote:
    def __init__(self, control: Channel) -> None:
        self.control = control
        self.sessions: dict[int, SessionProcess] = {}
        self.pool = SandboxPool(lambda spec: self._build(spec, StartReport(-1)))
        self.outer_ids = namespaces.outer_ids()
        self.owners = namespaces.OwnerMaps(self.outer_ids)
        self.poll = select.poll()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.entries: session_start.Entries | None = None
        self.hierarchies = cgroups.hierarchies()
        self.old_groups: list[cgroups.CgroupSet] = []
        """Cgroups of ended sessions that still have dying processes in them."""
        self.group_count = 0
        self.is_second_process = False
        """Whether this is the child that took over, because a preloaded library had started threads."""

    # --- loading ----------------------------------------------------------------------------------------------------

    def setup(self, record: dict[str, Any]) -> None:
        """Load the worker and the packages to preload; the memory is shared with every session from here on."""
        sys.path.extend(record.get("path_extra", []))
        commands = record.get("command_entry")
        self.entries = session_start.Entries(_function(record["entry"]), _function(commands) if commands else None)
        if "prepare" in record:
            _function(record["prepare"])(record.get("settings", {}))
        failures = {}
        for name in record.get("preload", []):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 -- a package may raise anything; the host reports it
                failures[name] = f"{type(error).__name__}: {error}"
        self._shed_threads()
        cgroups.remove_old_groups(self.hierarchies)
        root_fs.cache_host_files()
        for fork in (True, False):
            for setuid in (True, False):
                seccomp.program(fork=fork, setuid=setuid)
        ssl = sys.modules.get("_ssl")
        if ssl is not None:
            # Takes two milliseconds, here once instead of in every fork. A session has another process number, so
            # OpenSSL gives it other random numbers; for live forks see `SandboxFork.reseed`.
            ssl.RAND_status()
        gc.collect()
        gc.freeze()
        gc.disable()
        self.control.send({"op": "ready", "protocol": 1, "pid": os.getpid(), "preload_failures": failures})

    def _shed_threads(self) -> None:
        """Continue in a child without threads, where a preloaded library has started some: no fork keeps threads.

        This fork is an ordinary one, at which the library can close its pool; later forks run no hooks.
        """
        if len(os.listdir("/proc/self/task")) == 1:
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.is_second_process = True
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            return
        self.control.socket.detach()
        os.close(3)
        _, status = os.waitpid(pid, 0)
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the host closes its end: then end every session, and exit."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_up)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.poll.register(self.control.fileno(), select.POLLIN)
        self.poll.register(self.wake_read, select.POLLIN)
        self.poll.register(self.pool.mounts_fd, select.POLLPRI)
        while True:
            events = [source for source, _ in self.poll.poll(_IDLE * 1000 if self.pool.has_work else None)]
            if not events:
                self.pool.prepare()
            # First: a spawn that came at the same time must not get the old mounts.
            if self.pool.mounts_fd in events:
                events.remove(self.pool.mounts_fd)
                self.pool.discard()
            # The host last: before a spawn the ended sessions are reaped, whose reports may be among these events.
            for source in sorted(events, key=lambda source: source == self.control.fileno()):
                if source == self.wake_read:
                    os.read(self.wake_read, 4096)
                elif source == self.control.fileno():
                    if not self._receive():
                        self.end()
                else:
                    self._read_report(source)
            self._reap()

    def _receive(self) -> bool:
        """Read from the host once; False when it has closed its end."""
        try:
            for record, descriptors in self.control.receive():
                if record.get("op") == "spawn":
                    self.spawn(record, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
        except ChannelError:
            return False
        return True

    def _send(self, record: dict[str, Any]) -> None:
        try:
            self.control.send(record)
        except ChannelError:
            self.end()

    # --- starting a session -----------------------------------------------------------------------------------------

    def spawn(self, record: dict[str, Any], descriptors: list[int]) -> None:
        """Start a session. The answer follows when the worker's entry is about to be called, or a step has failed."""
        report = StartReport(-1)
        try:
            spec = read_spec(record.get("settings", {}))
            if len(descriptors) != 4 or self.entries is None:
                raise SpecError(
                    "a spawn needs a setup before it, and four descriptors: channel, control, stdout, stderr"
                )
            root = root_fs.RootFs(spec, report.step)
            try:
                # A root without user ids to spare may not copy these mounts; the session opens them itself.
                if spec.confined and os.geteuid() == 0 and self.outer_ids != (0, 0):
                    root.open_given(self.owners.for_path)
                self._start(spec, report, record, root.given, descriptors)
            finally:
                root.close_given()
        except (OSError, ValueError, TypeError) as error:
            number = error.errno if isinstance(error, OSError) else None
            failure = {"step": report.current, "errno": number, "message": str(error)}
            self._send({"op": "failed", "id": record.get("id"), **failure})

    def _start(
        self,
        spec: SandboxSpec,
        report: StartReport,
        record: dict[str, Any],
        mounts: dict[str, MountTree],
        descriptors: list[int],
    ) -> None:
        """Use the prepared sandbox if it fits, else build one."""
        self._reap()
        prepared = self.pool.take(spec)
        if prepared is not None:
            try:
                prepared.assign(record, mounts, descriptors)
                return
            except ChannelError:
                prepared.kill()  # It has died at this moment.
        process = self._build(spec, report)
        # If it is gone already, its report says why.
        with contextlib.suppress(ChannelError):
            process.assign(record, mounts, descriptors)

    def _build(self, spec: SandboxSpec, report: StartReport) -> SessionProcess:
        """Fork the first process of a session, which builds a sandbox of this kind and then waits for its session."""
        report.step("create the cgroup")
        group = self._create_group(spec)
        report.step("clone into new namespaces")
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
        assignment, theirs = socket.socketpair()
        try:
            pid = syscalls.fork_with_namespaces(namespaces.clone_flags(spec))
            if pid == 0:
                assert self.entries is not None
                own = session_start.InitDescriptors(theirs.detach(), lifeline_read, report_write)
                session_start.run_session(spec, own, self.entries, group)
        except OSError:
            os.close(report_read)
            os.close(lifeline_write)
            assignment.close()
            self._remove_group(group)
            raise
        finally:
            os.close(report_write)
            os.close(lifeline_read)
            theirs.close()
            if group is not None:
                group.close()
        process = self.sessions[pid] = SessionProcess(pid, spec, lifeline_write, report_read, assignment, group)
        self.poll.register(report_read, select.POLLIN)
        report.step("write the id maps")
        try:
            if spec.confined:
                namespaces.write_maps(pid, spec.uid, self.outer_ids, namespaces.outer_root(self.outer_ids))
            os.write(lifeline_write, b"g")
        except OSError:
            process.kill()
            raise
        return process

    def _read_report(self, report: int, *, reaped: bool = False) -> None:
        """Tell the host that a new session is ready, or why not. A session that ends without a report has failed too.

        `reaped`: it has ended, nothing more will come, and its process number may be another's by now."""
        process = next(process for process in self.sessions.values() if process.report == report)
        piece = os.read(report, 65536)
        process.reported += piece
        if piece and not process.reported.endswith(b"\n") and not reaped:
            return
        self.poll.unregister(report)
        os.close(report)
        process.report = -1
        if process.answered:
            return
        process.answered = True
        if process is self.pool.prepared:
            # Before it has a session it reports only that it could not be built.
            if not reaped:
                self.pool.discard()
            return
        # Where both the worker and init report, the first is the cause.
        result = parse_report(process.reported)
        if result.get("ok"):
            self._send({"op": "spawned", "id": process.spawn_id, "pid": process.pid})
            self.pool.session_started(process.spec)
            return
        if not process.reported and process.host_files is not None:
            result["lost"] = True  # It was prepared in advance and died when it was assigned: the host spawns again.
        self._send({"op": "failed", "id": process.spawn_id, **result})
        if not reaped:
            os.kill(process.pid, signal.SIGKILL)

    # --- cgroups ----------------------------------------------------------------------------------------------------

    def _create_group(self, spec: SandboxSpec) -> cgroups.CgroupSet | None:
        """The cgroups that the limits need, where this machine lets us create them.

        None for the number of processes alone where the session's own limit is enough: entering a cgroup takes longer
        than the rest of a start."""
        if "cgroup" not in spec.parts:
            return None
        limits = spec.limits
        if spec.confined and namespaces.count_processes(self.outer_ids):
            limits = dataclasses.replace(limits, processes=None)
        if not cgroups.settings(limits, 2).keys() & self.hierarchies.keys():
            return None
        self.group_count += 1
        group = cgroups.CgroupSet(cgroups.name_for(self.group_count), limits, self.hierarchies)
        spec.cgroup_controllers = frozenset(group.controllers)
        return group

    def _remove_group(self, group: cgroups.CgroupSet | None) -> None:
        if group is not None and not group.remove():
            self.old_groups.append(group)

    def _remove_old_groups(self) -> None:
        self.old_groups = [group for group in self.old_groups if not group.remove()]

    # --- the end ----------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap the sessions that have ended."""
        self._remove_old_groups()
        while self.sessions:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            process = self.sessions.get(pid)
            if process is None:
                continue
            if process.report >= 0:
                self._read_report(process.report, reaped=True)
            process.close()
            del self.sessions[pid]
            self.pool.forget(process)
            self._remove_group(process.group)

    def end(self) -> None:
        """A confined init takes its session along when killed; one without a pid namespace has to do it itself."""
        for process in self.sessions.values():
            if process.spec.confined:
                os.kill(process.pid, signal.SIGKILL)
            else:
                os.close(process.lifeline)
        for process in self.sessions.values():
            _wait_for_exit(process.pid, _EXIT_TIME)
            self._remove_group(process.group)
        for _ in range(100):
            self._remove_old_groups()
            if not self.old_groups:
                break
            time.sleep(0.01)
        os._exit(0)


def _function(name: str) -> Callable[..., Any]:
    """The function written as `package.module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _wait_for_exit(pid: int, seconds: float) -> None:
    """Wait for a child to exit; kill it when it takes longer."""
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.001)


def _wake_up(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""


def serve(descriptor: int) -> None:
    """The zygote's main: a setup record, then spawns."""
    # As many descriptors as allowed may be in transit between this user's processes. A session lowers it again.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.set_inheritable(descriptor, False)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    zygote = Zygote(Channel(socket.socket(fileno=descriptor)))
    try:
        setup, _ = zygote.control.read()
    except ChannelError:
        return
    zygote.setup(setup)
    # Loading takes long, and the host may be gone meanwhile. From here on the end of the socket is the better sign: the
    # signal comes when the *thread* that started the zygote ends, which a host may survive.
    if not zygote.is_second_process:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 0)
    zygote.serve()
