"""Pure: the schema that a stranger sent, in a size that can be worked with and without what can be made to hang."""

from collections.abc import Mapping
from typing import Any

DEEPEST = 40
LONGEST_TEXT, LONGEST_NAME = 16_000, 200
LEFT_OUT = frozenset(("pattern", "patternProperties", "uniqueItems", "$comment", "examples"))
"""Whoever has the tool checks them: an expression can take for ever, comparing all with all nearly so."""
_NAMED = frozenset(("properties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("default", "enum", "const"))


class Parts:
    """How many parts may still be taken; one count for all schemas of a server."""

    def __init__(self, left: int = 200_000) -> None:
        self.left = left


def taken(schema: Any, parts: Parts) -> Any:
    """A copy; what is nested too deeply or beyond the count is anything, and long texts are cut."""
    return _schema(schema, parts, 0)


def _schema(value: Any, parts: Parts, depth: int) -> Any:
    parts.left -= 1
    if isinstance(value, list):
        return [_schema(item, parts, depth + 1) for item in value] if _has_room(parts, depth) else []
    if not isinstance(value, Mapping):
        return value
    if not _has_room(parts, depth):
        return {}
    made: dict[str, Any] = {}
    for name, item in value.items():
        if name in LEFT_OUT:
            continue
        if name in _NAMED and isinstance(item, Mapping):
            # What is called description or pattern here is a name, and no word of the schema.
            named = {inner: one for inner, one in item.items() if len(inner) <= LONGEST_NAME}
            made[name] = {inner: _schema(one, parts, depth + 2) for inner, one in named.items()}
        elif name in _DATA:
            if len(str(item)) <= LONGEST_TEXT or name == "enum":
                made[name] = item
        else:
            made[name] = cut(item) if isinstance(item, str) else _schema(item, parts, depth + 1)
    if "patternProperties" in value:
        # Some names are allowed that are not listed; which, is not known any more.
        made["additionalProperties"] = True
    return made


def _has_room(parts: Parts, depth: int) -> bool:
    return parts.left >= 0 and depth <= DEEPEST


def cut(text: str) -> str:
    """The text in a bearable length."""
    return f"{text[:LONGEST_TEXT]}…" if len(text) > LONGEST_TEXT else text
