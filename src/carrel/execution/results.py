"""One run on the host: its turn, its time limit, and the result that its answer or its worker's death comes to."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar

from carrel.errors import ExecutorClosed, NoPython, WorkerLost
from carrel.execution.channels import Record
from carrel.execution.config import is_seconds
from carrel.execution.executor import ExecutionResult, Output, RunUsage, Variable
from carrel.guest.channel import ChannelError
from carrel.guest.worker import values
from carrel.guest.worker.recording import MAX_BYTES, MAX_VARIABLES
from carrel.guest.worker.values import safe_repr
from carrel.processes import BoundedOutput

_FAULTS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error",
    signal.SIGFPE: "an arithmetic fault",
    signal.SIGILL: "an illegal instruction",
    signal.SIGABRT: "an abort",
    signal.SIGSYS: "a system call that the sandbox refuses",
    signal.SIGXFSZ: "a file that grew beyond the limit",
    signal.SIGXCPU: "the limit on processor time",
}


class WorkerDied(Exception):
    """The worker ended before it answered."""


@dataclass(frozen=True)
class Ending:
    """How a result describes the end of a worker."""

    error_type: str
    text: str


def ending_of(status: int | None, broke: str, *, out_of_memory: bool = False) -> Ending:
    """From the wait status, if known; `out_of_memory`: the kernel has just killed a process for lack of memory."""
    if broke:
        return Ending("Crashed", f"the session's Python was ended: {broke}")
    if status is None:
        return Ending("Crashed", "the session's Python ended")
    if os.WIFEXITED(status):
        return Ending("Crashed", f"the code ended the session's Python, with exit code {os.WEXITSTATUS(status)}")
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and out_of_memory:
        return Ending("OutOfMemory", "the session used more memory than it may, and the kernel ended its Python")
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    reason = next((text for fault, text in _FAULTS.items() if fault == number), "it was killed")
    return Ending("Crashed", f"the session's Python ended by {name}: {reason}")


# --- turn and time limit --------------------------------------------------------------------------------------------

T = TypeVar("T")


class Turn:
    """Holds a lock for one request: `async with Turn(lock) as turn`."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._work: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        return self

    async def __aexit__(self, *problem: object) -> None:
        if self._work is None:
            self._lock.release()

    async def finish(self, work: Coroutine[Any, Any, T], stop: Callable[[], None]) -> T:
        """Wait for work that cannot be left halfway; the last step of a turn.

        A caller that is cancelled has it stopped, and waits for its end. Cancelled once more the caller returns at
        once; the work goes on to its end, and keeps the turn until then."""
        self._work = asyncio.get_running_loop().create_task(work)
        self._work.add_done_callback(self._ended)
        try:
            return await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if not self._work.done():
                stop()
                await asyncio.wait([self._work])
            raise

    def _ended(self, work: asyncio.Task[Any]) -> None:
        self._lock.release()
        if not work.cancelled():
            work.exception()  # The caller may be gone; asyncio is not to log it.


Why = Literal["timeout", "cancelled"]
_AGAIN = 0.1
"""Seconds between interrupts of code that goes on."""


class Stoppable(Protocol):
    """Something that runs code."""

    def interrupt(self) -> None: ...

    def kill(self, why: str = "") -> None: ...


class RunTimer:
    """Ends a run at its time limit, or when it is stopped: by an interrupt, and after the grace by a kill."""

    def __init__(self, session: Stoppable, grace: float) -> None:
        self._session = session
        self.grace = grace
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.why: Why | None = None
        self.killed = False
        self._kill_at = 0.0
        self._paused = 0
        self._left: float | None = None
        """Seconds that the run still has, while the clock is stopped."""

    def start(self, seconds: float) -> None:
        if seconds != float("inf"):
            self._timer = self._loop.call_later(max(seconds, 0.0), self.stop, "timeout")

    def pause(self) -> None:
        """Stop the clock, until `resume` was called as many times."""
        self._paused += 1
        if self._timer is not None and self.why is None:
            self._left = self._timer.when() - self._loop.time()
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        self._paused -= 1
        if self._paused == 0 and self._left is not None:
            left, self._left = self._left, None
            self.start(left)

    def stop(self, why: Why) -> None:
        """Interrupt the run again and again, and kill it after the grace."""
        self.cancel()
        self.why = self.why or why
        self._kill_at = self._loop.time() + self.grace
        self._interrupt_again()

    def interrupt(self) -> None:
        """Interrupt once, like Ctrl-C; nothing is killed."""
        self._session.interrupt()

    def _interrupt_again(self) -> None:
        """The worker ignores an interrupt that comes before it has begun with the code, so it is sent again."""
        if self._loop.time() >= self._kill_at:
            self.killed = True
            self._session.kill("it did not stop when it was interrupted")
            return
        self._session.interrupt()
        self._timer = self._loop.call_later(
            min(_AGAIN, max(self._kill_at - self._loop.time(), 0.0)), self._interrupt_again
        )

    def cancel(self) -> None:
        """The run has ended."""
        self._left = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# --- results --------------------------------------------------------------------------------------------------------


def closed_result() -> ExecutionResult:
    return ExecutionResult(error="Session is closed", error_type="Closed", state="lost", state_reason="it was closed")


def failed_result(error_type: str, text: str) -> ExecutionResult:
    return ExecutionResult(error=clean(text), error_type=error_type)


def misused(code: object, timeout: object) -> ExecutionResult | None:
    """The result of a run whose code or timeout has the wrong type; None if they are right."""
    if not isinstance(code, str):
        return failed_result("TypeError", f"code is a text (str), and this is {type(code).__name__}")
    if timeout is not None and not is_seconds(timeout):
        expected = "timeout is a number of seconds, or None for the executor's own"
        return failed_result("TypeError", f"{expected}, and this is {safe_repr(timeout, 100)}")
    return None


def finished(record: Record) -> ExecutionResult:
    """The result in a worker's answer; ValueError for an invalid answer."""
    error, kind = record.get("error"), record.get("error_type")
    usage: Any = record.get("usage") or {}
    display: Any = record.get("display") or []
    if not isinstance(display, list) or (display and not all(isinstance(item, dict) for item in display)):
        raise ValueError("its display is no list of bundles")
    try:
        spent = RunUsage(float(usage.get("cpu_seconds", 0.0)), int(usage.get("max_rss_bytes", 0)))
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError("its usage is no pair of numbers") from None
    return ExecutionResult(
        value=values.decode(record.get("value")),
        error=None if error is None else clean(str(error)),
        error_type=None if error is None else clean(str(kind or "Error")),
        display=display,
        usage=spent,
    )


LIST_VARIABLES = 5.0
"""Seconds after which variables are listed without calling `__repr__` methods."""


def variables_of(result: ExecutionResult) -> list[Variable]:
    """The variables in the result of a run without code; WorkerLost if they could not be listed."""
    if result.error_type == "Closed":
        raise ExecutorClosed("this executor is closed; make another")
    if result.error_type == NoPython.__name__:
        return []
    try:
        return [
            Variable(str(one["name"]), str(one["type"]), int(one["size"]), str(one["preview"])) for one in result.value
        ]
    except (TypeError, KeyError, ValueError):
        raise WorkerLost(f"the variables could not be listed: {result.error}; they are {result.state}") from None


def encode_variables(variables: Mapping[str, Any]) -> Any:
    """Encode variables for a request; TypeError for a value that is not data, ValueError for one that is too large."""
    for name, value in variables.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a variable")
        try:
            encoded, _ = values.encode_whole(value)
        except values.TooLarge as problem:
            raise ValueError(f"{name}: {problem}") from None
        if _has_repr(encoded):
            raise TypeError(f"{name} is or contains an object that is not data; it is {type(value).__name__}")
    try:
        return values.encode_whole(dict(variables))[0]
    except values.TooLarge as problem:
        raise ValueError(f"the variables together: {problem}") from None


def _has_repr(encoded: Any) -> bool:
    left = [encoded]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if item.get("$") == "repr":
                return True
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return False


def stopped(result: ExecutionResult, timer: RunTimer, seconds: float | None) -> ExecutionResult:
    """Set the error of a run that reached its time limit, whatever its code did afterwards."""
    if timer.why != "timeout" or (result.state, result.error_type) == ("lost", "Closed"):
        return result
    text = f"the code ran longer than its timeout of {seconds:g} s"
    if timer.killed:
        text += f" and did not stop within {timer.grace:g} s of being interrupted, so it was killed"
    elif result.error_type == "KeyboardInterrupt" and result.error:
        text += f"\n{result.error}"
    result.value, result.error, result.error_type = None, text, "Timeout"
    return result


def clean(text: str) -> str:
    """Replace lone surrogates, which terminals, files and JSON refuse."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


# --- output in pieces -------------------------------------------------------------------------------------------------

MOST_PENDING = 4 * 1024 * 1024
"""Bytes that wait for a slow reader; beyond them the code waits when it writes."""


class Streaming:
    """Both streams of one run; `watch` switches the pipes on and off."""

    def __init__(self, limit: int) -> None:
        self.stdout = _Streamed(limit, "stdout", self)
        self.stderr = _Streamed(limit, "stderr", self)
        self.watch: Callable[[bool], None] = _nothing_to_watch
        self._pieces: deque[tuple[Output, int]] = deque()
        self._pending = 0
        self._came = asyncio.Event()

    def put(self, piece: Output, size: int) -> None:
        self._pieces.append((piece, size))
        self._pending += size
        self._came.set()
        if self._pending > MOST_PENDING:
            self.watch(False)

    def take(self) -> Output | None:
        if not self._pieces:
            self._came.clear()
            return None
        piece, size = self._pieces.popleft()
        if self._pending > MOST_PENDING >= self._pending - size:
            self.watch(True)
        self._pending -= size
        return piece

    async def wait(self) -> None:
        await self._came.wait()

    def finish(self) -> None:
        """What was waiting for the rest of a character comes out as it is."""
        self.stdout.finish()
        self.stderr.finish()
        self._came.set()


class _Streamed(BoundedOutput):
    def __init__(self, limit: int, name: Literal["stdout", "stderr"], to: Streaming) -> None:
        super().__init__(limit)
        self._name: Literal["stdout", "stderr"] = name
        self._to = to
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        super().add(data)
        self._give(self._decoder.decode(data), len(data))

    def finish(self) -> None:
        self._give(self._decoder.decode(b"", final=True), 0)

    def _give(self, text: str, size: int) -> None:
        if text:
            self._to.put(Output(self._name, text), size)


def _nothing_to_watch(on: bool) -> None:
    """The run has not begun."""


async def streamed(
    limit: int, run: Callable[[Streaming], Coroutine[Any, Any, ExecutionResult]]
) -> AsyncGenerator[Output | ExecutionResult]:
    """Run, and give out the pieces and then the result; a reader who leaves cancels the run."""
    streaming = Streaming(limit)
    task = asyncio.get_running_loop().create_task(run(streaming))
    task.add_done_callback(lambda _: streaming.finish())
    try:
        while True:
            piece = streaming.take()
            if piece is not None:
                yield piece
            elif task.done():
                break
            else:
                await streaming.wait()
        yield task.result()
    finally:
        streaming.watch(True)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


# --- recorded variables -----------------------------------------------------------------------------------------------

_MAX_RECORD = 3 * MAX_BYTES
"""Bytes of a report as JSON, which escapes characters."""


@dataclass(slots=True, frozen=True)
class RecordedVariable:
    """A variable as it was after a run."""

    type: str
    size: int
    preview: str
    """Its beginning, as text; empty where there was no time to look at it."""
    digest: str
    """Equal for equal values. After `~`, it covers only a part of the value; empty where there is none."""


@dataclass(slots=True, frozen=True)
class VariableReport:
    """The variables of a session after a run."""

    variables: Mapping[str, RecordedVariable]
    left_out: int
    """How many more there are."""
    files: str
    """A digest of the workspace's files by their sizes and times; empty where there are too many."""


OnVariables = Callable[[VariableReport], None]
"""Called with the variables after a run; not called for a run that is followed by another at once."""


def read_report(record: Record, length: int) -> VariableReport:
    """Return the report in a record of a worker; ChannelError for what no worker sends."""
    listed, left_out, files = record.get("variables"), record.get("left_out"), record.get("files")
    if length > _MAX_RECORD or not isinstance(listed, list) or len(listed) > MAX_VARIABLES:
        raise ChannelError("the worker sent a report of variables that is too long")
    if type(left_out) is not int or left_out < 0 or not isinstance(files, str):
        raise ChannelError("the worker sent an invalid report of variables")
    found = {}
    for entry in listed:
        match entry:
            case [str(name), str(kind), int(size), str(preview), str(digest)]:
                found[name] = RecordedVariable(kind, size, preview, digest)
            case _:
                raise ChannelError("the worker sent an invalid report of variables")
    return VariableReport(found, left_out, files)
