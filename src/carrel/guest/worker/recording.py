"""What is recorded of a session's variables after a run: bounded, and without running any code of the user's."""

from __future__ import annotations

import datetime
import decimal
import os
import pathlib
import sys
import types
import uuid
from _blake2 import blake2b  # hashlib would load OpenSSL into every worker
from collections.abc import Callable
from time import perf_counter  # by name: what code sets on the module time does not matter here
from typing import Any

from .values import BoundedRepr, Full

LONGEST = 0.02
"""Seconds for all variables; those that are left after it are named without being looked at."""
MAX_BYTES = 64 * 1024
"""Of a report."""
MAX_VARIABLES = 1000
_MAX_NAME = 200
_PREVIEW = 200
_COMPARED = 32 * 1024
"""Characters of a variable's text that its digest covers; one that is longer has a `~` before its digest."""
_MAX_ITEMS = 1000
"""Items of an object of a subclass of list, dict and so on that are looked at."""
_HASHED = 1024 * 1024
"""Bytes of a text or an array that are hashed."""
_FILES_SECONDS = 0.005
_MAX_FILES = 2000

Entry = tuple[str, str, int, str, str]
"""Name, type, size, preview and digest; the last two are empty where the variable was not looked at."""

_name_of = type.__dict__["__name__"].__get__
_mro_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__
_size_of = type.__dict__["__basicsize__"].__get__
"""As they are, where a metaclass has properties of these names."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_BASES = (*_CONTAINERS, str, bytes, bytearray, int, float)
# By their ids, because a metaclass may have methods of its own for comparing classes.
_NUMBERS_AND_TEXTS = (bool, int, float, complex, decimal.Decimal, str, bytes, bytearray)
_OTHERS = (type(None), range, uuid.UUID, pathlib.PosixPath, datetime.date, datetime.timedelta)
_SCALARS = frozenset(map(id, (*_NUMBERS_AND_TEXTS, *_OTHERS)))
_PLAIN = _SCALARS | frozenset(map(id, _CONTAINERS))


class _Shape(BoundedRepr):
    """A text like `repr`, from builtin types and the attributes of objects. Methods of the user's are not called."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.is_whole = True

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is int and value.bit_length() > 10_000:
            self.is_whole = False
            self._add(f"<int of {value.bit_length()} bits>")
        elif id(kind) in _PLAIN:
            super().write(value, depth)
        elif kind is datetime.datetime and type(value.tzinfo) in (type(None), datetime.timezone):
            self._add(repr(value))
        else:
            self._object(value, kind, depth)

    def _object(self, value: Any, kind: type, depth: int) -> None:
        if any(base is type for base in _mro_of(kind)):
            self._add(f"<class {class_name(value)}>")
        elif kind is types.FunctionType:
            self._add(f"<function {str.__str__(value.__name__):.100}>")
            self.is_whole = False
        elif kind is types.ModuleType:
            name = value.__dict__.get("__name__")
            self._add(f"<module {name:.100}>" if type(name) is str else "<module>")
        elif (about := _about_array(value, kind)) is not None:
            self._add(about)
            self.is_whole = False
        elif depth < 8 and id(value) not in self._inside:
            self._inside.add(id(value))
            self._add(f"<{class_name(kind)}")
            self._content(value, kind, depth)
            self._add(">")
            self._inside.discard(id(value))
        else:
            self._add("...")

    def _content(self, value: Any, kind: type, depth: int) -> None:
        """The items of a subclass of a builtin type, and the attributes of an object."""
        builtin: Any = next((base for base in _BASES if any(each is base for each in _mro_of(kind))), None)
        is_known = False
        if builtin is not None and (builtin in (int, float) or builtin.__len__(value) <= _MAX_ITEMS):
            self._add(" ")
            self.write(_copy(builtin, value), depth + 1)
            is_known = True
        attributes = _attributes(value, kind)
        for number, (name, inner) in enumerate(attributes.items() if attributes else ()):
            self._add(f"{',' if number else ''} {name:.100}=" if type(name) is str else " …=")
            self.write(inner, depth + 1)
        self.is_whole = self.is_whole and (is_known or attributes is not None)


def _copy(builtin: Any, value: Any) -> Any:
    """A plain copy, made by the builtin type's own methods. Nothing is hashed, which could call the user's methods."""
    if builtin is dict:
        return list(dict.items(value))
    if builtin in _CONTAINERS:
        return list(builtin.__iter__(value))
    return builtin.__add__(value, 0) if builtin in (int, float) else builtin.__getitem__(value, slice(None))


def _attributes(value: Any, kind: type) -> dict[Any, Any] | None:
    """The attributes of an object, unless its class has something of its own in their place."""
    for base in _mro_of(kind):
        found = _dict_of(base).get("__dict__")
        if found is not None:
            if type(found) is not types.GetSetDescriptorType:
                return None
            attributes = found.__get__(value)
            return attributes if type(attributes) is dict else None
    return None


def _about_array(value: Any, kind: type) -> str | None:
    """Describe an array of numpy or a table of pandas by its shape; None for anything else."""
    if kind is _class_of("numpy", "ndarray"):
        return f"array of {value.dtype}, {' × '.join(map(str, value.shape))}"
    if kind is _class_of("pandas", "DataFrame"):
        return f"DataFrame of {len(value.index):,} rows × {len(value.columns):,} columns"
    return None


def _class_of(module: str, name: str) -> Any:
    """A class of a library, if the library is loaded."""
    loaded = sys.modules.get(module)
    return loaded.__dict__.get(name, False) if type(loaded) is types.ModuleType else False


def class_name(kind: type) -> str:
    return str.__str__(_name_of(kind))[:100]


def describe(value: Any) -> tuple[int, str, str]:
    """Return the size in bytes (without what is referred to), a preview, and a digest of a value."""
    kind = type(value)
    shape = _Shape(_COMPARED)
    try:
        shape.write(value, 0)
    except Full:
        shape.is_whole = False
    except Exception:  # noqa: BLE001 - another thread changes it meanwhile, or it is nested too deeply
        shape.is_whole = False
        shape.pieces.append("…")
    text = "".join(shape.pieces).encode("utf-8", "backslashreplace")
    preview = text[: 4 * _PREVIEW].decode("utf-8", "ignore")
    is_cut = len(preview) > _PREVIEW or (not shape.is_whole and len(text) >= _COMPARED)
    data = _buffer(value, kind)
    whole = shape.is_whole if data is None else len(data) <= _HASHED
    digest = blake2b(text if data is None else data[:_HASHED], digest_size=8).hexdigest()
    size = sys.getsizeof(value) if id(kind) in _PLAIN else int(_size_of(kind))
    return size, preview[:_PREVIEW] + "…" * is_cut, digest if whole else f"~{digest}"


def _buffer(value: Any, kind: type) -> Any:
    """What is hashed in place of the shown text: a long text or an array, and the instructions of a function."""
    if kind is str and len(value) > _COMPARED // 2:
        return value[: _HASHED + 1].encode("utf-8", "surrogatepass")
    if kind is bytes or kind is bytearray:
        return memoryview(value)
    if kind is types.FunctionType:
        code = value.__code__
        return repr(
            (code.co_code, code.co_names, [each for each in code.co_consts if id(type(each)) in _SCALARS])
        ).encode()
    if kind is _class_of("numpy", "ndarray") and value.flags.c_contiguous and value.size:
        try:
            return memoryview(value).cast("B")
        except (TypeError, ValueError):
            return None
    return None


def record_variables(
    names: dict[str, Any], own: dict[str, Any], is_wanted: Callable[[], bool]
) -> tuple[list[Entry], int] | None:
    """Return the variables and how many were left out; None as soon as it is not wanted any more.

    `own` are the names that every session has."""
    end = perf_counter() + LONGEST
    found: list[Entry] = []
    left_out, room = 0, MAX_BYTES - 2048
    for name, value in list(names.items()):
        if type(name) is not str or name.startswith("_") or (name in own and own[name] is value):
            continue
        if not is_wanted():
            return None
        kind = class_name(type(value))
        if len(found) >= MAX_VARIABLES or len(name) > _MAX_NAME or room <= 0:
            left_out += 1
            continue
        size, preview, digest = describe(value) if perf_counter() < end else (0, "", "")
        used = len(f"{name}{kind}{preview}".encode("utf-8", "backslashreplace")) + 60
        if used > room:
            preview, digest = "", ""
        room -= used if preview else len(name) + 60
        found.append((name, kind, size, preview, digest))
    return found, left_out


NO_FILES = blake2b(digest_size=8).hexdigest()
"""The fingerprint of an empty folder."""


def fingerprint(folder: str) -> str:
    """Return a digest of which files there are, with sizes and times; empty where there are too many to look at."""
    end = perf_counter() + _FILES_SECONDS
    seen = blake2b(digest_size=8)
    folders, count = [folder], 0
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > _MAX_FILES or perf_counter() > end:
                        return ""
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    about = entry.stat(follow_symlinks=False)
                    seen.update(f"{entry.path!r} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}\n".encode())
        except OSError:
            continue
    return seen.hexdigest()
