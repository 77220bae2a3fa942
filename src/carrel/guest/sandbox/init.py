"""The first process of a session: reaps, answers the host, makes forks, and takes everything with it when it goes."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

from .. import processes, syscalls
from ..channel import Channel, ChannelError
from . import copying, namespaces, place
from .forks import Forks
from .permits import Permits, number_of
from .plan import Plan
from .report import Report, heard

MOST_WORKERS = 64
LARGEST_FROM_WORKER = 1 << 16
QUIET = 0.005
"""Seconds without anything to do, after which the next fork's place is built."""


StartProcess = Callable[["list[int]", Report], "tuple[int, socket.socket]"]
"""From channel, stdout and stderr: the new process and this end of the link to it."""


class Starter(Protocol):
    """Starts the session's processes: the worker, and the command server."""

    def __call__(self, ends: list[int], report: Report) -> tuple[int, socket.socket]: ...

    def serve_commands(self, ends: list[int], report: Report, user: str) -> tuple[int, socket.socket]: ...


class Link:
    """The line to one worker and to what is forked from it."""

    def __init__(self, line: socket.socket, *, started_here: bool) -> None:
        line.setblocking(False)
        self.records = Channel(line, LARGEST_FROM_WORKER)
        self.filter_is_ours = started_here
        """Whether the questions of its filter arrive here, or further up, at the init that started its ancestor."""
        self.listener_is_due = started_here


class Init:
    """The loop: nothing in it runs user code, and nothing that a worker sends is believed beyond the session."""

    def __init__(self, plan: Plan, control: int, go: int, start: Starter, above: Channel | None = None) -> None:
        self.plan = plan
        self.go = go
        self.start = start
        self.control: Channel | None = Channel(socket.socket(fileno=control))
        self.links: dict[int, Link] = {}
        self.above = above
        """The init of the session that this one was forked from."""
        self.permits = Permits()
        self.forks = Forks(self)
        self.workers: set[int] = set()
        self.stop_guard = processes.StopGuard(processes.kill_namespace if plan.confined else processes.kill_descendants)
        # The first worker of a fork is in a session of the place above, which has no number here.
        self.sessions: set[int] = set() if above is None else {0}
        self.poll = select.poll()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, worker: int | None, link: socket.socket) -> None:
        """Until told to close, or until the host or the zygote is gone; never returns. A fork's worker comes later."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        self._connect(Link(link, started_here=worker is not None))
        if worker is not None:
            self._announce(worker)
        assert self.control is not None
        for source in (self.control.fileno(), self.go, self.wake_read):
            self.poll.register(source, select.POLLIN)
        self._reap()
        while True:
            events = self.poll.poll(QUIET * 1000 if self.forks.wants_ahead else None)
            if not events:
                self.forks.build_ahead()
            for source, _ in sorted(events, key=self._turn):
                self._heard(source)

    def _turn(self, event: tuple[int, int]) -> int:
        """In which order to hear of what happened at once.

        The host comes before the worker that wants to enter a fork's place: that was told after we were told to make
        it. Both come after what forks report, and the dead last: either may close a fork's descriptors and make others
        of the same numbers, for which what is still in the list was not meant.
        """
        source = event[0]
        if self.control is not None and source == self.control.fileno():
            return 1
        if source in self.links:
            return 2
        return 3 if source == self.wake_read else 0

    def _connect(self, link: Link) -> None:
        self.links[link.records.fileno()] = link
        self.poll.register(link.records.fileno(), select.POLLIN)

    def _announce(self, worker: int) -> None:
        self.workers.add(worker)
        self.sessions.add(worker)
        descriptor = syscalls.pidfd_open(worker)
        self.tell({"op": "worker", "pid": worker}, [descriptor])
        os.close(descriptor)

    def _end_run_of(self, session: object, since: object, besides: Any) -> None:
        """What a killed run has started: none of those after it may signal them, each being behind its own fence.

        The numbers were told by the worker, so only sessions of workers that came from here are ended."""
        if type(session) is int and type(since) is int and session in self.sessions:
            processes.end_started_since(since, set(besides or ()), session=session)

    def _again(self, identity: object, ends: list[int]) -> None:
        """Another worker in the same place, when the last was lost with all its frozen forks."""
        worker, said = self._start(self.start, ends, started_here=True)
        if worker:
            self._announce(worker)
        else:
            self.tell({"op": "again_failed", "id": identity, **said})

    def _serve_commands(self, identity: object, user: object, ends: list[int]) -> None:
        """Start a process that runs commands and reads files for the host, confined like the worker."""
        failed = {"op": "serve_failed", "id": identity, "step": "check", "errno": errno.EPERM}
        users = ["agent", "root"] if self.plan.confined and namespaces.has_root() else ["agent"]
        if user not in users:
            self.tell({**failed, "message": f"there is no user {user!r} in this sandbox, only {' and '.join(users)}"})
            return
        pid, said = self._start(
            lambda ends, report: self.start.serve_commands(ends, report, str(user)), ends, started_here=False
        )
        if not pid:
            self.tell({**failed, **said})
            return
        self.workers.add(pid)
        descriptor = syscalls.pidfd_open(pid)
        self.tell({"op": "serving", "id": identity, "pid": pid}, [descriptor])
        os.close(descriptor)

    def _start(self, start: StartProcess, ends: list[int], *, started_here: bool) -> tuple[int, dict[str, Any]]:
        """The number of the new process, or 0 and the step that failed."""
        said_read, said_write = os.pipe2(os.O_CLOEXEC)
        try:
            if len(ends) != 3:
                raise OSError(errno.EINVAL, "three descriptors are needed: channel, stdout and stderr")
            pid, link = start(ends, Report(said_write))
        except OSError as error:
            os.close(said_write)
            said: dict[str, Any] = {"step": "fork the process", "errno": error.errno, "message": str(error)}
        else:
            os.close(said_write)
            self._connect(Link(link, started_here=started_here))
            said = heard(said_read)
        os.close(said_read)
        return (pid, said) if said.get("ok") else (0, said)

    def _heard(self, source: int) -> None:
        if source == self.go:
            if not self.plan.confined:
                processes.kill_descendants(patience=60)
            os._exit(0)
        elif source == self.wake_read:
            os.read(self.wake_read, 4096)
            self._reap()
        elif self.control is not None and source == self.control.fileno():
            if not self._controlled(self.control):
                self.end()
        elif source in self.links:
            self._told_by_worker(self.links[source])
        elif source in self.permits.listeners:
            self._asked_by_kernel(source)
        else:
            self.forks.heard(source)

    def end(self) -> None:
        """The kernel kills a pid namespace with its first process, forks below it too: so init waits for those."""
        if not self.plan.confined:
            processes.kill_descendants(patience=60)
        if not self.forks.living:
            os._exit(0)
        self.forks.discard()
        if self.control is not None:
            self.poll.unregister(self.control.fileno())
            processes.kill_namespace(patience=60)
            for name in place.WRITABLE:
                if name != "work":
                    copying.empty_tree(f"scratch/{name}")
            self.control.close()
            self.control = None

    def tell(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            if self.control is not None:
                self.control.send(record, tuple(descriptors or ()))
        except (ChannelError, OSError):
            self.end()

    def permit(self, pidfd: int, *, here: bool) -> None:
        """Let one process into the namespaces of a fork, by whichever init its filter asks."""
        if here:
            self.permits.expected.add(number_of(pidfd))
        elif self.above is not None:
            self.above.request({"op": "permit"}, (pidfd,))

    def _asked_by_kernel(self, listener: int) -> None:
        if not self.permits.answer(listener):
            self.poll.unregister(listener)
            self.permits.listeners.discard(listener)
            os.close(listener)

    def _controlled(self, control: Channel) -> bool:
        """One reading of the host's socket; False when the session is over."""
        try:
            for record, descriptors in control.receive():
                if record.get("op") == "fork":
                    self.forks.begin(record.get("id"), descriptors)
                elif record.get("op") == "again":
                    self._end_run_of(record.get("session"), record.get("since"), record.get("besides"))
                    self._again(record.get("id"), descriptors)
                elif record.get("op") == "serve_commands":
                    self._serve_commands(record.get("id"), record.get("user", "agent"), descriptors)
                elif record.get("op") == "tend":
                    self.stop_guard.check(
                        int(record["worker"]), self.workers.union(record["spare"]), kill=record["end"]
                    )
                elif record.get("op") == "upper" and self.plan.confined:
                    self._show_upper(record.get("id"))
                for descriptor in descriptors:
                    os.close(descriptor)
                if record.get("op") == "close":
                    return False
        except ChannelError:
            return False
        return True

    def _show_upper(self, identity: object) -> None:
        """The folder of what was changed in the workspace, for the host to read; marks of deleted files included."""
        folder = os.open("kept/upper" if os.path.isdir("kept") else "scratch/upper", os.O_RDONLY | os.O_DIRECTORY)
        self.tell({"op": "upper", "id": identity}, [folder])
        os.close(folder)

    def _told_by_worker(self, link: Link) -> None:
        records = link.records
        try:
            for record, descriptors in records.receive():
                self._obey_worker(link, record, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            return
        except (ChannelError, OSError):
            # It has ended, sends what is not a record, or does not read its answers: then it has no init to talk to.
            pass
        del self.links[records.fileno()]
        self.poll.unregister(records.fileno())
        records.close()

    def _obey_worker(self, link: Link, record: dict[str, Any], descriptors: list[int]) -> None:
        pid = record.get("pid")
        op = record.get("op")
        if op == "listener" and link.listener_is_due and descriptors:
            # The first that comes was sent before any user code ran.
            link.listener_is_due = False
            listener = descriptors.pop()
            self.permits.listeners.add(listener)
            self.poll.register(listener, select.POLLIN)
        elif op == "worker" and isinstance(pid, int) and len(self.workers) < MOST_WORKERS:
            # A frozen fork that became the worker says so, to have its end reported.
            self.workers.add(pid)
        elif op in ("enter", "entered"):
            self.forks.asked(link, op, pid if isinstance(pid, int) else -1)

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
                self.tell({"op": "exited", "pid": pid, "status": status})
            else:
                self.forks.buried(pid, status)


def _ignore(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""
