"""The repr of anything, within a length and without an exception: also of what is huge, deep or rude."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LENGTH = 100_000
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}
_DEEPEST = 60


class _Full(Exception):
    """There is no more room."""


class _Repr:
    def __init__(self, length: int) -> None:
        self._left = length
        self.pieces: list[str] = []
        self._inside: set[int] = set()

    def _add(self, text: str) -> None:
        self.pieces.append(text[: self._left])
        self._left -= len(text)
        if self._left <= 0:
            raise _Full

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in (str, bytes, bytearray) and len(value) > self._left:
            # Never the repr of the whole: it may be a gigabyte.
            self._add(repr(value[: self._left + 1]))
            raise _Full
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


def safe_repr(value: Any, length: int = LENGTH) -> str:
    """`repr`, cut where it is too long."""
    writing = _Repr(length)
    try:
        writing.write(value, 0)
    except _Full:
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
