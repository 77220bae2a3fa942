"""The OpenAI Agents SDK keeps its conversations here: `Runner.run(agent, "…", session=KeptSession("id", store))`."""

from typing import Any

from agents.memory import SessionSettings

from carrel import SessionStore, from_provider, to_provider

FORMAT = "openai_responses"


class KeptSession:
    """The SDK's `Session` protocol on a SessionStore: an item is a message of the log, which people and other models
    can read; nothing that is taken back is lost from it."""

    def __init__(
        self, session_id: str, store: SessionStore, *, model: str = "unknown", limit: int | None = None
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = SessionSettings(limit=limit)
        self._store = store
        self._about = {"provider": "openai", "model": model}

    async def get_items(self, limit: int | None = None) -> list[Any]:
        items = _items(await self._said())
        return items if limit is None else items[max(0, len(items) - limit) :]

    async def add_items(self, items: list[Any]) -> None:
        messages = [message for item in items for message in from_provider([item], FORMAT)]
        if messages:
            await self._store.append_many(self.session_id, messages, **self._about)

    async def pop_item(self) -> Any | None:
        said = await self._said()
        items = _items(said)
        if not items:
            return None
        left = len(said) - 1
        # Reasoning that led to nothing is in the log and in no request; it goes with what stood before it.
        while left and len(_items(said[:left])) == len(items):
            left -= 1
        await self._store.append_rewind(self.session_id, left)
        return items[-1]

    async def clear_session(self) -> None:
        if await self._said():
            await self._store.clear_session(self.session_id)

    async def _said(self) -> list[dict[str, Any]]:
        kept = await self._store.load_session(self.session_id)
        return kept["messages"] if kept is not None else []


def _items(messages: list[dict[str, Any]]) -> list[Any]:
    items: list[Any] = to_provider(messages, FORMAT).payload["input"]
    return items
