"""Pure: what a model calls a tool with, as JSON text and as an object; also when it is neither."""

import json
from typing import Any

import orjson

from carrel.conversation.formats.turns import Converted, Piece
from carrel.conversation.messages import meta_of

INVALID_JSON = "INVALID_JSON"
"""The one key of a tool call's input that holds arguments which were no JSON object."""


def as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # Whole numbers over 64 bits, lone surrogates, keys that are no strings.
        return json.dumps(value, default=str)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_arguments(raw: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool call's input from its JSON text, and a meta that keeps the text where writing it again would differ."""
    value = _object(raw)
    return value or {}, {} if value is not None and as_json(value) == raw else {"raw_arguments": raw}


def arguments_text(piece: Piece) -> str:
    """A tool call's input as JSON text, in the model's own words while they still mean the same."""
    value, raw = piece.block.get("input"), meta_of(piece.block).get("raw_arguments")
    if isinstance(raw, str) and (_object(raw) or {}) == (value or {}):
        return raw
    return value if isinstance(value, str) else as_json({} if value is None else value)


def arguments_object(piece: Piece, report: Converted) -> dict[str, Any]:
    """A tool call's input as an object; what was no JSON object is wrapped, and comes back from `unwrapped`."""
    value = piece.block.get("input")
    if isinstance(value, dict) and value:
        return value
    text = arguments_text(piece)
    known = _object(text)
    if known is not None or not text.strip():
        return known or {}
    report.change(piece.at, "arguments", f"they are no JSON object; sent as the text under {INVALID_JSON!r}")
    return {INVALID_JSON: text}


def unwrapped(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The input and meta of a call whose arguments came as an object."""
    if not isinstance(value, dict):
        return {}, {"raw_arguments": as_json(value)}
    if set(value) == {INVALID_JSON} and isinstance(value[INVALID_JSON], str):
        return {}, {"raw_arguments": value[INVALID_JSON]}
    return value, {}
