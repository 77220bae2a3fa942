"""What it takes to fork a session, to keep a moment of it and to go back there, beside its executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from carrel.conversation.conversation import Conversation, ConversationStorage
from carrel.conversation.store import SessionStore
from carrel.errors import ForkRefused
from carrel.session.checkpoints import Checkpoint
from carrel.session.seam import StorageBackend


async def fork_conversation(store: SessionStore, session_id: str, new_id: str) -> bool:
    """Let the fork of a session begin with what was said in it; False where nothing was."""
    if await store.find_meta(session_id) is None:
        return False
    await store.fork_session(session_id, new_id=new_id)
    return True


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
        held, id_, conversations = await self._written()
        if await conversations.store.find_meta(id_) is None:
            return Checkpoint(label, 0, 0, id_)
        seq = await conversations.store.last_seq(id_)
        if held is not None:
            return Checkpoint(label, len(held.messages), seq, id_)
        return Checkpoint(label, len([None async for _ in conversations.store.iter_messages(id_)]), seq, id_)

    async def rewind(self, to: Checkpoint) -> None:
        held, id_, conversations = await self._written()
        if id_ != to.conversation_id:
            raise ForkRefused(f"the session holds another conversation now ({id_}) than at checkpoint {to}")
        if held is not None:
            await conversations.rewind(held, to_seq=to.seq)
        elif await conversations.store.find_meta(id_) is not None:
            await conversations.store.append_rewind(id_, to_seq=to.seq)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever keeps a session from being forked, kept or rewound, whoever asked is told so in the same way."""
    try:
        yield
    except ForkRefused:
        raise
    except Exception as problem:
        raise ForkRefused(f"the session could not be {what}: {problem}") from problem
