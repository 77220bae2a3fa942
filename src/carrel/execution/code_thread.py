"""A thread of this process that runs code, one cell after the other, and can be interrupted between two bytecodes."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import ctypes
import importlib
import io
import itertools
import os
import queue
import resource
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from carrel.execution.channels import Record
from carrel.execution.host_calls import known_errors
from carrel.guest.worker import cell_output, tracebacks, values
from carrel.guest.worker.cell_output import NoInput, no_input
from carrel.guest.worker.code_cell import Cell, ListVariables
from carrel.guest.worker.host_calls import error_class
from carrel.processes import BoundedOutput

Done = Callable[[Record], None]
_threads = itertools.count(1)
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_HERE = (os.path.dirname(os.path.abspath(__file__)) + os.sep,)
"""Folder of the frames through which calls to the host go; tracebacks leave them out."""


class CodeThread:
    """Holds the variables of one session. After `abandon` its results are dropped."""

    def __init__(self, given: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`given` makes the names that code starts with, from its builtins."""
        self._given = given
        self._lock = threading.Lock()
        self._running = False
        self._queued = self._early = False
        self._left = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown: list[dict[str, Any]] = []
        self._cells = 0
        self._number = next(_threads)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.names = self._fresh_names()
        self._thread = threading.Thread(target=self._live, name="carrel-code", daemon=True)
        self._thread.start()

    def _fresh_names(self) -> dict[str, Any]:
        """The names of a new module, which does not replace the host's main module."""
        own = dict(vars(builtins))
        own.update({name: error_class(name, also) for name, also in known_errors().items()})
        own.update(input=no_input, quit=sys.exit, exit=sys.exit, display=self._display)
        names = types.ModuleType("__main__").__dict__
        names["__builtins__"] = own
        names.update(self._given(own))
        self._own = dict(names)
        return names

    def _display(self, *shown: object) -> None:
        for value in shown:
            rich = cell_output.bundle(value)
            if rich is None:
                print(value)
            else:
                self._shown.append(rich)

    def reset(self) -> None:
        self.names = self._fresh_names()

    def run(self, code: str | None, streams: RunStreams, done: Done) -> None:
        """Run code, or without code list the variables. `done` is called in this thread with the record that a worker
        would send."""
        context = contextvars.Context()
        with self._lock:
            self._queued, self._early = True, False
        self._jobs.put(lambda: context.run(self._cell, code, streams, done))

    def interrupt(self) -> None:
        with self._lock:
            if self._running and self._thread.ident is not None:
                _set_exception(ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt))
            elif self._queued:
                self._early = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            # A loop that waits runs no bytecode; this makes it.
            loop.call_soon_threadsafe(_nothing)

    def abandon(self) -> None:
        """Do not use the thread any more; it ends when its code does."""
        self._left = True
        self._jobs.put(None)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            try:
                job = self._jobs.get()
                if job is None or self._left:
                    break
                job()
            except KeyboardInterrupt:
                continue  # It came after the code had ended.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.close()

    def _cell(self, code: str | None, streams: RunStreams, done: Done) -> None:
        _current.set(streams)
        answer: Record = {}
        cpu = time.thread_time()
        self._cells += 1
        # All sessions of a process share Python's memory of sources; tracebacks show these names without the last part.
        filename = f"<cell {self._cells} of {self._number}>"
        try:
            self._shown = []
            self._begin()
            answer = self._ran(code, filename)
        except BaseException as problem:  # noqa: BLE001 -- whatever the code raises is its result
            answer = _error_record(problem)
        answer = self._settle(answer)
        answer["display"] = self._shown
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer["usage"] = {"cpu_seconds": time.thread_time() - cpu, "max_rss_bytes": peak}
        restore_streams()
        streams.flush()
        if not self._left:
            done(answer)

    def _begin(self) -> None:
        """From here on an interrupt is raised in the code; one that came earlier is raised now."""
        with self._lock:
            self._running, self._queued = True, False
            early = self._early
        if early:
            raise KeyboardInterrupt

    def _ran(self, code: str | None, filename: str) -> Record:
        cell: Any = ListVariables(self._own) if code is None else Cell(code, filename)
        value = self._awaited(cell) if cell.is_async else cell.run(self.names)
        rich = cell_output.bundle(value)
        if rich is not None:
            self._shown.append(rich)
        return {"value": values.encode(value)}

    def _awaited(self, cell: Cell) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(cell.run_async(self.names))
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task], timeout=0.5))
            raise

    def _settle(self, answer: Record) -> Record:
        """From here on an interrupt has no effect; one that is pending is cancelled."""
        while True:
            try:
                with self._lock:
                    self._running = False
                    if self._thread.ident is not None:
                        _set_exception(ctypes.c_ulong(self._thread.ident), None)
                return answer
            except KeyboardInterrupt as problem:
                answer = _error_record(problem)


def _error_record(problem: BaseException) -> Record:
    """Only the frames of the code, without those of this package above them."""
    trace = problem.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    return {
        "error": tracebacks.format_exception(problem.with_traceback(trace), _HERE),
        "error_type": type(problem).__name__,
    }


def _nothing() -> None:
    """Wake up a loop."""


# --- standard streams -----------------------------------------------------------------------------------------------


class _Sink(io.RawIOBase):
    """The end of a run's stream: what is written there is added to the run's output."""

    def __init__(self, to: BoundedOutput, descriptor: Callable[[], int]) -> None:
        self._to = to
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._to.add(bytes(data))
        return len(data)

    def fileno(self) -> int:
        """The program's own: child processes write there."""
        return self._descriptor()


class _NoInput(NoInput):
    """What is typed is for the program, and not for code that runs in it."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("code here has no standard input")


class RunStreams:
    """The standard streams of one run. Whole lines are handed on, so that no output of handlers comes in between."""

    def __init__(self, stdout: BoundedOutput, stderr: BoundedOutput) -> None:
        self.by_name: dict[str, Any] = {"stdin": _NoInput()}
        for name, output in (("stdout", stdout), ("stderr", stderr)):
            sink: Any = _Sink(output, lambda name=name: _routed[name].original.fileno())  # type: ignore[misc]
            self.by_name[name] = io.TextIOWrapper(sink, "utf-8", "backslashreplace", line_buffering=True)

    def flush(self) -> None:
        for name in ("stdout", "stderr"):
            with suppress(ValueError):  # closed by the code
                self.by_name[name].flush()


_current: contextvars.ContextVar[RunStreams | None] = contextvars.ContextVar("carrel_run_streams", default=None)
_streams_lock = threading.Lock()
_stream_users = 0
_routed: dict[str, RoutedStream] = {}


class RoutedStream:
    """In the place of `sys.stdin`, `sys.stdout` or `sys.stderr`: the stream of the run that the caller belongs to, and
    for all other code the program's own."""

    def __init__(self, name: str, original: Any) -> None:
        self.name_in_sys, self.original = name, original

    def __getattr__(self, attribute: str) -> Any:
        run = _current.get()
        return getattr(self.original if run is None else run.by_name[self.name_in_sys], attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")


def use_streams() -> None:
    """Route the standard streams; each `use_streams` needs its `leave_streams`."""
    global _stream_users
    with _streams_lock:
        _stream_users += 1
    renew_streams()


def renew_streams() -> None:
    """Before a run: where the program has put other streams in place since, route those."""
    with _streams_lock:
        for name in ("stdin", "stdout", "stderr"):
            now = getattr(sys, name)
            if _stream_users and now is not None and not isinstance(now, RoutedStream):
                _routed[name] = RoutedStream(name, now)
                setattr(sys, name, _routed[name])


def restore_streams() -> None:
    """After a run, which may have put its own streams in place of the routed ones."""
    with _streams_lock:
        for name, stream in _routed.items():
            setattr(sys, name, stream)


def leave_streams() -> None:
    """The last user puts back what was there, unless something else was put there meanwhile."""
    global _stream_users
    with _streams_lock:
        _stream_users -= 1
        if _stream_users == 0:
            for name, stream in _routed.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.original)
            _routed.clear()


# --- import path ----------------------------------------------------------------------------------------------------

_folders_lock = threading.Lock()
_folder_users: dict[str, int] = {}


def add_import_folder(folder: str) -> None:
    """Put a folder last on this process's import path; each call needs its `remove_import_folder`."""
    with _folders_lock:
        _folder_users[folder] = _folder_users.get(folder, 0) + 1
        if folder not in sys.path:
            sys.path.append(folder)
            tracebacks.hide_folder(folder)
        importlib.invalidate_caches()


def remove_import_folder(folder: str) -> None:
    with _folders_lock:
        _folder_users[folder] -= 1
        if _folder_users[folder] == 0:
            del _folder_users[folder]
            if folder in sys.path:
                sys.path.remove(folder)
