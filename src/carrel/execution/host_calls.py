"""Calls from inside, answered by the host's handlers; each belongs to a run and is cancelled with it."""

from __future__ import annotations

import asyncio
import builtins
import functools
from collections.abc import Callable
from typing import Any

from carrel import errors
from carrel.errors import CarrelError, ToolCallError
from carrel.execution.channels import Record
from carrel.execution.executor import CallContext, Executor, Handler, RunClock, current_call
from carrel.guest.channel import ChannelError
from carrel.guest.worker import values
from carrel.guest.worker.host_calls import MAX_CALLS
from carrel.request_id import current_request

MOST_OPEN = 2 * MAX_CALLS
"""Twice what a worker asks at once: those that it has given up may not have ended yet."""
MOST_BYTES = 256 * 1024 * 1024
"""Of the arguments of open calls together; more than twice what a worker asks at once."""


class NoSuchName(LookupError):
    """Code called a name that no handler answers."""


class RecordedError(Exception):
    """An error that a handler has described itself, as `error_record` does for all others."""

    def __init__(self, record: Record) -> None:
        super().__init__(record["message"])
        self.record = record


def handler_for(handlers: dict[str, Handler], name: str) -> Handler:
    """The handler of the name, or of the longest beginning of it."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        found = handlers.get(".".join(words[:count]))
        if found is not None:
            return found
    raise NoSuchName(f"there is no {name} here")


def whole(name: str, answer: Any) -> Any:
    """A handler's answer as data: all of it, or an error, since code would take a part of it for the whole."""
    try:
        return values.encode_whole(answer)[0]
    except values.TooLarge as problem:
        text = f"{name[:100]}: what it returned cannot be given to the code: {problem}; ask for less at once"
        raise (ToolCallError if name.partition(".")[0] == "tools" else ValueError)(text) from None


def error_record(problem: BaseException) -> dict[str, Any]:
    """An exception as the code inside gets it: its class by name, what else it is, and what it knows as data."""
    if isinstance(problem, RecordedError):
        return problem.record
    name = "LookupError" if isinstance(problem, NoSuchName) else type(problem).__name__
    error = {"type": name, "message": str(problem), "also": _also(type(problem))}
    if isinstance(problem, CarrelError):
        own = {name: value for name, value in vars(problem).items() if not name.startswith("_")}
        if own:
            error["attributes"] = values.encode(own)
    return error


@functools.cache
def known_errors() -> dict[str, list[str]]:
    """carrel's own errors, parents first, and what else each is: code inside may catch them by name."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CarrelError)]
    return {kind.__name__: _also(kind) for kind in kinds}


def _also(kind: type[BaseException]) -> list[str]:
    """The errors of carrel's own that it is, and the builtins."""
    above = [other for other in kind.__mro__[1:] if other not in (object, BaseException, Exception)]
    own = [other for other in above if vars(errors).get(other.__name__) is other]
    standard = [other for other in above if getattr(builtins, other.__name__, None) is other]
    return [other.__name__ for other in (*own, *standard)]


class Calls:
    """The calls of one run that have no answer yet."""

    def __init__(
        self,
        handlers: dict[str, Handler],
        send: Callable[[Record], None],
        write: Callable[[str], None],
        executor: Executor,
        clock: RunClock | None = None,
    ) -> None:
        self._handlers = handlers
        self._send = send
        self._write = write
        self._executor = executor
        self._clock = clock
        self._over = False
        self._open: dict[int, asyncio.Task[None]] = {}
        self._bytes = 0

    def begin(self, record: Record, size: int = 0) -> None:
        """Answer when the handler has; ChannelError for what is no call. `size` is how many bytes the record had."""
        number, name = record.get("call"), record.get("name")
        if type(number) is not int or not isinstance(name, str):
            raise ChannelError("a call without a number or a name")
        if number in self._open:
            raise ChannelError(f"two calls with the number {number}")
        if len(self._open) >= MOST_OPEN or (self._open and self._bytes + size > MOST_BYTES):
            full = f"more than {MOST_OPEN} calls, or {MOST_BYTES // 2**20} MiB of arguments, wait for the host already"
            self._send({"op": "answer", "call": number, "error": error_record(RuntimeError(f"{name[:100]}: {full}"))})
            return
        try:
            arguments = values.decode(record.get("arguments"))
            args, kwargs = list(arguments["args"]), dict(arguments["kwargs"])
        except (ValueError, KeyError, TypeError) as problem:
            raise ChannelError(f"a call of {name[:100]} whose arguments cannot be read: {problem}") from None
        task = asyncio.get_running_loop().create_task(self._answer(number, name, args, kwargs))
        self._open[number] = task
        self._bytes += size
        task.add_done_callback(lambda _: self._ended(number, size))

    def _ended(self, number: int, size: int) -> None:
        self._open.pop(number, None)
        self._bytes -= size

    async def _answer(self, number: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        answer: Record = {"op": "answer", "call": number}
        call = CallContext(self._executor, self._written, self._clock)
        current_call.set(call)
        # This task was begun by the connection, which was opened for another request.
        current_request.set(None)
        try:
            value = await handler_for(self._handlers, name)(name, args, kwargs)
            answer["value"] = whole(name, value)
        except asyncio.CancelledError:
            raise
        except Exception as problem:  # noqa: BLE001 -- whatever a handler raises is for the code that called
            answer["error"] = error_record(problem)
        finally:
            call.active = False
        self._send(answer)

    def _written(self, text: str) -> None:
        if not self._over:
            self._write(text)

    def cancel(self) -> None:
        """The run is over: cancel its calls, and drop what they still write."""
        self._over = True
        for task in list(self._open.values()):
            task.cancel()

    def cancel_one(self, number: object) -> None:
        """Cancel a call whose caller does not wait any more."""
        task = self._open.get(number) if type(number) is int else None
        if task is not None:
            task.cancel()
