"""The host's connection to the worker of one session: requests, answers, calls, and recovery after its death."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from carrel.errors import ExecutionError
from carrel.execution.channels import CommandClient, CommandServerGone, Record, Sink
from carrel.execution.executor import Executor, Handler, RunClock
from carrel.execution.host_calls import Calls
from carrel.execution.results import Ending, OnVariables, WorkerDied, read_report
from carrel.guest.channel import ChannelError

READY = 30.0
"""Seconds within which a worker that was started must report that it is ready."""
_WAKE_UPS = (0.005, 0.05, 0.5)
"""Seconds after an interrupt, and from one to the next, at which a blocking system call is ended."""
_CHECK_STOPPED = 1.0
"""Seconds between two checks whether a process that owes an answer was stopped by a signal."""
_MAX_UNREAD = 256 * 1024 * 1024
"""Bytes of answers that wait to be read by the worker; beyond that an answer is replaced by a (short) error."""
_CHANGES_LOST = "the session's Python ended after the run before this one, whose changes to the variables are gone"

State = Literal["restored", "lost", "gone"]


class SpawnFailed(ExecutionError):
    """A session could not be started: at which step, and what the kernel or the engine reported."""

    def __init__(self, step: str, number: int | None, message: str) -> None:
        super().__init__(f"a session could not be started: {step}: {message}")
        self.step, self.number, self.message = step, number, message


@dataclass(frozen=True)
class Recovery:
    """What became of a session whose worker died."""

    state: State
    """The variables are those of the snapshot; or a fresh worker was started; or no worker can be started there."""
    reason: str
    changes_lost: bool = False
    """Whether a run that had ended well has changed variables since the snapshot."""


class Transport(Protocol):
    """How records, output and signals travel to one worker after the other, all in the same session."""

    listener: TransportListener

    @property
    def alive(self) -> bool:
        """Whether the session's first process is there, and with it the files."""

    @property
    def worker_alive(self) -> bool:
        """Whether requests can be sent."""

    @property
    def has_snapshot(self) -> bool: ...

    def send(self, record: Record, fds: Sequence[int] = (), *, max_unread: int | None = None) -> None:
        """Send to the worker, if there is one. ChannelError for a record that is too long, or with which more than
        `max_unread` bytes would wait for the worker to read them."""

    def start_run(self, send: Callable[[Sequence[int]], None], *, fresh_pipes: bool) -> None:
        """Call `send` with the descriptors that the request must carry; with `fresh_pipes`, only the new run can
        write to its output."""

    def signal(self, number: int) -> None:
        """Send a signal to the worker's process."""

    def set_output(self, stdout: Sink | None, stderr: Sink | None) -> None:
        """Where output goes from now on; what came before goes where it went."""

    def write_output(self, text: str) -> None:
        """Add to the run's stdout, after what its code has written so far."""

    def drain_output(self) -> None:
        """Read all that has been written by now."""

    def read_output(self, on: bool) -> None:
        """Whether to read output; when not, the code waits as soon as its pipe is full."""

    def continue_stopped(self, servers: Sequence[CommandClient], *, kill: bool) -> None:
        """Have the session's first process continue the worker and these command servers where they were stopped by
        a signal; with `kill`, one that is stopped again and again has all other processes killed."""

    @property
    def state_problem(self) -> str:
        """Why what a run saved of the variables did not arrive; empty if it did."""

    def keep_snapshot(self, record: Record, fds: list[int]) -> None:
        """Keep a snapshot that the worker has made, in place of the last one."""

    def drop_snapshot(self) -> None: ...

    def take_descriptors(self, fds: list[int]) -> None:
        """Take descriptors that came with any other record."""

    def restore_snapshot(self) -> None:
        """Make the snapshot the worker; it will report that it is ready."""

    def abandon_worker(self) -> None:
        """End a worker that did not report that it is ready."""

    async def wait_for_worker_end(self) -> bool:
        """Wait until the process of the last worker has ended; False when no other one can be started."""

    def start_worker(self) -> None:
        """Start a fresh worker in the session. What code of the last one had started is ended."""

    async def wait_for_process(self, step: str) -> None:
        """Wait until the process of a worker that is ready can be sent signals."""

    async def exit_status(self, broken: str) -> Ending:
        """How the worker that has just died ended; `broken` is why the host ended it, or empty."""

    async def start_command_server(self, user: str) -> CommandClient:
        """ConfigurationError for a user that the session does not have."""

    def kill_server(self, client: CommandClient) -> None:
        """End a command server that does not answer."""

    async def close(self) -> None:
        """End everything in the session; returns when it is gone."""


class TransportListener(Protocol):
    """What a transport reports to."""

    def on_record(self, record: Record, fds: list[int], length: int) -> None:
        """A record of the worker, of so many bytes; ChannelError for what no worker sends."""

    def on_end(self, reason: str, *, broken: bool = False) -> None:
        """The worker is gone; `broken` when it was ended because of what it sent."""

    def on_servers_lost(self) -> None:
        """The command servers are gone."""

    def kill(self, reason: str = "") -> None:
        """End the worker, which has sent what no worker sends."""


class StateFile(NamedTuple):
    """A request to load the variables from a file, or to save them in it."""

    operation: Literal["load", "save"]
    descriptor: int


T = TypeVar("T", bound=Transport)


class WorkerConnection(Generic[T]):
    """Requests to one worker after the other in the same session; after `close` nothing of the session runs."""

    def __init__(self, transport: T, handlers: dict[str, Handler]) -> None:
        self._loop = asyncio.get_running_loop()
        self.transport = transport
        transport.listener = self
        self._handlers = handlers
        self.commands = CommandServers(self._start_command_server)
        self.closed = False
        self.lost = False
        """Whether the session ended without being closed."""
        self.python = ""
        self.why_no_code = ""
        """Why there is no worker, and none can be started: only commands and files work."""
        self.no_snapshot_reason = "no snapshot had been made yet"
        self._changed = False
        """Whether the variables have changed since the snapshot was made."""
        self._is_unused = False
        """Whether the worker has nothing to lose: no request was sent to it, and it is no fork of another."""
        self._ready: asyncio.Future[Record] = self._loop.create_future()
        self._number = 0
        self._pending: dict[int, asyncio.Future[Record]] = {}
        self._calls: Calls | None = None
        self._reporting: tuple[int, OnVariables | None] = (0, None)
        """The last run, and where the variables after it go."""
        self._shared_pipes = False
        """Whether something that an earlier run has left may still write to the pipes."""
        self._broken = ""
        """Why the host has ended the worker."""
        self._checking: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return self.transport.alive

    @property
    def worker_alive(self) -> bool:
        return self.transport.worker_alive

    # --- start ------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the worker has reported; False while it starts."""
        return self._ready.done()

    async def wait_ready(self, step: str) -> None:
        """Wait for the worker's first record; SpawnFailed names the step."""
        self.check_stopped_later()
        try:
            async with asyncio.timeout(READY):
                hello = await asyncio.shield(self._ready)
        except TimeoutError:
            raise SpawnFailed(step, None, f"the worker did not report within {READY:.0f} seconds") from None
        except WorkerDied as problem:
            raise SpawnFailed(step, None, f"the worker ended before it was ready: {problem}") from None
        if hello.get("refused"):
            raise SpawnFailed(step, None, str(hello["refused"])[:1000])
        if hello.get("protocol") != 1:
            raise SpawnFailed(step, None, f"the worker uses protocol {hello.get('protocol')!r}, not 1")
        self.python = str(hello.get("python", ""))
        await self.transport.wait_for_process(step)

    def go_without_worker(self, reason: str) -> None:
        """Serve commands and files only."""
        self.why_no_code = reason
        self._ready.set_result({})

    async def _start_command_server(self, user: str) -> CommandClient:
        client = await self.transport.start_command_server(user)
        client.owner = self
        return client

    # --- requests ---------------------------------------------------------------------------------------------------

    def request(self, record: Record, fds: Sequence[int] = ()) -> asyncio.Future[Record]:
        """Send a request; the future has its answer, or WorkerDied."""
        self._number += 1
        answer: asyncio.Future[Record] = self._loop.create_future()
        if not self.worker_alive:
            fail(answer, WorkerDied(self._broken or "its channel is closed"))
            return answer
        self._pending[self._number], self._is_unused = answer, False
        self.check_stopped_later()
        try:
            self.transport.send({**record, "id": self._number}, fds)
        except BaseException:
            self._pending.pop(self._number, None)
            raise
        return answer

    def run(
        self,
        code: str | StateFile | None,
        stdout: Sink,
        stderr: Sink,
        executor: Executor,
        clock: RunClock | None = None,
        on_variables: OnVariables | None = None,
    ) -> asyncio.Future[Record]:
        """Request a run; without code the list of variables."""
        file: tuple[int, ...] = ()
        if isinstance(code, StateFile):
            file = (code.descriptor,)
            record: Record = {"op": "run", "state": code.operation}
        else:
            record = {"op": "run", "variables": True} if code is None else {"op": "run", "code": code}
        if on_variables is not None:
            record["report"] = True
        answers: list[asyncio.Future[Record]] = []
        fresh, self._shared_pipes = self._shared_pipes, False
        self._calls = Calls(self._handlers, self._answer_call, self.transport.write_output, executor, clock)

        def send(fds: Sequence[int]) -> None:
            self.transport.set_output(stdout, stderr)
            answers.append(self.request(record, (*fds, *file)))

        self.transport.start_run(send, fresh_pipes=fresh)
        self._reporting = self._number, on_variables
        return answers[0]

    def end_run(self) -> None:
        self.transport.set_output(None, None)
        if self._calls is not None:
            self._calls.cancel()
            self._calls = None

    def interrupt(self) -> None:
        """Interrupt the run as Ctrl-C does."""
        # The signal may come before the worker has begun with the code: the record says which run it was meant for.
        self.transport.send({"op": "interrupt", "id": self._number})
        self.transport.signal(signal.SIGINT)
        self._wake_up_later(self._number, _WAKE_UPS)

    def _wake_up_later(self, number: int, after: Sequence[float]) -> None:
        if after:
            self._loop.call_later(after[0], self._wake_up, number, after[1:])

    def _wake_up(self, number: int, after: Sequence[float]) -> None:
        """End a blocking system call by a signal without meaning. Python looks for interrupts before such a call and
        after it: one that comes right in between waits for its end, which may take long."""
        if number in self._pending:
            self.transport.signal(signal.SIGWINCH)
            self._wake_up_later(number, after)

    def kill(self, reason: str = "") -> None:
        """End the worker; requests under way get WorkerDied."""
        self._broken = self._broken or reason
        self.transport.signal(signal.SIGKILL)

    def _answer_call(self, record: Record) -> None:
        try:
            self.transport.send(record, max_unread=_MAX_UNREAD if "value" in record else None)
        except ChannelError as problem:
            error = {"type": "ValueError", "message": f"the answer cannot be sent to the code: {problem}"}
            self.transport.send({"op": "answer", "call": record["call"], "error": error})

    def check_stopped_later(self) -> None:
        if self._checking is None:
            self._checking = self._loop.call_later(_CHECK_STOPPED, self._check_stopped)

    def _check_stopped(self) -> None:
        """Continue what was stopped by a signal. Any process of a session can stop the worker and the command servers,
        and with them the clocks of all commands. A command that does so again and again may until its time is up."""
        self._checking = None
        busy = [client for client in self.commands.clients() if client.deadlines()]
        if self.alive and (busy or self._pending or not self._ready.done()):
            now = self._loop.time()
            kill = all(deadline <= now for client in busy for deadline in client.deadlines())
            self.transport.continue_stopped(busy, kill=kill)
            self.check_stopped_later()

    # --- what the transport reports ---------------------------------------------------------------------------------

    def on_record(self, record: Record, fds: list[int], length: int) -> None:
        operation, number = record.get("op"), record.get("id", 0)
        if type(number) is not int:
            raise ChannelError(f"an id that is not a number: {str(number)[:100]}")
        if operation == "snapshot":
            self._changed = False
            self.no_snapshot_reason = ""
            self.transport.keep_snapshot(record, fds)
            return
        if fds:
            self.transport.take_descriptors(fds)
        if operation == "done":
            self._take_answer(record, number)
        elif operation == "call":
            if self._calls is None:
                error = {"type": "RuntimeError", "message": "the host answers calls only during a run"}
                self._answer_call({"op": "answer", "call": record.get("call"), "error": error})
            else:
                self._calls.begin(record, length)
        elif operation == "cancel":
            if self._calls is not None:
                self._calls.cancel_one(record.get("call"))
        elif operation == "variables":
            report = read_report(record, length)
            if self._reporting[0] == number and self._reporting[1] is not None:
                self._reporting[1](report)
        elif operation == "ready":
            if not self._ready.done():
                self._is_unused = record.get("unused") is True
                self._ready.set_result(record)
        elif operation == "no_snapshot":
            self.transport.drop_snapshot()
            self.no_snapshot_reason = str(record.get("why"))
        else:
            raise ChannelError(f"a record of an unknown kind: {str(operation)[:100]!r}")

    def _take_answer(self, record: Record, number: int) -> None:
        answer = self._pending.pop(number, None)
        if answer is None:
            raise ChannelError("an answer to no request")
        self._shared_pipes = self._shared_pipes or record.get("shared") is True
        self._changed = record.get("changed") is True if "changed" in record else self._changed
        self.transport.drain_output()
        if not answer.done():
            answer.set_result(record)

    def on_end(self, reason: str, *, broken: bool = False) -> None:
        if broken:
            self._broken = self._broken or reason
        self.transport.drain_output()
        pending, self._pending = self._pending, {}
        for answer in [*pending.values(), self._ready]:
            if not answer.done():
                fail(answer, WorkerDied(self._broken or reason))

    def on_servers_lost(self) -> None:
        self.lost = not self.closed
        for client in self.commands.clients():
            client.close()

    # --- recovery ---------------------------------------------------------------------------------------------------

    async def exit_status(self) -> Ending:
        """How the worker that has just died ended."""
        return await self.transport.exit_status(self._broken)

    async def recover(self, *, fresh: bool = True) -> Recovery:
        """Continue after the worker's death: from the snapshot; else, with `fresh`, with an empty worker."""
        changed, self._changed = self._changed, False
        if self.closed:
            # Its first process is about to end, and a snapshot would end with it.
            return Recovery("gone", self._broken)
        if await self._restore_snapshot():
            if changed:
                return Recovery("restored", _CHANGES_LOST, changes_lost=True)
            return Recovery("restored", "the variables are as they were before this run")
        if self._is_unused and await self._restart_worker():
            return Recovery("restored", "nothing had been run yet")
        reason = self.no_snapshot_reason
        return Recovery("lost" if fresh and await self._restart_worker() else "gone", reason)

    async def _restore_snapshot(self) -> bool:
        if not self.transport.has_snapshot or not self.alive:
            self.transport.drop_snapshot()
            self.no_snapshot_reason = self.no_snapshot_reason or "the snapshot is gone"
            return False
        self._broken, self._shared_pipes = "", True
        self.no_snapshot_reason = "no snapshot had been made since the last one was used"
        self._ready = self._loop.create_future()
        try:
            self.transport.restore_snapshot()
            await self.wait_ready("restore the snapshot")
        except SpawnFailed as problem:
            self.no_snapshot_reason = f"the snapshot did not continue: {problem}"
            self.transport.abandon_worker()
            return False
        return True

    async def _restart_worker(self) -> bool:
        if not await self.transport.wait_for_worker_end():
            return False
        self._broken = ""
        self._ready = self._loop.create_future()
        try:
            self.transport.start_worker()
            await self.wait_ready("start a fresh worker")
        except (SpawnFailed, OSError):
            return False
        return True

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End everything in the session; returns when it is gone."""
        self._broken = self._broken or "the session was closed"
        self.closed = True
        self.commands.close()
        self.on_end("the session was closed")
        self.end_run()
        await self.transport.close()


class CommandServers:
    """The command servers of one session: one for each user, started with the first request that needs it."""

    def __init__(self, start: Callable[[str], Coroutine[Any, Any, CommandClient]]) -> None:
        self._start = start
        self._starting: dict[str, asyncio.Task[CommandClient]] = {}
        self._closed = False

    async def get(self, user: str) -> CommandClient:
        """The connection to the server of this user; raises what starting it raises."""
        if self._closed:
            raise CommandServerGone()
        starting = self._starting.get(user)
        if starting is None or (starting.done() and (starting.exception() or starting.result().closed)):
            starting = self._starting[user] = asyncio.get_running_loop().create_task(self._start(user))
        client = await asyncio.shield(starting)
        if self._closed:
            client.close()
        return client

    def clients(self) -> list[CommandClient]:
        """Those that are connected."""
        done = [starting for starting in self._starting.values() if starting.done() and not starting.cancelled()]
        return [starting.result() for starting in done if starting.exception() is None]

    def close(self) -> None:
        """End all of them."""
        self._closed = True
        for client in self.clients():
            client.close()


def fail(answer: asyncio.Future[Any], problem: WorkerDied) -> None:
    """Fail the future, marked as retrieved: its caller may be gone, and asyncio is not to log it."""
    answer.set_exception(problem)
    answer.exception()
