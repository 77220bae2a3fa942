"""Encode and decode one line of the log, and build the events that are not messages."""

import json
from datetime import UTC, datetime
from typing import Any

import orjson

from carrel.conversation.messages import ConversationMessage, build_message, meta_of, text_block
from carrel.errors import MessageRefused
from carrel.storage.base import Block

PAST_THE_END = 2**53 - 1
"""A rewind to here removes nothing. Notes that only carrel understands are written so; other readers skip them."""

UNREADABLE = "unreadable"
"""The role of a line that is not a JSON object, when it is read; never written."""

_SLOW = b"\t"
"""The beginning of a line that only the slow parser reads exactly, because of integers over 64 bits for example."""

_OPENING, _CLOSING = b"{}"

BLANK: ConversationMessage = {"role": UNREADABLE, "meta": {"reason": "blank"}}


def timestamp() -> str:
    """Return the current time as the log has it: UTC, ISO."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def encode(entry: ConversationMessage) -> bytes:
    """Encode an entry as one line without its newline; `MessageRefused` names what cannot be stored."""
    if not isinstance(entry, dict):
        raise MessageRefused(f"a message is a dict with a role and content, not {type(entry).__name__}")
    role = entry.get("role")
    if not isinstance(role, str) or not role:
        raise MessageRefused(f"a message needs a role, a non-empty text; this one has {role!r}")
    if role == UNREADABLE:
        raise MessageRefused(f"the role {UNREADABLE!r} is reserved for lines that cannot be read; use another")
    try:
        line = orjson.dumps(entry)
    except TypeError:
        return _encode_slowly(entry)
    # orjson writes nan and inf as null, which would lose them.
    if b"null" in line and _has_odd_float(entry):
        return _encode_slowly(entry)
    # Some programs treat these three characters as the end of a line.
    if not line.isascii() and (b"\xe2\x80" in line or b"\xc2\x85" in line):
        for character in ("\u2028", "\u2029", "\u0085"):
            line = line.replace(character.encode(), b"\\u%04x" % ord(character))
    return line


def _encode_slowly(entry: ConversationMessage) -> bytes:
    """Encode what orjson refuses and JSON allows: integers of any size, lone surrogates, keys that are numbers."""
    try:
        return _SLOW + json.dumps(entry, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as problem:
        raise MessageRefused(f"this message cannot be stored as JSON: {problem}") from problem


def _has_odd_float(value: Any) -> bool:
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    if isinstance(value, dict):
        return any(map(_has_odd_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_odd_float, value))
    return False


def decode(line: bytes) -> ConversationMessage:
    """Decode one line; an invalid line becomes an entry with the role `unreadable` and a reason, never an error."""
    try:
        entry = json.loads(line) if line.startswith(_SLOW) else orjson.loads(line)
    except ValueError:
        text = line.strip()
        if not text:
            return BLANK
        try:
            # Accepts what other writers produce and orjson refuses: NaN, lone surrogates, deep nesting.
            entry = json.loads(text)
        except (ValueError, RecursionError) as problem:
            return _unreadable(f"no JSON: {problem}")
    if type(entry) is not dict:
        return _unreadable(f"a JSON {type(entry).__name__}, no object")
    return entry


def _unreadable(reason: str) -> ConversationMessage:
    return {"role": UNREADABLE, "meta": {"reason": reason}}


def decode_all(block: Block) -> list[ConversationMessage]:
    """Decode each line of a block; parsed as one array if all lines are well-formed, which is faster."""
    array = block.array
    try:
        entries: list[ConversationMessage] = orjson.loads(array)
    except orjson.JSONDecodeError:
        return list(map(decode, block.records))
    # A search for one byte is fast; inside a line of JSON it occurs only between tokens, and rarely.
    if _SLOW in array and (array.startswith(b"[" + _SLOW) or b"\n" + _SLOW in array):
        return list(map(decode, block.records))
    # Broken lines can form whole ones together; then there are fewer, or not all begin and end as objects do.
    if len(entries) == block.count and set(map(type, entries)) == {dict} and _are_objects(array):
        return entries
    return list(map(decode, block.records))


def _are_objects(array: bytes) -> bool:
    """Return whether each line begins and ends as an object does.

    Where lines are long, going from newline to newline takes a quarter of the time of counting what is around them."""
    if not (array.startswith(b"[{") and array.endswith(b"}]")):
        return False
    newline = array.find(b"\n")
    while newline >= 0:
        if array[newline - 2] != _CLOSING or array[newline + 1] != _OPENING:
            return False
        newline = array.find(b"\n", newline + 1)
    return True


def build_compact_event(
    summary_text: str, *, provider: str, model: str, compacted_count: int, usage: Any = None
) -> ConversationMessage:
    """Build the event that replaces everything before it by a summary."""
    meta: dict[str, Any] = {"provider": provider, "model": model, "compacted_count": compacted_count}
    if usage is not None:
        meta["usage"] = usage
    return build_message("compact", [text_block(summary_text)], meta=meta)


def build_rewind_event(
    rewind_to: int, *, to_seq: int | None = None, created_at: str | None = None
) -> ConversationMessage:
    """Build the event that keeps the first `rewind_to` visible messages, or returns to right after entry `to_seq`."""
    meta: dict[str, Any] = {"rewind_to": rewind_to, "created_at": created_at or timestamp()}
    if to_seq is not None:
        meta["to_seq"] = to_seq
    return {"role": "rewind", "meta": meta}


def build_note(kind: str, *, created_at: str | None = None, **fields: Any) -> ConversationMessage:
    """Build an event that only carrel understands (label, pin, fork, meta), as a rewind that removes nothing."""
    event = build_rewind_event(PAST_THE_END, created_at=created_at)
    event["meta"] |= {"aside": kind, **fields}
    return event


def note_kind(entry: ConversationMessage) -> str | None:
    """Return the kind of a note (label, pin, fork, meta, usage), or None for any other entry."""
    kind = meta_of(entry).get("aside") if entry.get("role") == "rewind" else None
    return kind if isinstance(kind, str) else None
