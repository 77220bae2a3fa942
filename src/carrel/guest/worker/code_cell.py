"""Code that is run in a session's lasting variables: compiled, executed, and described in a result."""

from __future__ import annotations

import ast
import builtins
import ctypes
import gc
import inspect
import io
import linecache
import opcode
import os
import re
import resource
import site
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from ..channel import Record
from . import recording, saved_state, tracebacks, values
from .cell_output import DisplayedBundles, NoInput, StandardStreams, no_input
from .event_loop import CellLoop
from .host_calls import HostCallClient, error_class
from .interrupts import Interrupts
from .namespaces import namespaces

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_CONSTANT_INSTRUCTIONS = frozenset(
    opcode.opmap[name]
    for name in ("CACHE", "RESUME", "LOAD_CONST", "LOAD_SMALL_INT", "RETURN_VALUE", "RETURN_CONST")
    if name in opcode.opmap
)
_NEEDS_LOOP = re.compile(r"\b(?:create_task|ensure_future|get_running_loop|gather)\b")
_STARTS_LOOP = re.compile(
    r"\basyncio\s*\.\s*(?:run|Runner)\b|\brun_until_complete\b|\brun_forever\b|\bimport\b.*\brun\b"
)
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


class Cell:
    """One piece of code, compiled: its statements, and the last expression, whose value is the result."""

    def __init__(self, code: str, filename: str) -> None:
        """Raises what compiling raises: SyntaxError, ValueError for NUL bytes, RecursionError, MemoryError."""
        _sources.keep(code, filename)
        self._codes: list[types.CodeType] = []
        self._last: types.CodeType | None = None
        self._needs_loop = bool(_NEEDS_LOOP.search(code)) and not _STARTS_LOOP.search(code)
        tree: Any = compile(code, filename, "exec", _AWAIT | ast.PyCF_ONLY_AST, dont_inherit=True)
        self.definitions = _definitions_of(tree.body, code, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._codes.append(compile(tree, filename, "exec", _AWAIT, dont_inherit=True))
        if last is not None:
            self._last = compile(ast.Expression(last.value), filename, "eval", _AWAIT, dont_inherit=True)
        constant = self._last is None or _CONSTANT_INSTRUCTIONS.issuperset(self._last.co_code[::2])
        self.harmless = constant and not self._codes
        """Whether running it changes nothing, and can neither crash nor hang: an expression of literals."""

    @property
    def is_async(self) -> bool:
        """Whether it needs a running loop: it awaits at its top level, or starts a task that a later cell may await."""
        return self._needs_loop or any(map(_awaits, self._codes)) or (self._last is not None and _awaits(self._last))

    def run(self, names: dict[str, Any]) -> Any:
        """The value of the last expression, or None when the last statement is not an expression."""
        for code in self._codes:
            exec(code, names)
        return eval(self._last, names) if self._last is not None else None

    async def run_async(self, names: dict[str, Any]) -> Any:
        """The same, in a loop."""
        for code in self._codes:
            value = eval(code, names)
            if _awaits(code):
                await value
        if self._last is None:
            return None
        value = eval(self._last, names)
        return await value if _awaits(self._last) else value


def _awaits(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _definitions_of(body: list[ast.stmt], code: str, filename: str) -> saved_state.Definitions:
    """The top-level definitions of a cell."""
    lines: list[str] = []
    found: saved_state.Definitions = {}
    for statement in body:
        names = _defined_names(statement)
        if names:
            lines = lines or source_lines(code)
            found.update(dict.fromkeys(names, (filename, _source_of(statement, lines))))
    return found


def _source_of(statement: ast.stmt, lines: list[str]) -> str:
    """The statement with its decorators, and without others in the same lines."""
    start, column = statement.lineno, statement.col_offset
    decorators = [item.lineno for item in getattr(statement, "decorator_list", ())]
    if decorators:
        start, column = min(decorators), 0
    end = statement.end_lineno or start
    last = lines[end - 1].encode("utf-8")[: statement.end_col_offset].decode("utf-8")
    source = "".join([*lines[start - 1 : end - 1], last])
    return source.encode("utf-8")[column:].decode("utf-8")


def _defined_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


_source_cache = linecache.cache


def source_lines(code: str) -> list[str]:
    """The lines as Python counts them. The last one ends with a newline too, or Python 3.11 marks the wrong columns."""
    return io.StringIO(code if code.endswith("\n") else code + "\n", newline=None).readlines()


class _SourceCache:
    """The source of the newest cells, for tracebacks; the oldest is dropped when there is too much of it."""

    MAX_CELLS = 500
    MAX_CHARACTERS = 32 * 1024 * 1024

    def __init__(self) -> None:
        self._kept: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._size = 0

    def keep(self, code: str, filename: str) -> None:
        source = (len(code), None, source_lines(code), filename)
        _source_cache[filename] = source
        self._kept.append((filename, source))
        self._size += len(code)
        while len(self._kept) > 1 and (len(self._kept) > self.MAX_CELLS or self._size > self.MAX_CHARACTERS):
            oldest, source = self._kept.popleft()
            if _source_cache.get(oldest) is source:
                # Otherwise another session of this process has a cell of this name, which is newer.
                del _source_cache[oldest]
            self._size -= source[0]


_sources = _SourceCache()


# --- names ----------------------------------------------------------------------------------------------------------

_BUILTINS = builtins.__dict__
_original_builtins = dict(_BUILTINS)
_original_modules = dict(sys.modules)


def _new_namespace() -> dict[str, Any]:
    """The names of a fresh session, as those of the main module."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    return module.__dict__


def _add_builtin(name: str, value: Any) -> None:
    """A name that code has without importing it, and that it cannot lose."""
    _BUILTINS[name] = _original_builtins[name] = value


def _repair(names: dict[str, Any]) -> None:
    """Put back what a cell removed that all Python code needs. Uses no builtin, since there may be none."""
    if not _original_builtins.keys() <= _BUILTINS.keys():
        for name in _original_builtins.keys() - _BUILTINS.keys():
            _BUILTINS[name] = _original_builtins[name]
    names["__builtins__"] = builtins
    linecache.cache = _source_cache
    if "builtins" not in sys.modules:
        for name in _original_modules.keys() - sys.modules.keys():
            sys.modules[name] = _original_modules[name]


def _add_packages(folder: object) -> None:
    """A folder of packages in front of the interpreter's own, and behind the standard library."""
    if isinstance(folder, str):
        tracebacks.hide_folder(folder)
    if isinstance(folder, str) and folder not in sys.path:
        own = [number for number, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))]
        sys.path.insert(own[0] if own else len(sys.path), folder)
        try:
            site.addsitedir(folder)  # It is on the path already: this reads the `.pth` files of its packages.
        except SystemExit as wanted:
            print(f"a .pth file in {folder} tried to exit Python: {wanted.code!r}", file=sys.stderr)


# --- the list of variables -------------------------------------------------------------------------------------------

_MAX_VARIABLES = 1000
"""Variables in a list; the newest ones beyond are left out."""
_PREVIEW = 200
"""Characters of a preview."""


class ListVariables:
    """Takes the place of a `Cell`: it runs as code does, because previews call `__repr__` methods of the user's.

    After an interrupt it goes on without those."""

    is_async = harmless = False

    def __init__(self, own: dict[str, Any]) -> None:
        """`own` are the names that every session has; they are listed only where code has replaced them."""
        self._own = own

    def run(self, names: dict[str, Any]) -> list[dict[str, Any]]:
        calls_repr = True
        while True:
            try:
                return self._list(names, calls_repr=calls_repr)
            except KeyboardInterrupt:
                calls_repr = False

    def _list(self, names: dict[str, Any], *, calls_repr: bool) -> list[dict[str, Any]]:
        found = []
        for name, value in list(names.items()):
            if not isinstance(name, str) or name.startswith("_") or (name in self._own and self._own[name] is value):
                continue
            shown = calls_repr or type(value) in _SCALARS
            found.append(
                {
                    "name": name,
                    "type": str(type(value).__name__),
                    "size": _size(value),
                    "preview": values.safe_repr(value, _PREVIEW) if shown else "",
                }
            )
            if len(found) == _MAX_VARIABLES:
                break
        return found


def _size(value: Any) -> int:
    """Bytes of the object itself, without what it refers to."""
    try:
        return sys.getsizeof(value)
    except Exception:  # noqa: BLE001 - the user's own __sizeof__ may raise anything
        return 0


# --- runs -----------------------------------------------------------------------------------------------------------


_RESERVE = 120_000
"""Bytes that are allocated while code runs, and free for the worker between runs: code may use up all memory, or set
RLIMIT_DATA to 0. They are never written to, so they are part of the address space only; malloc would give a larger
block back to the system."""
_allocate, _free = ctypes.pythonapi.PyMem_RawMalloc, ctypes.pythonapi.PyMem_RawFree
_allocate.argtypes, _allocate.restype = (ctypes.c_size_t,), ctypes.c_void_p
_free.argtypes, _free.restype = (ctypes.c_void_p,), None


class ContinueAsFork(BaseException):
    """Raised in a new fork of the worker, to leave whatever was running and return to the loop."""


class CodeRunner:
    """A session's variables, and the one way to run code in them."""

    def __init__(self, host: HostCallClient, interrupts: Interrupts, settings: dict[str, Any], home: str) -> None:
        self.streams = StandardStreams()
        self.loop = CellLoop(interrupts)
        self._interrupts = interrupts
        self._host = host
        self._home = home
        self._names_of_host = [str(name) for name in settings.get("names") or []]
        self._cells = 0
        self._names: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        """The names that every session has."""
        self._state = saved_state.KeptNames({}, {}, dict(os.environ))
        self._shown = DisplayedBundles()
        _add_builtin("input", no_input)
        threading.excepthook = tracebacks.thread_excepthook
        _add_builtin("display", self._display)
        for name, bases in (settings.get("errors") or {}).items():
            _add_builtin(str(name), error_class(str(name), [str(base) for base in bases]))
        _add_packages(settings.get("packages"))
        self.reset()

    def reset(self) -> None:
        """Forget every name that code has made."""
        os.chdir(self._home)
        if sys.path[:1] != [""]:
            sys.path.insert(0, "")
        sys.argv = [""]
        self.loop.forget()
        self._names = _new_namespace()
        self._names.update(namespaces(self._host, self._names_of_host, builtins))
        self._own = dict(self._names)
        self._state = saved_state.KeptNames(self._names, self._own, self._state.environment)
        gc.collect()

    def save_and_exit(self, random_state: Any, file: int, report: int) -> None:
        """In a fork: write the variables to a file."""
        saved_state.save_and_exit(self._state, random_state, file, report)

    def state_cell(self, operation: str, file: int) -> saved_state.LoadVariables | saved_state.SaveVariables:
        """What `run` takes in the place of code to load variables from a file, or to save them in it."""
        kind = saved_state.LoadVariables if operation == "load" else saved_state.SaveVariables
        return kind(self._state, file)

    def recorded(self, is_wanted: Callable[[], bool]) -> Record | None:
        """What is recorded of the variables and the files; None if it was not wanted any more."""
        found = recording.record_variables(self._names, self._own, is_wanted)
        if found is None:
            return None
        return {"variables": found[0], "left_out": found[1], "files": recording.fingerprint(self._home)}

    def set_variables(self, variables: dict[str, Any]) -> None:
        self._names.update(variables)

    def run(self, code: Any, before_run: Callable[[Cell], None]) -> Record:
        """Run one cell; its outcome as the result record has it. Raises nothing but `ContinueAsFork`.

        The code is a text, or a `state_cell`; without code, the value is the list of variables.
        `before_run` is called when the code is compiled."""
        self._cells += 1
        self._shown = DisplayedBundles()
        before = _usage()
        if type(sys.stdin) is not NoInput:
            sys.stdin = NoInput()
        self._interrupts.install()
        reserve = _allocate(_RESERVE)
        try:
            self._interrupts.begin()
            outcome = self._outcome(code, f"<cell {self._cells}>", before_run)
            self._interrupts.end()
        except ContinueAsFork:
            raise
        except BaseException as error:  # noqa: BLE001 - an interrupt while the outcome was formatted
            self._interrupts.end()
            _repair(self._names)
            self.streams.settle()
            outcome = {"error": tracebacks.format_late_exception(error), "error_type": tracebacks.type_name(error)}
        finally:
            _free(reserve)
        after = _usage()
        outcome["usage"] = {"cpu_seconds": after[0] - before[0], "max_rss_bytes": after[1]}
        outcome["display"] = self._shown.bundles
        outcome["shared"] = self.streams.children_made
        return outcome

    def _outcome(self, code: Any, filename: str, before_run: Callable[[Cell], None]) -> Record:
        outcome: Record = {}
        try:
            cell = self._new_cell(code, filename)
            self._interrupts.end()
            before_run(cell)
            self.streams.children_made = False
            self._interrupts.begin()
            value = self.loop.run(cell.run_async(self._names)) if cell.is_async else cell.run(self._names)
            _repair(self._names)
            self._shown.add(value)
            outcome = {"value": values.encode(value)}
            value = None  # its destructor may be the code's own, and runs before the output is complete
        except ContinueAsFork:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the code raises is its result
            if tracebacks.is_plain_interrupt(error):
                # The host interrupts until it has the result; the next one must not cut off formatting the first.
                self._interrupts.end()
            _repair(self._names)
            outcome = {"error": tracebacks.format_exception(error), "error_type": tracebacks.type_name(error)}
            if isinstance(error, SystemExit):
                outcome["exit_code"] = exit_status(error.code)
        self._shown.add_open_figures()
        self.streams.settle()
        return outcome

    def _new_cell(self, code: Any, filename: str) -> Any:
        if code is None:
            return ListVariables(self._own)
        if not isinstance(code, str):
            return code
        cell = Cell(code, filename)
        self._state.definitions.update(cell.definitions)
        return cell

    def _display(self, *shown: Any) -> None:
        for value in shown:
            if not self._shown.add(value):
                sys.stdout.write(f"{value}\n")


def exit_status(code: object) -> int:
    """The status with which a Python program exits that raises SystemExit with this code."""
    if type(code) is not int:
        return int(code is not None)
    return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF


_INHERITED_PEAK = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""A program begins with the peak of the process that started it, which may have been far larger."""


def _usage() -> tuple[float, int]:
    """CPU seconds with those of children, and the largest resident size in bytes."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return seconds, (own.ru_maxrss if own.ru_maxrss != _INHERITED_PEAK else _own_peak(_INHERITED_PEAK)) * 1024


def _own_peak(default: int) -> int:
    """In kilobytes, of this program alone; slower than getrusage."""
    try:
        with open("/proc/self/status", "rb") as file:
            return next(int(row.split()[1]) for row in file if row.startswith(b"VmHWM:"))
    except (OSError, StopIteration, ValueError):
        return default
