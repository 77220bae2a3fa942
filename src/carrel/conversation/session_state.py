"""Pure: the metadata of a session as a fold of its log, and its form in `meta.json`."""

import json
import os.path
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from carrel.conversation.log_entries import UNREADABLE, note_kind
from carrel.conversation.messages import (
    ConversationMessage,
    SessionMeta,
    flatten_message_text,
    is_continuation,
    meta_of,
)
from carrel.conversation.usage import total_after
from carrel.errors import MetadataRefused, SessionIdRefused, SessionTooNew
from carrel.storage.base import Stamp

MESSAGE_FORMAT_VERSION = 5
"""The version of the session format that carrel writes, and the newest it reads."""
DEFAULT_SESSION_TITLE = "New chat"
DEFAULT_SESSION_PROVIDER = "anthropic"
TITLE_LENGTH = 48
COUNTS = ("message_count", "total_tokens", "log_seq", "log_bytes")
"""Counted in the log: visible messages, tokens, and the entries and bytes that the metadata covers."""

_NEVER = datetime.min.replace(tzinfo=UTC)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TEXTS = ("title", "provider", "model", "cwd", "created_at", "updated_at")


def is_id(session_id: object) -> bool:
    return isinstance(session_id, str) and _PLAIN_NAME.fullmatch(session_id) is not None


def checked_id(session_id: object) -> str:
    """Return the id if it is a plain name, which a folder can have, else raise `SessionIdRefused`."""
    if not isinstance(session_id, str) or not is_id(session_id):
        raise SessionIdRefused(
            f"{str(session_id)[:80]!r} is not a session id: use 1 to 128 letters, digits, '.', '_' and '-', "
            "beginning with a letter, a digit or '_'"
        )
    return session_id


def absolute_path(folder: str | None) -> str:
    """Return a folder as the metadata has it: an absolute path, or an empty text without one."""
    return os.path.abspath(os.path.expanduser(folder)) if folder else ""


def new_meta(
    session_id: str,
    *,
    now: str,
    title: str | None = None,
    provider: str | None = None,
    model: str | None = None,
    cwd: str | None = None,
    api_base: str | None = None,
    **more: Any,
) -> SessionMeta:
    meta: dict[str, Any] = {
        "id": session_id,
        "title": title or DEFAULT_SESSION_TITLE,
        "provider": provider or DEFAULT_SESSION_PROVIDER,
        "model": model or "",
        "cwd": absolute_path(cwd),
        "api_base": api_base,
        "message_format_version": MESSAGE_FORMAT_VERSION,
        "created_at": now,
        "updated_at": now,
        **more,
    }
    return cast(SessionMeta, meta)


def is_too_new(meta: SessionMeta) -> bool:
    """Return whether a newer carrel wrote the session; it is listed, but not read or changed."""
    return meta.get("message_format_version", 0) > MESSAGE_FORMAT_VERSION


def encode_meta(meta: SessionMeta, *, indent: bool = True) -> bytes:
    try:
        return orjson.dumps(meta, option=orjson.OPT_INDENT_2 if indent else 0)
    except TypeError:
        return json.dumps(meta, indent=2 if indent else None).encode("ascii")


def decode_meta(raw: bytes | None, session_id: str) -> SessionMeta | None:
    """Decode metadata; None if it must be rebuilt, `SessionTooNew` if a newer carrel wrote it."""
    if raw is None:
        return None
    try:
        meta = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if type(meta) is not dict:
        return None
    version = meta["message_format_version"] = _format_version(meta.get("message_format_version"))
    if version > MESSAGE_FORMAT_VERSION:
        raise SessionTooNew(
            f"session {session_id} was written in format {version}, this carrel reads up to {MESSAGE_FORMAT_VERSION}; "
            "update carrel to open it (nothing was changed)",
            version,
        )
    for name in _TEXTS:
        if type(meta.setdefault(name, "")) is not str:
            return None
    for name, is_sound in _SOUND.items():
        if name in meta and not is_sound(meta[name]):
            return None
    meta["id"] = session_id
    meta["title"] = meta["title"] or DEFAULT_SESSION_TITLE
    meta.setdefault("api_base", None)
    return cast(SessionMeta, meta)


def _format_version(value: Any) -> int | float:
    """Return the number of a format version; other programs leave it out or write other values."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:9])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else MESSAGE_FORMAT_VERSION


def date_of(text: Any) -> datetime | None:
    """Parse a date, in UTC if it has no offset; None for anything else."""
    try:
        date = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def last_change(meta: SessionMeta) -> datetime:
    """Return when a session was last changed, as a sort key; the earliest date without one."""
    return date_of(meta["updated_at"]) or _NEVER


def later(one: str, other: str) -> str:
    """Return the later of two dates; with different offsets, their texts cannot be compared."""
    if one[-6:] == other[-6:] == "+00:00":
        return max(one, other)
    return max(one, other, key=lambda text: date_of(text) or _NEVER)


def when_written(stamp: Stamp | None) -> str:
    """Return when a log was last written to, as the metadata has it; empty without a log."""
    return datetime.fromtimestamp(stamp.modified, UTC).isoformat() if stamp else ""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


_SOUND: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(COUNTS, _is_count),
    **dict.fromkeys(("api_base", "archived_at", "parent_session_id", "root_session_id"), _is_text_or_none),
    "project_dir": _is_text,
    "working_dir": _is_text_or_none,
    "forked_at_seq": lambda value: value is None or _is_count(value),
    "tags": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "pins": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "labels": lambda value: isinstance(value, list) and all(isinstance(label, dict) for label in value),
}


def _is_sound(name: str, value: object) -> bool:
    """Return whether a field has a valid value; fields that are not carrel's may have any."""
    check = _is_text if name in _TEXTS else _SOUND.get(name)
    return check is None or check(value)


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields if a caller may set them, else raise `MetadataRefused`."""
    for name, value in fields.items():
        if name in ("id", "message_format_version", "created_at", "updated_at", *COUNTS):
            raise MetadataRefused(f"{name} is maintained by carrel and cannot be set; nothing was written")
        if not _is_sound(name, value):
            raise MetadataRefused(f"{name} cannot be {value!r:.60}; nothing was written")
    try:
        orjson.dumps(fields)
    except TypeError as problem:
        raise MetadataRefused(f"this metadata cannot be stored as JSON: {problem}; nothing was written") from None
    return fields


def title_from(message: ConversationMessage) -> str:
    """Return the first characters of a user's text, in one line; empty for any other message."""
    if message.get("role") != "user" or meta_of(message).get("synthetic"):
        return ""
    return flatten_message_text(message, include_thinking=False).replace("\n", " ").strip()[:TITLE_LENGTH]


def has_counts(meta: SessionMeta, log_bytes: int) -> bool:
    """Return whether the metadata has exact counts for a log of this length."""
    return "log_seq" in meta and "message_count" in meta and meta.get("log_bytes") == log_bytes


def position_of(meta: SessionMeta) -> tuple[int, int] | None:
    """Return the last entry that the metadata covers and where it ends, as the `hint` of `Store.read_back`."""
    if meta.get("log_seq") and "message_count" in meta:
        return meta["log_seq"], meta.get("log_bytes", 0)
    return None  # written by another program, or by an earlier version while several programs wrote


class SessionState:
    """The metadata of a session after some of its log entries: the only place where entries change metadata.

    `meta` is what `meta.json` holds. It covers the entries up to `log_seq`, which end at byte `log_bytes` of the log.
    `message_count` is missing after a rewind or compact, until the visible messages are counted again."""

    def __init__(self, meta: SessionMeta) -> None:
        self.meta = meta
        self._unset: set[str] = set()
        """Fields that no program set; messages may set them."""
        self._written = ""
        """During a rebuild: when the log was last written to, used for entries without a date."""

    @classmethod
    def first(cls, session_id: str, written: str, created: SessionMeta | None = None) -> "SessionState":
        """Return the first state of a rebuild; `created` is the metadata that the session was created with, if known.

        `written`: when the log was last written to."""
        state = cls(new_meta(session_id, now=written))
        state._written = written
        state._unset = {"provider", "model", "created_at"}
        if created is not None:
            state.meta.update(created)
            state.meta["updated_at"] = written
            state._unset -= {name for name, value in created.items() if value}
        state.reset()
        return state

    def copy(self) -> "SessionState":
        return SessionState(self.meta.copy())

    @property
    def last_seq(self) -> int | None:
        """The last entry that the state covers; None if another program wrote the metadata."""
        return self.meta.get("log_seq")

    @property
    def log_bytes(self) -> int:
        return self.meta.get("log_bytes", 0)

    @property
    def needs_recount(self) -> bool:
        """Whether the visible messages must be counted again, because of a rewind or compact."""
        return "message_count" not in self.meta and "total_tokens" in self.meta

    def reset(self) -> None:
        """Cover no entry any more. Fields that entries set stay; applying those again changes nothing."""
        self.meta |= {"message_count": 0, "total_tokens": 0, "log_seq": 0, "log_bytes": 0}

    def apply(self, seq: int, entry: ConversationMessage, size: int) -> None:
        """Apply an entry that takes `size` bytes of the log.

        Only the entry after the last one is counted; of any other, only its fields are applied."""
        if seq - 1 == self.last_seq:
            self._count(seq, entry, size)
        self.note(seq, entry)

    def _count(self, seq: int, entry: ConversationMessage, size: int) -> None:
        meta, role, kind = self.meta, entry.get("role"), note_kind(entry)
        meta["log_seq"] = seq
        meta["log_bytes"] = self.log_bytes + size
        if "total_tokens" in meta and (kind is not None or meta_of(entry).get("usage")):
            meta["total_tokens"] = total_after(meta["total_tokens"], entry)
        if role == "compact" or (role == "rewind" and kind is None):
            meta.pop("message_count", None)
        elif "message_count" in meta and role not in ("rewind", UNREADABLE) and not is_continuation(entry):
            meta["message_count"] += 1

    def note(self, seq: int, entry: ConversationMessage) -> None:
        """Apply the fields that an entry sets, without counting; applying it twice changes nothing."""
        meta, kind = cast(dict[str, Any], self.meta), note_kind(entry)
        if self._written or self._unset:
            self._set_from(entry)
        if kind is None:
            if meta["title"] == DEFAULT_SESSION_TITLE and (title := title_from(entry)):
                meta["title"] = title
            return
        fields = meta_of(entry)
        changed: dict[str, Any] = {}
        if kind == "meta" and isinstance(fields.get("set"), dict):
            ours = ("id", "message_format_version", *COUNTS)
            changed = {name: value for name, value in fields["set"].items() if name not in ours}
            self._unset -= changed.keys()
        elif kind == "label":
            label = {name: fields.get(name) for name in ("text", "at_seq", "created_at")}
            changed["labels"] = [*(other for other in meta.get("labels", []) if other != label), label]
        elif kind == "pin" and _is_count(fields.get("at_seq")):
            changed["pins"] = sorted({*meta.get("pins", []), fields["at_seq"]})
        elif kind == "fork":
            changed = {name: fields.get(name) for name in ("parent_session_id", "root_session_id")}
            changed["forked_at_seq"] = fields.get("at_seq")
            changed["created_at"] = fields.get("created_at") or meta["created_at"]
        meta.update({name: value for name, value in changed.items() if _is_sound(name, value)})

    def _set_from(self, entry: ConversationMessage) -> None:
        """Set fields from a message that no program has set."""
        meta, fields = cast(dict[str, Any], self.meta), meta_of(entry)
        date = fields.get("created_at")
        is_dated = isinstance(date, str) and bool(date)
        if self._written:
            meta["updated_at"] = date if is_dated else self._written
        if is_dated and "created_at" in self._unset:
            meta["created_at"] = date
            self._unset.discard("created_at")
        if entry.get("role") == "assistant":
            for name in self._unset & {"provider", "model"}:
                if isinstance(fields.get(name), str):
                    meta[name] = fields[name]
