"""Compile test files in a separate process, in which no code under test runs, and print their digests.

Standard library only, except for pytest's assertion rewriting. Standard input has
`{"files": [[name, path, is_rewritten], …], "pytest": folder, "hook": bool}`.
"""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from carrel_code_digests import all_codes, digest, plain_repr

_TRANSPARENT = ("pytest.mark", "mark", "pytest.hookimpl", "hookimpl", "staticmethod", "classmethod", "property")
"""Decorators that return the function itself, or an object from which it can be read."""


class _Config:
    """The only setting that pytest's assertion rewriting reads."""

    def __init__(self, hook: bool) -> None:
        self._hook = hook

    def getini(self, name: str) -> Any:
        return self._hook if name == "enable_assertion_pass_hook" else None


def table_of(path: str, is_rewritten: bool, config: Any) -> Any:
    with open(path, "rb") as file:
        source = file.read()
    if is_rewritten:
        from _pytest.assertion.rewrite import _rewrite_test  # noqa: PLC0415 -- only needed for rewritten files

        code = _rewrite_test(Path(path), config)[1]
    else:
        code = compile(source, path, "exec", dont_inherit=True)
    return {
        "module": digest(code),
        "all": sorted({digest(each) for each in all_codes(code)}),
        "defs": _definitions(ast.parse(source).body, code, "", _made_global(source)),
        "patched": sorted(set(_patched(source))),
        **_globals(source),
    }


def _globals(source: bytes) -> Any:
    """The names of a module; of those that are bound once, the imports and the constants."""
    nodes, unsure = list(_statements(ast.parse(source).body)), _made_global(source)
    every = [name for node in nodes for name in _names_bound(node)]
    imports, constants = {}, {}  # type: dict[str, Any], dict[str, str]
    for node in nodes:
        if isinstance(node, ast.Import):
            imports.update({each.asname or each.name.partition(".")[0]: [_imported(each), ""] for each in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imports.update({each.asname or each.name: [node.module, each.name] for each in node.names})
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known = _constant(node.value)
            constants.update({each.id: known for each in targets if isinstance(each, ast.Name) and known is not None})
    has_all = not any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    return {
        "names": sorted({*every, *unsure}) if has_all else None,
        "imports": {name: at for name, at in imports.items() if every.count(name) == 1 and name not in unsure},
        "constants": {name: at for name, at in constants.items() if every.count(name) == 1 and name not in unsure},
    }


def _imported(alias: Any) -> str:
    return str(alias.name if alias.asname else alias.name.partition(".")[0])


def _constant(node: Any) -> Any:
    try:
        return plain_repr(ast.literal_eval(node)) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _made_global(source: bytes) -> Any:
    return {name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Global) for name in node.names}


def _patched(source: bytes) -> Any:
    """The attributes that the file sets: `Case.test_it = …`, `monkeypatch.setattr(helpers, "name", …)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield ("self." if getattr(node.value, "id", "") == "self" else "") + node.attr
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for each in node.args[:2] if name in ("setattr", "delattr", "patch", "object") else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value.rpartition(".")[2]


def _definitions(body: Any, code: Any, above: str, unsure: Any) -> Any:
    """The functions of a module or a class, by qualified name."""
    nodes, bound = list(_statements(body)), {}  # type: Any, dict[str, int]
    for node in nodes:
        for name in _names_bound(node):
            bound[name] = bound.get(name, 0) + 1
    found = {}
    inner = {}  # type: dict[str, Any]
    for value in code.co_consts:
        if hasattr(value, "co_consts"):
            inner.setdefault(value.co_name, []).append(value)
    for node in nodes:
        name = getattr(node, "name", None)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or name not in inner:
            continue
        is_sure = bound[name] == 1 and name not in unsure and all(map(_is_transparent, node.decorator_list))
        if isinstance(node, ast.ClassDef):
            is_sure = is_sure and not node.keywords
            for path, about in _definitions(node.body, inner[name][0], above + name + ".", ()).items():
                about["sure"] = about["sure"] and is_sure
                found[path] = about
        else:
            found[above + name] = {
                "codes": [digest(each) for each in inner[name]],
                "sure": is_sure,
                "defaults": [_value(each) for each in node.args.defaults],
                "names": {arg.arg: _value(each) for arg, each in zip(node.args.kwonlyargs, node.args.kw_defaults)},  # noqa: B905
            }
    return found


def _statements(body: Any) -> Any:
    """All statements of one scope, also those inside `if`, `try`, `for` and `with`."""
    for node in body:
        yield from _below(node)


def _below(node: Any) -> Any:
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _below(child)


def _names_bound(node: Any) -> Any:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return [node.id]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    named = getattr(node, "name", None) or getattr(node, "rest", None)  # of `except` and `match`
    return [named] if isinstance(named, str) else []


def _is_transparent(decorator: Any) -> bool:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    parts = []  # type: list[str]
    while isinstance(decorator, ast.Attribute):
        parts.insert(0, decorator.attr)
        decorator = decorator.value
    name = ".".join([decorator.id, *parts]) if isinstance(decorator, ast.Name) else ""
    return name in _TRANSPARENT or name.startswith(("pytest.mark.", "mark."))


def _value(node: Any) -> Any:
    """The `repr` of a constant default; None for any other expression."""
    return repr(node.value) if isinstance(node, ast.Constant) else None


def main() -> None:
    request = json.load(sys.stdin)
    if request.get("pytest"):
        sys.path.append(request["pytest"])
    config, found = _Config(request.get("hook", False)), {}
    for name, path, is_rewritten in request["files"]:
        try:
            found[name] = table_of(path, is_rewritten, config)
        except Exception as problem:  # noqa: BLE001 -- its tests cannot be compared; this is the reason
            found[name] = {"problem": type(problem).__name__ + ": " + str(problem)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
