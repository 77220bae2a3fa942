"""Texts, names and numbers that JSON or UTF-8 cannot hold, in a form that they can."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import quote

import orjson

MAX_NESTING = 200
"""Levels of nesting that a message may have."""


class LongInteger(float):
    """Stands for an integer with so many digits that Python refuses to parse it; no field accepts it."""


def parse_integer(digits: str) -> int | LongInteger:
    """Parse any integer for `json.loads`, without an error that does not name the field."""
    try:
        return int(digits)
    except ValueError:
        return LongInteger("inf")


def refuse_unstorable(value: Any, field: str, depth: int = 0) -> None:
    """Raise ValueError for a value that cannot be stored as JSON; `field` names it."""
    if isinstance(value, LongInteger):
        raise ValueError(f"{field}: the number has too many digits; send it as a text")
    if depth > MAX_NESTING:
        raise ValueError(f"{field[:200]}…: it is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        for name, part in value.items():
            refuse_unstorable(part, f"{field}.{name}", depth + 1)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            refuse_unstorable(part, f"{field}.{number}", depth + 1)


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can hold the text, that is, whether it has no lone surrogate."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def refuse_surrogates(text: str) -> str:
    """Return the text; raise ValueError if UTF-8 cannot hold it."""
    if not is_utf8(text):
        raise ValueError("it contains a lone surrogate, which UTF-8 cannot hold")
    return text


def escape_surrogates(data: Any) -> Any:
    """Return JSON data with every lone surrogate written as its escape."""
    match data:
        case str():
            return data if data.isascii() else data.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {escape_surrogates(name): escape_surrogates(part) for name, part in data.items()}
        case list() | tuple():
            return [escape_surrogates(part) for part in data]
        case _:
            return data


def url_name(name: str) -> str:
    """Return a file's name or path as it is, percent-encoded if it is not UTF-8."""
    return name if is_utf8(name) else quote(name, safe="/", errors="surrogateescape")


def json_bytes(data: Any) -> bytes:
    """Return data as JSON, including what orjson refuses: integers of any size, surrogates, deep nesting."""
    try:
        return orjson.dumps(data)
    except TypeError:
        pass
    try:
        return json.dumps(data, allow_nan=False).encode("ascii")
    except ValueError:
        return json.dumps(_without_infinities(data)).encode("ascii")


def _without_infinities(data: Any) -> Any:
    match data:
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: _without_infinities(part) for name, part in data.items()}
        case list() | tuple():
            return [_without_infinities(part) for part in data]
        case _:
            return data
