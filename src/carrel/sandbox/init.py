"""The first process of a session: builds its place, starts the worker, reaps, and takes all with it when it goes."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from . import confine, namespaces, syscalls
from .place import Place
from .plan import Plan
from .records import PeerBroken, Records

MOST_WORKERS = 64
Entry = Callable[[int, int, "dict[str, Any]"], None]


class Report:
    """Tells the zygote, once, how the start went: nothing but `ok`, or the step that failed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.now = "start"

    def step(self, name: str) -> None:
        self.now = name

    def failed(self, error: BaseException) -> None:
        number = error.errno if isinstance(error, OSError) else None
        text = (
            str(error)
            if isinstance(error, OSError)
            else "".join(traceback.format_exception(None, error, error.__traceback__))
        )
        self._tell({"step": self.now, "errno": number, "message": text})

    def succeeded(self) -> None:
        self._tell({"ok": True})

    def _tell(self, what: dict[str, Any]) -> None:
        os.write(self.descriptor, json.dumps(what)[:60_000].encode() + b"\n")
        os.close(self.descriptor)


class Ends:
    """The descriptors that a new session starts with."""

    def __init__(self, descriptors: list[int]) -> None:
        self.line, self.control, self.stdout, self.stderr, self.go, self.report = self.all = descriptors


def live(plan: Plan, place: Place, ends: Ends, entry: Entry, settings: dict[str, Any]) -> None:
    """The whole life of init, in the process that the zygote has just forked; never returns."""
    report = Report(ends.report)
    try:
        confine.usual_signals()
        confine.keep_only({*ends.all} | {tree.descriptor for tree in place.given.values()})
        report.step("wait for the zygote")
        if os.read(ends.go, 1) != b"g":
            os._exit(1)
        place.step = report.step
        _enter(plan, place, report)
        theirs, ours = socket.socketpair()
        report.step("fork the worker")
        pid = os.fork()
        if pid == 0:
            _become_worker(plan, ends, theirs, entry, settings, report)
        for descriptor in (ends.line, ends.stdout, ends.stderr, ends.report):
            os.close(descriptor)
        theirs.close()
        Init(plan, ends, pid, ours).serve()
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the zygote is told, and the session ends
        report.failed(error)
    os._exit(1)


def _enter(plan: Plan, place: Place, report: Report) -> None:
    if plan.confined:
        report.step("become the session's user")
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    # After the change of user, which would clear it.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if not plan.confined:
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


def _become_worker(
    plan: Plan, ends: Ends, init: socket.socket, entry: Entry, settings: dict[str, Any], report: Report
) -> None:
    try:
        report.step("prepare the worker")
        if not plan.confined:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        # Unlike init: user code may look at itself in /proc, and none is running yet.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        confine.standard_streams(ends.stdout, ends.stderr)
        confine.keep_only({ends.line, ends.report, init.fileno()})
        os.environ.clear()
        os.environ.update(confine.environment(plan))
        os.umask(0o022)
        # When memory runs out, the session's own processes go before its init.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")
        os.chdir(plan.workspace.at if plan.confined else plan.workspace.source or "/")
        confine.give_up_privileges(plan, report.step)
        report.step("call the entry")
        report.succeeded()
    except BaseException as error:  # noqa: BLE001 -- told to the zygote, which fails the spawn
        report.failed(error)
        os._exit(1)
    try:
        confine.call_entry(entry, ends.line, init.detach(), settings)
    except SystemExit as stopped:
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except BaseException:  # noqa: BLE001 -- the worker's own fault, shown where its output goes
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


class Init:
    """The loop: nothing in it runs user code, and what the worker sends can only be about the worker."""

    def __init__(self, plan: Plan, ends: Ends, worker: int, link: socket.socket) -> None:
        self.plan = plan
        self.go = ends.go
        self.control = Records(socket.socket(fileno=ends.control))
        self.link = Records(link)
        self.workers = {worker}
        self.poll = select.poll()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Until told to close, or until the host or the zygote is gone."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        (worker,) = self.workers
        descriptor = syscalls.pidfd_open(worker)
        self._tell({"op": "worker", "pid": worker}, [descriptor])
        os.close(descriptor)
        for source in (self.control.fileno(), self.go, self.link.fileno(), self.wake_read):
            self.poll.register(source, select.POLLIN)
        self._reap()
        while True:
            for source, _ in self.poll.poll():
                if source == self.go or (source == self.control.fileno() and not self._controlled()):
                    self.end()
                elif source == self.link.fileno():
                    self._told_by_worker()
                elif source == self.wake_read:
                    os.read(self.wake_read, 4096)
                    self._reap()

    def end(self) -> None:
        """In a pid namespace the kernel kills all others when its first process ends."""
        if not self.plan.confined:
            kill_descendants()
        os._exit(0)

    def _tell(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            self.control.send(record, descriptors)
        except OSError:
            self.end()

    def _controlled(self) -> bool:
        """One reading of the host's socket; False when the session is over."""
        try:
            if not self.control.read():
                return False
            while True:
                found = self.control.next()
                if found is None:
                    return True
                record, descriptors = found
                for descriptor in descriptors:
                    os.close(descriptor)
                if record.get("op") == "close":
                    return False
        except PeerBroken:
            return False

    def _told_by_worker(self) -> None:
        """A frozen fork that became the worker says so, to have its end reported."""
        try:
            alive = self.link.read()
            while alive:
                found = self.link.next()
                if found is None:
                    return
                record, descriptors = found
                for descriptor in descriptors:
                    os.close(descriptor)
                pid = record.get("pid")
                if record.get("op") == "worker" and isinstance(pid, int) and len(self.workers) < MOST_WORKERS:
                    self.workers.add(pid)
        except PeerBroken:
            alive = False
        self.poll.unregister(self.link.fileno())
        self.link.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.workers:
                self.workers.discard(pid)
                self._tell({"op": "exited", "pid": pid, "status": status})


def _ignore(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""


def kill_descendants() -> None:
    """Without a pid namespace: kill children, and theirs as they come to us, until there are none."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            children = []
        for child in children:
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
