"""The session store of mycode, on the files of carrel."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from carrel.compat.mycode.messages import (
    ConversationMessage,
    build_message,
    flatten_message_text,
    text_block,
    tool_result_block,
)
from carrel.conversation import compaction
from carrel.conversation.compaction import COMPACT_SUMMARY_PROMPT, DEFAULT_COMPACT_THRESHOLD
from carrel.conversation.log_entries import build_compact_event
from carrel.conversation.log_entries import build_rewind_event as build_event
from carrel.conversation.messages import SessionData as CarrelData
from carrel.conversation.messages import SessionMeta as CarrelMeta
from carrel.conversation.messages import blocks_of
from carrel.conversation.replay import apply_compact, apply_rewind, is_placeholder
from carrel.conversation.session_state import (
    COUNTS,
    DEFAULT_SESSION_PROVIDER,
    DEFAULT_SESSION_TITLE,
    MESSAGE_FORMAT_VERSION,
)
from carrel.conversation.store import SessionStore as CarrelStore
from carrel.errors import MessageRefused

__all__ = [
    "COMPACT_SUMMARY_PROMPT",
    "DEFAULT_COMPACT_THRESHOLD",
    "DEFAULT_SESSION_PROVIDER",
    "DEFAULT_SESSION_TITLE",
    "MESSAGE_FORMAT_VERSION",
    "ConversationMessage",
    "SessionData",
    "SessionMeta",
    "SessionMetaDict",
    "SessionStore",
    "apply_compact",
    "apply_rewind",
    "build_compact_event",
    "build_message",
    "build_rewind_event",
    "flatten_message_text",
    "resolve_mycode_home",
    "resolve_sessions_dir",
    "should_compact",
    "text_block",
    "tool_result_block",
]


@dataclass
class SessionMeta:
    """The fields of `meta.json`."""

    id: str
    title: str
    provider: str
    model: str
    cwd: str
    api_base: str | None
    message_format_version: int
    created_at: str
    updated_at: str


SessionMetaDict = dict[str, object]


class SessionData(TypedDict):
    session: SessionMetaDict
    messages: list[ConversationMessage]


def resolve_mycode_home() -> Path:
    """Return `$MYCODE_HOME`, else `~/.mycode`."""
    return Path(os.environ.get("MYCODE_HOME", "~/.mycode")).expanduser().resolve()


def resolve_sessions_dir() -> Path:
    return resolve_mycode_home() / "sessions"


def should_compact(last_usage: dict[str, Any] | None, context_window: int | None, threshold: float) -> bool:
    """Return whether the last request filled this share of the window; a count may be a text."""
    usage = last_usage or {}
    tokens = usage.get("input_tokens") or usage.get("prompt_tokens") or usage.get("prompt_token_count") or 0
    return compaction.should_compact({"input_tokens": int(tokens)}, context_window, threshold)


def build_rewind_event(rewind_to: int) -> ConversationMessage:
    return build_event(rewind_to)


@dataclass
class SessionStore:
    """Keeps each session in a folder of `data_dir`; needs no close, and may be used from any thread and event loop."""

    data_dir: Path = field(default_factory=resolve_sessions_dir)

    def __post_init__(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)

    def session_dir(self, session_id: str) -> Path:
        return self._store().session_dir(session_id)

    def meta_path(self, session_id: str) -> Path:
        return self.session_dir(session_id) / "meta.json"

    def messages_path(self, session_id: str) -> Path:
        return self.session_dir(session_id) / "messages.jsonl"

    def draft_session(
        self,
        title: str | None,
        *,
        provider: str = DEFAULT_SESSION_PROVIDER,
        model: str,
        cwd: str,
        api_base: str | None,
    ) -> SessionData:
        """Return the metadata of a new session, of which nothing is remembered."""
        data = self._store().draft_session(
            title, provider=provider, model=model, cwd=os.path.abspath(cwd), api_base=api_base
        )
        return {"session": _plain_meta(data["session"]), "messages": []}

    async def create_session(
        self,
        title: str | None,
        *,
        session_id: str | None = None,
        provider: str = DEFAULT_SESSION_PROVIDER,
        model: str,
        cwd: str,
        api_base: str | None,
    ) -> SessionData:
        async with self._opened() as store:
            data = await store.create_session(
                title,
                session_id=session_id,
                provider=provider,
                model=model,
                cwd=os.path.abspath(cwd),
                api_base=api_base,
            )
        return {"session": _plain_meta(data["session"]), "messages": []}

    async def list_sessions(self, *, cwd: str | None = None) -> list[SessionMetaDict]:
        """List sessions, newest first; those in another folder than `cwd` are left out."""
        async with self._opened() as store:
            metas = await store.list_sessions(cwd=cwd or None)
        return [_plain_meta(meta) for meta in metas if self.meta_path(meta["id"]).exists()]

    async def latest_session(self, *, cwd: str | None = None) -> SessionMetaDict | None:
        return next(iter(await self.list_sessions(cwd=cwd)), None)

    def load_session_sync(self, session_id: str) -> SessionData | None:
        """Call `load_session` without await; inside a running event loop it writes nothing."""
        if not self.meta_path(session_id).exists():
            return None
        return _plain_data(self._store().load_session_sync(session_id))

    async def load_session(self, session_id: str) -> SessionData | None:
        """Return the visible conversation; interrupted tool calls get an error result first."""
        if not self.meta_path(session_id).exists():
            return None
        async with self._opened() as store:
            return _plain_data(await store.load_session(session_id))

    async def delete_session(self, session_id: str) -> None:
        async with self._opened() as store:
            await store.delete_session(session_id)

    async def clear_session(self, session_id: str) -> None:
        """Hide all messages; unlike the original, the log keeps them."""
        async with self._opened() as store:
            await store.append_rewind(session_id, 0)

    async def append_rewind(self, session_id: str, rewind_to: int) -> None:
        async with self._opened() as store:
            await store.append_rewind(session_id, rewind_to)

    async def append_message(
        self,
        session_id: str,
        message: ConversationMessage,
        *,
        provider: str,
        model: str,
        cwd: str,
        api_base: str | None,
    ) -> None:
        """Append a message; for a session that is not stored yet, the keywords are its metadata."""
        cwd = os.path.abspath(cwd)
        try:
            async with self._opened() as store:
                await store.append_message(
                    session_id, message, provider=provider, model=model, cwd=cwd, api_base=api_base
                )
        except MessageRefused as problem:
            if isinstance(problem.__cause__, TypeError):
                raise TypeError(str(problem)) from problem
            raise

    def _store(self) -> CarrelStore:
        return CarrelStore(self.data_dir, output_files=False)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[CarrelStore]:
        """Open the folder for one call: nothing is cached between calls, and `meta.json` is current after each."""
        async with self._store() as store:
            yield store


def _plain_meta(meta: CarrelMeta) -> SessionMetaDict:
    """Return the metadata without the counts that carrel adds, so that it fits `SessionMeta`."""
    return {key: value for key, value in meta.items() if key not in COUNTS}


def _plain_data(data: CarrelData | None) -> SessionData | None:
    if data is None:
        return None
    return {"session": _plain_meta(data["session"]), "messages": list(map(_plain_repair, data["messages"]))}


def _plain_repair(message: ConversationMessage) -> ConversationMessage:
    """Return results of interrupted calls without the marks that carrel adds; any other message is unchanged."""
    if message.get("meta") != {"synthetic": True}:
        return message
    blocks = blocks_of(message)
    if not all(block.get("type") == "tool_result" and is_placeholder(block) for block in blocks):
        return message
    plain = [{key: value for key, value in block.items() if key != "meta"} for block in blocks]
    return build_message(message["role"], plain)
