"""One cell of code: compiled, run in a lasting namespace, its last expression's value kept."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import linecache
import opcode
import re
import sys
import types
from collections import deque
from typing import Any

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_KEPT_SOURCE = 32 * 1024 * 1024
_KEPT_CELLS = 500
_SHORT = 500
_MORE_THAN_AN_EXPRESSION = re.compile(r"[\n;\\]|^\s")
_HARMLESS_STEPS = frozenset(
    opcode.opmap[name]
    for name in ("CACHE", "RESUME", "LOAD_NAME", "LOAD_CONST", "BUILD_TUPLE", "BUILD_LIST", "RETURN_VALUE")
    if name in opcode.opmap
)
_WANTS_A_LOOP = re.compile(r"\b(?:create_task|ensure_future|get_running_loop|gather)\b")
_HAS_ITS_OWN = re.compile(
    r"\basyncio\s*\.\s*(?:run|Runner)\b|\brun_until_complete\b|\brun_forever\b|\bimport\b.*\brun\b"
)

_cache = linecache.cache


class Cell:
    """Compiled code: what is executed, and the expression whose value is wanted."""

    def __init__(self, code: str, filename: str) -> None:
        """Raises what compiling raises: SyntaxError, ValueError for NUL bytes, RecursionError, MemoryError."""
        _sources.keep(code, filename)
        self._codes: list[types.CodeType] = []
        self._last: types.CodeType | None = None
        self._wants_a_loop = bool(_WANTS_A_LOOP.search(code)) and not _HAS_ITS_OWN.search(code)
        self.harmless = False
        """Whether running it changes nothing, and can neither crash nor hang: names and literals."""
        if len(code) <= _SHORT and self._is_expression(code, filename):
            return
        self._add(compile(code, filename, "exec", _AWAIT | ast.PyCF_ONLY_AST, dont_inherit=True), filename)

    def _is_expression(self, code: str, filename: str) -> bool:
        """Compile one short expression as it stands, which takes a third of the time; False where a tree is needed."""
        if _MORE_THAN_AN_EXPRESSION.search(code):
            return False
        try:
            made = compile(code, filename, "eval", _AWAIT, dont_inherit=True)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return False
        harmless = _HARMLESS_STEPS.issuperset(made.co_code[::2])
        if not harmless and "(" not in code:
            return False
        self._last, self.harmless = made, harmless
        return True

    def _add(self, tree: Any, filename: str) -> None:
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._codes.append(compile(tree, filename, "exec", _AWAIT, dont_inherit=True))
        if last is not None:
            self._last = compile(ast.Expression(last.value), filename, "eval", _AWAIT, dont_inherit=True)

    @property
    def waits(self) -> bool:
        """Whether it needs a running loop: it awaits at its top level, or seems to begin something there that a later
        cell will await."""
        return self._wants_a_loop or any(map(_waits, self._codes)) or (self._last is not None and _waits(self._last))

    def run(self, names: dict[str, Any]) -> Any:
        """The value of the last expression, or None when the last statement is none."""
        for code in self._codes:
            exec(code, names)
        return eval(self._last, names) if self._last is not None else None

    async def run_waiting(self, names: dict[str, Any]) -> Any:
        """The same, in a loop."""
        for code in self._codes:
            value = eval(code, names)
            if _waits(code):
                await value
        if self._last is None:
            return None
        value = eval(self._last, names)
        return await value if _waits(self._last) else value


def _waits(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


class _Sources:
    """The source of the last cells, for tracebacks; the oldest goes when there is too much of it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._size = 0

    def keep(self, code: str, filename: str) -> None:
        source = (len(code), None, source_lines(code), filename)
        _cache[filename] = source
        self._kept.append((filename, source))
        self._size += len(code)
        while len(self._kept) > 1 and (len(self._kept) > _KEPT_CELLS or self._size > _KEPT_SOURCE):
            oldest, source = self._kept.popleft()
            if _cache.get(oldest) is source:
                # Otherwise another session of this process has a cell of this name, which is newer.
                del _cache[oldest]
            self._size -= source[0]


_sources = _Sources()


def source_lines(code: str) -> list[str]:
    """The lines as Python counts them, for tracebacks. The last one ends too, or Python 3.11 points beside what it
    means."""
    return io.StringIO(code if code.endswith("\n") else code + "\n", newline=None).readlines()


# --- names ----------------------------------------------------------------------------------------------------------

_BUILTINS = builtins.__dict__
_builtins_once = dict(_BUILTINS)
_modules_once = dict(sys.modules)


def new_namespace() -> dict[str, Any]:
    """The names of a fresh session, as those of the main module."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    return module.__dict__


def add_builtin(name: str, value: Any) -> None:
    """A name that code has without importing it, and that it cannot lose."""
    _BUILTINS[name] = _builtins_once[name] = value


def mend(names: dict[str, Any]) -> None:
    """Put back what a cell took away from all Python code. Uses no builtin, since there may be none."""
    if not _builtins_once.keys() <= _BUILTINS.keys():
        for name in _builtins_once.keys() - _BUILTINS.keys():
            _BUILTINS[name] = _builtins_once[name]
    names["__builtins__"] = builtins
    linecache.cache = _cache
    if "builtins" not in sys.modules:
        for name in _modules_once.keys() - sys.modules.keys():
            sys.modules[name] = _modules_once[name]
