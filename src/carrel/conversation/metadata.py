"""Pure: what `meta.json` holds, how it is checked, and how it is made again from the log."""

import json
import os.path
import re
from typing import Any, cast

import orjson

from carrel.conversation.entries import aside_of
from carrel.conversation.messages import ConversationMessage, SessionMeta, flatten_message_text, meta_of
from carrel.errors import SessionIdRefused, SessionTooNew

FORMAT_VERSION = 5
DEFAULT_TITLE = "New chat"
DEFAULT_PROVIDER = "anthropic"
TITLE_LENGTH = 48
COUNTS = ("message_count", "total_tokens", "log_seq", "log_bytes")
"""What is known of the log's content; left out where it may be old."""

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
        "title": title or DEFAULT_TITLE,
        "provider": provider or DEFAULT_PROVIDER,
        "model": model or "",
        "cwd": os.path.abspath(os.path.expanduser(cwd)) if cwd else "",
        "api_base": api_base,
        "message_format_version": FORMAT_VERSION,
        "created_at": now,
        "updated_at": now,
        **more,
    }
    return cast(SessionMeta, meta)


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
    version = meta.get("message_format_version", FORMAT_VERSION)
    if type(version) is int and version > FORMAT_VERSION:
        raise SessionTooNew(
            f"session {session_id} was written in format {version}, this carrel reads up to {FORMAT_VERSION}; "
            "update carrel to open it (nothing was changed)",
            version,
        )
    for name in _TEXTS:
        if type(meta.setdefault(name, "")) is not str:
            return None
    meta["id"] = session_id
    meta["title"] = meta["title"] or DEFAULT_TITLE
    meta.setdefault("api_base", None)
    meta.setdefault("message_format_version", FORMAT_VERSION)
    return cast(SessionMeta, meta)


def title_from(message: ConversationMessage) -> str:
    """The first characters of a user's text, in one line; empty for any other message."""
    if message.get("role") != "user" or meta_of(message).get("synthetic"):
        return ""
    return flatten_message_text(message, include_thinking=False).replace("\n", " ").strip()[:TITLE_LENGTH]


class Rebuild:
    """Metadata made again from the log, fed entry by entry."""

    def __init__(self, session_id: str, now: str) -> None:
        self.meta = new_meta(session_id, now=now)
        self._dated = False
        self._titled = False

    def take(self, seq: int, entry: ConversationMessage) -> None:
        meta, said = cast(dict[str, Any], self.meta), meta_of(entry)
        date = said.get("created_at")
        if isinstance(date, str) and date:
            if not self._dated:
                meta["created_at"] = date
                self._dated = True
            meta["updated_at"] = date
        if entry.get("role") == "assistant":
            meta.update({name: said[name] for name in ("provider", "model") if isinstance(said.get(name), str)})
        elif not self._titled and (title := title_from(entry)):
            meta["title"] = title
            self._titled = True
        apply_aside(meta, seq, entry)


def apply_aside(meta: dict[str, Any], seq: int, entry: ConversationMessage) -> None:
    """What an aside in the log says about the session as a whole."""
    kind, said = aside_of(entry), meta_of(entry)
    if kind == "meta" and isinstance(said.get("set"), dict):
        meta.update(said["set"])
    elif kind == "label":
        meta["labels"] = [*meta.get("labels", []), {k: said.get(k) for k in ("text", "at_seq", "created_at")}]
    elif kind == "pin":
        meta["pins"] = sorted({*meta.get("pins", []), said.get("at_seq")} - {None})
    elif kind == "fork":
        meta["parent_session_id"] = said.get("parent_session_id")
        meta["root_session_id"] = said.get("root_session_id")
        meta["forked_at_seq"] = said.get("at_seq")
        meta["created_at"] = said.get("created_at") or meta["created_at"]
