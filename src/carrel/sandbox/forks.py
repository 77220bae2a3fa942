"""Init's side of live forks: prepares a place below this session, lets one child in, and keeps watch over it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any

from . import confine, forked_place, namespaces, permits, syscalls
from .records import PeerBroken, Records
from .report import SILENCE

if TYPE_CHECKING:
    from .init import Init, Link


class Fork:
    """A forked session as its parent's init knows it."""

    def __init__(self, identity: object, pid: int, control: int, go: int) -> None:
        self.identity, self.pid, self.go = identity, pid, go
        self.control = Records(socket.socket(fileno=control))
        self.folder = ""
        self.namespaces: dict[str, int] = {}
        self.worker: int | None = None
        self.filter_is_ours = False

    def is_abandoned(self) -> bool:
        """Whether the host has closed its end."""
        look = select.poll()
        look.register(self.control.fileno(), 0)
        return any(event & select.POLLHUP for _, event in look.poll(0))


class Ends:
    """The descriptors between an init and that of a fork, made before the fork and shared out after it."""

    def __init__(self) -> None:
        self.go_read, self.go_write = os.pipe2(os.O_CLOEXEC)
        self.report_read, self.report_write = os.pipe2(os.O_CLOEXEC)
        self.link_ours, self.link_theirs = socket.socketpair()
        self.above_ours, self.above_theirs = socket.socketpair()


class Forks:
    def __init__(self, init: Init) -> None:
        self.init = init
        self.living: dict[int, Fork] = {}
        self.number = 0
        self.pending: Fork | None = None
        self.report: int | None = None
        self.entrance: socket.socket | None = None
        self.waiting: tuple[Link, int] | None = None
        """Who asked to enter before the place was ready."""
        self.aboves: dict[int, tuple[Records, Fork]] = {}

    def begin(self, identity: object, descriptors: list[int]) -> None:
        """Prepare a place; the host hears fork_ready or fork_failed."""
        try:
            if not self.init.plan.can_fork or len(descriptors) != 1:
                raise forked_place.ForkImpossible(
                    "this sandbox has not all that a live fork needs; see `carrel doctor`"
                )
            if self.pending is not None and not self.pending.is_abandoned():
                raise forked_place.ForkImpossible("another fork of this session is being made")
            self._give_up()
            forked_place.check(self.init.plan)
            self._make(identity, os.dup(descriptors[0]))
        except forked_place.ForkImpossible as refusal:
            self._failed(identity, {"step": "check", "errno": None, "message": str(refusal)})
        except OSError as error:
            self._failed(identity, {"step": "new namespaces", "errno": error.errno, "message": _explained(error)})

    def _failed(self, identity: object, why: dict[str, Any]) -> None:
        self.init.tell({"op": "fork_failed", "id": identity, **why})

    def _make(self, identity: object, control: int) -> None:
        self.number += 1
        folder = f"fork{self.number}"
        ends = Ends()
        # The maps of a process that is not dumpable belong to the host's root. Landlock keeps the worker from both.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        try:
            pid = syscalls.fork_with(namespaces.flags(self.init.plan))
            if pid == 0:
                self._live(ends, control, folder)
            namespaces.write_maps(pid, self.init.plan.uid, (self.init.plan.uid, self.init.plan.uid))
            wanted = namespaces.flags(self.init.plan)
            doors = {name: _door(pid, name) for name, flag in permits.NAMES.items() if flag & wanted}
        finally:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            os.close(ends.go_read)
            os.close(ends.report_write)
            ends.link_ours.close()
            ends.above_theirs.close()
        os.write(ends.go_write, b"g")
        self.pending = self.living[pid] = Fork(identity, pid, control, ends.go_write)
        self.pending.namespaces = doors
        self.pending.folder = folder
        self.report = ends.report_read
        self.entrance = ends.link_theirs
        self.aboves[ends.above_ours.fileno()] = (Records(ends.above_ours), self.pending)
        self.init.poll.register(ends.report_read, select.POLLIN)
        self.init.poll.register(ends.above_ours.fileno(), select.POLLIN)

    def _live(self, ends: Ends, control: int, folder: str) -> None:
        """The whole life of the fork's init; never returns."""
        step = ["start"]
        try:
            confine.usual_signals()
            kept = {control, ends.go_read, ends.report_write, ends.link_ours.fileno(), ends.above_theirs.fileno()}
            ours = (ends.link_ours, ends.above_theirs)
            confine.keep_only(kept)
            if os.read(ends.go_read, 1) != b"g":
                os._exit(1)
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            plan = self.init.plan
            if "uts" in plan.parts:
                syscalls.sethostname(plan.hostname)
            if "net" in plan.parts and not plan.network:
                namespaces.raise_loopback()
            forked_place.build(plan, folder, lambda name: step.__setitem__(0, name))
            again = type(self.init)(plan, control, ends.go_read, self.init.start, Records(ours[1]))
            gc.freeze()
            os.write(ends.report_write, b"{}\n")
            os.close(ends.report_write)
            again.serve(None, ours[0])
        except BaseException as error:  # noqa: BLE001 -- told to the init above, which tells the host
            number = error.errno if isinstance(error, OSError) else None
            said = {"step": step[0], "errno": number, "message": str(error) or type(error).__name__}
            os.write(ends.report_write, json.dumps(said).encode() + b"\n")
        os._exit(1)

    def heard(self, source: int) -> None:
        """A fork's init reports, or asks on behalf of one further down."""
        if source == self.report and self.pending is not None:
            said = os.read(source, 65536)
            if not said:
                return
            self.init.poll.unregister(source)
            os.close(source)
            self.report = None
            why = json.loads(said)
            if why:
                self._failed(self.pending.identity, why)
                self._give_up()
            else:
                self.init.tell({"op": "fork_ready", "id": self.pending.identity})
                if self.waiting is not None and self.entrance is not None:
                    (link, pid), self.waiting = self.waiting, None
                    with contextlib.suppress(OSError):
                        self._let_in(self.pending, self.entrance, link, pid)
        elif source in self.aboves:
            self._relay(source, *self.aboves[source])

    def _relay(self, source: int, line: Records, fork: Fork) -> None:
        try:
            alive = line.read()
            found = line.next() if alive else None
        except (PeerBroken, OSError):
            alive, found = False, None
        if found is not None:
            for descriptor in found[1]:
                self.init.permit(descriptor, here=fork.filter_is_ours)
                os.close(descriptor)
            with contextlib.suppress(OSError):
                line.send({"op": "permitted"})
        if not alive:
            self.init.poll.unregister(source)
            del self.aboves[source]
            line.close()

    def _give_up(self) -> None:
        if self.pending is not None and self.pending.pid in self.living:
            os.kill(self.pending.pid, signal.SIGKILL)
        self._settled()

    def _settled(self) -> None:
        if self.waiting is not None:
            (link, _), self.waiting = self.waiting, None
            with contextlib.suppress(OSError):
                link.records.send({"op": "refused", "message": "no place for the fork could be made"})
        if self.pending is not None:
            for descriptor in self.pending.namespaces.values():
                os.close(descriptor)
            self.pending.namespaces = {}
            self.pending = None
        if self.entrance is not None:
            self.entrance.close()
            self.entrance = None
        if self.report is not None:
            self.init.poll.unregister(self.report)
            os.close(self.report)
            self.report = None

    def asked(self, worker: Link, op: str, pid: int) -> None:
        """The worker wants to send a child into the place, and waits until that is ready; or a child has entered."""
        if self.pending is None or self.entrance is None:
            worker.records.send({"op": "refused", "message": "no place for a fork is ready"})
        elif op == "crossed":
            self._crossed(self.pending, pid)
            worker.records.send({"op": "noted"})
        elif self.report is None:
            self._let_in(self.pending, self.entrance, worker, pid)
        else:
            self.waiting = worker, pid

    def _let_in(self, fork: Fork, entrance: socket.socket, worker: Link, pid: int) -> None:
        try:
            descriptor = syscalls.pidfd_open(pid)
        except OSError:
            worker.records.send({"op": "refused", "message": "the child is gone"})
            return
        fork.filter_is_ours = worker.filter_is_ours
        self.init.permit(descriptor, here=worker.filter_is_ours)
        os.close(descriptor)
        flags = [permits.NAMES[name] for name in fork.namespaces]
        worker.records.send({"op": "entering", "flags": flags}, [entrance.fileno(), *fork.namespaces.values()])

    def _crossed(self, fork: Fork, pid: int) -> None:
        try:
            descriptor = syscalls.pidfd_open(pid)
        except OSError:
            return  # dead already, as its own init will say
        fork.worker = pid
        with contextlib.suppress(OSError):
            fork.control.send({"op": "worker", "pid": pid}, [descriptor])
        os.close(descriptor)
        self._settled()

    def buried(self, pid: int, status: int) -> None:
        """A child of init ended: perhaps a fork's worker, which is ours to reap, or a fork's init."""
        for fork in self.living.values():
            if fork.worker == pid:
                fork.worker = None
                # Where the host has closed this fork, its own init knows, and may be waiting for forks of its own.
                with contextlib.suppress(OSError):
                    fork.control.send({"op": "exited", "pid": pid, "status": status})
                # From here on only the fork's own init speaks to the host, which sees by its end that it is closed.
                fork.control.close()
        gone = self.living.pop(pid, None)
        if gone is None:
            return
        os.close(gone.go)
        gone.control.close()
        with contextlib.suppress(OSError):
            os.rmdir(gone.folder)
        if gone is self.pending:
            if self.report is not None:
                self._failed(gone.identity, SILENCE)
            self._settled()
        if not self.living and self.init.control is None:
            os._exit(0)


def _door(pid: int, name: str) -> int:
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)


def _explained(error: OSError) -> str:
    if error.errno in (28, 87):  # ENOSPC, EUSERS
        return f"{error}: forks of forks go about 30 deep, and the machine has a limit on namespaces"
    return str(error)
