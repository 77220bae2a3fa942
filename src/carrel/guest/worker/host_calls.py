"""Calls to the host by name, from code that waits and from code that awaits, from any thread; and the host's errors."""

from __future__ import annotations

import asyncio
import builtins
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from select import POLLIN, poll  # by name: what code sets on the module select does not matter here
from typing import Any, NoReturn

from ..channel import Channel, ChannelError, Record, RecordTooLong
from . import values
from .interrupts import Interrupts

MAX_CALLS = 1000
"""Calls of one run without an answer; more wait inside."""
MAX_BYTES = 96 * 1024 * 1024
"""Of their arguments together; the host itself refuses a little more than this."""
_CHECK_INTERVAL = 0.02
"""Seconds after which a thread that waits for something else than the channel looks again."""


# --- errors of the host, raised inside as exceptions of the same class -----------------------------------------------


class HostCallError(Exception):
    """An error of the host; the base of all its errors that are not builtin exceptions."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a message is for reading.
        return str(self.args[0]) if self.args else ""


_made: dict[str, type[Exception]] = {}
_combined: dict[tuple[str, ...], type[Exception]] = {}
"""Classes of a known name that are other errors, too."""
_UNFIT = (StopIteration, StopAsyncIteration)
"""Raised through a coroutine or a generator, these mean something else."""


def error_class(name: str, also: list[str]) -> type[Exception]:
    """The builtin exception of this name, or a class made for it; one that inherits from each of `also`."""
    known = _known(name)
    bases = [kind for kind in map(_known, also) if kind is not None]
    if known is not None:
        if all(issubclass(known, kind) for kind in bases):
            return known
        key = (name, *also)
        if key not in _combined:
            _combined[key] = _make(name, [known, *bases], known)
        return _combined[key]
    made = _made[name] = _make(name, bases, HostCallError)
    return made


def _make(name: str, bases: list[type[Exception]], otherwise: type[Exception]) -> type[Exception]:
    """Make a class with these bases; only with the last argument as its base if they do not fit together."""
    # Each only once, and none that another one of them is already.
    bases = [kind for kind in bases if not any(other is not kind and issubclass(other, kind) for other in bases)]
    if not any(issubclass(kind, HostCallError) for kind in bases):
        bases.insert(0, HostCallError)
    try:
        return type(name, tuple(dict.fromkeys(bases)), {"__module__": "carrel"})
    except TypeError:
        return type(name, (otherwise,), {"__module__": "carrel"})


def _known(name: str) -> type[Exception] | None:
    if name in _made:
        return _made[name]
    standard = getattr(builtins, name, None)
    if isinstance(standard, type) and issubclass(standard, Exception) and not issubclass(standard, _UNFIT):
        return standard
    return None


def error_from_record(error: dict[str, Any]) -> Exception:
    """The exception that an answer describes: class, message, and further attributes."""
    message = str(error.get("message", ""))
    name, also = error.get("type"), error.get("also")
    name = name if isinstance(name, str) and name.isidentifier() else "HostCallError"
    problem: Exception = HostCallError(f"{name}: {message}")
    # Some of Python's own want more than a message.
    for others in ([str(other) for other in also] if isinstance(also, list) else [], []):
        with suppress(TypeError):
            problem = error_class(name, others)(message)
            break
    if isinstance(problem, SyntaxError):
        # A traceback shows this and not the argument; a class that is two of Python's own has the other one's start.
        problem.msg = message
    attributes = values.decode(error.get("attributes"))
    for attribute, value in attributes.items() if isinstance(attributes, dict) else ():
        if str(attribute).isidentifier() and not str(attribute).startswith("_"):
            setattr(problem, str(attribute), value)
    return problem


# --- arguments ------------------------------------------------------------------------------------------------------


def encode_arguments(name: str, arguments: dict[str, Any]) -> tuple[Any, int]:
    """The arguments of a call (`args` and `kwargs`) as data, and about how many bytes the call has.

    An error names the argument that cannot be sent whole."""
    try:
        data, size = values.encode_whole(arguments)
    except values.TooLarge as problem:
        raise refusal(name, f"{_too_large_argument(arguments)} cannot be given to the host: {problem}") from None
    return data, size + len(name)


def refusal(name: str, why: str) -> Exception:
    """The error for a call that is not sent: a tool's own, else a ValueError."""
    if name.partition(".")[0] == "tools":
        return error_class("ToolCallError", ["RuntimeError"])(f"{name[:100]}: {why}")
    return ValueError(f"{name[:100]}: {why}")


def _too_large_argument(arguments: dict[str, Any]) -> str:
    """Which argument it is; each is encoded by itself."""
    named = [(f"argument {number}", value) for number, value in enumerate(arguments["args"], 1)]
    named += [(f"the argument {name}", value) for name, value in arguments["kwargs"].items()]
    for name, value in named:
        try:
            values.encode_whole([[value]])  # as deep as it is inside of the call
        except values.TooLarge:
            return name
    return "all its arguments together"


class CallLimiter:
    """How many calls of one run, and how much of their arguments, may be without an answer at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def try_acquire(self, size: int) -> bool:
        """Whether a call of this size may be sent now; one that is alone always may."""
        with self._lock:
            return self._try_acquire(size)

    def _try_acquire(self, size: int) -> bool:
        if self._calls and (self._calls >= MAX_CALLS or self._bytes + size > MAX_BYTES):
            return False
        self._calls += 1
        self._bytes += size
        return True

    async def acquire_or_wait(self, size: int) -> bool:
        """The same, or wait until it may be; returns whether it may be sent. Code that does not await may overtake:
        it would keep the loop, and with it the calls that wait here, from going on."""
        with self._lock:
            if self._try_acquire(size):
                return True
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            self._wake(1)  # it may have been woken already: then another may go on
            raise
        return False

    def release(self, size: int) -> None:
        """A call has its answer, or was given up."""
        with self._lock:
            self._calls -= 1
            self._bytes -= size
            free = MAX_CALLS - self._calls
        self._wake(free)

    def reset(self) -> None:
        """Another run begins: what waits here tries again with that run's limiter."""
        self._wake(len(self._waiting))

    def _wake(self, count: int) -> None:
        """The oldest ones; one that finds no room after all waits again."""
        woken: list[asyncio.Future[None]] = []
        with self._lock:
            while self._waiting and len(woken) < count:
                first = self._waiting.popleft()
                if not first.done():
                    woken.append(first)
        for future in woken:
            _set_result(future, None)


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    """From any thread."""

    def set_result() -> None:
        if not future.done():
            future.set_result(value)

    try:
        future.get_loop().call_soon_threadsafe(set_result)
    except RuntimeError:
        return  # its loop was closed, so nothing waits for it


# --- calls ----------------------------------------------------------------------------------------------------------


class _PendingCall:
    """One call that has no answer yet."""

    def __init__(self, future: asyncio.Future[Record] | None = None) -> None:
        self.answer: Record | None = None
        self.future = future
        self.acquired: list[tuple[CallLimiter, int]] = []
        """What it has acquired, until there is an answer."""

    def release(self) -> None:
        try:
            limiter, size = self.acquired.pop()
        except IndexError:
            return  # another thread was first
        limiter.release(size)


class HostCallClient:
    """Sends calls, and reads the channel: one of the threads that wait for an answer reads for all of them.

    A reader hands out every whole record before it stops reading: so what is not handed out is still in the socket,
    where the next reader sees it.
    """

    def __init__(self, channel: Channel, interrupts: Interrupts) -> None:
        self.channel = channel
        self.requests: deque[tuple[Record, list[int]]] = deque()
        """What was read and is no answer, for the main loop."""
        self._interrupts = interrupts
        self._number = 0
        self._wake_fd = -1
        self._reset()

    def _reset(self) -> None:
        self._pending: dict[int, _PendingCall] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        """How many calls each waits for."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads_waiting = 0
        self._reading = False
        self._poll = poll()
        self._poll.register(self.channel.fileno(), POLLIN)
        self._limiter = CallLimiter()

    def begin_run(self) -> None:
        """Calls of an earlier run do not count any more."""
        earlier, self._limiter = self._limiter, CallLimiter()
        earlier.reset()

    def use_channel(self, channel: Channel, wake_fd: int) -> None:
        """In a fork: another channel, and calls that wait on the old one fail. `wake_fd` wakes the main loop."""
        for pending in self._pending.values():
            if pending.future is not None and not pending.future.done():
                pending.future.set_exception(HostCallError("this call was made before the session was forked"))
        self.channel, self._wake_fd = channel, wake_fd
        self.requests.clear()
        self._reset()

    @contextmanager
    def _without_interrupts(self) -> Iterator[None]:
        self._interrupts.hold()
        try:
            yield
        finally:
            self._interrupts.release()

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call and wait for the answer."""
        encoded, size = encode_arguments(name, arguments)
        pending, number, answered = _PendingCall(), 0, False
        self._interrupts.hold()
        try:
            while not (limiter := self._limiter).try_acquire(size):
                self._read_a_moment()
            pending.acquired.append((limiter, size))
            number = self._send(name, encoded, pending)
            while not self._wait_for_answer(pending):
                pass
            answered = True
        finally:
            self._forget(number, pending, cancel=not answered)
            self._interrupts.release()
        return _value(pending.answer)

    async def call_async(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call; other tasks go on until the answer is there."""
        encoded, size = encode_arguments(name, arguments)
        loop = asyncio.get_running_loop()
        pending, number = _PendingCall(loop.create_future()), 0
        assert pending.future is not None
        try:
            with self._without_interrupts():
                self._watch(loop)
            while not await (limiter := self._limiter).acquire_or_wait(size):
                pass
            with self._without_interrupts():
                pending.acquired.append((limiter, size))
                number = self._send(name, encoded, pending)
            return _value(await pending.future)
        finally:
            self._unwatch(loop)
            self._forget(number, pending, cancel=not pending.future.done() or pending.future.cancelled())

    def _send(self, name: str, encoded: Any, pending: _PendingCall) -> int:
        with self._lock:
            self._number += 1
            number = self._number
            self._pending[number] = pending
        try:
            self.channel.send({"op": "call", "call": number, "name": name, "arguments": encoded})
        except RecordTooLong as problem:
            # Text with many characters that JSON escapes is longer than it was counted.
            del self._pending[number]
            raise refusal(name, f"its arguments cannot be given to the host: {problem}") from None
        return number

    def _forget(self, number: int, pending: _PendingCall, *, cancel: bool) -> None:
        """The caller goes on: nothing of the call does."""
        self._pending.pop(number, None)
        if number and cancel:
            with suppress(ChannelError):  # the next reader sees it too
                self.channel.send({"op": "cancel", "call": number})
        pending.release()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _wait_for_answer(self, pending: _PendingCall) -> bool:
        """Wait for something to happen; True when it was this answer."""
        with self._lock:
            while self._reading and pending.answer is None:
                self._wait_for_reader()
            if pending.answer is not None:
                return True
            self._reading = True
        try:
            self._interrupts.wait_for(self._poll)
            self._hand_out(self.channel.receive())
        finally:
            self._stop_reading()
        return pending.answer is not None

    def _wait_for_reader(self) -> None:
        """A short time, because interrupts are seen in between."""
        self._threads_waiting += 1
        try:
            self._changed.wait(_CHECK_INTERVAL)
        finally:
            self._threads_waiting -= 1
        self._interrupts.check()

    def _read_a_moment(self) -> None:
        """Wait a short time for something to happen, reading unless another thread does."""
        with self._lock:
            if self._reading:
                self._wait_for_reader()
                return
            self._reading = True
        try:
            self._interrupts.wait_for(self._poll, _CHECK_INTERVAL)
            self._hand_out(self.channel.receive(wait=False))
        finally:
            self._stop_reading()

    def read_available(self) -> bool:
        """Read what is there and hand it out, without waiting; False when another thread is reading."""
        with self._lock:
            if self._reading:
                return False
            self._reading = True
        try:
            self._hand_out(self.channel.receive(wait=False))
        finally:
            self._stop_reading()
        return True

    def is_interrupted(self, run: object) -> bool:
        """Whether the host has asked to interrupt this run; what it asked for earlier runs is forgotten."""
        with self._without_interrupts():
            self.read_available()
        interrupted = [record.get("id") for record, _ in self.requests if record.get("op") == "interrupt"]
        others = [item for item in self.requests if item[0].get("op") != "interrupt"]
        self.requests.clear()
        self.requests.extend(others)
        return run in interrupted

    def _stop_reading(self) -> None:
        with self._lock:
            self._reading = False
            if self._threads_waiting:
                self._changed.notify_all()

    def _hand_out(self, records: list[tuple[Record, list[int]]]) -> None:
        for record, fds in records:
            if record.get("op") != "answer":
                self.requests.append((record, fds))
                if self._wake_fd >= 0 and not self._interrupts.in_main_thread():
                    os.write(self._wake_fd, b"!")
                continue
            number: Any = record.get("call")
            pending = self._pending.get(number) if isinstance(number, int) else None
            if pending is None:
                continue
            with self._lock:
                pending.answer = record
                pending.release()
                if self._threads_waiting:
                    self._changed.notify_all()
            if pending.future is not None:
                _set_result(pending.future, record)

    # --- event loops --------------------------------------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loops[loop] = self._loops.get(loop, 0) + 1
        loop.add_reader(self.channel.fileno(), self._on_readable, loop)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            left = self._loops.pop(loop, 0) - 1
            if left > 0:
                self._loops[loop] = left
        if left == 0 and not loop.is_closed():
            loop.remove_reader(self.channel.fileno())

    def _on_readable(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._without_interrupts():
            try:
                self.read_available()
            except ChannelError as problem:
                loop.remove_reader(self.channel.fileno())
                for pending in list(self._pending.values()):
                    if pending.future is not None and not pending.future.done():
                        pending.future.set_exception(problem)


def _value(answer: Record | None) -> Any:
    assert answer is not None
    error = answer.get("error")
    if isinstance(error, dict):
        raise error_from_record(error)
    return values.decode(answer.get("value"))


class RemoteName:
    """A name on the host: `tools.curl.get(url=…)` calls `tools.curl.get` there."""

    __slots__ = ("_host", "_name")
    _host: HostCallClient
    _name: str

    def __init__(self, host: HostCallClient, name: str) -> None:
        object.__setattr__(self, "_host", host)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> RemoteName:
        # Copying, pickling, displaying and testing look for names that an object may have: these are no calls.
        if name.startswith(("__", "_repr_", "_ipython_")):
            raise AttributeError(name)
        return RemoteName(self._host, f"{self._name}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._name} is on the host; nothing can be set on it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call(self._name, {"args": list(args), "kwargs": kwargs})

    def call_sync(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call_async(self._name, {"args": list(args), "kwargs": kwargs})

    def __copy__(self) -> RemoteName:
        return self

    def __deepcopy__(self, memo: Any) -> RemoteName:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._name} is on the host and cannot be pickled")

    def __repr__(self) -> str:
        return f"<{self._name}, on the host>"


# --- records --------------------------------------------------------------------------------------------------------


class AttributeDict(dict[str, Any]):
    """A dict whose keys can be read as attributes: `tools.list()[0].name`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} in it; there is {', '.join(map(str, self))}") from None

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *map(str, self)})


def with_attributes(value: Any) -> Any:
    """The same data, each dict in it as an `AttributeDict`."""
    if isinstance(value, dict):
        return AttributeDict({key: with_attributes(item) for key, item in value.items()})
    if isinstance(value, list):
        return [with_attributes(item) for item in value]
    return value


class RecordCall(RemoteName):
    """A call of the host that returns records: dicts, or lists of them."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return with_attributes(super().__call__(*args, **kwargs))

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_attributes(super().call_async(*args, **kwargs))

    async def _with_attributes(self, call: Any) -> Any:
        return with_attributes(await call)
