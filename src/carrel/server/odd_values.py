"""Pure: texts, names and numbers that JSON or UTF-8 cannot hold, in a form that they can."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import quote

import orjson

DEEPEST = 200
"""Levels of nesting that a message may have."""


class LongInteger(float):
    """Stands for an integer with so many digits that Python refuses to read it; no field takes it."""


def parse_int(digits: str) -> int | LongInteger:
    """For `json.loads`: any integer, without an error that does not say where it stands."""
    try:
        return int(digits)
    except ValueError:
        return LongInteger("inf")


def refuse_odd(value: Any, where: str, depth: int = 0) -> None:
    """ValueError for what cannot be kept as JSON; `where` names the field."""
    if isinstance(value, LongInteger):
        raise ValueError(f"{where}: the number has too many digits; send it as a text")
    if depth > DEEPEST:
        raise ValueError(f"{where[:200]}…: it is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict):
        for name, part in value.items():
            refuse_odd(part, f"{where}.{name}", depth + 1)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            refuse_odd(part, f"{where}.{number}", depth + 1)


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: no half of a surrogate pair is in it."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def refuse_surrogates(text: str) -> str:
    """The text itself; ValueError when UTF-8 cannot hold it."""
    if not is_text(text):
        raise ValueError("there is half of a surrogate pair in it, which UTF-8 cannot hold")
    return text


def escaped(data: Any) -> Any:
    """JSON data in which every half of a surrogate pair is written as its escape."""
    match data:
        case str():
            return data if data.isascii() else data.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {escaped(name): escaped(part) for name, part in data.items()}
        case list() | tuple():
            return [escaped(part) for part in data]
        case _:
            return data


def url_name(name: str) -> str:
    """A name or path of a file as it stands: percent-encoded where it is not UTF-8."""
    return name if is_text(name) else quote(name, safe="/", errors="surrogateescape")


def json_bytes(data: Any) -> bytes:
    """Data as JSON, also what orjson refuses: integers of any size, surrogates, deep nesting."""
    try:
        return orjson.dumps(data)
    except TypeError:
        pass
    try:
        return json.dumps(data, allow_nan=False).encode("ascii")
    except ValueError:
        return json.dumps(_finite(data)).encode("ascii")


def _finite(data: Any) -> Any:
    """With null for what JSON has no number for, as orjson writes it."""
    match data:
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: _finite(part) for name, part in data.items()}
        case list() | tuple():
            return [_finite(part) for part in data]
        case _:
            return data
