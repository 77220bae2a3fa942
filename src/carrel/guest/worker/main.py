"""The worker's loop: requests come over the line, one at a time; between cells a frozen fork is kept."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, poll  # by name: what code sets on the module select does not matter here
from typing import Any

from .. import syscalls
from ..channel import Channel, ChannelError, Record, RecordTooLong
from ..processes import end_started_in_session, set_title, started_in_session
from . import reopen_files, values
from .code_cell import Cell, CodeRunner, ContinueAsFork
from .fork_checks import (
    connections_reason,
    devices_reason,
    native_threads,
    native_threads_reason,
    open_descriptors,
    python_threads_reason,
    shared_memory_reason,
)
from .host_calls import HostCallClient
from .host_errors import error_class
from .interrupts import Interrupts
from .snapshot import Snapshot, quiet_fork
from .std_streams import move_to_high_number
from .tracebacks import worker_traceback

PROTOCOL = 1
IDLE = 0.001
"""How long nothing must have come before a frozen fork is made."""
BURIAL = 0.02
"""How often those that have been ended are looked after."""
CEILING = 2 << 30
"""How large a session may be for one to be kept."""


class Worker:
    """One session's Python."""

    def __init__(self, line: Channel, init: int, settings: dict[str, Any]) -> None:
        self._init = init
        home = str(settings.get("home") or os.getcwd())
        self._snapshot = Snapshot(int(settings.get("frozen_ceiling") or CEILING))
        self._keeps_snapshot = bool(settings.get("frozen", True))
        self._opened: dict[int, reopen_files.OpenFile] = {}
        self._asleep: bool | None = None
        """In a fork that is there only to be forked: whether others could look into its process before."""
        self._fork_process: Callable[[], int] = settings.get("enter_fork") or os.fork
        self._why_not = "no frozen fork was made yet" if self._keeps_snapshot else "frozen forks are switched off"
        self._changed = True
        self._covers: Any = None
        self._forking = False
        self._stray = False
        self._survivors: set[int] = set()
        """What the last run that started something has left running."""
        self._private = os.getsid(0) == os.getpid()
        """Whether its session is its own, so that all in it is what code has started."""
        self._line = line
        self._interrupts = Interrupts()
        self._host = HostCallClient(line, self._interrupts)
        self._poll = poll()
        self._bell: tuple[int, int] | None = None
        self._begin(line)
        self._runner = CodeRunner(self._host, self._interrupts, settings, home)
        self._work = {
            "run": self._run,
            "set_variables": self._set_variables,
            "reset": self._reset,
            "fork": self._fork,
            "close": self._close,
            "interrupt": self._interrupt,
        }
        os.register_at_fork(after_in_child=self._forked_by_the_user)

    def _begin(self, line: Channel) -> None:
        """Everything that belongs to this process alone; again in each fork."""
        self._line = line
        for fd in self._bell or ():
            os.close(fd)
        heard, rung = os.pipe()
        self._bell = (move_to_high_number(heard), move_to_high_number(rung))
        os.close(heard)
        os.close(rung)
        self._poll = poll()
        for own in (line.fileno(), self._bell[0]):
            self._poll.register(own, POLLIN)
        self._host.use_channel(line, self._bell[1])
        self._interrupts.end()
        self._interrupts.install()

    def _rung(self) -> None:
        os.read(self._bell[0] if self._bell else -1, 4096)

    def _send(self, record: Record) -> None:
        self._line.send(record)

    def _ready(self) -> None:
        version = ".".join(map(str, sys.version_info[:3]))
        about = {"protocol": PROTOCOL, "python": version, "pid": os.getpid(), "pipes": True}
        self._send({"op": "ready", **about})

    def serve(self) -> None:
        """Until the host closes the line."""
        self._ready()
        while True:
            try:
                self._next()
            except ContinueAsFork:
                continue
            except ChannelError:
                return

    # --- requests ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if not self._host.requests:
            self._wait()
        if self._host.requests:
            self._answer(*self._host.requests.popleft())

    def _wait(self) -> None:
        """For something to happen; a frozen fork is made when nothing does."""
        freezes = self._changed and self._keeps_snapshot and self._asleep is None
        soon = IDLE if freezes else BURIAL if self._snapshot.reap() else None
        events = self._poll.poll(None if soon is None else soon * 1000)
        for fd, _ in events:
            if fd == self._line.fileno():
                self._host.read_available()
            else:
                self._rung()
        if not events and freezes:
            self._freeze()

    def _answer(self, record: Record, fds: list[int]) -> None:
        work = self._work.get(str(record.get("op")))
        if work is None:
            self._send({"op": "done", "id": record.get("id"), "error": f"there is no request {record.get('op')!r}"})
        else:
            work(record, fds)

    def _set_variables(self, record: Record, fds: list[int]) -> None:
        self._runner.set_variables(values.decode(record.get("values")))
        self._changed = True
        self._send({"op": "done", "id": record.get("id"), "unkept": True})

    def _reset(self, record: Record, fds: list[int]) -> None:
        self._runner.reset()
        self._changed = True
        self._send({"op": "done", "id": record.get("id"), "unkept": True})

    def _interrupt(self, record: Record, fds: list[int]) -> None:
        """Its signal has come by now, or comes; see `HostCallClient.is_interrupted`."""

    def _close(self, record: Record, fds: list[int]) -> None:
        self._send({"op": "done", "id": record.get("id")})
        raise ChannelError("the host has closed the session")

    # --- cells ------------------------------------------------------------------------------------------------------

    def _run(self, record: Record, fds: list[int]) -> None:
        changed_before = self._changed
        self._runner.streams.begin(fds)
        self._host.begin_run()

        def before_it(cell: Cell) -> None:
            if changed_before and self._keeps_snapshot and not cell.harmless:
                self._freeze()
            self._changed = self._changed or not cell.harmless

        def unsafe() -> None:
            if changed_before and self._keeps_snapshot:
                self._freeze()

        code = None if record.get("variables") is True else str(record.get("code", ""))
        self._interrupts.meant = lambda: self._host.is_interrupted(record.get("id"))
        self._interrupts.taken = False
        outcome = self._runner.run(code, before_it, unsafe)
        if self._stray:
            _end_stray(outcome)
        if self._private and self._runner.streams.children_made:
            if self._interrupts.taken:
                end_started_in_session(exclude=self._own_processes(), trees=self._survivors, interrupt_first=True)
            self._survivors = set(started_in_session(exclude=self._own_processes()))
        self._covers = record.get("id")
        result = {"op": "done", "id": record.get("id"), "frozen": self._why_not, "unkept": self._changed}
        result.update(outcome)
        try:
            self._send(result)
        except RecordTooLong:
            # Text that JSON has to escape grows on its way.
            value = values.as_repr("", "it is too large to cross as data")
            self._send({**result, "value": value, "display": []})
        self._runner.streams.repair()

    def _own_processes(self) -> set[int]:
        """The processes of the worker itself in its kernel session."""
        return {os.getpid(), *self._snapshot.processes()}

    def _freeze(self) -> None:
        """Keep a fork of this moment, or say why there is none."""
        made: Channel | str | None = self._snapshot.refusal()
        if made is None:
            self._forking = True
            try:
                made = self._snapshot.make(self._line, self._covers)
            finally:
                self._forking = False
        self._changed = False
        if isinstance(made, Channel):
            self._wake(made)
            return
        self._why_not = made or "kept"
        if made is not None:
            self._snapshot.drop()
            self._send({"op": "unfrozen", "why": made, "covers": self._covers})

    def _wake(self, line: Channel) -> None:
        """In the frozen fork: the worker is dead, and this is the worker now. What its last run started goes too."""
        if self._private:
            end_started_in_session(exclude=self._own_processes(), trees=self._survivors)
        self._go_on(line)
        if self._init >= 0:
            init = socket.socket(fileno=os.dup(self._init))
            with init:
                Channel(init).send({"op": "worker", "pid": os.getpid()})
        self._ready()
        raise ContinueAsFork

    def _go_on(self, line: Channel) -> None:
        self._begin(line)
        self._runner.loop.renew()
        self._snapshot.forget()
        self._why_not = "no frozen fork was made yet"
        self._changed = True

    # --- forks ------------------------------------------------------------------------------------------------------

    def _fork(self, record: Record, fds: list[int]) -> None:
        """Another worker with the same variables, on its own line; or the reason why not, and nothing has changed."""
        pid, state = -1, None
        try:
            why = self._why_no_fork(fds)
            if why is None:
                self._forking = True
                # Python sows its random numbers anew in a child; a moment that is gone back to has those of then.
                goes_back = record.get("asleep") is True or self._asleep is not None
                state = random.getstate() if goes_back else None
                pid = quiet_fork(self._fork_process)
        except OSError as problem:
            why = str(problem.strerror or problem)
        except MemoryError:
            why = "there is no memory left for it"
        finally:
            self._forking = False
        if pid == 0:
            if state is not None:
                random.setstate(state)
            unshared = self._unshare(record.get("asleep") is True)
            self._line.socket.close()
            line = move_to_high_number(fds[0])
            os.close(fds[0])
            self._line = Channel(socket.socket(fileno=line))
            if unshared is not None:
                self._send({"op": "ready", "protocol": PROTOCOL, "refused": unshared})
                os._exit(1)
            # Said at once: what is left to do is done while the host hears of it, and before it can ask for anything.
            self._interrupts.install()
            self._ready()
            self._runner.streams.replace(fds[1], fds[2])
            self._go_on(self._line)
            reseed = getattr(self._fork_process, "reseed", None)
            if reseed is not None:
                reseed()
            raise ContinueAsFork
        for fd in fds:
            os.close(fd)
        answer = {"pid": pid} if why is None else {"refused": why}
        self._send({"op": "done", "id": record.get("id"), **answer})

    def _unshare(self, asleep: bool) -> str | None:
        """In a fork: part from what it has together with whom it came from; why that could not be, or None."""
        if self._asleep is not None:
            syscalls.set_dumpable(self._asleep)
        why = None
        try:
            reopen_files.reopen(self._opened)
        except OSError as problem:
            why = problem.strerror or str(problem)
        self._asleep = syscalls.set_dumpable(False) if asleep else None
        return why

    def _why_no_fork(self, fds: list[int]) -> str | None:
        if len(fds) != 3:
            return "the request brought no line, stdout and stderr of the fork"
        own = {self._line.fileno(), self._init, *fds, *(self._bell or ())}
        own |= self._runner.streams.descriptors() | self._runner.loop.descriptors()
        opened = open_descriptors()
        why = python_threads_reason() or devices_reason(opened) or connections_reason(opened, own)
        if why is None:
            self._opened, why = reopen_files.files_of(opened, own), shared_memory_reason()
        if why is None and native_threads():
            # Some libraries end their threads before a fork: a child that ends at once shows which are left.
            self._forking = True
            pid = quiet_fork()
            if pid == 0:
                os._exit(0)
            with suppress(ChildProcessError):  # where code ignores SIGCHLD
                os.waitpid(pid, 0)
            left = native_threads()
            why = native_threads_reason(left) if left else None
        return why

    def _forked_by_the_user(self) -> None:
        """A child made by the user's code is no worker: it has no line, and ends when its cell does."""
        if not self._forking:
            self._stray = True
            self._line.socket.close()


def _end_stray(outcome: Record) -> None:
    """End a child that the user's code forked, as a Python program ends."""
    code = outcome.get("exit_code", int("error" in outcome))
    if "error" in outcome and "exit_code" not in outcome:
        sys.stderr.write(f"{outcome['error']}\n")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def prepare(settings: dict[str, Any]) -> None:
    """In the process that workers are forked from: make once what each of them would make with these settings."""
    set_title()
    for name, also in (settings.get("errors") or {}).items():
        error_class(str(name), [str(other) for other in also])


def run(line_fd: int, init_fd: int, settings: dict[str, Any]) -> None:
    """Be the worker of a session until the host is gone; never returns."""
    code = 1
    try:
        line = move_to_high_number(line_fd)
        os.close(line_fd)
        Worker(Channel(socket.socket(fileno=line)), init_fd, settings).serve()
        code = 0
    except BaseException as problem:  # noqa: BLE001 - a bug of the worker: reported in the session's output
        sys.stderr.write(f"{worker_traceback(problem)}\n")
    finally:
        os._exit(code)
