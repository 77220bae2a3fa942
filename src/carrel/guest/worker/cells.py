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
from collections.abc import Iterator
from typing import Any

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
LARGE = 512 * 1024
"""Longer code is compiled in pieces: as one tree, ten megabytes of it would take gigabytes of memory."""
_KEPT_SOURCE = 32 * 1024 * 1024
_KEPT_CELLS = 500
_SHORT = 500
_MORE_THAN_AN_EXPRESSION = re.compile(r"[\n;\\]|^\s")
_HARMLESS_STEPS = frozenset(
    opcode.opmap[name]
    for name in ("CACHE", "RESUME", "LOAD_NAME", "LOAD_CONST", "BUILD_TUPLE", "BUILD_LIST", "RETURN_VALUE")
    if name in opcode.opmap
)
_STARTS = re.compile(r"^(?!(?:else|elif|except|finally|case)\b)[\w@]", re.MULTILINE)

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
        self.harmless = self.changes_nothing = False
        self.line = 1
        """Where its last expression begins."""
        if len(code) <= _SHORT and self._is_expression(code, filename):
            return
        if len(code) <= LARGE:
            self._add(compile(code, filename, "exec", _AWAIT | ast.PyCF_ONLY_AST, dont_inherit=True), filename)
            return
        rest = ""
        for piece, left in _pieces(code, filename):
            self._codes.append(piece)
            rest = left
        self._add(compile(rest or code, filename, "exec", _AWAIT | ast.PyCF_ONLY_AST, dont_inherit=True), filename)
        self.harmless = self.changes_nothing = False

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
        self._last, self.harmless, self.changes_nothing = made, harmless, harmless
        return True

    def _add(self, tree: Any, filename: str) -> None:
        self.harmless = all(map(_harmless, tree.body))
        self.changes_nothing = self.harmless and all(isinstance(node, (ast.Expr, ast.Pass)) for node in tree.body)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._codes.append(compile(tree, filename, "exec", _AWAIT, dont_inherit=True))
        if last is not None:
            self.line = last.lineno
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


_LET_GO = compile("of.clear()", "<cell>", "exec")


def let_go(of: list[Any], filename: str, line: int) -> None:
    """Drop what a cell gave or raised, as if its own line did: what Python says when something goes, of a coroutine
    that nobody has awaited above all, names the line that runs at that moment."""
    exec(_LET_GO.replace(co_filename=filename, co_firstlineno=line), {"of": of})


def line_in(trace: types.TracebackType | None, filename: str) -> int:
    """The line of a cell from which an exception came; 1 where it never ran."""
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    return 1 if trace is None else trace.tb_lineno or 1


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


def _pieces(code: str, filename: str) -> Iterator[tuple[types.CodeType, str]]:
    """Long code, compiled piece by piece; with each, what is left after it."""
    begin, lines = 0, 0
    while len(code) - begin > LARGE:
        size = LARGE // 2
        while True:
            found = _STARTS.search(code, begin + size)
            if found is None:
                return
            piece = code[begin : found.start()]
            try:
                # Where it was cut inside of a statement this does not compile, and more is taken.
                made = compile("\n" * lines + piece, filename, "exec", _AWAIT, dont_inherit=True)
                break
            except SyntaxError:
                size *= 2
        begin, lines = found.start(), lines + piece.count("\n")
        yield made, "\n" * lines + code[begin:]


def _harmless(node: ast.AST) -> bool:
    """Whether running this can neither crash nor hang: names and literals, and a little arithmetic on them."""
    if isinstance(node, ast.Expr):
        return _harmless(node.value)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets) and _harmless(node.value)
    if isinstance(node, ast.BinOp):
        return _number(node)
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(_harmless, node.elts))
    return isinstance(node, (ast.Constant, ast.Name, ast.Pass))


def _number(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.Add, ast.Sub)) and _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


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
