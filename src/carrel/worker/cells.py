"""One cell of code: compiled, run in a lasting namespace, its last expression's value kept."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import sys
import types
from typing import Any

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class Cell:
    """Compiled code: what is executed, and the expression whose value is wanted."""

    def __init__(self, code: str, filename: str) -> None:
        """Raises what compiling raises: SyntaxError, ValueError for NUL bytes, RecursionError, MemoryError."""
        # A lazy entry, so that tracebacks show the user's lines.
        linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
        tree = compile(code, filename, "exec", _AWAIT | ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        self.harmless = all(map(_harmless, tree.body))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._body = compile(tree, filename, "exec", _AWAIT, dont_inherit=True)
        self._last = None
        if isinstance(last, ast.Expr):
            self._last = compile(ast.Expression(last.value), filename, "eval", _AWAIT, dont_inherit=True)

    @property
    def waits(self) -> bool:
        """Whether it awaits at its top level and so needs a running loop."""
        codes = [code for code in (self._body, self._last) if code is not None]
        return any(code.co_flags & inspect.CO_COROUTINE for code in codes)

    def run(self, names: dict[str, Any]) -> Any:
        exec(self._body, names)
        return eval(self._last, names) if self._last is not None else None

    async def run_waiting(self, names: dict[str, Any]) -> Any:
        value = eval(self._body, names)
        if self._body.co_flags & inspect.CO_COROUTINE:
            await value
        if self._last is None:
            return None
        value = eval(self._last, names)
        return await value if self._last.co_flags & inspect.CO_COROUTINE else value


def _harmless(node: ast.AST) -> bool:
    """Whether running this can neither crash, hang nor be killed: names and literals, and a little arithmetic on them."""
    if isinstance(node, ast.Expr):
        return _harmless(node.value)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets) and _harmless(node.value)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.Add, ast.Sub)) and _number(node.left) and _number(node.right)
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(_harmless, node.elts))
    return isinstance(node, (ast.Constant, ast.Name, ast.Pass))


def _number(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.Add, ast.Sub)) and _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def new_namespace() -> dict[str, Any]:
    """The names of a fresh session, in a module of their own: what code does to them, or to its builtins, stays there."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = dict(vars(builtins))
    return module.__dict__
