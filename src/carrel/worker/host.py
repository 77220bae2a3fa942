"""Calls to the host by name, from code that waits and from code that awaits, from any thread."""

from __future__ import annotations

import asyncio
import builtins
import threading
from typing import Any

from . import values
from .line import Line, LineBroken, Record


class HostCallError(Exception):
    """What the host answered instead of a value."""


_known: dict[str, type[BaseException]] = {}


def error_class(name: str, also: list[str]) -> type[BaseException]:
    """The class for an error of the host: the builtin of that name, or one made for it that is also what `also` says."""
    standard = getattr(builtins, name, None)
    if isinstance(standard, type) and issubclass(standard, Exception):
        return standard
    if name not in _known:
        bases = [getattr(builtins, other, None) for other in also]
        standards = [kind for kind in bases if isinstance(kind, type) and issubclass(kind, Exception)]
        try:
            _known[name] = type(name, (HostCallError, *standards), {"__module__": "carrel"})
        except TypeError:
            _known[name] = type(name, (HostCallError,), {"__module__": "carrel"})
    return _known[name]


class _Waiting:
    """One call that has no answer yet."""

    def __init__(self) -> None:
        self.answer: Record | None = None
        self.future: asyncio.Future[Record] | None = None


class Host:
    """Whoever needs an answer reads the line for all; the others wait for whoever reads."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.requests: list[tuple[Record, list[int]]] = []
        """What came meanwhile and is no answer; the main loop takes it up afterwards."""
        self._number = 0
        self._open: dict[int, _Waiting] = {}
        self._changed = threading.Condition()
        self._reading = False

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask, and wait for the answer."""
        number, waiting = self._asked(name, arguments)
        try:
            while True:
                with self._changed:
                    while waiting.answer is None and self._reading:
                        self._changed.wait()
                    if waiting.answer is not None:
                        return _value(waiting.answer)
                    self._reading = True
                try:
                    self._take(*self.line.read())
                finally:
                    with self._changed:
                        self._reading = False
                        self._changed.notify_all()
        finally:
            self._open.pop(number, None)

    async def call_async(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask; others go on until the answer is there."""
        loop = asyncio.get_running_loop()
        number, waiting = self._asked(name, arguments)
        waiting.future = loop.create_future()
        loop.add_reader(self.line.fileno(), self._readable, loop)
        try:
            while self.line.waiting():
                self._readable(loop)
            return _value(await waiting.future)
        finally:
            self._open.pop(number, None)
            if not any(other.future is not None for other in self._open.values()):
                loop.remove_reader(self.line.fileno())

    def _asked(self, name: str, arguments: dict[str, Any]) -> tuple[int, _Waiting]:
        with self._changed:
            self._number += 1
            number, waiting = self._number, _Waiting()
            self._open[number] = waiting
        self.line.send({"op": "call", "call": number, "name": name, "arguments": values.encode(arguments)})
        return number, waiting

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            if self._reading:
                return
        try:
            self._take(*self.line.read())
        except LineBroken as problem:
            loop.remove_reader(self.line.fileno())
            for waiting in list(self._open.values()):
                if waiting.future is not None and not waiting.future.done():
                    waiting.future.set_exception(problem)

    def _take(self, record: Record, fds: list[int]) -> None:
        if record.get("op") != "answer":
            self.requests.append((record, fds))
            return
        waiting = self._open.get(record.get("call", 0))
        if waiting is None:
            return
        with self._changed:
            waiting.answer = record
            self._changed.notify_all()
        future = waiting.future
        if future is not None and not future.done():
            future.get_loop().call_soon_threadsafe(_settle, future, record)

    def forget(self) -> None:
        """After a fork or a reset: nobody waits for what was asked before."""
        self._open.clear()
        self.requests.clear()
        self._reading = False
        self._changed = threading.Condition()


def _settle(future: asyncio.Future[Record], record: Record) -> None:
    if not future.done():
        future.set_result(record)


def _value(answer: Record) -> Any:
    error = answer.get("error")
    if isinstance(error, dict):
        also = [str(name) for name in error.get("also", [])]
        raise error_class(str(error.get("type", "HostCallError")), also)(str(error.get("message", "")))
    return values.decode(answer.get("value"))


class Remote:
    """A name on the host: `tools.curl.get(url=…)` calls `tools.curl.get` there."""

    __slots__ = ("_host", "_name")

    def __init__(self, host: Host, name: str) -> None:
        object.__setattr__(self, "_host", host)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Remote:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._host, "%s.%s" % (self._name, name))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("%s is on the host; nothing can be set on it" % self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call(self._name, {"args": list(args), "kwargs": kwargs})

    def call_sync(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call_async(self._name, {"args": list(args), "kwargs": kwargs})

    def __repr__(self) -> str:
        return "<%s, on the host>" % self._name
