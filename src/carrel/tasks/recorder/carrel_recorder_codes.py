"""Digests of code objects: equal for code that was compiled from the same file by the same Python.

Standard library only, and any Python from 3.6 on. From 3.11 on a code object runs a copy of its byte code that adapts
itself and that `co_code` does not show, so that one is read, and what has adapted is put back.
"""

import dis
import hashlib
import opcode
import types
from typing import Any

_FIELDS = (
    *("co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_names", "co_varnames"),
    *("co_freevars", "co_cellvars", "co_firstlineno", "co_exceptiontable"),
)
_Code, _sha256, _repr = types.CodeType, hashlib.sha256, repr
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))


_TRACED = "INSTRUMENTED_"


def _adapted() -> Any:
    """For each number of an instruction its plain one and how many cells of memory follow it; None if not known.

    None stands for one that hides the plain one (`INSTRUMENTED_LINE`), which only `co_code` knows then.
    """
    names, numbers = getattr(dis, "deoptmap", None), getattr(dis, "_all_opmap", None)
    caches = getattr(opcode, "_inline_cache_entries", None)
    if names is None or numbers is None or caches is None:
        return None
    table = {}
    for name, number in opcode.opmap.items():
        if number < 256:
            table[number] = (number, caches.get(name, 0) if isinstance(caches, dict) else caches[number])
    for name, plain in names.items():
        if name in numbers and plain in opcode.opmap:
            table[numbers[name]] = table[opcode.opmap[plain]]
    # What is measured or traced (from Python 3.12 on) has instructions of its own in the place of the plain ones.
    for name, number in numbers.items():
        if name.startswith(_TRACED):
            table[number] = table.get(opcode.opmap.get(name[len(_TRACED) :]))
    return table


_TABLE = _adapted()  # type: Any


def byte_code(code: Any) -> bytes:
    """What is really run, as it was compiled."""
    if _TABLE is None:
        return bytes(code.co_code)
    raw, compiled, found, at = code._co_code_adaptive, code.co_code, bytearray(), 0
    if raw == compiled:
        return bytes(compiled)
    while at < len(raw):
        known = _TABLE.get(raw[at], ())
        if known is None:
            known = _TABLE.get(compiled[at])
        if not known:
            return bytes(compiled)
        number, cells = known
        found += bytes((number, raw[at + 1])) + bytes(2 * cells)
        at += 2 + 2 * cells
    return bytes(found)


def digest(code: Any) -> str:
    return str(_sha256(_repr(_whole(code)).encode("utf-8", "surrogatepass")).hexdigest()[:32])


def _whole(code: Any) -> Any:
    fields = tuple(getattr(code, name, None) for name in _FIELDS)
    return (fields, byte_code(code), tuple(_constant(value) for value in code.co_consts))


def _constant(value: Any) -> Any:
    kind = type(value)
    if kind is _Code:
        return _whole(value)
    if kind is tuple:
        return ("tuple", tuple(_constant(part) for part in value))
    if kind is frozenset:
        return ("frozenset", tuple(sorted(_repr(_constant(part)) for part in value)))
    return (kind.__name__, _repr(value) if kind in _PLAIN else "?")


def all_codes(code: Any) -> Any:
    """This one and all in it."""
    yield code
    for value in code.co_consts:
        if type(value) is _Code:
            yield from all_codes(value)


def _calibrate() -> None:
    """Where this Python adapts code in a way that is not understood here, `co_code` has to do."""
    global _TABLE
    for module in (dis, opcode, types):
        for value in vars(module).values():
            code = getattr(value, "__code__", None)
            if _TABLE is not None and type(code) is _Code and byte_code(code) != code.co_code:
                _TABLE = None


_calibrate()
