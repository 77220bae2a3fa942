"""One session's processes as the host holds them: the worker's line, the two pipes, init, and the frozen fork."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from carrel.errors import ForkRefused
from carrel.execution.calls import Calls
from carrel.execution.endings import Ending, MemoryKills, WorkerDied, told_ending
from carrel.execution.executor import Handler, RunClock
from carrel.execution.host_line import HostLine, Record
from carrel.execution.init_control import InitControl
from carrel.execution.pipes import Discard, OutputPipe, Sink
from carrel.execution.zygotes import SpawnFailed, Zygote
from carrel.worker.line import LineBroken

READY = 30.0
"""Seconds in which a worker that was started, or woken, must say so."""
Piece = Callable[[Record], None]


class LiveSession:
    """Opened by `open`; after `close` nothing of the session runs."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._loop = asyncio.get_running_loop()
        self._handlers = handlers
        self.stdout, self.stderr = OutputPipe(), OutputPipe()
        self._line: HostLine | None = None
        self.init: InitControl | None = None
        self._worker_fd = -1
        self._worker_pid = 0
        self._frozen: tuple[socket.socket, int, int] | None = None
        self.unfrozen = "no frozen fork had been made yet"
        self._ready: asyncio.Future[Record] = self._loop.create_future()
        self._number = 0
        self._pending: dict[int, asyncio.Future[Record]] = {}
        self._pieces: dict[int, Piece] = {}
        self._late: dict[int, Record] = {}
        """Answers to requests whose caller was cancelled, until it asks for them again."""
        self._calls: Calls | None = None
        self._discard = Discard()
        self._takes_pipes = False
        self._shared = False
        """Whether something that an earlier run has left may still write to the pipes."""
        self._broke = ""
        self._memory_kills = MemoryKills()
        self.python = ""

    # --- beginning --------------------------------------------------------------------------------------------------

    async def open(self, zygote: Zygote, settings: dict[str, Any]) -> None:
        """Ask the zygote for it; SpawnFailed leaves nothing behind."""
        line, theirs = socket.socketpair()
        control, init = socket.socketpair()
        try:
            fds = [theirs.fileno(), init.fileno(), self.stdout.write_end, self.stderr.write_end]
            self._line = HostLine(line, self._heard, self._line_ended)
            self.init = InitControl(control, self._watch_worker, self._init_ended)
            spawned = await asyncio.wrap_future(zygote.spawn(settings, fds))
        finally:
            theirs.close()
            init.close()
            self.stdout.handed_over()
            self.stderr.handed_over()
        try:
            self.init.watch(int(spawned["pid"]))
        except ProcessLookupError:
            raise SpawnFailed("start", None, "the session ended at once") from None
        if settings.get("limits", {}).get("memory") is not None:
            self._memory_kills = MemoryKills.of(int(spawned["pid"]))
        await self._get_ready("start")

    async def _get_ready(self, step: str) -> None:
        try:
            hello = await asyncio.wait_for(asyncio.shield(self._ready), READY)
        except TimeoutError:
            raise SpawnFailed(step, None, f"the worker said nothing for {READY:.0f} seconds") from None
        except WorkerDied as problem:
            raise SpawnFailed(step, None, f"the worker ended before it was ready: {problem}") from None
        if hello.get("protocol") != 1:
            raise SpawnFailed(step, None, f"the worker speaks protocol {hello.get('protocol')!r}, not 1")
        self.python = str(hello.get("python", ""))
        self._takes_pipes = hello.get("pipes") is True

    # --- asking -----------------------------------------------------------------------------------------------------

    def request(self, record: Record, piece: Piece | None = None, fds: Sequence[int] = ()) -> asyncio.Future[Record]:
        """Send a request; the future has its answer, or WorkerDied."""
        self._number += 1
        answer: asyncio.Future[Record] = self._loop.create_future()
        if self._line is None or self._line.closed:
            _fail(answer, WorkerDied(self._broke or "its line is closed"))
            return answer
        self._memory_kills.begin()
        self._pending[self._number] = answer
        if piece is not None:
            self._pieces[self._number] = piece
        try:
            self._line.send({**record, "id": self._number}, fds)
        except BaseException:
            self._pending.pop(self._number, None)
            self._pieces.pop(self._number, None)
            raise
        return answer

    def rejoin(self, number: int, answer: asyncio.Future[Record]) -> asyncio.Future[Record]:
        """The same answer once more, for a caller whose cancellation has cancelled the future as well."""
        if not answer.cancelled():
            return answer
        again: asyncio.Future[Record] = self._loop.create_future()
        if number in self._late:
            again.set_result(self._late.pop(number))
        elif number in self._pending:
            self._pending[number] = again
        else:
            _fail(again, WorkerDied(self._broke or "its process ended"))
        return again

    @property
    def last_request(self) -> int:
        return self._number

    def _begin_run(self, stdout: Sink, stderr: Sink, clock: RunClock | None) -> None:
        """From here on output has somewhere to go, and the worker may call the host."""
        self._calls = Calls(self._handlers, self._answer_call, self._write, clock)
        # What came since the last run belongs to nobody.
        self.stdout.drain()
        self.stderr.drain()
        self.stdout.sink, self.stderr.sink = stdout, stderr

    def run(self, code: str, stdout: Sink, stderr: Sink, clock: RunClock | None = None) -> asyncio.Future[Record]:
        """Ask for a run; where an earlier one has left writers behind, with pipes that only this one has."""
        fds: list[int] = []
        if self._shared and self._takes_pipes:
            self._shared = False
            self._discard.take([self.stdout.give_up(), self.stderr.give_up()])
            self.stdout, self.stderr = OutputPipe(), OutputPipe()
            fds = [self.stdout.write_end, self.stderr.write_end]
        self._begin_run(stdout, stderr, clock)
        try:
            return self.request({"op": "run", "code": code}, fds=fds)
        finally:
            self.stdout.handed_over()
            self.stderr.handed_over()

    def _write(self, text: str) -> None:
        """Into the run's stdout, after what its code has written so far."""
        self.stdout.drain()
        if self.stdout.sink is not None:
            self.stdout.sink(text.encode("utf-8", "backslashreplace"))

    def watch_output(self, on: bool) -> None:
        self.stdout.watch(on)
        self.stderr.watch(on)

    def end_run(self) -> None:
        self.stdout.sink = self.stderr.sink = None
        if self._calls is not None:
            self._calls.cancel()
            self._calls = None

    def _answer_call(self, record: Record) -> None:
        if self._line is not None:
            try:
                self._line.send(record)
            except LineBroken as problem:
                error = {"type": "ValueError", "message": f"what it returned cannot be given to the code: {problem}"}
                self._line.send({"op": "answer", "call": record["call"], "error": error})

    def interrupt(self) -> None:
        # The signal may come before the worker has begun with the code; then it looks for which run it was meant.
        if self._line is not None:
            self._line.send({"op": "interrupt", "id": self.last_request})
        self._signal(signal.SIGINT)

    def kill(self, why: str = "") -> None:
        """End the worker; whoever waits for an answer gets WorkerDied."""
        self._broke = self._broke or why
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._worker_fd >= 0:
            try:
                signal.pidfd_send_signal(self._worker_fd, number)
            except ProcessLookupError:
                return
        elif number == signal.SIGKILL and self.init is not None:
            self.init.kill()

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _heard(self, record: Record, fds: list[int]) -> None:
        operation, number = record.get("op"), record.get("id", 0)
        if type(number) is not int:
            raise LineBroken(f"an id that is no number: {str(number)[:100]}")
        if operation == "frozen":
            self._keep_frozen(record, fds)
            return
        # Read ends of pipes that a command's background processes still write to; anything else is dropped as well.
        self._discard.take(fds)
        if operation == "done":
            answer = self._pending.pop(number, None)
            if answer is None:
                raise LineBroken("an answer to nothing that was asked")
            self._pieces.pop(number, None)
            self._shared = self._shared or record.get("shared") is True
            self.stdout.drain()
            self.stderr.drain()
            if answer.done():
                self._late[number] = record
            else:
                answer.set_result(record)
        elif operation == "call":
            if self._calls is None:
                error = {"type": "RuntimeError", "message": "no run is under way; the host answers calls during one"}
                self._answer_call({"op": "answer", "call": record.get("call"), "error": error})
            else:
                self._calls.begin(record, self._line.length if self._line is not None else 0)
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
            raise LineBroken(f"a record of an unknown kind: {str(operation)[:100]!r}")

    def _keep_frozen(self, record: Record, fds: list[int]) -> None:
        try:
            if len(fds) != 2:
                raise OSError("a frozen fork without its two descriptors")
            signal.pidfd_send_signal(fds[1], 0)
            wake = socket.socket(fileno=fds[0])
        except OSError as problem:
            for descriptor in fds:
                os.close(descriptor)
            if isinstance(problem, ProcessLookupError):
                return
            raise LineBroken("a frozen fork whose descriptors are not what they should be") from None
        self._drop_frozen("")
        pid = record.get("pid")
        self._frozen = wake, fds[1], pid if type(pid) is int else 0

    def _drop_frozen(self, why: str) -> None:
        self.unfrozen = why
        if self._frozen is not None:
            wake, watched, _ = self._frozen
            self._frozen = None
            wake.close()
            os.close(watched)

    def _watch_worker(self, descriptor: int, pid: int) -> None:
        self._forget_worker()
        self._worker_fd, self._worker_pid = descriptor, pid
        self._loop.add_reader(descriptor, self._worker_gone)

    def _forget_worker(self) -> None:
        if self._worker_fd >= 0:
            self._loop.remove_reader(self._worker_fd)
            os.close(self._worker_fd)
            self._worker_fd = -1

    def _line_ended(self, reason: str) -> None:
        """Dead, or broken; either way this worker is done with."""
        if reason not in ("the line was closed", "the line is gone: Connection reset by peer"):
            self._broke = self._broke or reason
        self._signal(signal.SIGKILL)
        self._fail_all(reason)

    def _worker_gone(self) -> None:
        self._loop.remove_reader(self._worker_fd)
        if self._line is not None:
            self._line.read_rest()
            self._line.close()
        self._fail_all("its process ended")

    def _init_ended(self, reason: str) -> None:
        if self._line is not None:
            self._line.read_rest()
            self._line.close()
        self._drop_frozen("the session's first process is gone")
        self._fail_all(f"the session's first process is gone ({reason})")

    def _fail_all(self, reason: str) -> None:
        self.stdout.drain()
        self.stderr.drain()
        waiting, self._pending = self._pending, {}
        self._pieces.clear()
        for answer in [*waiting.values(), self._ready]:
            if not answer.done():
                _fail(answer, WorkerDied(self._broke or reason))

    # --- after a death ----------------------------------------------------------------------------------------------

    @property
    def worker_alive(self) -> bool:
        return self._line is not None and not self._line.closed

    @property
    def alive(self) -> bool:
        """Whether the place itself is still there."""
        return self.init is not None and self.init.alive

    async def how_it_ended(self) -> Ending:
        """Of the worker that has just died, as init saw it."""
        if self._broke or self.init is None:
            return told_ending(None, self._broke)
        status = await self.init.status_of(self._worker_pid)
        return told_ending(status, self._broke, out_of_memory=self._memory_kills.has_grown())

    async def wake(self) -> bool:
        """Go on from the frozen fork; False when there is none, or it does not answer."""
        if self._frozen is None or not self.alive:
            return False
        wake, watched, pid = self._frozen
        self._frozen = None
        self._broke = ""
        self._shared = True
        self.unfrozen = "no frozen fork had been made since the last one was used"
        self._ready = self._loop.create_future()
        self._line = HostLine(wake, self._heard, self._line_ended)
        self._watch_worker(watched, pid)
        self._line.send({"op": "wake"})
        try:
            await self._get_ready("wake the frozen fork")
        except SpawnFailed as problem:
            self.unfrozen = f"the frozen fork did not go on: {problem}"
            return False
        return True

    async def begin_again(self) -> bool:
        """A fresh worker in the same place, the files as they are; False when init cannot give one."""
        if self.init is None or not self.init.alive:
            return False
        line, theirs = socket.socketpair()
        for pipe in (self.stdout, self.stderr):
            pipe.close()
        self.stdout, self.stderr = OutputPipe(), OutputPipe()
        self._broke = ""
        self._ready = self._loop.create_future()
        self._line = HostLine(line, self._heard, self._line_ended)
        self._forget_worker()
        self.init.tell({"op": "again"}, [theirs.fileno(), self.stdout.write_end, self.stderr.write_end])
        try:
            theirs.close()
            self.stdout.handed_over()
            self.stderr.handed_over()
            await self._get_ready("start a fresh worker")
        except SpawnFailed:
            return False
        return True

    # --- forking ----------------------------------------------------------------------------------------------------

    async def fork(self, handlers: dict[str, Handler]) -> LiveSession:
        """Another session with the same variables and files; ForkRefused, and nothing has changed."""
        if self.init is None:
            raise ForkRefused("the session has not begun")
        control, init = socket.socketpair()
        line, theirs = socket.socketpair()
        child = LiveSession(handlers)
        child._memory_kills = self._memory_kills.shared()
        try:
            child._line = HostLine(line, child._heard, child._line_ended)
            child.init = InitControl(control, child._watch_worker, child._init_ended)
            # Init makes the place while the worker forks; who is first waits for the other.
            preparing = self.init.ask({"op": "fork"}, [init.fileno()])
            ends = [theirs.fileno(), child.stdout.write_end, child.stderr.write_end]
            answer = await asyncio.shield(self.request({"op": "fork"}, fds=ends))
            prepared = await preparing
            if prepared.get("op") != "fork_ready":
                raise ForkRefused(f"a live fork was refused: {prepared.get('message')}")
            self.init.has_forked = True
            if "refused" in answer or answer.get("error"):
                raise ForkRefused(f"a live fork was refused: {answer.get('refused') or answer.get('error')}")
            theirs.close()
            child.stdout.handed_over()
            child.stderr.handed_over()
            await child._get_ready("start the fork")
        except BaseException as problem:
            await child.close()
            if isinstance(problem, SpawnFailed):
                raise ForkRefused(f"a live fork failed: {problem}") from None
            raise
        finally:
            init.close()
            theirs.close()
        return child

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Init takes everything with it; returns when all is gone."""
        if self.init is not None:
            self.init.tell({"op": "close"})
        self._broke = self._broke or "the session was closed"
        if self._line is not None:
            self._line.close()
        self._fail_all("the session was closed")
        self.end_run()
        try:
            if self.init is not None:
                await asyncio.wait_for(self.init.until_gone(self._worker_fd), 5)
        except TimeoutError:
            if self.init is not None:
                self.init.kill()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._forget_worker()
        self._drop_frozen("the session is closed")
        if self.init is not None:
            self.init.close()
        self._memory_kills.close()
        self.stdout.close()
        self.stderr.close()
        self._discard.close()


def _fail(answer: asyncio.Future[Record], problem: WorkerDied) -> None:
    """For whoever waits; that nobody may wait any more is no fault to be told of."""
    answer.set_exception(problem)
    answer.exception()
