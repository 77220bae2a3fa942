"""A conversation as typed objects, and the storage that keeps conversations in a SessionStore."""

import asyncio
import builtins
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from carrel.conversation.messages import SessionMeta
from carrel.conversation.models.info import DEFAULT_TITLE, SessionInfo, cwd_fields, info_from_meta, meta_fields, now
from carrel.conversation.models.message import Message, is_openai, message_to_lines, plain_shape, provider_messages
from carrel.conversation.models.parts import ImagePart
from carrel.conversation.models.state import ConversationState, read_log
from carrel.conversation.store import SessionStore
from carrel.errors import MessageRefused, SessionNotFound, SessionTooNew, StorageReadError
from carrel.events import Bus, Event, EventType
from carrel.events import bus as shared_bus
from carrel.home import resolve_sessions_dir
from carrel.text import count_messages, html_table

logger = logging.getLogger(__name__)

_SHOWN_MESSAGES = 20
"""Messages that a notebook shows of a conversation."""


class Saving:
    """An awaitable that writes the conversation; it may also be ignored."""

    __slots__ = ("_save",)

    def __init__(self, save: Callable[[], Awaitable[Any]]) -> None:
        self._save = save

    def __await__(self) -> Generator[Any, None, None]:
        return self._saved().__await__()

    async def _saved(self) -> None:
        await self._save()


class Conversation(BaseModel):
    """A session with its messages.

    Its methods change the object at once and write nothing; `ConversationStorage.update` writes what is new. Awaiting
    what they return is the same as calling `update` of the storage that the conversation came from."""

    info: SessionInfo
    messages: list[Message] = Field(default_factory=list)

    # Not fields: a copy does not have them, and reads the log when it is written.
    __slots__ = ("_state", "_storage")
    if TYPE_CHECKING:
        _state: ConversationState
        _storage: "ConversationStorage | None"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def title(self) -> str:
        return self.info.title

    @property
    def storage(self) -> "ConversationStorage | None":
        """The storage it was read from or written to; None before that."""
        return getattr(self, "_storage", None)

    def add_message(self, message: Message) -> Message:
        """Add a message and return it."""
        message.session_id = message.session_id or self.id
        self.messages.append(message)
        self.info.message_count = len(self.messages)
        self.info.time.updated = now()
        message._save = self._save
        return message

    def create_user_message(
        self, content: str, images: Iterable[ImagePart | Mapping[str, Any]] | None = None
    ) -> Message:
        """Add a user's message, with images as dicts of `media_type` and `data` (base64) or `url`."""
        message = Message(session_id=self.id, role="user")
        image_list = list(images or ())
        if content or not image_list:
            message.add_text(content)
        for image in image_list:
            if isinstance(image, ImagePart):
                message.parts.append(image)
                continue
            if not isinstance(image, Mapping) or not (image.get("data") or image.get("url")):
                raise MessageRefused(
                    f"invalid image {image!r:.80}: use an ImagePart, or a dict with media_type and data (base64) or url"
                )
            message.add_image(
                image.get("media_type") or image.get("mime_type") or "",
                data=image.get("data"),
                url=image.get("url"),
                detail=image.get("detail") or "auto",
            )
        return self.add_message(message)

    def create_assistant_message(self) -> Message:
        """Add an empty assistant's message, to be filled."""
        message = Message(
            session_id=self.id, role="assistant", model=self.info.model_id, provider=self.info.provider_id
        )
        return self.add_message(message)

    def create_system_message(self, content: str) -> Message:
        message = Message(session_id=self.id, role="system")
        message.add_text(content)
        return self.add_message(message)

    def get_messages_for_llm(self, provider: str = "openai") -> list[dict[str, Any]]:
        """The messages as the provider's API expects them (see `Message.to_llm_format`).

        For Anthropic and Gemini the system message is not among them: `to_provider(…).payload` has it."""
        lines = (line for each in self.messages for line in message_to_lines(each))
        return provider_messages(map(plain_shape, lines) if is_openai(provider) else lines, provider)

    def update_title(self, title: str) -> Saving:
        self.info.title = title
        self.info.time.updated = now()
        return Saving(self._save)

    def add_usage(self, usage: Mapping[str, Any]) -> Saving:
        """Add the `total_tokens` of an answer, if there are any, to the session's; no message is changed."""
        self.info.total_tokens += usage.get("total_tokens", 0)
        return Saving(self._save)

    def _repr_html_(self) -> str:
        """Show the last messages in a notebook."""
        rows = [(message.role, message.get_text_content()) for message in self.messages[-_SHOWN_MESSAGES:]]
        return html_table(f"{self.title}: {count_messages(len(self.messages))}", rows)

    async def _save(self) -> None:
        await (getattr(self, "_storage", None) or get_session_storage()).update(self)


def _state_of(conversation: Conversation) -> ConversationState:
    if not hasattr(conversation, "_state"):
        conversation._state, conversation._storage = ConversationState(), None
    return conversation._state


class ConversationStorage:
    """Conversations in a SessionStore; without one, that of `$CARREL_HOME`."""

    def __init__(self, store: SessionStore | None = None, *, bus: Bus | None = None) -> None:
        self.store = store if store is not None else SessionStore()
        self.bus = bus if bus is not None else shared_bus
        self._logs = self.store._logs

    async def create(self, session: Conversation) -> Conversation:
        """Write a new conversation with its messages; `SessionExists` when its id is taken."""
        await self._publish(await asyncio.shield(self._write(session, is_new=True)))
        return session

    async def get(self, session_id: str, *, repair: bool = True) -> Conversation | None:
        """The conversation as the log shows it now; None when there is no such session.

        Tool calls that nothing will answer any more have an error result, unless `repair` is False."""
        meta = await self._logs.meta(session_id)
        if meta is None:
            return None
        conversation = Conversation(info=info_from_meta(await self._counted(meta)))
        state = _state_of(conversation)
        state.begin(meta, is_new=False)
        try:
            log = await read_log(self._logs, session_id)
            if not repair:
                log = log._replace(repaired=log.raw)
        except SessionNotFound:
            # It was deleted after the metadata was read.
            return None
        conversation.messages = state.load(conversation.info, log)
        conversation._storage = self
        return conversation

    async def _counted(self, meta: SessionMeta) -> SessionMeta:
        return (await self._logs.counted([meta]))[0]

    async def rewind(self, conversation: Conversation, *, to_seq: int) -> Conversation:
        """Go back to what was visible right after an entry of the log; unwritten changes are written first.

        Messages that are visible then as they are now stay the same objects, a call without a result at that entry
        has none, and messages added during the call come last. `RewindRefused` when there is no such entry and
        `SessionNotFound` when the session was deleted; nothing has changed then."""
        before = list(conversation.messages)
        await self.update(conversation)
        last = seq = await self.store.last_seq(conversation.id)
        if last != to_seq:
            seq = await self.store.append_rewind(conversation.id, to_seq=to_seq)
        try:
            await self._reload(conversation, before)
        except BaseException:
            # Undo the rewind, unless another writer has added something after it.
            if last != to_seq and await self.store.last_seq(conversation.id) == seq:
                await self.store.append_rewind(conversation.id, to_seq=last)
            raise
        return conversation

    async def _reload(self, conversation: Conversation, before: builtins.list[Message]) -> None:
        """Show what the log shows, followed by the messages that were added since there were these."""
        state = _state_of(conversation)
        async with state.turn:
            meta = await self._counted(await self._logs.require_meta(conversation.id))
            state.begin(meta, is_new=False)
            conversation.info.total_tokens = info_from_meta(meta).total_tokens
            log = await read_log(self._logs, conversation.id, awaits_result=True)
            known = set(map(id, before))
            added = [message for message in conversation.messages if id(message) not in known]
            conversation.messages[:] = [*state.load(conversation.info, log, before), *added]
            for message in conversation.messages:
                message._save = conversation._save

    async def update(self, session: Conversation, *, recheck: bool = False) -> Conversation:
        """Write what is new, at a cost that depends on the change and not on the length of the conversation.

        A conversation that is not in the storage yet is created. Written messages are never edited: the log is rewound
        to the first message that was changed or removed, and continues from there. What other processes added stays,
        and where they changed the same message, this later change wins. A change is noticed anywhere except inside a
        dict or list of a message that is not one of the last 32: call `message.touch()` after it, or pass `recheck`."""
        await self._publish(await asyncio.shield(self._write(session, recheck=recheck)))
        return session

    async def delete(self, session_id: str) -> bool:
        """Delete a session with all that belongs to it; False when there is none."""
        meta = await self._logs.meta(session_id)
        if meta is None or not await self._logs.delete(session_id):
            return False
        await self._publish([Event(EventType.SESSION_DELETED, {"session_id": session_id, "title": meta["title"]})])
        return True

    async def list_infos(self) -> list[SessionInfo]:
        """All sessions, newest first; messages are read only to count those of a log whose writer was killed."""
        return await self._infos(await self.store.list_sessions())

    async def children(self, session_id: str) -> list[SessionInfo]:
        """The sub-sessions of a session, newest first."""
        return await self._infos(await self.store.children(session_id))

    async def _infos(self, metas: list[SessionMeta]) -> list[SessionInfo]:
        # Sessions of other programs have no counts and get none: a list would have to read every log.
        await self._logs.counted(meta for meta in metas if "message_count" in meta or "project_dir" in meta)
        return [info_from_meta(meta) for meta in metas]

    async def _write(self, conversation: Conversation, *, is_new: bool = False, recheck: bool = False) -> list[Event]:
        """Create or update a conversation, one call at a time; returns the events to publish.

        Callers shield it from cancellation, so that the state always matches the log."""
        state = _state_of(conversation)
        async with state.turn:
            is_missing = is_new
            if conversation._storage is not self and not is_new:
                meta = await self._logs.meta(conversation.id)
                is_missing = meta is None
                if meta is not None:
                    state.begin(await self._counted(meta), is_new=False)
            if is_missing:
                state.begin(await self._create_session(conversation.info), is_new=True)
            conversation._storage = self
            session = {"session_id": conversation.id, "title": conversation.title}
            events = [Event(EventType.SESSION_CREATED, session)] if is_new else []
            plan = await state.save(self._logs, conversation.info, conversation.messages, recheck)
        session = {"session_id": conversation.id, "title": conversation.title}
        for kind, messages in ((EventType.MESSAGE_CREATED, plan.created), (EventType.MESSAGE_UPDATED, plan.updated)):
            events += [Event(kind, {**session, "message_id": m.id, "role": m.role}) for m in messages]
        if plan.removed:
            events.append(Event(EventType.SESSION_REWOUND, dict(session)))
        return events if is_new else [*events, Event(EventType.SESSION_UPDATED, dict(session))]

    async def _create_session(self, info: SessionInfo) -> SessionMeta:
        fields = meta_fields(info)
        arguments = {"cwd": info.working_dir} | {key: fields.pop(key) for key in ("title", "model", "provider")}
        fields |= cwd_fields(info.working_dir)
        more = {key: value for key, value in fields.items() if value is not None and key != "cwd"}
        if info.provider_id is None:
            more["provider_id"] = None
        dates = {"created_at": info.time.created.isoformat(), "updated_at": info.time.updated.isoformat()}
        data = await self.store._create(info.id, arguments, more | dates)
        info.title = data["session"]["title"]
        return data["session"]

    async def _publish(self, events: Iterable[Event]) -> None:
        for delivery in [self.bus.publish(event) for event in events]:
            await delivery.settle()

    # The last method, because after it `list` means this method.
    async def list(self) -> builtins.list[Conversation]:
        """All sessions with their messages, newest first; `list_infos` reads no messages."""
        found = []
        for info in await self.list_infos():
            try:
                found.append(await self.get(info.id))
            except (SessionTooNew, StorageReadError) as problem:
                logger.warning("not in the list: %s", problem)
        return [conversation for conversation in found if conversation is not None]


_shared: list[ConversationStorage] = []
_is_set = False


def get_session_storage() -> ConversationStorage:
    """The storage that the functions below use: that of `$CARREL_HOME` as it is now, unless one was set."""
    if not _is_set and (not _shared or _shared[0].store.data_dir != resolve_sessions_dir()):
        _shared[:] = [ConversationStorage()]
    return _shared[0]


def set_session_storage(storage: ConversationStorage | None) -> None:
    """Use this storage from now on; None goes back to that of `$CARREL_HOME`."""
    global _is_set
    _shared[:] = [storage] if storage is not None else []
    _is_set = storage is not None


async def create_session(
    project_dir: Path | str,
    working_dir: Path | str | None = None,
    title: str = DEFAULT_TITLE,
    model_id: str | None = None,
    provider_id: str | None = None,
    root_session_id: str | None = None,
    parent_session_id: str | None = None,
    *,
    session_id: str | None = None,
) -> Conversation:
    """Create a conversation in the shared storage; with a parent it is a sub-session of that one."""
    storage = get_session_storage()
    if parent_session_id is not None and root_session_id is None:
        parent = await storage.store._logs.meta(parent_session_id)
        root_session_id = (parent or {}).get("root_session_id") or parent_session_id
    info = SessionInfo(
        title=title,
        project_dir=str(project_dir),
        working_dir=str(working_dir if working_dir is not None else project_dir),
        model_id=model_id,
        provider_id=provider_id,
        root_session_id=root_session_id,
        parent_session_id=parent_session_id,
        **({"id": session_id} if session_id else {}),
    )
    return await storage.create(Conversation(info=info))


async def get_session(session_id: str) -> Conversation | None:
    """The conversation with that id in the shared storage; None when there is none."""
    return await get_session_storage().get(session_id)


async def list_sessions() -> list[SessionInfo]:
    """All sessions of the shared storage, newest first; no messages are read."""
    return await get_session_storage().list_infos()
