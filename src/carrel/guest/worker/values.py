"""Values as tagged JSON data, both ways: what is no data crosses as its repr, and nothing is ever evaluated."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

LARGEST = 32 * 1024 * 1024
"""How many bytes an encoded value may have; a larger one crosses as the beginning of its repr."""
DEEPEST = 200
TAG = "$"
_SAFE = 2**53
_MOST_EQUAL_HASHES = 1000


class TooLarge(ValueError):
    """A value that cannot cross as data; the message is what it has too much of."""


class Repr(str):
    """The repr of an object that is no data; what the host has in its place. Equal to its text."""

    __slots__ = ("why",)
    why: str
    """Why data has not arrived as itself: too large, too deep, or not to be looked at. Empty for what is no data."""

    def __new__(cls, text: str, why: str = "") -> Repr:
        made = super().__new__(cls, text)
        made.why = why
        return made

    def __repr__(self) -> str:
        return str(self)


def encode(value: Any, largest: int = LARGEST) -> Any:
    """The value as JSON data; never raises, whatever the value's own methods do."""
    if value is None or value is True or value is False or (type(value) is int and -_SAFE <= value <= _SAFE):
        return value
    try:
        return _Encoding(largest).encode(value, 0)
    except TooLarge as problem:
        return as_repr(value, str(problem))
    except (RecursionError, MemoryError):
        return as_repr(value, "it is too large or too deep to cross as data")
    except RuntimeError:
        return as_repr(value, "it was changed by another thread while it was sent")


def encode_whole(value: Any, largest: int = LARGEST) -> tuple[Any, int]:
    """The value as JSON data and about how many bytes that has; TooLarge when it cannot cross as it is."""
    encoding = _Encoding(largest)
    try:
        return encoding.encode(value, 0), encoding.spent
    except (RecursionError, MemoryError) as problem:
        raise TooLarge(f"it is too large or too deep ({type(problem).__name__})") from None
    except RuntimeError:
        raise TooLarge("it was changed by another thread while it was sent") from None


def as_repr(value: Any, why: str) -> Any:
    """The repr of a value in its place, and the reason."""
    return {TAG: "repr", "text": safe_repr(value), "why": why}


class _Encoding:
    """One value on its way out: counts what it makes, and knows what it is inside of."""

    def __init__(self, largest: int) -> None:
        self._largest = self._left = largest
        self._inside: set[int] = set()

    @property
    def spent(self) -> int:
        return self._largest - self._left

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return self._spent(value, 5)
        if kind is int:
            return self._int(value)
        if kind is float:
            return self._float(value)
        if kind is str:
            return self._text(value)
        if depth > DEEPEST:
            raise TooLarge(f"it is nested deeper than {DEEPEST} levels")
        plain = _PLAIN.get(kind)
        if plain is not None:
            return self._plain(plain, value)
        if kind in _ITEMS:
            return self._container(kind, value, value, depth)
        return self._other(value, depth)

    def _spent(self, data: Any, size: int) -> Any:
        self._left -= size
        if self._left < 0:
            raise self._full()
        return data

    def _full(self) -> TooLarge:
        return TooLarge(f"it has more than {self._largest // (1024 * 1024)} MiB")

    def _tagged(self, name: str, data: str) -> Any:
        return self._spent({TAG: name, "of": data}, len(data) + 16)

    def _plain(self, plain: Callable[[Any], tuple[str, str]], value: Any) -> Any:
        if isinstance(value, (bytes, bytearray)) and len(value) > self._left:
            raise self._full()
        return self._tagged(*plain(value))

    def _int(self, value: int) -> Any:
        if -_SAFE <= value <= _SAFE:
            return self._spent(value, 17)
        self._spent(None, value.bit_length() // 4)
        return {TAG: "int", "of": format(value, "x")}

    def _float(self, value: float) -> Any:
        if math.isfinite(value):
            return self._spent(value, 20)
        return self._tagged("float", repr(value))

    def _text(self, value: str) -> Any:
        # A cheap bound first, so that a text of a gigabyte is never copied.
        self._spent(None, len(value) + 2)
        try:
            self._spent(None, len(value.encode("utf-8")) - len(value))
        except UnicodeEncodeError:
            return self._tagged("text", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii"))
        return value

    def _container(self, kind: type, value: Any, itself: object, depth: int) -> Any:
        if not value and (kind is list or kind is dict):
            return self._spent(kind(), 2)
        if id(itself) in self._inside:
            return {TAG: "repr", "text": "..."}
        self._inside.add(id(itself))
        try:
            self._spent(None, 2 + len(value))
            if kind is dict:
                return self._dict(value, depth)
            items = [self.encode(item, depth + 1) for item in value]
        finally:
            self._inside.discard(id(itself))
        return items if kind is list else {TAG: kind.__name__, "of": items}

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        if all(type(key) is str and not key.startswith(TAG) and key.isascii() for key in value):
            for key in value:
                self._spent(None, len(key) + 4)
            return {key: self.encode(item, depth + 1) for key, item in value.items()}
        return {TAG: "dict", "of": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()]}

    def _other(self, value: Any, depth: int) -> Any:
        """Subclasses of the plain kinds as those, enum members as their value, dataclasses as dicts."""
        try:
            return self._as_data(value, depth)
        except (TooLarge, RecursionError, MemoryError):
            raise
        except Exception as problem:  # noqa: BLE001 - the user's own class may raise anything; its repr is what is left
            return self._repr(value, f"it raised {type(problem).__name__} when it was looked at")

    def _as_data(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return self.encode(value.value, depth + 1)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return self._container(dict, fields, value, depth)
        if isinstance(value, pathlib.PurePath):
            return self._tagged("path", str(value))
        if isinstance(value, str):
            return self._text(str.__str__(value))
        if isinstance(value, int):
            return self._int(int.__index__(value))
        if isinstance(value, float):
            return self._float(float.__float__(value))
        for kind, items in _ITEMS.items():
            if isinstance(value, kind):
                # By the builtin's own iteration: a subclass may go on forever.
                return self._container(kind, kind(items(value)), value, depth)
        for kind, plain in _PLAIN.items():
            if isinstance(value, kind):
                return self._plain(plain, value)
        return self._repr(value)

    def _repr(self, value: Any, why: str | None = None) -> Any:
        text = safe_repr(value)
        tagged = {TAG: "repr", "text": text} if why is None else {TAG: "repr", "text": text, "why": why}
        return self._spent(tagged, len(text) + 32)


_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    dict: dict.items,
}


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


_PLAIN: dict[type, Callable[[Any], tuple[str, str]]] = {
    bytes: lambda v: ("bytes", _base64(v)),
    bytearray: lambda v: ("bytes", _base64(v)),
    complex: lambda v: ("complex", f"{v.real!r} {v.imag!r}"),
    datetime.datetime: lambda v: ("datetime", v.isoformat() + ("|fold" if v.fold else "")),
    datetime.date: lambda v: ("date", v.isoformat()),
    datetime.time: lambda v: ("time", v.isoformat() + ("|fold" if v.fold else "")),
    datetime.timedelta: lambda v: ("timedelta", f"{v.days} {v.seconds} {v.microseconds}"),
    decimal.Decimal: lambda v: ("decimal", str(v)),
    uuid.UUID: lambda v: ("uuid", str(v)),
}


# --- the way back ---------------------------------------------------------------------------------------------------


def decode(data: Any) -> Any:
    """The value that tagged data stands for; ValueError for data that no `encode` makes."""
    try:
        return _decode(data, 0)
    except (KeyError, TypeError, ArithmeticError, binascii.Error, RecursionError) as problem:
        raise ValueError(f"this is no value of the protocol: {problem}") from None


def _decode(data: Any, depth: int) -> Any:
    if depth > DEEPEST + 50:
        raise ValueError("deeper than any value that is sent")
    if isinstance(data, list):
        return [_decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return {key: _decode(item, depth + 1) for key, item in data.items()}
    kind = data[TAG]
    if kind == "repr":
        return Repr(data["text"], str(data.get("why", "")))
    if kind == "dict":
        pairs = [(_hashable(_decode(k, depth + 1)), _decode(v, depth + 1)) for k, v in data["of"]]
        _spread([key for key, _ in pairs])
        return dict(pairs)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]([_decode(item, depth + 1) for item in data["of"]])
    if kind not in _READ or not isinstance(data["of"], str):
        raise ValueError(f"an unknown kind of value: {kind!r}")
    return _READ[kind](data["of"])


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        return Repr(safe_repr(key, 1000))
    return key


def _spread(keys: list[Any]) -> None:
    """Refuse keys that were made to share one hash: putting a million such into a dict would take hours."""
    if len(keys) <= _MOST_EQUAL_HASHES:
        return
    hashes = sorted(map(hash, keys))
    if any(one == other for one, other in zip(hashes, hashes[_MOST_EQUAL_HASHES:])):  # noqa: B905 - of two lengths
        raise ValueError("too many keys with the same hash")


def _set(items: list[Any]) -> set[Any]:
    keys = [_hashable(item) for item in items]
    _spread(keys)
    return set(keys)


def _folded(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        text, _, fold = text.partition("|")
        return read(text).replace(fold=1) if fold else read(text)

    return value


def _timedelta(text: str) -> datetime.timedelta:
    days, seconds, microseconds = map(int, text.split())
    return datetime.timedelta(days, seconds, microseconds)


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": _set,
    "frozenset": lambda items: frozenset(_set(items)),
}
_READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda text: complex(*map(float, text.split())),
    "text": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "datetime": _folded(datetime.datetime.fromisoformat),
    "date": datetime.date.fromisoformat,
    "time": _folded(datetime.time.fromisoformat),
    "timedelta": _timedelta,
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "path": pathlib.PurePosixPath,
}


# --- reprs ----------------------------------------------------------------------------------------------------------

REPR_LENGTH = 100_000
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}
_DEEPEST = 60


class Full(Exception):
    """There is no more room."""


class BoundedRepr:
    """A `repr` of limited length."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.pieces: list[str] = []
        self._inside: set[int] = set()

    def _add(self, text: str) -> None:
        self.pieces.append(text[: self._left])
        self._left -= len(text)
        if self._left <= 0:
            raise Full

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in (str, bytes, bytearray) and len(value) > self._left:
            # Never the repr of the whole: it may be a gigabyte.
            self._add(repr(value[: self._left + 1]))
            raise Full
        if kind in _BRACKETS and depth < _DEEPEST:
            self._container(value, kind, depth)
        else:
            self._add(_own(value) if kind not in _BRACKETS else "...")

    def _container(self, value: Any, kind: type, depth: int) -> None:
        if id(value) in self._inside:
            self._add("...")
            return
        self._inside.add(id(value))
        opening, closing = _BRACKETS[kind] if value or kind in (list, tuple, dict) else (kind.__name__ + "(", ")")
        self._add(opening)
        self._items(value.items() if kind is dict else value, kind is dict, depth)
        self._add("," + closing if kind is tuple and len(value) == 1 else closing)
        self._inside.discard(id(value))

    def _items(self, items: Iterable[Any], pairs: bool, depth: int) -> None:
        for number, item in enumerate(items):
            if number:
                self._add(", ")
            if pairs:
                self.write(item[0], depth + 1)
                self._add(": ")
                self.write(item[1], depth + 1)
            else:
                self.write(item, depth + 1)


def _own(value: Any) -> str:
    try:
        text = repr(value)
        return str.__str__(text) if isinstance(text, str) else f"<{_name(value)} object>"
    except RecursionError:
        return f"<{_name(value)} object, too deep to show>"
    except Exception as problem:  # noqa: BLE001 - the user's own __repr__ may raise anything
        return f"<{_name(value)} object whose repr raised {_name(problem)}>"


def _name(value: Any) -> str:
    return str(type(value).__name__)


def safe_repr(value: Any, length: int = REPR_LENGTH) -> str:
    """`repr`, cut where it is too long."""
    writing = BoundedRepr(length)
    try:
        writing.write(value, 0)
    except Full:
        writing.pieces.append(_cut(value))
    except RecursionError:
        writing.pieces.append("…")
    except RuntimeError:
        # Another thread changed a dict or a set meanwhile.
        writing.pieces.append("… (changed while it was shown)")
    # A lone surrogate shows as its escape, as `repr` itself does where it can.
    return "".join(writing.pieces).encode("utf-8", "backslashreplace").decode("utf-8")


def _cut(value: Any) -> str:
    if type(value) in (str, bytes, bytearray):
        return f"… ({len(value)} characters in all)" if type(value) is str else f"… ({len(value)} bytes in all)"
    if type(value) in _BRACKETS:
        return f"… ({len(value)} items in all)"
    return "… (the rest is left out)"
