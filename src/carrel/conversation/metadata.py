"""Pure: what `meta.json` holds, how it is checked, and how it is made again from the log."""

import json
import os.path
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from carrel.conversation.entries import aside_of
from carrel.conversation.messages import ConversationMessage, SessionMeta, flatten_message_text, meta_of
from carrel.errors import MetadataRefused, SessionIdRefused, SessionTooNew
from carrel.storage.base import Stamp

MESSAGE_FORMAT_VERSION = 5
"""The version of the session format that carrel writes, and the newest it reads."""
DEFAULT_SESSION_TITLE = "New chat"
DEFAULT_SESSION_PROVIDER = "anthropic"
TITLE_LENGTH = 48
SUMS = ("message_count", "total_tokens")
"""What was counted in the log; left out where somebody else wrote too."""
COUNTS = (*SUMS, "log_seq", "log_bytes")
"""The same, and up to where the metadata has what the log says."""

_NEVER = datetime.min.replace(tzinfo=UTC)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TEXTS = ("title", "provider", "model", "cwd", "created_at", "updated_at")


def is_id(session_id: object) -> bool:
    return isinstance(session_id, str) and _PLAIN_NAME.fullmatch(session_id) is not None


def checked_id(session_id: object) -> str:
    """The id itself when it is a plain name, else `SessionIdRefused`: an id becomes a folder's name."""
    if not isinstance(session_id, str) or not is_id(session_id):
        raise SessionIdRefused(
            f"{str(session_id)[:80]!r} is no session id: use 1 to 128 letters, digits, '.', '_' and '-', "
            "beginning with a letter, a digit or '_'"
        )
    return session_id


def whole_path(folder: str | None) -> str:
    """A folder as the metadata has it: absolute; empty when there is none."""
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
        "cwd": whole_path(cwd),
        "api_base": api_base,
        "message_format_version": MESSAGE_FORMAT_VERSION,
        "created_at": now,
        "updated_at": now,
        **more,
    }
    return cast(SessionMeta, meta)


def is_too_new(meta: SessionMeta) -> bool:
    """Whether a newer carrel wrote the session: a list has it, and nothing of it is read or changed."""
    return meta.get("message_format_version", 0) > MESSAGE_FORMAT_VERSION


def encode_meta(meta: SessionMeta) -> bytes:
    try:
        return orjson.dumps(meta, option=orjson.OPT_INDENT_2)
    except TypeError:
        return json.dumps(meta, indent=2).encode("ascii")


def decode_meta(raw: bytes | None, session_id: str) -> SessionMeta | None:
    """The metadata, or None when it must be made again; `SessionTooNew` when a newer carrel wrote it."""
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
    """The number of a format; other programs leave it out or write something else in its place."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:9])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else MESSAGE_FORMAT_VERSION


def date_of(text: Any) -> datetime | None:
    """A date of the log, or None when it is none; one without an offset is UTC."""
    try:
        date = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def last_change(meta: SessionMeta) -> datetime:
    """When a session was last changed, to sort by; what has no date was never changed."""
    return date_of(meta["updated_at"]) or _NEVER


def later(one: str, other: str) -> str:
    """The later of two dates; writers may use different offsets, so the texts say nothing."""
    if one[-6:] == other[-6:] == "+00:00":
        return max(one, other)
    return max(one, other, key=lambda text: date_of(text) or _NEVER)


def when_written(stamp: Stamp | None) -> str:
    """When a log was last written to, as the metadata says it; empty when there is none."""
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
    """Whether a field of the metadata is of its kind; any value will do for a field that is not ours."""
    check = _is_text if name in _TEXTS else _SOUND.get(name)
    return check is None or check(value)


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields themselves when they may be set from outside, else `MetadataRefused`."""
    for name, value in fields.items():
        if name in ("id", "message_format_version", "created_at", "updated_at", *COUNTS):
            raise MetadataRefused(f"{name} is kept by carrel and cannot be set; nothing was written")
        if not _is_sound(name, value):
            raise MetadataRefused(f"{name} cannot be {value!r:.60}; nothing was written")
    try:
        orjson.dumps(fields)
    except TypeError as problem:
        raise MetadataRefused(f"metadata is kept as JSON, and this cannot be: {problem}; nothing was written") from None
    return fields


def title_from(message: ConversationMessage) -> str:
    """The first characters of a user's text, in one line; empty for any other message."""
    if message.get("role") != "user" or meta_of(message).get("synthetic"):
        return ""
    return flatten_message_text(message, include_thinking=False).replace("\n", " ").strip()[:TITLE_LENGTH]


def has_sums(meta: SessionMeta, log_bytes: int) -> bool:
    """Whether the metadata has true sums of a log that is so long."""
    return "log_seq" in meta and "message_count" in meta and meta.get("log_bytes") == log_bytes


def catch_up(meta: SessionMeta, news: Iterable[tuple[int, ConversationMessage]]) -> None:
    """Have the metadata say what these entries do; to hear it twice changes nothing."""
    for seq, entry in news:
        if meta["title"] == DEFAULT_SESSION_TITLE and (title := title_from(entry)):
            meta["title"] = title
        apply_aside(cast(dict[str, Any], meta), seq, entry)


class Rebuild:
    """Metadata made again from the log, fed entry by entry, and from what was given when the session was made.

    `written`: when the log was last written to. It is the date of what has none."""

    def __init__(self, session_id: str, written: str, given: SessionMeta | None = None) -> None:
        self.meta = new_meta(session_id, now=written)
        self._written = written
        self._given: set[str] = set()
        """What somebody said, and is not to be guessed from the messages."""
        if given is not None:
            self.meta.update(given)
            self.meta["updated_at"] = written
            self._given = {
                name for name, value in given.items() if value and (name, value) != ("title", DEFAULT_SESSION_TITLE)
            }

    def take(self, seq: int, entry: ConversationMessage) -> None:
        meta, said = cast(dict[str, Any], self.meta), meta_of(entry)
        date = said.get("created_at")
        if isinstance(date, str) and date:
            self._guess("created_at", date)
            self._given.add("created_at")
            meta["updated_at"] = date
        else:
            meta["updated_at"] = self._written
        if entry.get("role") == "assistant":
            for name in ("provider", "model"):
                self._guess(name, said.get(name))
        elif "title" not in self._given and (title := title_from(entry)):
            meta["title"] = title
            self._given.add("title")
        apply_aside(meta, seq, entry)
        if aside_of(entry) == "meta" and isinstance(said.get("set"), dict):
            self._given.update(said["set"])

    def _guess(self, name: str, value: object) -> None:
        if name not in self._given and isinstance(value, str):
            cast(dict[str, Any], self.meta)[name] = value


def as_given(meta: SessionMeta) -> bytes:
    """What is kept of new metadata to make it again from, in one line: all but the counts."""
    given = {name: value for name, value in meta.items() if name not in COUNTS}
    try:
        return orjson.dumps(given)
    except TypeError:
        return json.dumps(given).encode("ascii")


def apply_aside(meta: dict[str, Any], seq: int, entry: ConversationMessage) -> None:
    """What an aside in the log says about the session as a whole."""
    kind, said = aside_of(entry), meta_of(entry)
    told: dict[str, Any] = {}
    if kind == "meta" and isinstance(said.get("set"), dict):
        ours = ("id", "message_format_version", "message_count", "log_seq", "log_bytes")
        told = {name: value for name, value in said["set"].items() if name not in ours}
        if _is_count(told.get("total_tokens")):
            told["total_tokens"] = max(told["total_tokens"], meta.get("total_tokens", 0))
    elif kind == "label":
        label = {k: said.get(k) for k in ("text", "at_seq", "created_at")}
        told["labels"] = [*(other for other in meta.get("labels", []) if other != label), label]
    elif kind == "pin" and _is_count(said.get("at_seq")):
        told["pins"] = sorted({*meta.get("pins", []), said["at_seq"]})
    elif kind == "fork":
        told = {name: said.get(name) for name in ("parent_session_id", "root_session_id")}
        told["forked_at_seq"] = said.get("at_seq")
        told["created_at"] = said.get("created_at") or meta["created_at"]
    meta.update({name: value for name, value in told.items() if _is_sound(name, value)})
