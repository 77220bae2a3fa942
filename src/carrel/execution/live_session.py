"""A session as the host holds it: what is asked and heard over its line. How the line is held is each kind's own."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from carrel.errors import ExecutionError
from carrel.execution.executor import Executor, Handler, RunClock
from carrel.execution.host_calls import Calls
from carrel.execution.host_line import Record
from carrel.execution.output_pipes import Sink
from carrel.execution.results import Ending, WorkerDied
from carrel.guest.channel import ChannelError

READY = 30.0
"""Seconds in which a worker that was started, or woken, must say so."""
_NUDGES = (0.005, 0.05, 0.5)
"""Seconds after an interrupt, and from one to the next, in which code that stops has stopped."""
Piece = Callable[[Record], None]
_TEND = 1.0
"""Seconds between two looks at a worker that owes an answer."""
_MOST_UNREAD = 256 * 1024 * 1024
"""Bytes of answers that wait to be read by the worker: one more is an error, which is short."""


class SpawnFailed(ExecutionError):
    """A session could not be started; says at which step, and what the kernel or the engine said."""

    def __init__(self, step: str, number: int | None, message: str) -> None:
        super().__init__(f"a session could not be started: {step}: {message}")
        self.step, self.number, self.said = step, number, message


class LiveSession(ABC):
    """One worker after the other in one place; after `close` nothing of the session runs."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._loop = asyncio.get_running_loop()
        self._handlers = handlers
        self.unfrozen = "no frozen fork had been made yet"
        self.unkept = False
        """Whether the variables have changed since the frozen fork was made."""
        self._ready: asyncio.Future[Record] = self._loop.create_future()
        self._number = 0
        self._pending: dict[int, asyncio.Future[Record]] = {}
        self._pieces: dict[int, Piece] = {}
        self._calls: Calls | None = None
        self._takes_pipes = False
        self._shared = False
        """Whether something that an earlier run has left may still write to the pipes."""
        self._broke = ""
        self.python = ""
        self._tending: asyncio.TimerHandle | None = None
        self._limits: dict[int, float] = {}
        """When the time of a command is up, by the loop's clock, for each that has a limit or may run for ever."""
        """Of the worker that is there: the session that what code starts belongs to, when it last answered, and what
        had been started in that very moment."""

    # --- what each kind does its own way ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def worker_alive(self) -> bool:
        """Whether it can be asked."""

    @abstractmethod
    def _send(self, record: Record, fds: Sequence[int] = (), *, most_unread: int | None = None) -> None:
        """To the worker; nothing when it is gone. Raises ChannelError for a record that is too long, or with which more
        than `most_unread` bytes would wait for the worker to read them."""

    @abstractmethod
    def run(
        self, code: str, stdout: Sink, stderr: Sink, executor: Executor, clock: RunClock | None = None
    ) -> asyncio.Future[Record]:
        """Ask for a run; where an earlier one has left writers behind, with pipes that only this one has."""

    @abstractmethod
    def watch_output(self, on: bool) -> None:
        """Whether to take what the code writes; when not, it waits as soon as its pipe is full."""

    @abstractmethod
    def _set_sinks(self, stdout: Sink | None, stderr: Sink | None) -> None:
        """Where output goes from now on; what came until now goes where it did."""

    @abstractmethod
    def _write(self, text: str) -> None:
        """Into the run's stdout, after what its code has written so far."""

    @abstractmethod
    def _drain(self) -> None:
        """Take all that has been written by now."""

    @abstractmethod
    def _signal(self, number: int) -> None:
        """To the worker's process."""

    @abstractmethod
    def _tend_worker(self, end: bool) -> None:
        """Have the first process of the place continue a worker that is stopped; with `end`, one that is stopped time
        and again has all others in the place killed."""

    @abstractmethod
    def _keep_frozen(self, record: Record, fds: list[int]) -> None:
        """A frozen fork was made; it replaces the last."""

    @abstractmethod
    def _drop_frozen(self, why: str) -> None:
        """There is none now."""

    @abstractmethod
    def _take_strangers(self, fds: list[int]) -> None:
        """Descriptors that came along with another record."""

    @abstractmethod
    async def how_it_ended(self) -> Ending:
        """Of the worker that has just died."""

    @abstractmethod
    async def wake(self) -> bool:
        """Go on from the frozen fork; False when there is none, or it does not answer."""

    @abstractmethod
    async def begin_again(self) -> bool:
        """A fresh worker in the same place, the files as they are; False when there is none to be had. What the dead
        one's last run had started goes first."""

    @abstractmethod
    async def close(self) -> None:
        """End all that runs there; returns when it is gone."""

    # --- beginning --------------------------------------------------------------------------------------------------

    async def _get_ready(self, step: str) -> None:
        self._tend_later()
        try:
            async with asyncio.timeout(READY):
                hello = await asyncio.shield(self._ready)
        except TimeoutError:
            raise SpawnFailed(step, None, f"the worker said nothing for {READY:.0f} seconds") from None
        except WorkerDied as problem:
            raise SpawnFailed(step, None, f"the worker ended before it was ready: {problem}") from None
        if hello.get("refused"):
            raise SpawnFailed(step, None, str(hello["refused"])[:1000])
        if hello.get("protocol") != 1:
            raise SpawnFailed(step, None, f"the worker speaks protocol {hello.get('protocol')!r}, not 1")
        self.python = str(hello.get("python", ""))
        self._takes_pipes = hello.get("pipes") is True

    # --- asking -----------------------------------------------------------------------------------------------------

    def request(self, record: Record, piece: Piece | None = None, fds: Sequence[int] = ()) -> asyncio.Future[Record]:
        """Send a request; the future has its answer, or WorkerDied."""
        self._number += 1
        answer: asyncio.Future[Record] = self._loop.create_future()
        if not self.worker_alive:
            fail(answer, WorkerDied(self._broke or "its line is closed"))
            return answer
        self._pending[self._number] = answer
        if piece is not None:
            self._pieces[self._number] = piece
        if record["op"] == "exec":
            seconds = record.get("timeout")
            self._limits[self._number] = self._loop.time() + (float("inf") if seconds is None else seconds)
        self._tend_later()
        try:
            self._send({**record, "id": self._number}, fds)
        except BaseException:
            self._forget(self._number)
            raise
        return answer

    def _forget(self, number: int) -> asyncio.Future[Record] | None:
        self._pieces.pop(number, None)
        self._limits.pop(number, None)
        return self._pending.pop(number, None)

    def _tend_later(self) -> None:
        if self._tending is None:
            self._tending = self._loop.call_later(_TEND, self._tend)

    def _tend(self) -> None:
        """Any process of a session can stop the worker, by SIGSTOP, and with it the clocks of all its commands: while
        an answer is due it is continued from outside. A command that stops it time and again may do so until its time
        is up."""
        self._tending = None
        if self.worker_alive and (self._pending or not self._ready.done()):
            now = self._loop.time()
            self._tend_worker(all(limit <= now for limit in self._limits.values()))
            self._tend_later()

    @property
    def last_request(self) -> int:
        return self._number

    def _begin_run(self, stdout: Sink, stderr: Sink, executor: Executor, clock: RunClock | None) -> None:
        """From here on output has somewhere to go, and the worker may call the host."""
        self._calls = Calls(self._handlers, self._answer_call, self._write, executor, clock)
        self._set_sinks(stdout, stderr)

    def end_run(self) -> None:
        self._set_sinks(None, None)
        if self._calls is not None:
            self._calls.cancel()
            self._calls = None

    def _answer_call(self, record: Record) -> None:
        try:
            self._send(record, most_unread=_MOST_UNREAD if "value" in record else None)
        except ChannelError as problem:
            error = {"type": "ValueError", "message": f"what it returned cannot be given to the code: {problem}"}
            self._send({"op": "answer", "call": record["call"], "error": error})

    def interrupt(self) -> None:
        # The signal may come before the worker has begun with the code; then it looks for which run it was meant.
        self._send({"op": "interrupt", "id": self.last_request})
        self._signal(signal.SIGINT)
        self._nudge_later(self.last_request, _NUDGES)

    def _nudge_later(self, number: int, after: Sequence[float]) -> None:
        if after:
            self._loop.call_later(after[0], self._nudge, number, after[1:])

    def _nudge(self, number: int, after: Sequence[float]) -> None:
        """Python looks for signals before a system call and after it: one that comes right in between waits for the
        call to end, which may be long. Another signal, which means nothing, ends it."""
        if number in self._pending:
            self._signal(signal.SIGWINCH)
            self._nudge_later(number, after)

    def kill(self, why: str = "") -> None:
        """End the worker; whoever waits for an answer gets WorkerDied."""
        self._broke = self._broke or why
        self._signal(signal.SIGKILL)

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _heard(self, record: Record, fds: list[int], length: int) -> None:
        """A record of the worker, which had so many bytes; ChannelError for what no worker sends."""
        operation, number = record.get("op"), record.get("id", 0)
        if type(number) is not int:
            raise ChannelError(f"an id that is no number: {str(number)[:100]}")
        if operation == "frozen":
            self.unkept = False
            self._keep_frozen(record, fds)
            return
        if fds:
            self._take_strangers(fds)
        if operation == "done":
            answer = self._forget(number)
            if answer is None:
                raise ChannelError("an answer to nothing that was asked")
            self._shared = self._shared or record.get("shared") is True
            self.unkept = record.get("unkept") is True if "unkept" in record else self.unkept
            self._drain()
            if not answer.done():
                answer.set_result(record)
        elif operation == "call":
            if self._calls is None:
                error = {"type": "RuntimeError", "message": "no run is under way; the host answers calls during one"}
                self._answer_call({"op": "answer", "call": record.get("call"), "error": error})
            else:
                self._calls.begin(record, length)
        elif operation == "cancel":
            if self._calls is not None:
                self._calls.cancel_one(record.get("call"))
        elif operation == "ran":
            if self._calls is not None:
                self._calls.command_ended(record)
        elif operation == "output" and "call" in record:
            if self._calls is not None:
                self._calls.command_wrote(record)
        elif operation == "output":
            piece = self._pieces.get(number)
            if piece is not None:
                piece(record)
        elif operation == "ready":
            if not self._ready.done():
                self._ready.set_result(record)
        elif operation == "unfrozen":
            self._drop_frozen(str(record.get("why")))
        else:
            raise ChannelError(f"a record of an unknown kind: {str(operation)[:100]!r}")

    def _fail_all(self, reason: str) -> None:
        self._drain()
        waiting, self._pending = self._pending, {}
        self._pieces.clear()
        self._limits.clear()
        for answer in [*waiting.values(), self._ready]:
            if not answer.done():
                fail(answer, WorkerDied(self._broke or reason))


def fail(answer: asyncio.Future[Record], problem: WorkerDied) -> None:
    """For whoever waits; that nobody may wait any more is no fault to be told of."""
    answer.set_exception(problem)
    answer.exception()
