"""How a session starts.

Its first process, forked by the zygote, builds the file system and forks the worker, which drops its privileges: so far
all sessions of a kind are alike, and this may happen in advance (see `sandbox_pool`). Then the zygote assigns it to a
session. It mounts what that session was given, passes on its settings to the worker, and becomes init.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import processes, syscalls
from ..channel import Channel, ChannelError
from . import cgroups, namespaces, privileges
from .init import Init
from .root_fs import RootFs
from .sandbox_fork import SandboxFork
from .sandbox_pool import Assignment
from .spec import SandboxSpec, StartReport

Entry = Callable[[int, int, "dict[str, Any]"], None]


class Entries(NamedTuple):
    """The functions that a session's processes run."""

    worker: Entry
    commands: Entry | None
    """The command server, where the host uses one."""


class InitDescriptors(NamedTuple):
    """The descriptors that init starts with."""

    assignment: int
    lifeline: int
    report: int


def run_session(
    spec: SandboxSpec, descriptors: InitDescriptors, entries: Entries, group: cgroups.CgroupSet | None
) -> None:
    """The whole life of init, in the process that the zygote has just forked; never returns."""
    report = StartReport(descriptors.report)
    try:
        processes.reset_signals()
        processes.close_others({*descriptors, *(group.descriptors if group is not None else ())})
        report.step("wait for the zygote")
        if os.read(descriptors.lifeline, 1) != b"g":
            os._exit(1)
        if group is not None:
            report.step("enter the cgroup")
            group.enter()
        _become_session_user(spec, report)
        root = RootFs(spec, report.step)
        worker = None
        if spec.confined:
            root.build()
            # User code has the same user id: a process that is not dumpable it can neither trace nor read in /proc.
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            worker = WorkerProcess(spec, entries.worker, report)
        assignment = Assignment.wait(
            descriptors.assignment, spec.cgroup_controllers, worker.link if worker is not None else None
        )
        if assignment is None:
            os._exit(1)
        report.step("read the settings")
        starter = ProcessStarter(assignment.spec, entries, _read_settings(assignment.control))
        if spec.confined:
            root.spec, root.given = assignment.spec, assignment.mounts
            if not root.given:
                root.uncover()
                root.open_given(_no_idmap)
            root.enter()
        streams = [assignment.channel, assignment.stdout, assignment.stderr]
        pid, link = starter.start_worker(streams, report, worker)
        for descriptor in streams:
            os.close(descriptor)
        report.close()
        Init(assignment.spec, assignment.control, descriptors.lifeline, starter).serve(pid, link)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the zygote hears of it, and the session ends
        report.failed(error)
    finally:
        os._exit(1)  # Otherwise it would continue as a second zygote.


def _read_settings(control: int) -> bytes:
    """What only this session may know, received without the zygote, whose memory every later session inherits.

    It is not decoded here: the worker does that, and init needs less memory."""
    with socket.socket(fileno=os.dup(control)) as end:
        return Channel(end).read_undecoded()


def _become_session_user(spec: SandboxSpec, report: StartReport) -> None:
    if spec.confined:
        report.step("become the session's user")
        os.setresgid(spec.uid, spec.uid, spec.uid)
        os.setresuid(spec.uid, spec.uid, spec.uid)
    os.setsid()
    if not spec.confined:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # so that orphans become its children, as in a pid namespace
        return
    # After the change of user, which would clear it. Without a pid namespace init must live to end the others.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if "uts" in spec.parts:
        report.step("set the host name")
        syscalls.sethostname(spec.hostname)
    if "net" in spec.parts and not spec.network:
        report.step("start the loopback device")
        namespaces.start_loopback()


def _no_idmap(path: str) -> None:
    """Without root there is nothing to map: the session is the user who owns the files."""


class WorkerProcess:
    """A process that drops its privileges and then waits for the settings of its session."""

    def __init__(
        self, spec: SandboxSpec, entry: Entry, report: StartReport, *, forks: bool = True, user: str = "agent"
    ) -> None:
        report.step("fork the worker")
        theirs, self.link = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.link.close()
            _become_worker(spec, theirs, entry, report, forks=forks and spec.can_fork, user=user)
        theirs.close()

    def begin(self, spec: SandboxSpec, settings: bytes, streams: list[int]) -> None:
        """Send it the settings, with channel, stdout and stderr. If it is dead, its report says why."""
        cwd = spec.workspace.at if spec.confined else spec.workspace.source or "/"
        with contextlib.suppress(ChannelError, ConnectionError):
            Channel(self.link).send({"op": "begin", "cwd": cwd}, tuple(streams))
            self.link.sendall(settings)


class ProcessStarter:
    """Starts a session's processes: the first worker, another when that was lost, and the command server.

    The streams are channel, stdout and stderr; it returns the process number and init's end of the link to it."""

    def __init__(self, spec: SandboxSpec, entries: Entries, settings: bytes) -> None:
        self.spec, self.entries, self.settings = spec, entries, settings

    def start_worker(
        self, streams: list[int], report: StartReport, prepared: WorkerProcess | None = None
    ) -> tuple[int, socket.socket]:
        return self._begin(prepared or WorkerProcess(self.spec, self.entries.worker, report), streams, report)

    def start_command_server(self, streams: list[int], report: StartReport, user: str) -> tuple[int, socket.socket]:
        """Confined like a worker; it never forks live."""
        if self.entries.commands is None:
            raise OSError(errno.ENOSYS, "this zygote was set up without a command server (command_entry)")
        server = WorkerProcess(self.spec, self.entries.commands, report, forks=False, user=user)
        return self._begin(server, streams, report)

    def _begin(self, process: WorkerProcess, streams: list[int], report: StartReport) -> tuple[int, socket.socket]:
        report.step("begin the worker")
        process.begin(self.spec, self.settings, streams)
        return process.pid, process.link


def _become_worker(
    spec: SandboxSpec, init: socket.socket, entry: Entry, report: StartReport, *, forks: bool, user: str
) -> None:
    try:
        report.step("prepare the worker")
        if not spec.confined:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if user == "root":
            privileges.become_root()
        # Unlike init: user code may look at its own process in /proc, and none is running yet.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        processes.reset_signals()
        processes.close_others({report.descriptor, init.fileno()})
        os.umask(0o022)
        processes.become_killable()
        listener = privileges.drop_privileges(spec, report.step, forks=forks, root=user == "root")
        if listener is not None:
            Channel(init).send({"op": "listener"}, (listener,))
            os.close(listener)
        privileges.limit_open_files(spec)
        report.step("wait for init")
        records = Channel(init)
        begin, (channel, stdout, stderr) = records.read()
        first, _ = records.read()
        settings = first.get("settings", {})
        processes.set_standard_streams(stdout, stderr)
        os.environ.clear()
        os.environ.update(privileges.environment(spec, settings, user))
        os.chdir(begin["cwd"])
        report.step("call the entry")
        report.succeeded()
    except ChannelError:
        os._exit(1)  # Init has been killed, and this process is about to be.
    except BaseException as error:  # noqa: BLE001 -- reported to the zygote, which fails the spawn
        report.failed(error)
        os._exit(1)
    try:
        link = init.detach()
        if forks:
            settings = {**settings, "enter_fork": SandboxFork(link)}
        privileges.call_entry(entry, channel, link, settings)
    except SystemExit as stopped:
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except BaseException:  # noqa: BLE001 -- a bug of the worker, shown where its output goes
        traceback.print_exc()
        os._exit(70)
    os._exit(0)
