"""The OpenAI Agents SDK keeps its conversations here: `Runner.run(agent, "…", session=KeptSession("id", store))`."""

from itertools import groupby
from typing import Any

from agents.memory import SessionSettings

from carrel import SessionStore, build_rewind_event, from_provider, to_provider

FORMAT = "openai_responses"
ITEM = "openai_item"
"""Where a message of the log keeps the item that it was made from, so that it comes back exactly as it was."""


class KeptSession:
    """The SDK's `Session` protocol on a SessionStore: an item is a message of the log, which people and other models
    can read; an item that is popped stays in the log.

    Items come back as they were added. Nothing is repaired here: when the SDK builds a request it leaves out the calls
    that were never answered."""

    def __init__(
        self, session_id: str, store: SessionStore, *, model: str = "unknown", limit: int | None = None
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = SessionSettings(limit=limit)
        self._store = store
        self._about = {"provider": "openai", "model": model}

    async def get_items(self, limit: int | None = None) -> list[Any]:
        items = [item for is_ours, run in _runs(await self._messages()) for item in _items(is_ours, run)]
        return items if limit is None else items[max(0, len(items) - limit) :]

    async def add_items(self, items: list[Any]) -> None:
        messages = [_with_item(message, item) for item in items for message in from_provider([item], FORMAT)]
        if messages:
            await self._store.append_many(self.session_id, messages, **self._about)

    async def pop_item(self) -> Any | None:
        while messages := await self._messages():
            is_ours, run = _runs(messages)[-1]
            items = _items(is_ours, run)
            if is_ours:
                await self._rewind(len(messages) - 1)
            else:  # messages of another program: those that stay are written again as items
                await self._rewind(len(messages) - len(run))
                await self.add_items(items[:-1])
            if items:
                return items[-1]
        return None

    async def clear_session(self) -> None:
        await self._store.clear_session(self.session_id)

    async def _messages(self) -> list[dict[str, Any]]:
        """The visible messages as they were written."""
        if await self._store.find_meta(self.session_id) is None:
            return []
        return [message async for message in self._store.iter_messages(self.session_id)]

    async def _rewind(self, count: int) -> None:
        """Keep the first `count` messages as they were written; `append_rewind` counts them as `load_session` does."""
        await self._store.append_message(self.session_id, build_rewind_event(count), **self._about)


def _with_item(message: dict[str, Any], item: Any) -> dict[str, Any]:
    return {**message, "meta": {**message.get("meta", {}), ITEM: item}}


def _runs(messages: list[dict[str, Any]]) -> list[tuple[bool, list[dict[str, Any]]]]:
    """Runs of messages that were items, and of messages that another program wrote."""
    return [(ours, list(run)) for ours, run in groupby(messages, lambda each: ITEM in (each.get("meta") or {}))]


def _items(is_ours: bool, messages: list[dict[str, Any]]) -> list[Any]:
    if is_ours:
        return [message["meta"][ITEM] for message in messages]
    found: list[Any] = to_provider(messages, FORMAT).payload["input"]
    return found
