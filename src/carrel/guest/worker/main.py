"""The worker's loop: answers the host's requests, one at a time, and keeps a snapshot between runs."""

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
from . import fork_checks, values
from .cell_output import move_to_high_number
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
from .host_calls import HostCallClient, error_class
from .interrupts import Interrupts
from .snapshot import Snapshot, quiet_fork
from .tracebacks import worker_traceback

PROTOCOL = 1
_IDLE = 0.001
"""Seconds without a request, after which a snapshot is made."""
_REAP_INTERVAL = 0.02
"""Seconds between two attempts to reap snapshots that were ended."""
_MAX_SNAPSHOT = 2 << 30
"""Bytes of memory up to which a snapshot is kept."""


class Worker:
    """One session's Python."""

    def __init__(self, channel: Channel, init: int, settings: dict[str, Any]) -> None:
        self._init = init
        home = str(settings.get("home") or os.getcwd())
        self._snapshot = Snapshot(int(settings.get("max_snapshot_bytes") or _MAX_SNAPSHOT))
        self._keeps_snapshot = bool(settings.get("snapshots", True))
        self._opened: dict[int, fork_checks.OpenFile] = {}
        self._was_dumpable: bool | None = None
        """In a checkpoint, a fork that is only there to be forked: whether its process was dumpable before."""
        self._fork_process: Callable[[], int] = settings.get("enter_fork") or os.fork
        self._no_snapshot_reason = "snapshots are switched off"
        if self._keeps_snapshot:
            self._no_snapshot_reason = "no snapshot has been made yet"
        self._changed = True
        """Whether the variables have changed since the snapshot was made."""
        self._is_unused = True
        """Whether there are no variables to lose yet: a session that only runs commands needs no snapshot (0.7 MB)."""
        self._last_run: Any = None
        self._unreported: Any = None
        """The run after which the host wants to know the variables; None once they were reported, or another request
        has come."""
        self._forking = False
        self._is_user_fork = False
        """Whether this process was forked by the user's code."""
        self._survivors: set[int] = set()
        """What earlier runs have left running."""
        self._owns_session = os.getsid(0) == os.getpid()
        """Whether all processes in its kernel session were started by its code."""
        self._channel = channel
        self._interrupts = Interrupts()
        self._host = HostCallClient(channel, self._interrupts)
        self._poll = poll()
        self._wake_up: tuple[int, int] | None = None
        """A pipe by which other threads wake up the loop."""
        self._use_channel(channel)
        self._runner = CodeRunner(self._host, self._interrupts, settings, home)
        self._work = {
            "run": self._run,
            "set_variables": self._set_variables,
            "reset": self._reset,
            "fork": self._fork,
            "save": self._save,
            "report": self._report,
            "interrupt": self._interrupt,
        }
        os.register_at_fork(after_in_child=self._after_user_fork)

    def _use_channel(self, channel: Channel) -> None:
        """Set up what belongs to this process alone; again in each fork."""
        self._channel = channel
        for fd in self._wake_up or ():
            os.close(fd)
        read, write = os.pipe()
        self._wake_up = (move_to_high_number(read), move_to_high_number(write))
        os.close(read)
        os.close(write)
        self._poll = poll()
        for own in (channel.fileno(), self._wake_up[0]):
            self._poll.register(own, POLLIN)
        self._host.use_channel(channel, self._wake_up[1])
        self._interrupts.end()
        self._interrupts.install()

    def _woken_up(self) -> None:
        os.read(self._wake_up[0] if self._wake_up else -1, 4096)

    def _send(self, record: Record) -> None:
        self._channel.send(record)

    def _ready(self) -> None:
        version = ".".join(map(str, sys.version_info[:3]))
        about = {"protocol": PROTOCOL, "python": version, "pid": os.getpid()}
        self._send({"op": "ready", "unused": self._is_unused, **about})

    def serve(self) -> None:
        """Answer requests until the host closes the channel."""
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
        """Wait for something to happen; make a snapshot when nothing does."""
        keeps_snapshot = self._keeps_snapshot and not self._is_unused
        wants_snapshot = self._changed and keeps_snapshot and self._was_dumpable is None
        is_due = wants_snapshot or self._unreported is not None
        soon = _IDLE if is_due else _REAP_INTERVAL if self._snapshot.reap() else None
        events = self._poll.poll(None if soon is None else soon * 1000)
        for fd, _ in events:
            if fd == self._channel.fileno():
                self._host.read_available()
            else:
                self._woken_up()
        if not events and wants_snapshot:
            self._make_snapshot()
        elif not events and self._unreported is not None:
            self._report_variables()

    def _answer(self, record: Record, fds: list[int]) -> None:
        self._unreported = None
        work = self._work.get(str(record.get("op")))
        if work is None:
            self._send({"op": "done", "id": record.get("id"), "error": f"there is no request {record.get('op')!r}"})
        else:
            work(record, fds)

    def _set_variables(self, record: Record, fds: list[int]) -> None:
        self._runner.set_variables(values.decode(record.get("values")))
        self._changed, self._is_unused = True, False
        self._send({"op": "done", "id": record.get("id"), "changed": True})

    def _reset(self, record: Record, fds: list[int]) -> None:
        self._runner.reset()
        self._changed = True
        self._send({"op": "done", "id": record.get("id"), "changed": True})

    def _interrupt(self, record: Record, fds: list[int]) -> None:
        """The signal itself interrupts; see `HostCallClient.is_interrupted`."""

    # --- runs -------------------------------------------------------------------------------------------------------

    def _run(self, record: Record, fds: list[int]) -> None:
        changed_before, self._is_unused = self._changed, False
        state = str(record.get("state") or "")
        file = fds.pop() if state else -1
        self._runner.streams.begin(fds)
        self._host.begin_run()

        def before_run(cell: Cell) -> None:
            if changed_before and self._keeps_snapshot and not cell.harmless:
                self._make_snapshot()
            self._changed = self._changed or not cell.harmless

        code: Any = None if record.get("variables") is True else str(record.get("code", ""))
        if state:
            code = self._runner.state_cell(state, file)
        self._interrupts.is_for_this_run = lambda: self._host.is_interrupted(record.get("id"))
        self._interrupts.taken = False
        outcome = self._runner.run(code, before_run)
        if self._is_user_fork:
            _exit_user_fork(outcome)
        if self._owns_session and self._runner.streams.children_made:
            if self._interrupts.taken:
                end_started_in_session(exclude=self._own_processes(), trees=self._survivors, interrupt_first=True)
            self._survivors = set(started_in_session(exclude=self._own_processes()))
        self._last_run = record.get("id")
        result = {"op": "done", "id": record.get("id"), "snapshot": self._no_snapshot_reason, "changed": self._changed}
        result.update(outcome)
        try:
            self._send(result)
        except RecordTooLong:
            # Text with many characters that JSON escapes is longer than it was counted.
            value = values.as_repr("", "it is too large to be sent as data")
            self._send({**result, "value": value, "display": []})
        self._runner.streams.repair()
        self._unreported = record.get("id") if record.get("report") is True else None

    def _report_variables(self) -> None:
        """Tell the host what the variables are after a run, unless a request comes meanwhile."""
        number, self._unreported = self._unreported, None
        found = self._runner.recorded(lambda: not self._poll.poll(0))
        if found is not None:
            self._send({"op": "variables", "id": number, **found})

    def _report(self, record: Record, fds: list[int]) -> None:
        """The same as an answer."""
        self._send({"op": "done", "id": record.get("id"), **(self._runner.recorded(lambda: True) or {})})

    def _own_processes(self) -> set[int]:
        """The processes of the worker itself in its kernel session."""
        return {os.getpid(), *self._snapshot.processes()}

    def _make_snapshot(self) -> None:
        """Keep a paused fork of this moment, or tell the host why there is none."""
        made: Channel | str | None = self._snapshot.refusal()
        if made is None:
            self._forking = True
            try:
                made = self._snapshot.make(self._channel, self._last_run)
            finally:
                self._forking = False
        self._changed = False
        if isinstance(made, Channel):
            self._continue_as_snapshot(made)
            return
        self._no_snapshot_reason = made or "kept"
        if made is not None:
            self._snapshot.drop()
            self._send({"op": "no_snapshot", "why": made, "covers": self._last_run})

    def _continue_as_snapshot(self, channel: Channel) -> None:
        """In the snapshot: the worker is dead, and this is the worker now. End what the worker's last run started."""
        if self._owns_session:
            end_started_in_session(exclude=self._own_processes(), trees=self._survivors)
        self._continue_in_fork(channel)
        if self._init >= 0:
            init = socket.socket(fileno=os.dup(self._init))
            with init:
                Channel(init).send({"op": "worker", "pid": os.getpid()})
        self._ready()
        raise ContinueAsFork

    def _continue_in_fork(self, channel: Channel) -> None:
        self._use_channel(channel)
        self._runner.loop.renew()
        self._snapshot.forget()
        self._no_snapshot_reason = "no snapshot has been made yet"
        self._changed, self._unreported = True, None
        self._is_unused = False

    def _save(self, record: Record, fds: list[int]) -> None:
        """Write the variables to the first descriptor, and a report to the second, in a fork that nothing waits for."""
        reason = self._snapshot.refusal()
        if reason is None:
            self._forking = True
            random_state = random.getstate()
            try:
                pid = quiet_fork()
                if pid == 0:
                    self._channel.socket.close()
                    self._runner.save_and_exit(random_state, *fds)
                self._snapshot.reap_later(pid)
            except OSError as problem:
                reason = str(problem)
            finally:
                self._forking = False
        for fd in fds:
            os.close(fd)
        self._send({"op": "done", "id": record.get("id"), **({} if reason is None else {"refused": reason})})

    # --- forks ------------------------------------------------------------------------------------------------------

    def _fork(self, record: Record, fds: list[int]) -> None:
        """Fork another worker with the same variables and a channel of its own, or answer why not."""
        pid, random_state = -1, None
        try:
            reason = self._fork_refusal(fds)
            if reason is None:
                self._forking = True
                # Python seeds its random numbers anew in a child; a checkpoint that is rewound to has those of then.
                is_checkpoint = record.get("checkpoint") is True or self._was_dumpable is not None
                random_state = random.getstate() if is_checkpoint else None
                pid = quiet_fork(self._fork_process)
        except OSError as problem:
            reason = str(problem.strerror or problem)
        except MemoryError:
            reason = "there is no memory left for it"
        finally:
            self._forking = False
        if pid == 0:
            if random_state is not None:
                random.setstate(random_state)
            failure = self._separate(record.get("checkpoint") is True)
            self._channel.socket.close()
            channel = move_to_high_number(fds[0])
            os.close(fds[0])
            self._channel = Channel(socket.socket(fileno=channel))
            if failure is not None:
                self._send({"op": "ready", "protocol": PROTOCOL, "refused": failure})
                os._exit(1)
            # Before the rest is done, which takes less time than the host needs to send a request.
            self._interrupts.install()
            self._ready()
            self._runner.streams.replace(fds[1], fds[2])
            self._continue_in_fork(self._channel)
            reseed = getattr(self._fork_process, "reseed", None)
            if reseed is not None:
                reseed()
            raise ContinueAsFork
        for fd in fds:
            os.close(fd)
        answer = {"pid": pid} if reason is None else {"refused": reason}
        self._send({"op": "done", "id": record.get("id"), **answer})

    def _separate(self, is_checkpoint: bool) -> str | None:
        """In a fork: stop sharing open files with the parent; None, or why that failed."""
        if self._was_dumpable is not None:
            syscalls.set_dumpable(self._was_dumpable)
        failure = None
        try:
            fork_checks.reopen(self._opened)
        except OSError as problem:
            failure = problem.strerror or str(problem)
        self._was_dumpable = syscalls.set_dumpable(False) if is_checkpoint else None
        return failure

    def _fork_refusal(self, fds: list[int]) -> str | None:
        if len(fds) != 3:
            return "the request came without the channel, stdout and stderr of the fork"
        own = {self._channel.fileno(), self._init, *fds, *(self._wake_up or ())}
        own |= self._runner.streams.descriptors() | self._runner.loop.descriptors()
        opened = open_descriptors()
        reason = python_threads_reason() or devices_reason(opened) or connections_reason(opened, own)
        if reason is None:
            self._opened, reason = fork_checks.files_of(opened, own), shared_memory_reason()
        if reason is None and native_threads():
            # Some libraries end their threads before a fork: a child that exits at once shows which are left.
            self._forking = True
            pid = quiet_fork()
            if pid == 0:
                os._exit(0)
            with suppress(ChildProcessError):  # where code ignores SIGCHLD
                os.waitpid(pid, 0)
            left = native_threads()
            reason = native_threads_reason(left) if left else None
        return reason

    def _after_user_fork(self) -> None:
        """A child forked by the user's code is not a worker: it has no channel, and exits when its code ends."""
        if not self._forking:
            self._is_user_fork = True
            self._channel.socket.close()


def _exit_user_fork(outcome: Record) -> None:
    """Exit a child that the user's code forked, as a Python program exits."""
    code = outcome.get("exit_code", int("error" in outcome))
    if "error" in outcome and "exit_code" not in outcome:
        sys.stderr.write(f"{outcome['error']}\n")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def prepare(settings: dict[str, Any]) -> None:
    """In the process that workers are forked from: create once what each of them would create."""
    set_title()
    for name, also in (settings.get("errors") or {}).items():
        error_class(str(name), [str(other) for other in also])


def run(channel_fd: int, init_fd: int, settings: dict[str, Any]) -> None:
    """Be the worker of a session until the host is gone; never returns."""
    code = 1
    try:
        channel = move_to_high_number(channel_fd)
        os.close(channel_fd)
        Worker(Channel(socket.socket(fileno=channel)), init_fd, settings).serve()
        code = 0
    except BaseException as problem:  # noqa: BLE001 - a bug of the worker: reported in the session's output
        sys.stderr.write(f"{worker_traceback(problem)}\n")
    finally:
        os._exit(code)
