"""Values as tagged JSON data, both ways: what is no data crosses as its repr, and nothing is ever evaluated."""

import base64
import binascii
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import uuid

LARGEST = 32 * 1024 * 1024
"""How many bytes an encoded value may have; a larger one crosses as the beginning of its repr."""
DEEPEST = 200
REPR_LENGTH = 100000
TAG = "$"
_SAFE = 2**53


class TooLarge(Exception):
    """A value that would not fit into one record."""


class Repr(str):
    """The repr of an object that is no data; what the host has in its place."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


def encode(value, largest=LARGEST):
    """The value as JSON data; never raises, whatever the value's own methods do."""
    try:
        return _Encoding(largest).encode(value, 0)
    except (TooLarge, RecursionError, MemoryError):
        return {TAG: "repr", "text": safe_repr(value), "why": "too large or too deep to cross as data"}


def safe_repr(value, length=REPR_LENGTH):
    """`repr`, cut, also of an object whose own one raises."""
    try:
        text = repr(value)
        if not isinstance(text, str):
            raise TypeError("__repr__ returned no text")
    except RecursionError:
        text = "<%s object, too deep to show>" % type(value).__name__
    except Exception as problem:  # noqa: BLE001 - the user's own __repr__ may raise anything
        text = "<%s object whose repr raised %s>" % (type(value).__name__, type(problem).__name__)
    if len(text) > length:
        text = text[:length] + "… (%d characters in all)" % len(text)
    return text


class _Encoding:
    """One value on its way out: counts what it makes, and knows what it is inside of."""

    def __init__(self, largest):
        self._left = largest
        self._inside = set()

    def encode(self, value, depth):
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
            raise TooLarge
        plain = _PLAIN.get(kind)
        if plain is not None:
            return self._tagged(*plain(value))
        if kind in (list, tuple, set, frozenset, dict):
            return self._container(kind, value, depth)
        return self._other(value, depth)

    def _spent(self, data, size):
        self._left -= size
        if self._left < 0:
            raise TooLarge
        return data

    def _tagged(self, name, data):
        return self._spent({TAG: name, "of": data}, len(data) + 16)

    def _int(self, value):
        if -_SAFE <= value <= _SAFE:
            return self._spent(value, 17)
        return self._tagged("int", format(value, "x"))

    def _float(self, value):
        if math.isfinite(value):
            return self._spent(value, 20)
        return self._tagged("float", repr(value))

    def _text(self, value):
        # A cheap bound first, so that a text of a gigabyte is never copied.
        self._spent(None, len(value))
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return {TAG: "text", "of": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii")}
        return value

    def _container(self, kind, value, depth):
        if id(value) in self._inside:
            return {TAG: "repr", "text": "..."}
        self._inside.add(id(value))
        try:
            self._spent(None, 2 + len(value))
            if kind is dict:
                return self._dict(value, depth)
            items = [self.encode(item, depth + 1) for item in value]
        finally:
            self._inside.discard(id(value))
        return items if kind is list else {TAG: kind.__name__, "of": items}

    def _dict(self, value, depth):
        if all(type(key) is str and not key.startswith(TAG) and key.isascii() for key in value):
            for key in value:
                self._spent(None, len(key) + 4)
            return {key: self.encode(item, depth + 1) for key, item in value.items()}
        return {TAG: "dict", "of": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()]}

    def _other(self, value, depth):
        """Subclasses of the plain kinds as those, enum members as their value, dataclasses as dicts."""
        try:
            if isinstance(value, enum.Enum):
                return self.encode(value.value, depth + 1)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
                return self._container(dict, fields, depth)
            if isinstance(value, pathlib.PurePath):
                return self._tagged("path", str(value))
            for kind in (int, float, str):
                if isinstance(value, kind):
                    return self.encode(kind.__new__(kind, value) if kind is not str else str.__str__(value), depth)
            for kind in (list, tuple, set, frozenset, dict):
                if isinstance(value, kind):
                    return self._container(kind, kind(value), depth)
            for kind, plain in _PLAIN.items():
                if isinstance(value, kind):
                    return self._tagged(*plain(value))
        except (TooLarge, RecursionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - the user's own class may raise anything; its repr is what is left
            pass
        text = safe_repr(value)
        return self._spent({TAG: "repr", "text": text}, len(text))


def _base64(data):
    return base64.b64encode(data).decode("ascii")


_PLAIN = {
    bytes: lambda v: ("bytes", _base64(v)),
    bytearray: lambda v: ("bytes", _base64(bytes(v))),
    complex: lambda v: ("complex", "%r %r" % (v.real, v.imag)),
    datetime.datetime: lambda v: ("datetime", v.isoformat() + ("|fold" if v.fold else "")),
    datetime.date: lambda v: ("date", v.isoformat()),
    datetime.time: lambda v: ("time", v.isoformat() + ("|fold" if v.fold else "")),
    datetime.timedelta: lambda v: ("timedelta", "%d %d %d" % (v.days, v.seconds, v.microseconds)),
    decimal.Decimal: lambda v: ("decimal", str(v)),
    uuid.UUID: lambda v: ("uuid", str(v)),
}


def decode(data):
    """The value that tagged data stands for; ValueError for data that no `encode` makes."""
    try:
        return _decode(data, 0)
    except (KeyError, TypeError, ArithmeticError, binascii.Error, RecursionError, OverflowError) as problem:
        raise ValueError("this is no value of the protocol: %s" % problem) from None


def _decode(data, depth):
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
        return Repr(data["text"])
    if kind == "dict":
        return {_hashable(_decode(k, depth + 1)): _decode(v, depth + 1) for k, v in data["of"]}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]([_decode(item, depth + 1) for item in data["of"]])
    if kind not in _READ or not isinstance(data["of"], str):
        raise ValueError("an unknown kind of value: %r" % (kind,))
    return _READ[kind](data["of"])


def _hashable(key):
    try:
        hash(key)
    except TypeError:
        return Repr(repr(key))
    return key


def _set(items):
    return {_hashable(item) for item in items}


def _folded(read):
    def value(text):
        text, _, fold = text.partition("|")
        return read(text).replace(fold=1) if fold else read(text)

    return value


_CONTAINERS = {"tuple": tuple, "set": _set, "frozenset": lambda items: frozenset(_set(items))}
_READ = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda text: complex(*map(float, text.split())),
    "text": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "datetime": _folded(datetime.datetime.fromisoformat),
    "date": datetime.date.fromisoformat,
    "time": _folded(datetime.time.fromisoformat),
    "timedelta": lambda text: datetime.timedelta(*map(int, text.split())),
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "path": pathlib.PurePosixPath,
}


def dumps(record):
    """A record as the bytes of one JSON object."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
