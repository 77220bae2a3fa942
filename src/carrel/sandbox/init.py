"""The first process of a session: reaps, answers the host, makes forks, and takes everything with it when it goes."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any

from . import copying, place, syscalls
from .forks import Forks
from .permits import NAMES, Permits, number_of
from .plan import Plan
from .records import PeerBroken, Records

MOST_WORKERS = 64
LARGEST_FROM_WORKER = 1 << 16


class Init:
    """The loop: nothing in it runs user code, and nothing that the worker sends is believed beyond the session."""

    def __init__(self, plan: Plan, control: int, go: int, link: socket.socket, above: Records | None = None) -> None:
        self.plan = plan
        self.go = go
        self.control: Records | None = Records(socket.socket(fileno=control))
        link.setblocking(False)
        self.link: Records | None = Records(link, LARGEST_FROM_WORKER)
        self.above = above
        """The init of the session that this one was forked from."""
        self.permits: Permits | None = None
        self.forks = Forks(self)
        self.workers: set[int] = set()
        self.poll = select.poll()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, worker: int | None) -> None:
        """Until told to close, or until the host or the zygote is gone; never returns."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        if worker is not None:
            self.workers.add(worker)
            descriptor = syscalls.pidfd_open(worker)
            self.tell({"op": "worker", "pid": worker}, [descriptor])
            os.close(descriptor)
        assert self.control is not None
        assert self.link is not None
        for source in (self.control.fileno(), self.go, self.link.fileno(), self.wake_read):
            self.poll.register(source, select.POLLIN)
        self._reap()
        while True:
            for source, _ in self.poll.poll():
                self._heard(source)

    def _heard(self, source: int) -> None:
        if source == self.go:
            os._exit(0)
        elif source == self.wake_read:
            os.read(self.wake_read, 4096)
            self._reap()
        elif self.control is not None and source == self.control.fileno():
            if not self._controlled(self.control):
                self.end()
        elif self.link is not None and source == self.link.fileno():
            self._told_by_worker(self.link)
        elif self.permits is not None and source == self.permits.listener:
            self.permits.answer()
        else:
            self.forks.heard(source)

    def end(self) -> None:
        """The kernel kills a pid namespace with its first process, forks below it too: so init waits for those."""
        if not self.plan.confined:
            kill_descendants()
        if not self.forks.living:
            os._exit(0)
        if self.control is not None:
            self.poll.unregister(self.control.fileno())
            kill_own_processes()
            for name in place.WRITABLE:
                if name != "work":
                    copying.empty_tree(f"scratch/{name}")
            self.control.close()
            self.control = None

    def tell(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            if self.control is not None:
                self.control.send(record, descriptors)
        except OSError:
            self.end()

    def permit(self, pidfd: int) -> None:
        """Let one process call setns once; the filter's questions arrive at the first session of the family."""
        if self.permits is not None:
            self.permits.expected[number_of(pidfd)] = len(NAMES)
        elif self.above is not None:
            self.above.ask({"op": "permit"}, [pidfd])

    def _controlled(self, control: Records) -> bool:
        """One reading of the host's socket; False when the session is over."""
        try:
            if not control.read():
                return False
            while True:
                found = control.next()
                if found is None:
                    return True
                record, descriptors = found
                if record.get("op") == "fork":
                    self.forks.begin(record.get("id"), descriptors)
                elif record.get("op") == "upper" and self.plan.confined:
                    self._show_upper(record.get("id"))
                for descriptor in descriptors:
                    os.close(descriptor)
                if record.get("op") == "close":
                    return False
        except PeerBroken:
            return False

    def _show_upper(self, identity: object) -> None:
        """The folder of what was changed in the workspace, for the host to read; marks of deleted files included."""
        folder = os.open("kept/upper" if os.path.isdir("kept") else "scratch/upper", os.O_RDONLY | os.O_DIRECTORY)
        self.tell({"op": "upper", "id": identity}, [folder])
        os.close(folder)

    def _told_by_worker(self, link: Records) -> None:
        try:
            alive = link.read()
            while alive:
                found = link.next()
                if found is None:
                    return
                record, descriptors = found
                self._obey_worker(link, record, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
        except (PeerBroken, OSError):
            # It sends what is no record, or does not read its answers: then it has no init to talk to.
            alive = False
        self.poll.unregister(link.fileno())
        link.close()
        self.link = None

    def _obey_worker(self, link: Records, record: dict[str, Any], descriptors: list[int]) -> None:
        pid = record.get("pid")
        op = record.get("op")
        if op == "listener" and self.permits is None and self.above is None and descriptors:
            # The first that comes was sent before any user code ran.
            self.permits = Permits(descriptors.pop())
            self.poll.register(self.permits.listener, select.POLLIN)
        elif op == "worker" and isinstance(pid, int) and len(self.workers) < MOST_WORKERS:
            # A frozen fork that became the worker says so, to have its end reported.
            self.workers.add(pid)
        elif op in ("enter", "crossing", "crossed"):
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


def kill_own_processes() -> None:
    """All of this pid namespace but init, and none of the namespaces below it."""
    while True:
        found = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1" and _depth(name) == 1:
                found += 1
                os.kill(int(name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.001)


def _depth(name: str) -> int:
    """How many pid namespaces, from ours downwards, a process has a number in; 0 when it is gone or a zombie."""
    try:
        with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
            text = file.read()
        if "\nState:\tZ" in text:
            return 0
        return next((len(line.split()) - 1 for line in text.splitlines() if line.startswith("NSpid:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


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
