"""Digests of code objects: equal for code that was compiled from the same file by the same Python.

Standard library only; Python 3.6 or later. Since 3.11 a code object runs an adaptive copy of its byte code, which
`co_code` does not show. That copy is read here, and adapted instructions are mapped back to the compiled ones.
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
    """Map each opcode to its base opcode and the number of cache entries after it; None if this Python is unknown.

    A value of None stands for an opcode that hides the base one (`INSTRUMENTED_LINE`): only `co_code` has it then.
    """
    names, numbers = getattr(dis, "deoptmap", None), getattr(dis, "_all_opmap", None)
    caches = getattr(opcode, "_inline_cache_entries", None)
    if names is None or numbers is None or caches is None:
        return None
    table = {}
    for name, number in opcode.opmap.items():
        if number < 256:
            table[number] = (number, caches.get(name, 0) if isinstance(caches, dict) else caches[number])
    for name, plain_function in names.items():
        if name in numbers and plain_function in opcode.opmap:
            table[numbers[name]] = table[opcode.opmap[plain_function]]
    # Since Python 3.12, traced code has instrumented opcodes in place of the base ones.
    for name, number in numbers.items():
        if name.startswith(_TRACED):
            table[number] = table.get(opcode.opmap.get(name[len(_TRACED) :]))
    return table


_TABLE = _adapted()  # type: Any


def byte_code(code: Any) -> bytes:
    """The byte code that really runs, mapped back to the compiled instructions."""
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


def plain_repr(value: Any) -> Any:
    """A description of a constant; None when the value is not one of Python's own immutable types."""
    if type(value) in (tuple, frozenset):
        parts = [plain_repr(part) for part in value]
        return (
            None
            if None in parts
            else type(value).__name__ + _repr(sorted(parts) if type(value) is frozenset else parts)
        )
    return type(value).__name__ + _repr(value) if type(value) in _PLAIN else None


def all_codes(code: Any) -> Any:
    """This code object and all nested ones."""
    yield code
    for value in code.co_consts:
        if type(value) is _Code:
            yield from all_codes(value)


def _calibrate() -> None:
    """Fall back to `co_code` when this Python adapts code in an unknown way."""
    global _TABLE
    for module in (dis, opcode, types):
        for value in vars(module).values():
            code = getattr(value, "__code__", None)
            if _TABLE is not None and type(code) is _Code and byte_code(code) != code.co_code:
                _TABLE = None


_calibrate()
