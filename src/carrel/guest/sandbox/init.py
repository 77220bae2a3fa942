"""Init, the first process of a session: reaps, obeys the host, makes live forks, and takes the session along when it
exits. It runs no code of the user, and nothing that a worker sends it has an effect beyond the session."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from .. import processes, syscalls
from ..channel import Channel, ChannelError
from . import copy_tree, namespaces, root_fs
from .live_fork import LiveForks, WorkerLink
from .spec import SandboxSpec, StartReport, read_report

MAX_WORKERS = 64


class Starter(Protocol):
    """Starts the session's processes; both return the process number and this end of the link to it."""

    def start_worker(self, streams: list[int], report: StartReport) -> tuple[int, socket.socket]: ...

    def start_command_server(self, streams: list[int], report: StartReport, user: str) -> tuple[int, socket.socket]: ...


class Init:
    """The loop."""

    def __init__(
        self, spec: SandboxSpec, control: int, lifeline: int, starter: Starter, parent: Channel | None = None
    ) -> None:
        self.spec = spec
        self.lifeline = lifeline
        """A pipe that is closed when the zygote, or the init of the parent session, ends."""
        self.starter = starter
        self.control: Channel | None = Channel(socket.socket(fileno=control))
        """The socket to the host; None when the session is closed and only its forks are left."""
        self.parent = parent
        """The init of the session that this one was forked from."""
        self.links: dict[int, WorkerLink] = {}
        self.setns_guard = SetnsGuard()
        self.workers: set[int] = set()
        """The processes whose end the host hears of."""
        self.worker_session = 0
        """The kernel session of the worker, and of what its code starts. That of a fork's first worker belongs to the
        parent's pid namespace, and has the number 0 here."""
        self.stop_guard = processes.StopGuard(processes.kill_namespace if spec.confined else processes.kill_descendants)
        self.poll = select.poll()
        self.forks = LiveForks(self)
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, worker: int | None, link: socket.socket) -> None:
        """Serve until the host closes the session, or the host or the zygote is gone; never returns.

        In a fork's init the worker is None: it comes later."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_up)
        self._add_link(WorkerLink(link, started_here=worker is not None))
        if worker is not None:
            self._worker_started(worker)
        assert self.control is not None
        for source in (self.control.fileno(), self.lifeline, self.wake_read):
            self.poll.register(source, select.POLLIN)
        self._reap()
        while True:
            for source, _ in sorted(self.poll.poll(), key=self._order):
                self._handle(source)

    def serve_fork(self, control: int, lifeline: int, parent: Channel, link: socket.socket) -> None:
        """In the first process of a live fork: be its init; never returns."""
        Init(self.spec, control, lifeline, self.starter, parent).serve(None, link)

    def _order(self, event: tuple[int, int]) -> int:
        """The order in which simultaneous events are handled.

        The host comes before a worker that wants to enter a fork: it hears of the fork only after init. Both come after
        the reports of forks, and reaping comes last: either may close descriptors of a fork and open others with the
        same numbers, to which the rest of the events would not belong.
        """
        source = event[0]
        if self.control is not None and source == self.control.fileno():
            return 1
        if source in self.links:
            return 2
        return 3 if source == self.wake_read else 0

    def _handle(self, source: int) -> None:
        if source == self.lifeline:
            if not self.spec.confined:
                _kill_and_reap_all()
            os._exit(0)
        elif source == self.wake_read:
            os.read(self.wake_read, 4096)
            self._reap()
        elif self.control is not None and source == self.control.fileno():
            if not self._receive_from_host(self.control):
                self.end()
        elif source in self.links:
            self._receive_from_worker(self.links[source])
        elif source in self.setns_guard.listeners:
            if not self.setns_guard.answer(source):
                self.poll.unregister(source)
                self.setns_guard.listeners.discard(source)
                os.close(source)
        else:
            self.forks.handle(source)

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
                self.send({"op": "exited", "pid": pid, "status": status})
            else:
                self.forks.reaped(pid, status)

    def end(self) -> None:
        """The kernel kills a pid namespace with its first process, forks below it too: so init waits for those."""
        if not self.spec.confined:
            _kill_and_reap_all()
        if not self.forks.alive:
            os._exit(0)
        if self.control is not None:
            self.poll.unregister(self.control.fileno())
            processes.kill_namespace(patience=60)
            for name in root_fs.WRITABLE:
                if name != "work":
                    copy_tree.empty_tree(f"scratch/{name}")
            self.control.close()
            self.control = None

    # --- the host ---------------------------------------------------------------------------------------------------

    def send(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            if self.control is not None:
                self.control.send(record, tuple(descriptors or ()))
        except (ChannelError, OSError):
            self.end()

    def _receive_from_host(self, control: Channel) -> bool:
        """Read from the host's socket once; False when the session is over."""
        try:
            for record, descriptors in control.receive():
                self._obey_host(record, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                if record.get("op") == "close":
                    return False
        except ChannelError:
            return False
        return True

    def _obey_host(self, record: dict[str, Any], descriptors: list[int]) -> None:
        op, request = record.get("op"), record.get("id")
        if op == "fork":
            self.forks.prepare(request, descriptors, str(record.get("generation") or ""))
        elif op == "restart":
            self._restart_worker(request, descriptors)
        elif op == "serve_commands":
            self._start_command_server(request, record.get("user", "agent"), descriptors)
        elif op == "continue":
            self.stop_guard.check(int(record["worker"]), self.workers.union(record["spare"]), kill=record["end"])
        elif op == "upper" and self.spec.confined:
            self._send_upper(request)

    def _restart_worker(self, request: object, streams: list[int]) -> None:
        """Start another worker in this sandbox, when the last one and its snapshot are lost. What its code has started
        is ended first: the new worker could not signal it from behind its own Landlock fence."""
        processes.end_started_in_session(self.worker_session)
        worker, report = self._start(self.starter.start_worker, streams, started_here=True)
        if worker:
            self._worker_started(worker)
        else:
            self.send({"op": "restart_failed", "id": request, **report})

    def _worker_started(self, worker: int) -> None:
        self.workers.add(worker)
        self.worker_session = worker
        descriptor = syscalls.pidfd_open(worker)
        self.send({"op": "worker", "pid": worker}, [descriptor])
        os.close(descriptor)

    def _start_command_server(self, request: object, user: object, streams: list[int]) -> None:
        """Start a process that runs commands and reads files for the host, confined like the worker."""
        failed = {"op": "serve_failed", "id": request, "step": "check", "errno": errno.EPERM}
        users = ["agent", "root"] if self.spec.confined and namespaces.has_root() else ["agent"]
        if user not in users:
            self.send({**failed, "message": f"there is no user {user!r} in this sandbox, only {' and '.join(users)}"})
            return
        pid, report = self._start(
            lambda streams, report: self.starter.start_command_server(streams, report, str(user)),
            streams,
            started_here=False,
        )
        if not pid:
            self.send({**failed, **report})
            return
        self.workers.add(pid)
        descriptor = syscalls.pidfd_open(pid)
        self.send({"op": "serving", "id": request, "pid": pid}, [descriptor])
        os.close(descriptor)

    def _start(
        self,
        start: Callable[[list[int], StartReport], tuple[int, socket.socket]],
        streams: list[int],
        *,
        started_here: bool,
    ) -> tuple[int, dict[str, Any]]:
        """The number of the new process, or 0 and the report of the step that failed."""
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        try:
            if len(streams) != 3:
                raise OSError(errno.EINVAL, "three descriptors are needed: channel, stdout and stderr")
            pid, link = start(streams, StartReport(report_write))
        except OSError as error:
            os.close(report_write)
            report: dict[str, Any] = {"step": "fork the process", "errno": error.errno, "message": str(error)}
        else:
            os.close(report_write)
            self._add_link(WorkerLink(link, started_here=started_here))
            report = read_report(report_read)
        os.close(report_read)
        return (pid, report) if report.get("ok") else (0, report)

    def _send_upper(self, request: object) -> None:
        """Send the folder of the changes in the workspace, with the marks of deleted files, for the host to read."""
        folder = os.open(f"{root_fs.changes_folder(self.spec)}/upper", os.O_RDONLY | os.O_DIRECTORY)
        self.send({"op": "upper", "id": request}, [folder])
        os.close(folder)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _add_link(self, link: WorkerLink) -> None:
        self.links[link.channel.fileno()] = link
        self.poll.register(link.channel.fileno(), select.POLLIN)

    def _receive_from_worker(self, link: WorkerLink) -> None:
        channel = link.channel
        try:
            for record, descriptors in channel.receive():
                self._obey_worker(link, record, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            return
        except (ChannelError, OSError):
            # It has ended, sends what is not a record, or does not read its answers: it loses its link to init.
            pass
        del self.links[channel.fileno()]
        self.poll.unregister(channel.fileno())
        channel.close()

    def _obey_worker(self, link: WorkerLink, record: dict[str, Any], descriptors: list[int]) -> None:
        pid = record.get("pid")
        op = record.get("op")
        if op == "listener" and link.expects_listener and descriptors:
            # The first one was sent before any user code ran.
            link.expects_listener = False
            listener = descriptors.pop()
            self.setns_guard.listeners.add(listener)
            self.poll.register(listener, select.POLLIN)
        elif op == "worker" and isinstance(pid, int) and len(self.workers) < MAX_WORKERS:
            # A restored snapshot is the worker now: the host wants to hear of its end.
            self.workers.add(pid)
        elif op == "enter":
            self.forks.enter(link, pid if isinstance(pid, int) else -1)
        elif op == "entered":
            self.forks.entered(pid if isinstance(pid, int) else -1)

    def permit_setns(self, pidfd: int, *, here: bool) -> None:
        """Let one process into the namespaces of a fork: here, or at the init above that its filter asks."""
        if here:
            self.setns_guard.permitted.update(processes.numbers_of(pidfd)[:1])
        elif self.parent is not None:
            self.parent.request({"op": "permit"}, (pidfd,))


# --- permission to enter a fork ---------------------------------------------------------------------------------------

# SECCOMP_IOCTL_NOTIF_RECV and _SEND; struct seccomp_notif and seccomp_notif_resp.
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_CONTINUE = 1


class SetnsGuard:
    """Answers the filters of the workers that this init has started, which ask before a user namespace is entered.

    Only the one child that a live fork is waiting for may enter, and once. The flags are in registers, so what is
    checked is what runs. The descriptor that setns gets could be any: the kernel lets this user only into namespaces
    that it owns, which are those of its forks.
    """

    def __init__(self) -> None:
        self.listeners: set[int] = set()
        self.permitted: set[int] = set()

    def answer(self, listener: int) -> bool:
        """Answer one request without waiting; False when all processes under this filter are gone."""
        events = _events(listener)
        if not events & select.POLLIN:
            return not events & select.POLLHUP
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, buffer)
        except OSError as error:
            if error.errno == errno.ENOENT:  # The process that asked is dead.
                return True
            raise
        request, pid, _, _, _, _, _, flags, *_ = _NOTIFICATION.unpack(bytes(buffer))
        allowed = pid in self.permitted and flags == syscalls.CLONE_NEWUSER
        self.permitted.discard(pid)
        response = _RESPONSE.pack(request, 0, 0 if allowed else -errno.EPERM, _CONTINUE if allowed else 0)
        try:
            fcntl.ioctl(listener, _SEND, bytearray(response))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
        return True


def _events(listener: int) -> int:
    """Checked before receiving, which would wait for ever after a hang-up."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return sum(event for _, event in poll.poll(0))


def _kill_and_reap_all() -> None:
    """Without a pid namespace: end the session's processes, which are all this one's descendants."""
    processes.kill_descendants(patience=60)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


def _wake_up(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""
