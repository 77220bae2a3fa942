"""The worker's loop: requests come over the line, one at a time; between cells a frozen fork is kept."""

from __future__ import annotations

import asyncio
import os
import resource
import selectors
import socket
import sys
import time
from typing import Any

from . import display, files, telling, values
from .cells import Cell, new_namespace
from .commands import Commands
from .freezing import Frozen, foreign_threads
from .host import Host, Remote
from .interrupts import Interrupts
from .line import Line, LineBroken, Record
from .output import NoInput, StandardStreams, no_input

PROTOCOL = 1
IDLE = 0.001
"""How long nothing must have come before a frozen fork is made."""


class Woken(BaseException):
    """Raised in a fork that goes on: back to the loop, with its own line."""


class Worker:
    """One session's Python."""

    def __init__(self, line: Line, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._home = str(settings.get("home") or os.getcwd())
        self._frozen = Frozen(int(settings.get("frozen_ceiling") or (1 << 31)))
        self._keeps_frozen = bool(settings.get("frozen", True))
        self._streams = StandardStreams()
        self._interrupts = Interrupts()
        self._host = Host(line, self._interrupts)
        self._changed = False
        self._refused: str | None = None
        self._cells = 0
        self._pid = os.getpid()
        self._forking = False
        self._stray = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown: list[dict[str, Any]] = []
        self._names: dict[str, Any] = {}
        self._begin(line)
        self._reset()
        os.register_at_fork(after_in_child=self._forked_by_the_user)

    # --- beginning, also again in a fork ----------------------------------------------------------------------------

    def _begin(self, line: Line) -> None:
        self._pid = os.getpid()
        self._line = line
        self._selector = selectors.DefaultSelector()
        self._bell, bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._rung)
        self._host.move(line, bell)
        self._selector.register(line.socket, selectors.EVENT_READ, None)
        self._commands = Commands(self._selector, self._home, self._send)
        self._interrupts.end()
        self._interrupts.install()

    def _rung(self) -> None:
        os.read(self._bell, 4096)

    def _reset(self) -> None:
        os.chdir(self._home)
        sys.path[:0] = [""] if sys.path[:1] != [""] else []
        sys.argv = [""]
        sys.stdin = NoInput()  # type: ignore[assignment]
        self._names = new_namespace()
        own: dict[str, Any] = self._names["__builtins__"]
        own["input"] = no_input
        own["display"] = self._display
        for name in self._settings.get("names", []):
            self._names[name] = Remote(self._host, name)
        self._changed = True

    def _send(self, record: Record) -> None:
        self._line.send(record)

    def _ready(self) -> None:
        version = "%d.%d.%d" % sys.version_info[:3]
        self._send({"op": "ready", "protocol": PROTOCOL, "python": version, "pid": os.getpid()})

    def serve(self) -> None:
        """Until the host closes the line."""
        self._ready()
        while True:
            try:
                self._next()
            except Woken:
                self._ready()
            except LineBroken:
                return

    # --- requests ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._host.requests:
            self._answer(*self._host.requests.popleft())
        elif self._selected() and self._readable:
            self._host.take()

    def _selected(self) -> bool:
        """Wait for something; freeze when there is time. True when anything happened."""
        deadline = self._commands.next_deadline()
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._changed and self._keeps_frozen:
            wait = IDLE if wait is None else min(wait, IDLE)
        events = self._selector.select(wait)
        self._readable = False
        for key, _ in events:
            if key.data is None:
                self._readable = True
            else:
                key.data()
        self._commands.check_deadlines()
        if not events and self._changed and self._keeps_frozen:
            self._freeze()
        return bool(events)

    def _answer(self, record: Record, fds: list[int]) -> None:
        work = {
            "run": self._run,
            "exec": self._exec,
            "file": self._file,
            "processes": self._processes,
            "kill": self._kill,
            "reset": self._reset_for,
            "fork": self._fork,
        }.get(str(record.get("op")))
        if work is None:
            self._send({"op": "done", "id": record.get("id"), "error": "unknown request %r" % (record.get("op"),)})
        else:
            work(record, fds)

    def _exec(self, record: Record, fds: list[int]) -> None:
        self._commands.start(record)

    def _file(self, record: Record, fds: list[int]) -> None:
        try:
            answer = files.answer(record, self._home)
        except (OSError, ValueError) as problem:
            answer = {"error": str(problem), "error_type": type(problem).__name__}
        self._send({"op": "done", "id": record.get("id"), **answer})

    def _processes(self, record: Record, fds: list[int]) -> None:
        self._send({"op": "done", "id": record.get("id"), "processes": self._commands.listing()})

    def _kill(self, record: Record, fds: list[int]) -> None:
        self._send({"op": "done", "id": record.get("id"), "killed": self._commands.kill(int(record.get("pid", 0)))})

    def _reset_for(self, record: Record, fds: list[int]) -> None:
        self._reset()
        self._send({"op": "done", "id": record.get("id")})

    # --- cells ------------------------------------------------------------------------------------------------------

    def _run(self, record: Record, fds: list[int]) -> None:
        self._cells += 1
        self._shown = []
        answer: Record = {"op": "done", "id": record.get("id")}
        before = _usage()
        try:
            self._interrupts.install()
            self._interrupts.begin()
            try:
                answer.update(self._ran(str(record.get("code", "")), "<cell %d>" % self._cells))
            finally:
                self._interrupts.end()
        except Woken:
            raise
        except BaseException as problem:  # noqa: BLE001 - whatever the code raises is its result
            self._interrupts.end()
            answer.update(error=telling.told(problem), error_type=type(problem).__name__)
        if self._stray or os.getpid() != self._pid:
            os._exit(0)
        self._streams.settle()
        after = _usage()
        answer["usage"] = {"cpu_seconds": after[0] - before[0], "max_rss_bytes": after[1]}
        answer["display"] = self._shown
        self._send(answer)

    def _ran(self, code: str, filename: str) -> Record:
        cell = Cell(code, filename)
        if self._changed and self._keeps_frozen and not cell.harmless:
            self._interrupts.end()
            self._freeze()
            self._interrupts.begin()
        self._changed = True
        value = self._awaited(cell) if cell.waits else cell.run(self._names)
        rich = display.bundle(value)
        if rich is not None:
            self._shown.append(rich)
        self._shown += display.open_figures()
        return {"value": values.encode(value)}

    def _awaited(self, cell: Cell) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(cell.run_waiting(self._names))
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            # An interrupt leaves the task half way; it gets the chance to clean up.
            if not task.done():
                task.cancel()
                try:
                    self._loop.run_until_complete(asyncio.wait([task], timeout=0.5))
                except RuntimeError:
                    self._loop = None
            raise

    def _display(self, *shown: Any) -> None:
        for value in shown:
            rich = display.bundle(value)
            if rich is None:
                print(value)
            else:
                self._shown.append(rich)

    # --- forks ------------------------------------------------------------------------------------------------------

    def _freeze(self) -> None:
        why = self._frozen.refusal()
        if why is not None:
            self._frozen.drop()
            if why != self._refused:
                self._send({"op": "unfrozen", "why": why})
            self._refused = why
            self._changed = False
            return
        self._refused = None
        self._forking = True
        try:
            line = self._frozen.make(self._line)
        finally:
            self._forking = False
        self._changed = False
        if line is not None:
            self._changed = True
            self._begin(line)
            raise Woken

    def _fork(self, record: Record, fds: list[int]) -> None:
        why = foreign_threads()
        if why is not None or len(fds) != 3:
            for fd in fds:
                os.close(fd)
            self._send({"op": "done", "id": record.get("id"), "refused": why or "no line came with the request"})
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self._forking = True
        pid = os.fork()
        self._forking = False
        if pid == 0:
            self._line.socket.close()
            self._frozen.forget()
            self._streams.replace(fds[1], fds[2])
            self._begin(Line(socket.socket(fileno=fds[0])))
            self._changed = True
            raise Woken
        for fd in fds:
            os.close(fd)
        self._send({"op": "done", "id": record.get("id"), "pid": pid})

    def _forked_by_the_user(self) -> None:
        """A child made by the user's code is no worker: it has no line, and ends when its cell does."""
        if not self._forking:
            self._stray = True
            self._line.socket.close()


def _usage() -> tuple[float, int]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return seconds, own.ru_maxrss * 1024


def run(line_fd: int, init_fd: int, settings: dict[str, Any]) -> None:
    """Be the worker of a session until the host is gone; never returns."""
    worker = Worker(Line(socket.socket(fileno=line_fd)), settings)
    try:
        worker.serve()
    finally:
        os._exit(0)
