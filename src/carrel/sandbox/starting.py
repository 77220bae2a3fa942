"""How a session starts: its first process builds the place and forks the worker, then becomes init."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from . import confine, entering, namespaces, syscalls
from .init import Init
from .place import Place
from .plan import Plan, read_env
from .records import PeerBroken, Records
from .report import Report

Entry = Callable[[int, int, "dict[str, Any]"], None]


class Ends:
    """The descriptors that a new session starts with."""

    def __init__(self, descriptors: list[int]) -> None:
        self.line, self.control, self.stdout, self.stderr, self.go, self.report = self.all = descriptors


def live(plan: Plan, place: Place, ends: Ends, entry: Entry) -> None:
    """The whole life of init, in the process that the zygote has just forked; never returns."""
    report = Report(ends.report)
    try:
        confine.usual_signals()
        confine.keep_only({*ends.all} | {tree.descriptor for tree in place.given.values()})
        report.step("wait for the zygote")
        if os.read(ends.go, 1) != b"g":
            os._exit(1)
        place.step = report.step
        report.step("read the settings")
        settings = _read_settings(ends.control)
        plan.env = read_env(settings)
        _enter(plan, place, report)
        start = Starter(plan, entry, settings)
        pid, link = start([ends.line, ends.stdout, ends.stderr], report)
        for descriptor in (ends.line, ends.stdout, ends.stderr, ends.report):
            os.close(descriptor)
        Init(plan, ends.control, ends.go, start).serve(pid, link)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the zygote is told, and the session ends
        report.failed(error)
    os._exit(1)


def _read_settings(control: int) -> dict[str, Any]:
    """What this session alone may know, past the zygote: whose memory every later session begins with."""
    line = socket.socket(fileno=os.dup(control))
    try:
        found = Records(line).receive_first()
    finally:
        line.close()
    if found is None:
        raise PeerBroken("the host closed the line before it had sent the settings")
    return dict(found.get("settings", {}))


def _enter(plan: Plan, place: Place, report: Report) -> None:
    if plan.confined:
        report.step("become the session's user")
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    os.setsid()
    if plan.confined:
        # After the change of user, which would clear it. Without a pid namespace it must live to end the others.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        syscalls.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to us, as they do to the first of a namespace.
        return
    if "uts" in plan.parts:
        report.step("set the host name")
        syscalls.sethostname(plan.hostname)
    if "net" in plan.parts and not plan.network:
        report.step("raise the loopback device")
        namespaces.raise_loopback()
    if not place.given:
        place.take_given(_unmapped)
    place.build()
    # User code has the same user id: what is not dumpable it cannot trace or read in /proc.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def _unmapped(path: str) -> None:
    """Without root there is nothing to map: the session is the user who owns the files."""


class Starter:
    """Forks a worker into the place that is there: the session's first, and another when that was lost."""

    def __init__(self, plan: Plan, entry: Entry, settings: dict[str, Any]) -> None:
        self.plan, self.entry, self.settings = plan, entry, settings

    def __call__(self, ends: list[int], report: Report) -> tuple[int, socket.socket]:
        """With line, stdout and stderr; gives the process number and our end of the link to it."""
        report.step("fork the worker")
        theirs, ours = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _become_worker(self.plan, ends, theirs, self.entry, self.settings, report)
        theirs.close()
        return pid, ours


def _become_worker(
    plan: Plan, ends: list[int], init: socket.socket, entry: Entry, settings: dict[str, Any], report: Report
) -> None:
    line, stdout, stderr = ends
    try:
        report.step("prepare the worker")
        if not plan.confined:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        # Unlike init: user code may look at itself in /proc, and none is running yet.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        confine.usual_signals()
        confine.standard_streams(stdout, stderr)
        confine.keep_only({line, report.descriptor, init.fileno()})
        os.environ.clear()
        os.environ.update(confine.environment(plan))
        os.umask(0o022)
        # When memory runs out, the session's own processes go before its init.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")
        os.chdir(plan.workspace.at if plan.confined else plan.workspace.source or "/")
        listener = confine.give_up_privileges(plan, report.step)
        if listener is not None:
            Records(init).send({"op": "listener"}, [listener])
            os.close(listener)
        report.step("call the entry")
        report.succeeded()
    except BaseException as error:  # noqa: BLE001 -- told to the zygote, which fails the spawn
        report.failed(error)
        os._exit(1)
    try:
        number = init.detach()
        confine.call_entry(entry, line, number, entering.offer(settings, number) if plan.can_fork else settings)
    except SystemExit as stopped:
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except BaseException:  # noqa: BLE001 -- the worker's own fault, shown where its output goes
        traceback.print_exc()
        os._exit(70)
    os._exit(0)
