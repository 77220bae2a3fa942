"""What was said in a session, for those who fork it, keep a moment of it, or go back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from carrel.conversation.models.conversation import Conversation, ConversationStorage
from carrel.errors import ForkRefused
from carrel.session.forking import fork_conversation
from carrel.session.seam import StorageBackend


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A moment of a session: what was said, what was known and what was made by then."""

    label: str
    messages: int
    """How many messages were visible."""
    seq: int
    """The last entry of the conversation's log."""
    conversation_id: str
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    made_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    begun: str = ""
    """When the conversation began: another of its name is not the same."""

    def __str__(self) -> str:
        return f"{self.label[:60]!r} ({self.id})" if self.label else self.id


class Said:
    """What was said in a session: in the conversation that it holds, or in one of its name in the storage."""

    def __init__(self, session_id: str, storage: StorageBackend, held: Callable[[], Conversation | None]) -> None:
        self._session_id = session_id
        self._storage = storage
        self._held = held

    async def _written(self) -> tuple[Conversation | None, str, ConversationStorage]:
        """The conversation that the session holds, its id, and where it is kept."""
        held = self._held()
        conversations = (held and held.storage) or ConversationStorage(self._storage.get_session_store())
        if held is None:
            return None, self._session_id, conversations
        # What was added and not yet written is part of this moment.
        await conversations.update(held)
        return held, held.id, conversations

    async def fork(self, new_id: str, undone: AsyncExitStack, *, is_needed: bool) -> Conversation | None:
        """Fork it, where anything was said; the typed one where the session holds it, or it `is_needed`."""
        held, id_, conversations = await self._written()
        if not await fork_conversation(conversations.store, id_, new_id):
            return None
        undone.push_async_callback(conversations.store.delete_session, new_id)
        return await conversations.get(new_id) if held is not None or is_needed else None

    async def moment(self, label: str) -> Checkpoint:
        """How far it is."""
        held, id_, conversations = await self._written()
        store, count, seq = conversations.store, 0, 0
        meta = await store.find_meta(id_)
        if meta is not None:
            seq = await store.last_seq(id_)
            if held is not None:
                count = len(held.messages)
            elif meta.get("log_seq") == seq and "message_count" in meta:
                count = meta["message_count"]
            else:
                count = len([None async for _ in store.iter_messages(id_)])
        return Checkpoint(label, count, seq, id_, begun=meta["created_at"] if meta is not None else "")

    async def rewind(self, to: Checkpoint) -> None:
        """Show what was visible then."""
        held, id_, conversations = await self._written()
        store = conversations.store
        if id_ != to.conversation_id:
            raise ForkRefused(f"the session holds another conversation now ({id_}) than at checkpoint {to}")
        meta = await store.find_meta(id_)
        if to.begun and (meta is None or meta["created_at"] != to.begun):
            raise ForkRefused(f"the conversation {id_} was deleted since checkpoint {to}")
        if held is not None:
            await conversations.rewind(held, to_seq=to.seq)
        elif meta is not None and await store.last_seq(id_) != to.seq:
            await store.append_rewind(id_, to_seq=to.seq)
