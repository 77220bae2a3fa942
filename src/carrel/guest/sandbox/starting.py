"""How a session starts: its first process builds the place and forks the worker, ahead of whose they are; then it
is told, finishes both, and becomes init."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from .. import syscalls
from ..channel import Channel, ChannelError
from . import cgroups, confine, entering, limits, namespaces
from .claiming import Claim
from .init import Init
from .place import Place
from .plan import Plan
from .report import Report

Entry = Callable[[int, int, "dict[str, Any]"], None]


class Entries:
    """What a session's processes run: the worker, and the server of commands and files where the host has one."""

    def __init__(self, worker: Entry, commands: Entry | None) -> None:
        self.worker, self.commands = worker, commands


class Ends:
    """The descriptors that init starts with."""

    def __init__(self, descriptors: list[int]) -> None:
        self.claim, self.go, self.report = self.all = descriptors


def live(plan: Plan, ends: Ends, entries: Entries, group: cgroups.Group | None) -> None:
    """The whole life of init, in the process that the zygote has just forked; never returns."""
    report = Report(ends.report)
    try:
        confine.usual_signals()
        confine.keep_only({*ends.all, *(group.doors if group is not None else ())})
        report.step("wait for the zygote")
        if os.read(ends.go, 1) != b"g":
            os._exit(1)
        if group is not None:
            report.step("enter the cgroup")
            group.enter()
        _become_somebody(plan, report)
        place = Place(plan, report.step)
        ahead = None
        if plan.confined:
            place.begin()
            # User code has the same user id: what is not dumpable it cannot trace or read in /proc.
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            ahead = NewWorker(plan, entries.worker, report)
        claim = Claim.wait(ends.claim, plan.held, ahead.link if ahead is not None else None)
        if claim is None:
            os._exit(1)
        report.step("read the settings")
        start = Starter(claim.plan, entries, _read_settings(claim.control))
        if plan.confined:
            place.plan, place.given = claim.plan, claim.trees
            if not place.given:
                place.uncover()
                place.take_given(_unmapped)
            place.finish()
        pid, link = start([claim.line, claim.stdout, claim.stderr], report, ahead)
        for descriptor in (claim.line, claim.stdout, claim.stderr):
            os.close(descriptor)
        report.close()
        Init(claim.plan, claim.control, ends.go, start).serve(pid, link)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the zygote is told, and the session ends
        report.failed(error)
    finally:
        os._exit(1)  # Who gets out of here is a second zygote.


def _read_settings(control: int) -> bytes:
    """What this session alone may know, past the zygote: whose memory every later session begins with.

    As it came: the worker takes it apart, and init needs that much less memory."""
    line = socket.socket(fileno=os.dup(control))
    try:
        return Channel(line).read_undecoded()
    finally:
        line.close()


def _become_somebody(plan: Plan, report: Report) -> None:
    if plan.confined:
        report.step("become the session's user")
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    os.setsid()
    if plan.confined:
        # After the change of user, which would clear it. Without a pid namespace it must live to end the others.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # as orphans come to the first process of a namespace
        return
    if "uts" in plan.parts:
        report.step("set the host name")
        syscalls.sethostname(plan.hostname)
    if "net" in plan.parts and not plan.network:
        report.step("raise the loopback device")
        namespaces.raise_loopback()


def _unmapped(path: str) -> None:
    """Without root there is nothing to map: the session is the user who owns the files."""


class NewWorker:
    """A process that has given up all it must, and waits to be told whose worker it is."""

    def __init__(self, plan: Plan, entry: Entry, report: Report, *, forks: bool = True, user: str = "agent") -> None:
        report.step("fork the worker")
        theirs, self.link = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.link.close()
            _become_worker(plan, theirs, entry, report, forks=forks and plan.can_fork, user=user)
        theirs.close()

    def begin(self, plan: Plan, settings: bytes, ends: list[int]) -> None:
        """With line, stdout and stderr. One that is dead has said why, or is heard of by its silence."""
        cwd = plan.workspace.at if plan.confined else plan.workspace.source or "/"
        with contextlib.suppress(ChannelError, ConnectionError):
            Channel(self.link).send({"op": "begin", "cwd": cwd}, tuple(ends))
            self.link.sendall(settings)


class Starter:
    """Starts a worker in the place that is there: the session's first, and another when that was lost."""

    def __init__(self, plan: Plan, entries: Entries, settings: bytes) -> None:
        self.plan, self.entries, self.settings = plan, entries, settings

    def __call__(self, ends: list[int], report: Report, ahead: NewWorker | None = None) -> tuple[int, socket.socket]:
        """With line, stdout and stderr; gives the process number and our end of the link to it."""
        worker = ahead or NewWorker(self.plan, self.entries.worker, report)
        return self._begin(worker, ends, report)

    def serve_commands(self, ends: list[int], report: Report, user: str) -> tuple[int, socket.socket]:
        """The same for the server of commands and files, which is confined as a worker is and never forks."""
        if self.entries.commands is None:
            raise OSError(errno.ENOSYS, "this zygote was set up without a command server (command_entry)")
        server = NewWorker(self.plan, self.entries.commands, report, forks=False, user=user)
        return self._begin(server, ends, report)

    def _begin(self, worker: NewWorker, ends: list[int], report: Report) -> tuple[int, socket.socket]:
        report.step("begin the worker")
        worker.begin(self.plan, self.settings, ends)
        return worker.pid, worker.link


def _become_worker(plan: Plan, init: socket.socket, entry: Entry, report: Report, *, forks: bool, user: str) -> None:
    try:
        report.step("prepare the worker")
        if not plan.confined:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if user == "root":
            confine.become_root()
        # Unlike init: user code may look at itself in /proc, and none is running yet.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        confine.usual_signals()
        confine.keep_only({report.descriptor, init.fileno()})
        os.umask(0o022)
        # When memory runs out, the session's own processes go before its init.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")
        listener = confine.give_up_privileges(plan, report.step, forks=forks, root=user == "root")
        if listener is not None:
            Channel(init).send({"op": "listener"}, (listener,))
            os.close(listener)
        limits.apply_open_files(plan)
        report.step("wait for init")
        records = Channel(init)
        begin, given = records.read(), records.read()
        line, stdout, stderr = begin[1]
        settings = given[0].get("settings", {})
        confine.standard_streams(stdout, stderr)
        os.environ.clear()
        os.environ.update(confine.environment(plan, settings, user))
        os.chdir(begin[0]["cwd"])
        report.step("call the entry")
        report.succeeded()
    except ChannelError:
        os._exit(1)  # Init has been killed, and this process is about to be.
    except BaseException as error:  # noqa: BLE001 -- told to the zygote, which fails the spawn
        report.failed(error)
        os._exit(1)
    try:
        number = init.detach()
        confine.call_entry(entry, line, number, entering.offer(settings, number) if forks else settings)
    except SystemExit as stopped:
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except BaseException:  # noqa: BLE001 -- the worker's own fault, shown where its output goes
        traceback.print_exc()
        os._exit(70)
    os._exit(0)
