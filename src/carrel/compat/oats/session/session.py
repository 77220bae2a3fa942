"""Sessions of oats, kept as conversations of carrel."""

import builtins
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from carrel.compat.oats.core.bus import Event, EventType, bus
from carrel.compat.oats.core.storage import SessionExistsError, Storage, data_folder
from carrel.compat.oats.date import utc
from carrel.compat.oats.session.message import Message, from_carrel, to_carrel
from carrel.conversation.models.conversation import Conversation, ConversationStorage
from carrel.conversation.models.info import SessionInfo, SessionTime
from carrel.conversation.store import SessionStore
from carrel.errors import SessionExists
from carrel.events import Bus
from carrel.storage.files.store import FileStore

__all__ = [
    "Session",
    "SessionInfo",
    "SessionStorage",
    "SessionTime",
    "create_session",
    "get_session",
    "get_session_storage",
    "list_sessions",
]

_NAMESPACE = "sessions"


class Session(BaseModel):
    """A session with its messages; `SessionStorage.update` writes it."""

    info: SessionInfo
    messages: list[Message] = Field(default_factory=list)

    # No field: a copy does not have it, and is compared with the log when it is written.
    __slots__ = ("_conversation",)
    if TYPE_CHECKING:
        _conversation: Conversation

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def title(self) -> str:
        return self.info.title

    def add_message(self, message: Message) -> Message:
        self.messages.append(message)
        self.info.message_count = len(self.messages)
        self.info.time.updated = utc()
        return message

    def create_user_message(self, content: str, images: Sequence[Mapping[str, str]] | None = None) -> Message:
        """Add a message with images as dicts of `media_type` and `data` (base64) or `url`."""
        message = Message(session_id=self.id, role="user")
        message.add_text(content)
        for image in images or ():
            message.add_image(image["media_type"], data=image.get("data"), url=image.get("url"))
        return self.add_message(message)

    def create_assistant_message(self) -> Message:
        """Add an empty message, to be filled."""
        model, provider = self.info.model_id, self.info.provider_id
        return self.add_message(Message(session_id=self.id, role="assistant", model=model, provider=provider))

    def create_system_message(self, content: str) -> Message:
        message = Message(session_id=self.id, role="system")
        message.add_text(content)
        return self.add_message(message)

    def get_messages_for_llm(self) -> list[dict[str, Any]]:
        return [message.to_llm_format() for message in self.messages]

    def update_title(self, title: str) -> None:
        self.info.title = title
        self.info.time.updated = utc()

    def add_usage(self, usage: Mapping[str, int]) -> None:
        """Add the `total_tokens` of an answer, if it has any."""
        self.info.total_tokens += usage.get("total_tokens", 0)


class SessionStorage:
    """Keeps sessions in `<data folder>/sessions/`, and publishes an event after each write.

    Files `<id>.json` of the original are read, too; the first update of such a session writes it as carrel does."""

    def __init__(self) -> None:
        self._originals = Storage(namespace=_NAMESPACE, model_class=Session)
        self._storages: dict[Path, ConversationStorage] = {}

    async def create(self, session: Session) -> Session:
        if await self._originals.read(session.id) is not None:
            raise SessionExistsError(f"session {session.id} exists; give the new one another id")
        try:
            await self._create(session)
        except SessionExists as problem:
            raise SessionExistsError(str(problem)) from problem
        await bus.publish(Event(EventType.SESSION_CREATED, {"session_id": session.id, "title": session.title}))
        return session

    async def get(self, session_id: str) -> Session | None:
        conversation = await self._storage.get(session_id, repair=False)
        if conversation is None:
            return await self._originals.read(session_id)
        messages = [each for each in map(from_carrel, conversation.messages) if each is not None]
        info = (await self._exact([conversation.info]))[0]
        session = Session(info=info, messages=messages)
        session._conversation = conversation
        return session

    async def update(self, session: Session) -> Session:
        """Write what differs from the log; an unknown session is stored."""
        storage = self._storage
        conversation = getattr(session, "_conversation", None)
        if conversation is None or conversation.storage is not storage or not await self._exists(session.id):
            conversation = await storage.get(session.id, repair=False)
        if conversation is None:
            await self._create(session)
        else:
            _copy(session, conversation)
            await storage.update(conversation)
            session._conversation = conversation
            await self._keep_info(session)
        await bus.publish(Event(EventType.SESSION_UPDATED, {"session_id": session.id}))
        return session

    async def delete(self, session_id: str) -> bool:
        kept = await self._storage.delete(session_id)
        if not await self._originals.delete(session_id) and not kept:
            return False
        await bus.publish(Event(EventType.SESSION_DELETED, {"session_id": session_id}))
        return True

    async def list_infos(self) -> builtins.list[SessionInfo]:
        """Return all sessions without their messages."""
        infos = await self._exact(await self._storage.list_infos())
        known = {info.id for info in infos}
        return [*infos, *(each.info for each in await self._originals.list() if each.id not in known)]

    # --- conversations ------------------------------------------------------------------------------------------------

    @property
    def _storage(self) -> ConversationStorage:
        folder = data_folder() / _NAMESPACE
        if folder not in self._storages:
            # Its own events have other data; they go to a bus without subscribers.
            self._storages[folder] = ConversationStorage(SessionStore(folder), bus=Bus())
        return self._storages[folder]

    async def _exists(self, session_id: str) -> bool:
        return await self._storage.store.find_meta(session_id) is not None

    async def _create(self, session: Session) -> None:
        conversation = Conversation(info=session.info.model_copy(deep=True))
        _copy(session, conversation)
        await self._storage.create(conversation)
        session._conversation = conversation
        await self._keep_info(session)

    async def _keep_info(self, session: Session) -> None:
        """Keep the info as it is: carrel itself counts messages and tokens, and notes the time of the last write."""
        files = FileStore(data_folder() / _NAMESPACE)
        log = await files.stamp(f"{session.id}/messages.jsonl")
        kept = {"log_bytes": log.size if log else 0, "info": session.info.model_dump(mode="json")}
        await files.put(f"{session.id}/oats-info.json", json.dumps(kept).encode())

    async def _exact(self, infos: builtins.list[SessionInfo]) -> builtins.list[SessionInfo]:
        """Return each info as it was given, unless the log was written to by another program since then."""
        files = FileStore(data_folder() / _NAMESPACE)
        kept = await files.get_many([f"{info.id}/oats-info.json" for info in infos])
        logs = await files.stamps([f"{info.id}/messages.jsonl" for info in infos])
        found = []
        for info, raw, log in zip(infos, kept, logs, strict=True):
            try:
                data = json.loads(raw or b"{}")
                is_current = log is not None and data.get("log_bytes") == log.size
                found.append(SessionInfo.model_validate(data["info"]) if is_current else info)
            except (ValueError, KeyError, TypeError, AttributeError):  # the file is damaged
                found.append(info)
        return found

    # The last method, because after it `list` means this method.
    async def list(self) -> builtins.list[Session]:
        found = [await self.get(info.id) for info in await self.list_infos()]
        return [session for session in found if session is not None]


def _copy(session: Session, conversation: Conversation) -> None:
    """Make a conversation what the session is; messages that are unchanged stay the same objects."""
    conversation.info = session.info.model_copy(deep=True)
    known = {message.id: message for message in conversation.messages}
    messages = []
    for message in (to_carrel(each, session.id) for each in session.messages):
        before = known.get(message.id)
        is_same = before is not None and from_carrel(before) == from_carrel(message)
        messages.append(before if before is not None and is_same else message)
    conversation.messages = messages


_shared: SessionStorage | None = None


def get_session_storage() -> SessionStorage:
    """Return the storage of this process."""
    global _shared
    _shared = _shared or SessionStorage()
    return _shared


async def create_session(
    project_dir: Path,
    working_dir: Path | None = None,
    title: str = "New Session",
    model_id: str | None = None,
    provider_id: str | None = None,
    root_session_id: str | None = None,
) -> Session:
    """Create a session in the storage of this process."""
    info = SessionInfo(
        title=title,
        project_dir=str(project_dir),
        working_dir=str(project_dir if working_dir is None else working_dir),
        model_id=model_id,
        provider_id=provider_id,
        root_session_id=root_session_id,
    )
    return await get_session_storage().create(Session(info=info))


async def get_session(session_id: str) -> Session | None:
    return await get_session_storage().get(session_id)


async def list_sessions() -> list[SessionInfo]:
    return await get_session_storage().list_infos()
