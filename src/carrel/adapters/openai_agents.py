"""The conversation memory of the OpenAI Agents SDK in a carrel session: `Runner.run(agent, "…", session=…)`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from agents.memory import SessionSettings
from agents.memory.session import SessionABC

from carrel.adapters.sessions import check_source
from carrel.conversation.formats import from_provider, to_provider
from carrel.conversation.log_entries import build_rewind_event
from carrel.conversation.messages import build_message, text_block
from carrel.session.session import Session
from carrel.session.storage import FileStorage, StorageBackend

FORMAT = "openai_responses"
ITEM = "openai_item"
"""Where a message keeps the item that it was made from, so that the item comes back exactly as it was."""

Messages = list[dict[str, Any]]


class CarrelSession(SessionABC):
    """The SDK's `Session` in the conversation of a carrel session, which people, searches and other models can read.

    An item is a message; an item that is popped stays in the log. Only the conversation is used: no interpreter is
    started. `limit` is the number of newest items that the SDK sees."""

    def __init__(
        self,
        session: Session | None = None,
        *,
        base: Path | str | None = None,
        session_id: str | None = None,
        model: str = "unknown",
        limit: int | None = None,
    ) -> None:
        check_source(session, base, session_id)
        self._own = FileStorage(base) if base is not None else None
        storage: StorageBackend = session.storage if session is not None else self._own  # type: ignore[assignment]
        self.session_id = session.id if session is not None else session_id or uuid4().hex
        self.session_settings = SessionSettings(limit=limit)
        self._store = storage.get_session_store()
        self._about = {"provider": "openai", "model": model}
        self._popping = asyncio.Lock()

    async def close(self) -> None:
        """Close the files of the folder `base`; a session that was handed in stays open."""
        if self._own is not None:
            await self._own.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """Return the items, oldest first; with a limit the newest ones (a negative limit means all)."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        items = [item for is_ours, run in _runs(await self._messages()) for item in _items(is_ours, run)]
        return items if limit is None or limit < 0 else items[max(0, len(items) - limit) :]

    async def add_items(self, items: Sequence[Any]) -> None:
        messages = [_message(item) for item in items]
        if messages:
            await self._store.append_many(self.session_id, messages, **self._about)

    async def pop_item(self) -> Any | None:
        """Remove the newest item and return it; None if there is none."""
        async with self._popping:
            while messages := await self._messages():
                is_ours, run = _runs(messages)[-1]
                items = _items(is_ours, run)
                if is_ours:
                    await self._rewind(len(messages) - 1)
                else:  # Messages of another program: those that stay are written again as items.
                    await self._rewind(len(messages) - len(run))
                    await self.add_items(items[:-1])
                if items:
                    return items[-1]
        return None

    async def clear_session(self) -> None:
        await self._store.clear_session(self.session_id)

    async def _messages(self) -> Messages:
        """Return the visible messages as they were written: the SDK itself leaves out calls without a result."""
        if await self._store.find_meta(self.session_id) is None:
            return []
        return [message async for message in self._store.iter_messages(self.session_id)]

    async def _rewind(self, count: int) -> None:
        """Keep the first `count` messages as they were written; `append_rewind` counts them as `load_session` does."""
        await self._store.append_message(self.session_id, build_rewind_event(count), **self._about)


def _message(item: Any) -> dict[str, Any]:
    """Return the one message for an item, which keeps the item itself."""
    messages = from_provider([item], FORMAT)
    message = messages[0] if len(messages) == 1 else build_message("assistant", [text_block(f"[{item.get('type')}]")])
    return {**message, "meta": {**message.get("meta", {}), ITEM: item}}


def _runs(messages: Messages) -> list[tuple[bool, Messages]]:
    """Return runs of messages that were items, and of messages that another program wrote."""
    return [(ours, list(run)) for ours, run in groupby(messages, lambda each: ITEM in (each.get("meta") or {}))]


def _items(is_ours: bool, messages: Messages) -> list[Any]:
    if is_ours:
        return [message["meta"][ITEM] for message in messages]
    found: list[Any] = to_provider(messages, FORMAT).payload["input"]
    return found
