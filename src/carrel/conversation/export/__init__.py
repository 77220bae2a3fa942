"""Export sessions as JSON lines, Markdown or one HTML page. This module has what the formats share. Pure."""

import json
import re
from base64 import b64decode
from binascii import Error as NotBase64
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from carrel.conversation.formats.turns import normalize_base64, split_data_url
from carrel.conversation.log_entries import PAST_THE_END, UNREADABLE, encode, note_kind
from carrel.conversation.messages import ConversationMessage, MessageBlock, meta_of
from carrel.conversation.replay import rewind_target_count, rewind_target_seq
from carrel.text import count_messages, neutralize_control_chars, parse_time, readable_size, single_line

_IMAGE = re.compile(r"image/(png|jpeg|jpg|gif|webp|avif|bmp|svg\+xml)")
_DOCUMENT = re.compile(r"application/(pdf|json)|text/(plain|csv|markdown)")
"""Other types are offered as plain bytes, so that no browser opens them as a page of their own."""
_LONGEST_URL = 300


Format = Literal["jsonl", "markdown", "html"]


@dataclass(frozen=True)
class Attachment:
    """An image or document with its data URL; `missing` if its data is not in the log or cannot be read."""

    kind: Literal["image", "document", "missing"]
    name: str
    detail: str
    href: str = ""


def to_line(entry: ConversationMessage) -> str:
    """The entry as a line of a log; an export of all entries keeps the sequence numbers.

    An unreadable line becomes a note that says so, to keep its number."""
    if entry.get("role") == UNREADABLE:
        entry = {"role": "rewind", "meta": {"rewind_to": PAST_THE_END, **meta_of(entry), "aside": UNREADABLE}}
    if not isinstance(entry.get("role"), str) or not entry.get("role"):
        return f"{json.dumps(entry)}\n"
    return f"{encode(entry).decode()}\n"


def attachment_of(block: MessageBlock) -> Attachment:
    """The image or document of a block."""
    kind = str(block.get("type"))
    mime = str(block.get("mime_type") or "").lower()
    name = single_line(block.get("name") or kind)
    data, url = str(block.get("data") or ""), str(block.get("url") or "")
    mime, data = split_data_url(url) or (mime, data)
    if not data and url:
        return Attachment("missing", name, f"{kind} at {single_line(url)[:_LONGEST_URL]}")
    try:
        data = normalize_base64(data) or data
        size = len(b64decode(data, validate=True))
    except (NotBase64, ValueError):
        return Attachment("missing", name, f"{kind}, its data cannot be read")
    if not size:
        return Attachment("missing", name, f"{kind}, its data is not here")
    detail = f"{single_line(mime) or 'unknown type'}, {readable_size(size)}"
    if kind == "image" and _IMAGE.fullmatch(mime):
        return Attachment("image", name, detail, f"data:{mime};base64,{data}")
    safe = mime if _DOCUMENT.fullmatch(mime) else "application/octet-stream"
    return Attachment("document", name, detail, f"data:{safe};base64,{data}")


def indented_json(value: object) -> str:
    """JSON on several lines, with control characters neutralized."""
    try:
        return neutralize_control_chars(json.dumps(value, indent=2, ensure_ascii=False, default=str))
    except RecursionError:
        return "(nested too deeply to show)"


def describe_event(seq: int, entry: ConversationMessage) -> str | None:
    """What an event did, in a few words; None for a message and for a blank line."""
    role, meta = entry.get("role"), meta_of(entry)
    if role == "compact":
        count = meta.get("compacted_count")
        return f"{count_messages(count)} became a summary" if type(count) is int else "Summary of earlier messages"
    if role == UNREADABLE:
        reason = single_line(meta.get("reason") or "no reason given")
        return None if reason == "blank" else f"Line {seq} could not be read: {reason}"
    if role != "rewind":
        return None
    at = meta.get("at_seq")
    match note_kind(entry):
        case None:
            jump, cut = rewind_target_seq(entry), rewind_target_count(entry)
            if jump is not None:
                return f"Rewound to right after entry {jump}"
            return f"Rewound to {count_messages(cut)}" if cut else "Rewound to the start"
        case "label":
            return f"Labelled entry {at}: {single_line(meta.get('text') or '')}"
        case "pin":
            return f"Pinned entry {at}"
        case "fork":
            parent = single_line(meta.get("parent_session_id") or "another session")
            return f"Forked here; everything above comes from {parent}"
        case "meta":
            return f"Set {', '.join(_described_settings(meta.get('set')))}"
        case other:
            return f"Noted: {single_line(other)}"


def _described_settings(settings: Any) -> list[str]:
    if not isinstance(settings, dict):
        return ["nothing"]
    return [
        f"{single_line(name)} to {'nothing' if value is None else single_line(value)}"
        for name, value in settings.items()
    ]


def time_of(entry: ConversationMessage) -> datetime | None:
    """The time when an entry was written, if it has one."""
    meta = meta_of(entry)
    return parse_time(meta.get("created_at") or meta.get("timestamp"))
