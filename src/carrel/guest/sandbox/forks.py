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

from .. import syscalls
from ..channel import Channel, ChannelError
from . import confine, forked_place, namespaces, permits
from .report import SILENCE

if TYPE_CHECKING:
    from .init import Init, Link


class Fork:
    """A forked session as its parent's init knows it, or a place that waits for the next."""

    def __init__(self, pid: int, folder: str, ends: Ends, doors: dict[str, int]) -> None:
        self.pid, self.folder, self.go, self.namespaces = pid, folder, ends.go_write, doors
        self.report, self.entrance = ends.report_read, ends.link_theirs
        self.above = Channel(ends.above_ours)
        self.identity: object = None
        self.control: Channel | None = None
        self.worker: int | None = None
        self.is_open = False
        """Whether somebody was let in."""
        self.filter_is_ours = False
        self.built_ahead = False

    def claim(self, identity: object, control: int) -> None:
        """It is that of the fork which the host has asked for under this number."""
        self.identity = identity
        self.control = Channel(socket.socket(fileno=os.dup(control)))
        # Where it has just died, its end is heard of soon.
        with contextlib.suppress(ChannelError):
            self.above.send({"op": "claim"}, (control,))

    def is_abandoned(self) -> bool:
        """Whether the host has closed its end."""
        if self.control is None:
            return False
        look = select.poll()
        look.register(self.control.fileno(), 0)
        return any(event & select.POLLHUP for _, event in look.poll(0))

    def tell(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """To the host, if it still wants to hear."""
        if self.control is not None:
            with contextlib.suppress(ChannelError, OSError):
                self.control.send(record, tuple(descriptors or ()))

    def close(self) -> None:
        """It has ended."""
        os.close(self.go)
        if self.control is not None:
            self.control.close()
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)


class Ends:
    """The descriptors between an init and that of a fork, made before the fork and shared out after it."""

    def __init__(self) -> None:
        self.go_read, self.go_write = os.pipe2(os.O_CLOEXEC)
        self.report_read, self.report_write = os.pipe2(os.O_CLOEXEC)
        self.link_ours, self.link_theirs = socket.socketpair()
        self.above_ours, self.above_theirs = socket.socketpair()

    def close_theirs(self) -> None:
        """What the fork's init has, or would have had."""
        os.close(self.go_read)
        os.close(self.report_write)
        self.link_ours.close()
        self.above_theirs.close()

    def close_ours(self) -> None:
        """By which its init, if there is one, ends."""
        os.close(self.go_write)
        os.close(self.report_read)
        self.link_theirs.close()
        self.above_ours.close()


class Forks:
    def __init__(self, init: Init) -> None:
        self.init = init
        self.living: dict[int, Fork] = {}
        self.number = 0
        self.pending: Fork | None = None
        self.waiting: tuple[Link, int] | None = None
        """Who asked to enter before the place was ready."""
        self.aboves: dict[int, Fork] = {}
        self.ahead: Fork | None = None
        self.wants_ahead = False
        """Who has forked once does so again: the next place is built while nothing else is to be done."""

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
        except forked_place.ForkImpossible as refusal:
            self._failed(identity, {"step": "check", "errno": None, "message": str(refusal)})
        else:
            self._claim(identity, descriptors[0])

    def _failed(self, identity: object, why: dict[str, Any]) -> None:
        self.init.tell({"op": "fork_failed", "id": identity, **why})

    def _claim(self, identity: object, control: int) -> None:
        self.wants_ahead = False
        try:
            fork, self.ahead = self.ahead or self._make(), None
            self.living[fork.pid] = self.pending = fork
            fork.claim(identity, control)
        except OSError as error:
            self._failed(identity, {"step": "new namespaces", "errno": error.errno, "message": _explained(error)})
            self._give_up()

    def build_ahead(self) -> None:
        """A place for the next fork; that there is none is no fault."""
        self.wants_ahead = False
        with contextlib.suppress(OSError):
            self.ahead = self._make()
            self.ahead.built_ahead = True

    def discard(self) -> None:
        """What was built ahead; it counts among the living until its end is heard of."""
        self.wants_ahead = False
        if self.ahead is not None:
            os.kill(self.ahead.pid, signal.SIGKILL)
            self._take_down()

    def _take_down(self) -> None:
        if self.ahead is not None:
            self.living[self.ahead.pid] = self.ahead
            self._shut(self.ahead)
            self.ahead = None

    def _make(self) -> Fork:
        """A place that is being built, up to where it must be known when the fork is made."""
        self.number += 1
        folder = f"fork{self.number}"
        ends = Ends()
        # The maps of a process that is not dumpable belong to the host's root. Landlock keeps the worker from both.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        try:
            pid = syscalls.fork_with_namespaces(namespaces.flags(self.init.plan))
            if pid == 0:
                self._live(ends, folder)
            uid, root = self.init.plan.uid, 0 if namespaces.has_root() else None
            namespaces.write_maps(pid, uid, (uid, uid), root)
            doors = _doors(pid, namespaces.flags(self.init.plan))
        except OSError:
            ends.close_ours()
            raise
        finally:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            ends.close_theirs()
        # Where it has been killed already, its end is heard of soon.
        with contextlib.suppress(BrokenPipeError):
            os.write(ends.go_write, b"g")
        fork = Fork(pid, folder, ends, doors)
        self.aboves[fork.above.fileno()] = fork
        self.init.poll.register(fork.report, select.POLLIN)
        self.init.poll.register(fork.above.fileno(), select.POLLIN)
        return fork

    def _live(self, ends: Ends, folder: str) -> None:
        """The whole life of the fork's init; never returns."""
        step = ["start"]

        def at(name: str) -> None:
            step[0] = name

        try:
            confine.usual_signals()
            kept = {ends.go_read, ends.report_write, ends.link_ours.fileno(), ends.above_theirs.fileno()}
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
            forked_place.begin(plan, folder, at)
            gc.freeze()
            above = Channel(ends.above_theirs)
            claim = above.read()
            forked_place.finish(plan, folder, at)
            again = type(self.init)(plan, claim[1][0], ends.go_read, self.init.start, above)
            os.write(ends.report_write, b"{}\n")
            os.close(ends.report_write)
            again.serve(None, ends.link_ours)
        except BaseException as error:  # noqa: BLE001 -- told to the init above, which tells the host
            number = error.errno if isinstance(error, OSError) else None
            said = {"step": step[0], "errno": number, "message": str(error) or type(error).__name__}
            # Once it serves, nobody listens there any more; and it must not go on as the init it was forked from.
            with contextlib.suppress(OSError):
                os.write(ends.report_write, json.dumps(said).encode() + b"\n")
        finally:
            os._exit(1)

    def heard(self, source: int) -> None:
        """A fork's init reports, or asks on behalf of one further down."""
        if self.ahead is not None and source == self.ahead.report:
            self.discard()  # It could not be built, or is gone; the next fork will say why.
        elif self.pending is not None and source == self.pending.report:
            said = os.read(source, 65536)
            if not said:
                return
            self._close_report(self.pending)
            why = json.loads(said)
            if why:
                self._failed(self.pending.identity, why)
                self._give_up()
            else:
                self.init.tell({"op": "fork_ready", "id": self.pending.identity})
                if self.waiting is not None:
                    (link, pid), self.waiting = self.waiting, None
                    with contextlib.suppress(ChannelError, OSError):
                        self._let_in(self.pending, link, pid)
        elif source in self.aboves:
            self._relay(source, self.aboves[source])

    def _close_report(self, fork: Fork) -> None:
        if fork.report >= 0:
            self.init.poll.unregister(fork.report)
            os.close(fork.report)
            fork.report = -1

    def _relay(self, source: int, fork: Fork) -> None:
        line = fork.above
        try:
            for _, descriptors in line.receive():
                for descriptor in descriptors:
                    self.init.permit(descriptor, here=fork.filter_is_ours)
                    os.close(descriptor)
                line.send({"op": "permitted"})
        except (ChannelError, OSError):
            self.init.poll.unregister(source)
            del self.aboves[source]
            line.close()
            if fork is self.ahead:
                self.discard()

    def _give_up(self) -> None:
        if self.pending is not None and self.pending.pid in self.living:
            os.kill(self.pending.pid, signal.SIGKILL)
        self._settled()

    def _settled(self) -> None:
        if self.waiting is not None:
            (link, pid), self.waiting = self.waiting, None
            with contextlib.suppress(ChannelError, OSError):
                _refuse(link, pid, "no place for the fork could be made")
        fork, self.pending = self.pending, None
        if fork is not None:
            self._shut(fork)

    def _shut(self, fork: Fork) -> None:
        """Nobody enters any more."""
        for descriptor in fork.namespaces.values():
            os.close(descriptor)
        fork.namespaces = {}
        fork.entrance.close()
        self._close_report(fork)

    def asked(self, worker: Link, op: str, pid: int) -> None:
        """The worker wants to send a child into the place, and waits until that is ready; or a child has entered."""
        if op == "entered":
            # Into one that has ended since, where nobody was let into this.
            if self.pending is not None and self.pending.is_open:
                self._crossed(self.pending, pid)
        elif self.pending is None:
            _refuse(worker, pid, "no place for a fork is ready")
        elif self.pending.report < 0:
            self._let_in(self.pending, worker, pid)
        else:
            self.waiting = worker, pid

    def _let_in(self, fork: Fork, worker: Link, pid: int) -> None:
        try:
            descriptor = syscalls.pidfd_open(pid)
        except OSError:
            _refuse(worker, pid, "the child is gone")
            return
        fork.filter_is_ours = worker.filter_is_ours
        self.init.permit(descriptor, here=worker.filter_is_ours)
        os.close(descriptor)
        flags = [permits.NAMES[name] for name in fork.namespaces]
        entrance = fork.entrance.fileno()
        worker.records.send({"op": "entering", "pid": pid, "flags": flags}, (entrance, *fork.namespaces.values()))
        fork.is_open = True

    def _crossed(self, fork: Fork, pid: int) -> None:
        try:
            descriptor = syscalls.pidfd_open(pid)
        except OSError:
            return  # dead already, as its own init will say
        fork.worker = pid
        fork.tell({"op": "worker", "pid": pid}, [descriptor])
        os.close(descriptor)
        self._settled()
        self.wants_ahead = True

    def buried(self, pid: int, status: int) -> None:
        """A child of init ended: perhaps a fork's worker, which is ours to reap, or a fork's init."""
        for fork in self.living.values():
            if fork.worker == pid:
                fork.worker = None
                # Where the host has closed this fork, its own init knows, and may be waiting for forks of its own.
                fork.tell({"op": "exited", "pid": pid, "status": status})
                # From here on only the fork's own init speaks to the host, which sees by its end that it is closed.
                if fork.control is not None:
                    fork.control.close()
                    fork.control = None
        if self.ahead is not None and self.ahead.pid == pid:
            self._take_down()
        gone = self.living.pop(pid, None)
        if gone is None:
            return
        if gone is self.pending and gone.report >= 0 and gone.built_ahead and gone.control is not None:
            # It had died before it was claimed, or just then; nobody has entered it.
            self._shut(gone)
            self._claim(gone.identity, gone.control.fileno())
        elif gone is self.pending:
            if gone.report >= 0:
                self._failed(gone.identity, SILENCE)
            self._settled()
        gone.close()
        if not self.living and self.init.control is None:
            os._exit(0)


def _refuse(worker: Link, pid: int, message: str) -> None:
    worker.records.send({"op": "refused", "pid": pid, "message": message})


def _doors(pid: int, wanted: int) -> dict[str, int]:
    """The namespaces of a process, in the order of entering."""
    found: dict[str, int] = {}
    try:
        for name, flag in permits.NAMES.items():
            if flag & wanted:
                found[name] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        for descriptor in found.values():
            os.close(descriptor)
        raise
    return found


def _explained(error: OSError) -> str:
    if error.errno in (28, 87):  # ENOSPC, EUSERS
        return (
            f"{error}: forks of forks go about 30 deep, and the machine has a limit on namespaces; a checkpoint that "
            "was made after a rewind lies two deeper, and an older one can still be gone back to"
        )
    return str(error)
