"""Calls to the host by name, from code that waits and from code that awaits, from any thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from select import POLLIN, poll  # by name: what code sets on the module select does not matter here
from typing import Any, NoReturn

from ..channel import Channel, ChannelError, Record, RecordTooLong
from . import asking, values
from .call_commands import CallCommand
from .host_errors import HostCallError, raised
from .interrupts import Interrupts
from .turns import Turns

_LOOK = 0.02
"""Seconds after which whoever waits for what need not come over the line looks again."""


class _Waiting:
    """One call that has no answer yet."""

    def __init__(self, future: asyncio.Future[Record] | None = None) -> None:
        self.answer: Record | None = None
        self.future = future
        self.command: CallCommand | None = None
        """What runs in the session's place before the host can answer."""
        self.turn: list[tuple[Turns, int]] = []
        """The turn it has, until there is an answer."""

    def end_turn(self) -> None:
        try:
            turns, size = self.turn.pop()
        except IndexError:
            return  # another thread was first
        turns.over(size)


class Host:
    """Whoever needs an answer reads the line for all; the others wait for whoever reads.

    One reader at a time, and it gives out every whole record before it lets go: so what is not given out is still
    in the socket, where the next one to look sees it.
    """

    def __init__(self, line: Channel, interrupts: Interrupts, home: str) -> None:
        self.line = line
        self._home = home
        self.requests: deque[tuple[Record, list[int]]] = deque()
        """What came meanwhile and is no answer; the main loop takes it up."""
        self._interrupts = interrupts
        self._number = 0
        self._bell = -1
        self._begin()

    def _begin(self) -> None:
        self._open: dict[int, _Waiting] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads_waiting = 0
        self._reading = False
        self._readable_line = poll()
        self._readable_line.register(self.line.fileno(), POLLIN)
        self._turns = Turns()

    def begin_run(self) -> None:
        """What an earlier run has asked for gets no answer any more, and takes nobody's turn."""
        earlier, self._turns = self._turns, Turns()
        earlier.dissolve()

    def move(self, line: Channel, bell: int) -> None:
        """In a fork: another line, and nobody waits for what was asked on the old one. `bell` wakes the main loop."""
        for waiting in self._open.values():
            if waiting.future is not None and not waiting.future.done():
                waiting.future.set_exception(HostCallError("this call was asked before the session was forked"))
        self.line, self._bell = line, bell
        self.requests.clear()
        self._begin()

    # --- asking -----------------------------------------------------------------------------------------------------

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask, and wait for the answer."""
        encoded, size = asking.encoded(name, arguments)
        waiting, number, told = _Waiting(), 0, False
        self._interrupts.hold()
        try:
            while not (turns := self._turns).taken(size):
                self._look()
            waiting.turn.append((turns, size))
            number = self._ask(name, encoded, waiting)
            while not self._arrived(waiting):
                pass
            told = True
        finally:
            self._over(number, waiting)
            if number and not told:
                self._cancel(number)
            waiting.end_turn()
            self._interrupts.release()
        return _value(waiting.answer)

    async def call_async(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask; others go on until the answer is there."""
        encoded, size = asking.encoded(name, arguments)
        loop = asyncio.get_running_loop()
        waiting, number = _Waiting(loop.create_future()), 0
        assert waiting.future is not None
        try:
            self._interrupts.hold()
            try:
                self._watch(loop)
            finally:
                self._interrupts.release()
            while not await (turns := self._turns).wait(size):
                pass
            self._interrupts.hold()
            try:
                waiting.turn.append((turns, size))
                number = self._ask(name, encoded, waiting)
            finally:
                self._interrupts.release()
            return _value(await waiting.future)
        finally:
            self._over(number, waiting)
            self._unwatch(loop)
            if number and (not waiting.future.done() or waiting.future.cancelled()):
                self._cancel(number)
            waiting.end_turn()

    def _ask(self, name: str, encoded: Any, waiting: _Waiting) -> int:
        with self._lock:
            self._number += 1
            number = self._number
            self._open[number] = waiting
        try:
            self.line.send({"op": "call", "call": number, "name": name, "arguments": encoded})
        except RecordTooLong as problem:
            # Text that JSON has to escape grows on its way.
            del self._open[number]
            raise asking.refusal(name, f"its arguments cannot be given to the host: {problem}") from None
        return number

    def _over(self, number: int, waiting: _Waiting) -> None:
        """Nobody waits for it any more, so nothing of it goes on either."""
        self._open.pop(number, None)
        if waiting.command is not None:
            waiting.command.end()

    def _cancel(self, number: int) -> None:
        try:
            self.line.send({"op": "cancel", "call": number})
        except ChannelError:
            return  # whoever reads next sees it too

    # --- reading ----------------------------------------------------------------------------------------------------

    def _arrived(self, waiting: _Waiting) -> bool:
        """Wait for something to happen; True when it was this answer."""
        with self._lock:
            while self._reading and waiting.answer is None:
                # Short, because an interrupt is only looked at in between.
                self._wait_for_reader()
            if waiting.answer is not None:
                return True
            self._reading = True
        try:
            self._interrupts.wait_for(self._readable_line)
            self._give_out(self.line.receive())
        finally:
            self._let_go()
        return waiting.answer is not None

    def _wait_for_reader(self) -> None:
        self._threads_waiting += 1
        try:
            self._changed.wait(_LOOK)
        finally:
            self._threads_waiting -= 1
        self._interrupts.check()

    def _look(self) -> None:
        """Wait a little for something to happen, reading what comes unless somebody else does."""
        with self._lock:
            if self._reading:
                self._wait_for_reader()
                return
            self._reading = True
        try:
            self._interrupts.wait_for(self._readable_line, _LOOK)
            self._give_out(self.line.receive(wait=False))
        finally:
            self._let_go()

    def take(self) -> bool:
        """Read what is there and give it out, unless somebody else is at it; False then. Never waits."""
        with self._lock:
            if self._reading:
                return False
            self._reading = True
        try:
            self._give_out(self.line.receive(wait=False))
        finally:
            self._let_go()
        return True

    def interrupts(self, run: object) -> bool:
        """Whether the host has asked to interrupt this run; what it asked of runs before is forgotten."""
        self._interrupts.hold()
        try:
            self.take()
        finally:
            self._interrupts.release()
        asked = [record.get("id") for record, _ in self.requests if record.get("op") == "interrupt"]
        kept = [item for item in self.requests if item[0].get("op") != "interrupt"]
        self.requests.clear()
        self.requests.extend(kept)
        return run in asked

    def _let_go(self) -> None:
        with self._lock:
            self._reading = False
            if self._threads_waiting:
                self._changed.notify_all()

    def _give_out(self, records: list[tuple[Record, list[int]]]) -> None:
        for record, fds in records:
            if record.get("op") != "answer":
                self.requests.append((record, fds))
                if self._bell >= 0 and not self._interrupts.mine():
                    os.write(self._bell, b"!")
                continue
            number: Any = record.get("call")
            waiting = self._open.get(number) if isinstance(number, int) else None
            if waiting is None:
                continue
            if "run" in record:
                self._run_first(number, waiting, record["run"])
                continue
            with self._lock:
                waiting.answer = record
                waiting.end_turn()
                if self._threads_waiting:
                    self._changed.notify_all()
            if waiting.future is not None:
                _settle(waiting.future, record)

    def _run_first(self, number: int, waiting: _Waiting, request: Any) -> None:
        """A command that the host wants to have run before it answers; None when it is not wanted any more."""
        if waiting.command is not None:
            waiting.command.end()
        waiting.command = None if request is None else CallCommand(number, request, self._home, self.line)
        if waiting.command is not None and number not in self._open:
            waiting.command.end()  # Its call was given up meanwhile, in another thread.

    # --- loops that wait --------------------------------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loops[loop] = self._loops.get(loop, 0) + 1
        loop.add_reader(self.line.fileno(), self._readable, loop)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            left = self._loops.pop(loop, 0) - 1
            if left > 0:
                self._loops[loop] = left
        if left == 0 and not loop.is_closed():
            loop.remove_reader(self.line.fileno())

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        self._interrupts.hold()
        try:
            self.take()
        except ChannelError as problem:
            loop.remove_reader(self.line.fileno())
            for waiting in list(self._open.values()):
                if waiting.future is not None and not waiting.future.done():
                    waiting.future.set_exception(problem)
        finally:
            self._interrupts.release()


def _settle(future: asyncio.Future[Record], record: Record) -> None:
    def settled() -> None:
        if not future.done():
            future.set_result(record)

    try:
        future.get_loop().call_soon_threadsafe(settled)
    except RuntimeError:
        return  # its loop was closed, so nobody waits


def _value(answer: Record | None) -> Any:
    assert answer is not None
    error = answer.get("error")
    if isinstance(error, dict):
        raise raised(error)
    return values.decode(answer.get("value"))


class Remote:
    """A name on the host: `tools.curl.get(url=…)` calls `tools.curl.get` there."""

    __slots__ = ("_host", "_name")
    _host: Host
    _name: str

    def __init__(self, host: Host, name: str) -> None:
        object.__setattr__(self, "_host", host)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Remote:
        # Asking for what an object may have is no call: copying, pickling, displaying and testing all do so.
        if name.startswith(("__", "_repr_", "_ipython_")):
            raise AttributeError(name)
        return Remote(self._host, f"{self._name}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._name} is on the host; nothing can be set on it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call(self._name, {"args": list(args), "kwargs": kwargs})

    def call_sync(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call_async(self._name, {"args": list(args), "kwargs": kwargs})

    def __copy__(self) -> Remote:
        return self

    def __deepcopy__(self, memo: Any) -> Remote:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._name} is on the host and cannot be pickled")

    def __repr__(self) -> str:
        return f"<{self._name}, on the host>"
