"""Conversation: the log as typed objects, and where they are kept."""

import asyncio
import builtins
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from carrel.conversation.messages import SessionMeta
from carrel.conversation.place import Place
from carrel.conversation.session_info import DEFAULT_TITLE, SessionInfo, info_of, kept_folder, meta_fields, now
from carrel.conversation.store import SessionStore
from carrel.conversation.typed_log import look_at, up_to_date
from carrel.conversation.typed_message import Message, is_openai, message_to_lines, plain_shape, provider_messages
from carrel.conversation.typed_parts import ImagePart
from carrel.errors import MessageRefused, SessionNotFound, SessionTooNew
from carrel.events import Bus, Event, EventType
from carrel.events import bus as shared_bus
from carrel.home import resolve_sessions_dir

logger = logging.getLogger(__name__)


class Saving:
    """What may be awaited to have the conversation written, or left alone."""

    __slots__ = ("_save",)

    def __init__(self, save: Callable[[], Awaitable[Any]]) -> None:
        self._save = save

    def __await__(self) -> Generator[Any, None, None]:
        return self._saved().__await__()

    async def _saved(self) -> None:
        await self._save()


class Conversation(BaseModel):
    """A session with its messages.

    Its methods change the object at once and write nothing; `ConversationStorage.update` writes what is new. What they
    give back can also be awaited: that is the same as calling `update` with the storage the conversation came from."""

    info: SessionInfo
    messages: list[Message] = Field(default_factory=list)

    # No field: a copy is not in the log, and has it to find out what is.
    __slots__ = ("_place", "_storage")
    if TYPE_CHECKING:
        _place: Place
        _storage: "ConversationStorage | None"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def title(self) -> str:
        return self.info.title

    @property
    def storage(self) -> "ConversationStorage | None":
        """Where it is kept; None while it is nowhere."""
        return getattr(self, "_storage", None)

    def add_message(self, message: Message) -> Message:
        """Add a message and give it back."""
        message.session_id = message.session_id or self.id
        self.messages.append(message)
        self.info.message_count = len(self.messages)
        self.info.time.updated = now()
        message._save = self._save
        return message

    def create_user_message(
        self, content: str, images: Iterable[ImagePart | Mapping[str, Any]] | None = None
    ) -> Message:
        """A user's message, with images as dicts of `media_type` and `data` (base64) or `url`."""
        message = Message(session_id=self.id, role="user")
        pictures = list(images or ())
        if content or not pictures:
            message.add_text(content)
        for image in pictures:
            if isinstance(image, ImagePart):
                message.parts.append(image)
                continue
            if not isinstance(image, Mapping) or not (image.get("data") or image.get("url")):
                raise MessageRefused(
                    f"an image is an ImagePart, or a dict with media_type and data (base64) or url, not {image!r:.80}"
                )
            message.add_image(
                image.get("media_type") or image.get("mime_type") or "",
                data=image.get("data"),
                url=image.get("url"),
                detail=image.get("detail") or "auto",
            )
        return self.add_message(message)

    def create_assistant_message(self) -> Message:
        """An empty one, to be filled."""
        message = Message(
            session_id=self.id, role="assistant", model=self.info.model_id, provider=self.info.provider_id
        )
        return self.add_message(message)

    def create_system_message(self, content: str) -> Message:
        message = Message(session_id=self.id, role="system")
        message.add_text(content)
        return self.add_message(message)

    def get_messages_for_llm(self, provider: str = "openai") -> list[dict[str, Any]]:
        """The messages as the provider's API has them, in an order that it takes (see `Message.to_llm_format`).

        Anthropic and Gemini have what the system says beside the messages: it is in `to_provider(…).payload`."""
        lines = (line for each in self.messages for line in message_to_lines(each))
        return provider_messages(map(plain_shape, lines) if is_openai(provider) else lines, provider)

    def update_title(self, title: str) -> Saving:
        self.info.title = title
        self.info.time.updated = now()
        return Saving(self._save)

    def add_usage(self, usage: Mapping[str, Any]) -> Saving:
        """Add the `total_tokens` of an answer, where it has them, to those of the session; no message is changed."""
        self.info.total_tokens += usage.get("total_tokens", 0)
        return Saving(self._save)

    async def _save(self) -> None:
        await (getattr(self, "_storage", None) or get_session_storage()).update(self)


def _place_of(conversation: Conversation) -> Place:
    if not hasattr(conversation, "_place"):
        conversation._place, conversation._storage = Place(), None
    return conversation._place


class ConversationStorage:
    """Conversations kept in a SessionStore (the one in `$CARREL_HOME` unless another is given)."""

    def __init__(self, store: SessionStore | None = None, *, bus: Bus | None = None) -> None:
        self.store = store if store is not None else SessionStore()
        self.bus = bus if bus is not None else shared_bus
        self._logs = self.store._logs

    async def create(self, session: Conversation) -> Conversation:
        """Keep a new one, with the messages it has; `SessionExists` when its id is taken."""
        await self._tell(await asyncio.shield(self._in_turn(session, is_new=True)))
        return session

    async def get(self, session_id: str) -> Conversation | None:
        """The conversation as it is seen now; None when there is no such session."""
        meta = await self._logs.meta(session_id)
        if meta is None:
            return None
        conversation = Conversation(info=info_of(await self._counted(meta)))
        place = _place_of(conversation)
        place.begin(meta, is_new=False)
        try:
            look = await look_at(self._logs, session_id)
        except SessionNotFound:
            # Deleted a moment ago.
            return None
        conversation.messages = place.read(conversation.info, look)
        conversation._storage = self
        return conversation

    async def _counted(self, meta: SessionMeta) -> SessionMeta:
        await up_to_date(self._logs, [meta])
        if "total_tokens" not in meta:
            meta["total_tokens"] = await self._logs.reading(meta["id"]).tokens_spent()
        return meta

    async def rewind(self, conversation: Conversation, *, to_seq: int) -> Conversation:
        """Go back to what was visible right after an entry of the log; what is not yet written is written before.

        Messages that are visible then as they are now stay the same objects, a call that was not answered then is not
        answered, and what is added meanwhile comes after it. `RewindRefused` when there is no such
        entry, and `SessionNotFound` when it was deleted; nothing has changed."""
        before = list(conversation.messages)
        await self.update(conversation)
        last = seq = await self.store.last_seq(conversation.id)
        if last != to_seq:
            seq = await self.store.append_rewind(conversation.id, to_seq=to_seq)
        try:
            await self._show(conversation, before)
        except BaseException:
            # Unless somebody has said something since: that would be gone with it.
            if last != to_seq and await self.store.last_seq(conversation.id) == seq:
                await self.store.append_rewind(conversation.id, to_seq=last)
            raise
        return conversation

    async def _show(self, conversation: Conversation, before: builtins.list[Message]) -> None:
        """What is visible in the log, and after it what was added since there were these messages."""
        place = _place_of(conversation)
        async with place.turn:
            meta = await self._counted(await self._logs.known_meta(conversation.id))
            place.begin(meta, is_new=False)
            conversation.info.total_tokens = info_of(meta).total_tokens
            look = await look_at(self._logs, conversation.id, waits=True)
            there = set(map(id, before))
            added = [message for message in conversation.messages if id(message) not in there]
            conversation.messages[:] = [*place.read(conversation.info, look, before), *added]
            for message in conversation.messages:
                message._save = conversation._save

    async def update(self, session: Conversation, *, recheck: bool = False) -> Conversation:
        """Write what is new; what it costs depends on what changed, not on the length of the conversation.

        One that is not in the storage yet is put there.

        Nothing that was written is edited: from a message on that was changed or taken out, the log is rewound and
        goes on anew. What others wrote meanwhile stays. A change is noticed anywhere, except inside a dict of a message
        that is not one of the last 32: say `message.touch()` after it, or give `recheck`."""
        await self._tell(await asyncio.shield(self._in_turn(session, recheck=recheck)))
        return session

    async def delete(self, session_id: str) -> bool:
        """Remove it with all that belongs to it; False when there was none."""
        meta = await self._logs.meta(session_id)
        if meta is None or not await self._logs.delete(session_id):
            return False
        await self._tell([Event(EventType.SESSION_DELETED, {"session_id": session_id, "title": meta["title"]})])
        return True

    async def list_infos(self) -> list[SessionInfo]:
        """All sessions, newest first; no messages are read (but to count those of a log whose writer was killed)."""
        return await self._infos(await self.store.list_sessions())

    async def children(self, session_id: str) -> list[SessionInfo]:
        """The sub-sessions of a session, newest first."""
        return await self._infos(await self.store.children(session_id))

    async def _infos(self, metas: list[SessionMeta]) -> list[SessionInfo]:
        await up_to_date(self._logs, metas)
        return [info_of(meta) for meta in metas]

    async def _in_turn(self, conversation: Conversation, *, is_new: bool = False, recheck: bool = False) -> list[Event]:
        """Create or update, one call after the other; returns what there is to tell.

        Shielded by its callers: once begun, it ends, so that what is known of the log stays true."""
        place = _place_of(conversation)
        async with place.turn:
            make = is_new
            if conversation._storage is not self and not is_new:
                meta = await self._logs.meta(conversation.id)
                make = meta is None
                if meta is not None:
                    place.begin(await self._counted(meta), is_new=False)
            if make:
                place.begin(await self._make(conversation.info), is_new=True)
            conversation._storage = self
            told = [Event(EventType.SESSION_CREATED, _about(conversation))] if is_new else []
            plan = await place.write(self._logs, conversation.info, conversation.messages, recheck)
        for kind, messages in ((EventType.MESSAGE_CREATED, plan.created), (EventType.MESSAGE_UPDATED, plan.updated)):
            told += [Event(kind, {**_about(conversation), "message_id": m.id, "role": m.role}) for m in messages]
        if plan.removed:
            told.append(Event(EventType.SESSION_REWOUND, _about(conversation)))
        return told if is_new else [*told, Event(EventType.SESSION_UPDATED, _about(conversation))]

    async def _make(self, info: SessionInfo) -> SessionMeta:
        fields = meta_fields(info)
        given = {"cwd": info.working_dir} | {key: fields.pop(key) for key in ("title", "model", "provider")}
        fields |= kept_folder(info.working_dir)
        more = {key: value for key, value in fields.items() if value is not None and key != "cwd"}
        if info.provider_id is None:
            more["provider_id"] = None
        dates = {"created_at": info.time.created.isoformat(), "updated_at": info.time.updated.isoformat()}
        data = await self.store._made(info.id, given, more | dates)
        info.title = data["session"]["title"]
        return data["session"]

    async def _tell(self, events: Iterable[Event]) -> None:
        for delivery in [self.bus.publish(event) for event in events]:
            await delivery.settle()

    # Last, because below it the word means this method.
    async def list(self) -> builtins.list[Conversation]:
        """All sessions with their messages, newest first; `list_infos` is the light one."""
        found = []
        for info in await self.list_infos():
            try:
                found.append(await self.get(info.id))
            except SessionTooNew as problem:
                logger.warning("left out of the list: %s", problem)
        return [conversation for conversation in found if conversation is not None]


def _about(conversation: Conversation) -> dict[str, Any]:
    return {"session_id": conversation.id, "title": conversation.title}


_shared: list[ConversationStorage] = []
_is_given = False


def get_session_storage() -> ConversationStorage:
    """The storage that everybody shares: that of `$CARREL_HOME` as it is now, unless one was set."""
    if not _is_given and (not _shared or _shared[0].store.data_dir != resolve_sessions_dir()):
        _shared[:] = [ConversationStorage()]
    return _shared[0]


def set_session_storage(storage: ConversationStorage | None) -> None:
    """Share this one from now on; None goes back to that of `$CARREL_HOME`."""
    global _is_given
    _shared[:] = [storage] if storage is not None else []
    _is_given = storage is not None


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
    """A new conversation in the shared storage; with a parent it is a sub-session of that one."""
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
    """The conversation of that id in the shared storage, or None."""
    return await get_session_storage().get(session_id)


async def list_sessions() -> list[SessionInfo]:
    """All sessions of the shared storage, newest first; no messages are read."""
    return await get_session_storage().list_infos()
