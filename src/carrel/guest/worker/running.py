"""Running cells: names that last, an outcome for whatever they do, and what they showed."""

from __future__ import annotations

import builtins
import gc
import os
import resource
import site
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..channel import Record
from . import display, telling, values
from .cells import Cell, add_builtin, mend, new_namespace
from .event_loop import CellLoop
from .host_calls import HostCallClient
from .host_errors import error_class
from .interrupts import Interrupts
from .namespaces import namespaces
from .output import NoInput, StandardStreams, no_input

_SCALARS = (type(None), bool, int, float, str, bytes)


class Woken(BaseException):
    """Raised in a fork that goes on: out of whatever was under way, back to the loop, with its own line."""


class Running:
    """The session's names, and the one way to run code in them."""

    def __init__(self, host: HostCallClient, interrupts: Interrupts, settings: dict[str, Any], home: str) -> None:
        self.streams = StandardStreams()
        self.loop = CellLoop(interrupts)
        self._interrupts = interrupts
        self._host = host
        self._home = home
        self._names_of_host = [str(name) for name in settings.get("names") or []]
        self._cells = 0
        self._names: dict[str, Any] = {}
        self._shown = display.Shown()
        add_builtin("input", no_input)
        threading.excepthook = telling.told_of_thread
        add_builtin("display", self._display)
        for name, also in (settings.get("errors") or {}).items():
            add_builtin(str(name), error_class(str(name), [str(other) for other in also]))
        _add_packages(settings.get("packages"))
        self.reset()

    def reset(self) -> None:
        """Forget every name that code has made."""
        os.chdir(self._home)
        if sys.path[:1] != [""]:
            sys.path.insert(0, "")
        sys.argv = [""]
        self.loop.forget()
        self._names = new_namespace()
        self._names.update(namespaces(self._host, self._names_of_host, builtins))
        gc.collect()

    def run(self, code: str, before_it: Callable[[Cell], None], unsafe: Callable[[], None]) -> Record:
        """The outcome of one cell, as its result says it. Never raises, but `Woken` where a fork goes on from here.

        `before_it` is called when the code is compiled, and `unsafe` before the user's own code shows a value that
        nothing has been kept for.
        """
        self._cells += 1
        self._shown = display.Shown()
        before = _usage()
        if type(sys.stdin) is not NoInput:
            sys.stdin = NoInput()
        self._interrupts.install()
        try:
            self._interrupts.begin()
            outcome = self._outcome(code, f"<cell {self._cells}>", before_it, unsafe)
            self._interrupts.end()
        except Woken:
            raise
        except BaseException as problem:  # noqa: BLE001 - an interrupt while the outcome was told
            self._interrupts.end()
            mend(self._names)
            self.streams.settle()
            outcome = {"error": telling.told_late(problem), "error_type": telling.kind(problem)}
        after = _usage()
        outcome["usage"] = {"cpu_seconds": after[0] - before[0], "max_rss_bytes": after[1]}
        outcome["display"] = self._shown.bundles
        outcome["shared"] = self.streams.shared()
        return outcome

    def _outcome(
        self, code: str, filename: str, before_it: Callable[[Cell], None], unsafe: Callable[[], None]
    ) -> Record:
        outcome: Record = {}
        try:
            cell = Cell(code, filename)
            self._interrupts.end()
            before_it(cell)
            self.streams.children_made = False
            self._interrupts.begin()
            value = self.loop.run(cell.run_waiting(self._names)) if cell.waits else cell.run(self._names)
            if not cell.harmless:
                mend(self._names)
            if cell.harmless and type(value) not in _SCALARS:
                self._interrupts.end()
                unsafe()
                self.streams.children_made = False
                self._interrupts.begin()
            self._shown.add(value)
            outcome = {"value": values.encode(value)}
            value = None  # its destructor may be the code's own, and runs before the output is complete
        except Woken:
            raise
        except BaseException as problem:  # noqa: BLE001 - whatever the code raises is its result
            if telling.is_plain_interrupt(problem):
                # The host presses until it has the result; the telling of the first is not to be cut off by the second.
                self._interrupts.end()
            mend(self._names)
            outcome = {"error": telling.told(problem), "error_type": telling.kind(problem)}
            if isinstance(problem, SystemExit):
                outcome["exit_code"] = exit_status(problem.code)
        self._shown.add_open_figures()
        self.streams.settle()
        return outcome

    def _display(self, *shown: Any) -> None:
        for value in shown:
            if not self._shown.add(value):
                sys.stdout.write(f"{value}\n")


def exit_status(code: object) -> int:
    """The status with which a Python program ends that raises SystemExit with this code."""
    if type(code) is not int:
        return int(code is not None)
    return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF


_INHERITED = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""A program begins with the peak of the process that started it, which may have been far larger."""


def _add_packages(folder: object) -> None:
    """A folder of packages in front of the interpreter's own, and behind the standard library."""
    if isinstance(folder, str):
        telling.leave_out(folder)
    if isinstance(folder, str) and folder not in sys.path:
        own = [number for number, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))]
        sys.path.insert(own[0] if own else len(sys.path), folder)
        try:
            site.addsitedir(folder)  # It is on the path already: this reads the `.pth` files of its packages.
        except SystemExit as wanted:
            print(f"a .pth file in {folder} wanted to end Python: {wanted.code!r}", file=sys.stderr)


def _usage() -> tuple[float, int]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return seconds, (own.ru_maxrss if own.ru_maxrss != _INHERITED else _own_peak(_INHERITED)) * 1024


def _own_peak(otherwise: int) -> int:
    """In kilobytes, of this program alone; slower to ask for."""
    try:
        with open("/proc/self/status", "rb") as table:
            return next(int(row.split()[1]) for row in table if row.startswith(b"VmHWM:"))
    except (OSError, StopIteration, ValueError):
        return otherwise
