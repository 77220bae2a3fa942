"""Pure: times, sizes and events of a log in a few words, for people."""

from datetime import UTC, datetime
from typing import Any

from carrel.conversation.entries import UNREADABLE, aside_of
from carrel.conversation.inert import inert_line
from carrel.conversation.messages import ConversationMessage, meta_of
from carrel.conversation.replay import cut_of, jump_of


def event_words(seq: int, entry: ConversationMessage) -> str | None:
    """What an entry that is no message did; None for a message and for a blank line."""
    role, meta = entry.get("role"), meta_of(entry)
    if role == "compact":
        count = meta.get("compacted_count")
        return f"{messages(count)} became a summary" if type(count) is int else "Summary of what was said before"
    if role == UNREADABLE:
        reason = inert_line(meta.get("reason") or "no reason given")
        return None if reason == "blank" else f"Line {seq} could not be read: {reason}"
    if role != "rewind":
        return None
    at = meta.get("at_seq")
    match aside_of(entry):
        case None:
            jump, cut = jump_of(entry), cut_of(entry)
            if jump is not None:
                return f"Rewound to right after entry {jump}"
            return f"Rewound to {messages(cut)}" if cut else "Rewound to the start"
        case "label":
            return f"Labelled entry {at}: {inert_line(meta.get('text') or '')}"
        case "pin":
            return f"Pinned entry {at}"
        case "fork":
            return (
                f"Forked here; all above was said in {inert_line(meta.get('parent_session_id') or 'another session')}"
            )
        case "meta":
            return f"Set {', '.join(_settings(meta.get('set')))}"
        case other:
            return f"Noted: {inert_line(other)}"


def _settings(given: Any) -> list[str]:
    if not isinstance(given, dict):
        return ["nothing"]
    return [
        f"{inert_line(name)} to {'nothing' if value is None else inert_line(value)}" for name, value in given.items()
    ]


def moment_of(entry: ConversationMessage) -> datetime | None:
    """When an entry was written, where it says so."""
    meta = meta_of(entry)
    return parsed(meta.get("created_at") or meta.get("timestamp"))


def parsed(given: object) -> datetime | None:
    """An ISO time in UTC, or None for anything else."""
    if not isinstance(given, str) or not given:
        return None
    try:
        when = datetime.fromisoformat(given)
        return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def day_and_time(given: object) -> str:
    """An ISO time for people, in UTC; anything else as it is."""
    when = parsed(given)
    return f"{when.day} {when:%b %Y, %H:%M} UTC" if when else str(given or "")


def messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"


def size_of(count: int) -> str:
    """Bytes for people."""
    if count < 1024:
        return "1 byte" if count == 1 else f"{count} bytes"
    size = count / 1024
    for unit in ("KB", "MB"):
        if size < 1024:
            return f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GB"
