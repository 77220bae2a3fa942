"""One line of the log: how it is written, how it is read, and the events that are no messages."""

import json
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson

from carrel.conversation.messages import ConversationMessage, build_message, meta_of, text_block
from carrel.errors import MessageRefused
from carrel.storage.base import Block

PAST_THE_END = 2**53 - 1
"""A rewind to here cuts nothing: what only we understand is written so, and other readers pass over it."""

UNREADABLE = "unreadable"
"""The role under which a line that is no JSON object is handed on; it is never written."""

_SLOW = b"\t"
"""What a line begins with that only the slow parser reads exactly: whole numbers over 64 bits, for example."""

BLANK: ConversationMessage = {"role": UNREADABLE, "meta": {"reason": "blank"}}


def timestamp() -> str:
    """Now, as the log writes it: UTC, ISO."""
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    return f"{_up_to_the_second(seconds)}.{micros:06}+00:00"


@lru_cache(maxsize=1)
def _up_to_the_second(seconds: int) -> str:
    """Kept until the next one: every append is dated, and a date takes long to write."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def encode(entry: ConversationMessage) -> bytes:
    """The entry as one line without its newline; `MessageRefused` says what cannot be kept."""
    if not isinstance(entry, dict):
        raise MessageRefused(f"a message is a dict with a role and content, not {type(entry).__name__}")
    role = entry.get("role")
    if not isinstance(role, str) or not role:
        raise MessageRefused(f"a message needs a role, a non-empty text; this one has {role!r}")
    if role == UNREADABLE:
        raise MessageRefused(f"the role {UNREADABLE!r} stands for lines that cannot be read; use another")
    try:
        line = orjson.dumps(entry)
    except TypeError:
        return _encode_slowly(entry)
    # orjson writes nan and inf as null, which would lose them.
    if b"null" in line and _has_odd_float(entry):
        return _encode_slowly(entry)
    # Some programs take these three characters for the end of a line.
    if not line.isascii() and (b"\xe2\x80" in line or b"\xc2\x85" in line):
        for character in ("\u2028", "\u2029", "\u0085"):
            line = line.replace(character.encode(), b"\\u%04x" % ord(character))
    return line


def _encode_slowly(entry: ConversationMessage) -> bytes:
    """For what orjson refuses and JSON can say: integers of any size, lone surrogates, keys that are numbers."""
    try:
        return _SLOW + json.dumps(entry, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as problem:
        raise MessageRefused(f"a message is kept as JSON, and this one cannot be: {problem}") from None


def _has_odd_float(value: Any) -> bool:
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    if isinstance(value, dict):
        return any(map(_has_odd_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_odd_float, value))
    return False


def decode(line: bytes) -> ConversationMessage:
    """The entry of one line; a line that is none comes back with the role `unreadable` and a reason, never an error."""
    try:
        entry = json.loads(line) if line.startswith(_SLOW) else orjson.loads(line)
    except ValueError:
        text = line.strip()
        if not text:
            return BLANK
        try:
            # Accepts what orjson does not and other writers make: NaN, lone surrogates, deep nesting.
            entry = json.loads(text)
        except (ValueError, RecursionError) as problem:
            return _unreadable(f"no JSON: {problem}")
    if type(entry) is not dict:
        return _unreadable(f"a JSON {type(entry).__name__}, no object")
    return entry


def _unreadable(reason: str) -> ConversationMessage:
    return {"role": UNREADABLE, "meta": {"reason": reason}}


def decode_all(block: Block) -> list[ConversationMessage]:
    """`decode` for each line of a block; read as one array as long as they are well-formed."""
    array = block.array
    try:
        entries: list[ConversationMessage] = orjson.loads(array)
    except orjson.JSONDecodeError:
        return list(map(decode, block.records))
    # Found at once, as one byte is; inside a line of JSON it stands only between tokens, and hardly ever.
    if _SLOW in array and (array.startswith(b"[" + _SLOW) or b"\n" + _SLOW in array):
        return list(map(decode, block.records))
    # Broken lines can make whole ones together: then they are fewer, or do not all begin and end as objects do.
    whole = array.startswith(b"[{") and array.endswith(b"}]") and array.count(b"},\n{") == block.count - 1
    if whole and len(entries) == block.count and set(map(type, entries)) == {dict}:
        return entries
    return list(map(decode, block.records))


def build_compact_event(
    summary_text: str, *, provider: str, model: str, compacted_count: int, usage: Any = None
) -> ConversationMessage:
    """The event that replaces all before it by a summary."""
    meta: dict[str, Any] = {"provider": provider, "model": model, "compacted_count": compacted_count}
    if usage is not None:
        meta["usage"] = usage
    return build_message("compact", [text_block(summary_text)], meta=meta)


def build_rewind_event(
    rewind_to: int, *, to_seq: int | None = None, created_at: str | None = None
) -> ConversationMessage:
    """The event that cuts what is visible to its first `rewind_to` messages, or goes back to after entry `to_seq`."""
    meta: dict[str, Any] = {"rewind_to": rewind_to, "created_at": created_at or timestamp()}
    if to_seq is not None:
        meta["to_seq"] = to_seq
    return {"role": "rewind", "meta": meta}


def build_note(kind: str, *, created_at: str | None = None, **fields: Any) -> ConversationMessage:
    """An event that only we understand (label, pin, fork, meta), written as a rewind that cuts nothing."""
    event = build_rewind_event(PAST_THE_END, created_at=created_at)
    event["meta"] |= {"aside": kind, **fields}
    return event


def note_kind(entry: ConversationMessage) -> str | None:
    """The kind of a note (label, pin, fork, meta, usage), or None for any other entry."""
    kind = meta_of(entry).get("aside") if entry.get("role") == "rewind" else None
    return kind if isinstance(kind, str) else None
