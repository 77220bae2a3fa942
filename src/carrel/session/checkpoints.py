"""Checkpoints: conversation, variables and files kept together, to return to them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from carrel.errors import ForkRefused, SessionExists
from carrel.execution.executor import Executor, ExecutorCheckpoint
from carrel.session.storage import StorageBackend

if TYPE_CHECKING:
    from carrel.conversation.models.conversation import Conversation, ConversationStorage
    from carrel.conversation.store import SessionStore

MAX_CHECKPOINTS = 32
"""Each checkpoint has a process and a copy of the changed files."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A moment of a session: its conversation, variables and files as they were then."""

    label: str
    message_count: int
    """How many messages were visible."""
    seq: int
    """The last entry of the conversation's log."""
    conversation_id: str
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    conversation_created_at: str = ""
    """Distinguishes a conversation from a later one with the same id."""

    def __str__(self) -> str:
        return f"{self.label[:60]!r} ({self.id})" if self.label else self.id


@contextmanager
def fork_refused(action: str) -> Iterator[None]:
    """Raise every error of the block as ForkRefused: `action` ("forked", "rewound") was not possible."""
    try:
        yield
    except ForkRefused:
        raise
    except Exception as problem:
        raise ForkRefused(f"the session could not be {action}: {problem}") from problem


async def fork_conversation(store: SessionStore, session_id: str, new_id: str) -> bool:
    """Copy the conversation for a fork of the session; False when the session has no conversation."""
    if await store.find_meta(session_id) is None:
        return False
    await store.fork_session(session_id, new_id=new_id, load=False)
    return True


class ConversationBranch:
    """Opens, forks and rewinds the conversation of a session: the typed one it holds, or the stored one with its id."""

    def __init__(self, session_id: str, storage: StorageBackend, get_held: Callable[[], Conversation | None]) -> None:
        """`get_held` returns the typed conversation that the session holds now, if any."""
        self._session_id = session_id
        self._storage = storage
        self._get_held = get_held

    async def open(self, title: str, fields: Mapping[str, Any]) -> Conversation:
        """Return the typed conversation with the session's id, created in the storage if it does not exist yet."""
        from carrel.conversation.models.conversation import Conversation, ConversationStorage  # noqa: PLC0415 -- slow
        from carrel.conversation.models.info import SessionInfo  # noqa: PLC0415 -- slow to import

        conversations = ConversationStorage(self._storage.get_session_store())
        folders = {"project_dir": "", "working_dir": fields.get("project_dir", "")}
        info = SessionInfo(id=self._session_id, title=title, **{**folders, **fields})
        while (found := await conversations.get(self._session_id)) is None:
            # Another process may create it at this moment; then open it.
            with suppress(SessionExists):
                return await conversations.create(Conversation(info=info))
        return found

    async def _saved(self) -> tuple[Conversation | None, str, ConversationStorage]:
        """Return the held conversation, its id and its storage, with every change written."""
        from carrel.conversation.models.conversation import ConversationStorage  # noqa: PLC0415 -- slow to import

        held = self._get_held()
        conversations = (held and held.storage) or ConversationStorage(self._storage.get_session_store())
        if held is None:
            return None, self._session_id, conversations
        await conversations.update(held)
        return held, held.id, conversations

    async def save(self) -> None:
        """Write every change of the typed conversation that the session holds."""
        if self._get_held() is not None:
            await self._saved()

    async def fork(self, new_id: str, undo: AsyncExitStack, *, typed: bool) -> Conversation | None:
        """Fork the conversation; return the fork if the session holds its conversation or `typed` is set.

        A callback that deletes the fork is pushed onto `undo`."""
        store, id_ = self._storage.get_session_store(), self._session_id
        held = self._get_held()
        if held is not None:
            _, id_, conversations = await self._saved()
            store = conversations.store
        if not await fork_conversation(store, id_, new_id):
            return None
        undo.push_async_callback(store.delete_session, new_id)
        if held is None and not typed:
            return None
        return await (await self._saved())[2].get(new_id)

    async def checkpoint(self, label: str) -> Checkpoint:
        """Describe the conversation as it is now."""
        held, id_, conversations = await self._saved()
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
        created_at = meta["created_at"] if meta is not None else ""
        return Checkpoint(label, count, seq, id_, conversation_created_at=created_at)

    async def rewind(self, to: Checkpoint) -> None:
        """Show the messages that were visible at the checkpoint."""
        held, id_, conversations = await self._saved()
        store = conversations.store
        if id_ != to.conversation_id:
            raise ForkRefused(f"the session holds another conversation now ({id_}) than at checkpoint {to}")
        meta = await store.find_meta(id_)
        if to.conversation_created_at and (meta is None or meta["created_at"] != to.conversation_created_at):
            raise ForkRefused(f"the conversation {id_} was deleted since checkpoint {to}")
        if held is not None:
            await conversations.rewind(held, to_seq=to.seq)
        elif meta is not None and await store.last_seq(id_) != to.seq:
            await store.append_rewind(id_, to_seq=to.seq)


class Checkpoints:
    """The checkpoints of one session, oldest first; they end with its executor."""

    def __init__(self, executor: Executor, conversation: ConversationBranch) -> None:
        self._executor = executor
        self._conversation = conversation
        self._kept: dict[str, tuple[Checkpoint, ExecutorCheckpoint]] = {}
        self._creating = asyncio.Lock()

    def all(self) -> list[Checkpoint]:
        return [point for point, _ in self._kept.values()]

    async def create(self, label: str) -> Checkpoint:
        """Keep the present moment; ForkRefused changes nothing."""
        async with self._creating:
            if len(self._kept) >= MAX_CHECKPOINTS:
                raise ForkRefused(
                    f"a session keeps at most {MAX_CHECKPOINTS} checkpoints, and it has that many; "
                    "remove one with drop_checkpoint"
                )
            with fork_refused("kept"):
                moment = await self._executor.checkpoint()
                try:
                    point = await self._conversation.checkpoint(label)
                except BaseException:
                    await moment.close()
                    raise
            self._kept[point.id] = (point, moment)
            return point

    async def rewind(self, to: Checkpoint) -> None:
        """Return to a checkpoint in conversation, variables and files, or in none of them."""
        _, moment = self._find(to)
        with fork_refused("rewound"):
            await self._executor.rewind(moment, lambda: self._conversation.rewind(to))

    def find(self, wanted: Checkpoint | str | int) -> Checkpoint:
        """Find a checkpoint by itself, its id, its label or its message count; the newest that matches."""
        return self._find(wanted)[0]

    def _find(self, wanted: Checkpoint | str | int) -> tuple[Checkpoint, ExecutorCheckpoint]:
        if isinstance(wanted, bool) or not isinstance(wanted, Checkpoint | str | int):
            raise TypeError(f"{wanted!r} is not a checkpoint; give one, its id or label, or a number of messages")
        id_ = wanted.id if isinstance(wanted, Checkpoint) else wanted
        if isinstance(id_, str) and id_ in self._kept:
            return self._kept[id_]
        for point, moment in reversed(self._kept.values()):
            if wanted != "" and wanted == (point.message_count if isinstance(wanted, int) else point.label):
                return point, moment
        there = ", ".join(f"{point} at {point.message_count} messages" for point in self.all()) or "none"
        what = f"at {wanted} messages" if isinstance(wanted, int) else f"{wanted}" or "without a name"
        raise ForkRefused(f"there is no checkpoint {what}; there are: {there}")

    async def drop(self, wanted: Checkpoint | str | int) -> Checkpoint:
        """Remove a checkpoint with its process and its copy of the changed files."""
        point, moment = self._find(wanted)
        del self._kept[point.id]
        await moment.close()
        return point
