"""The sessions of one store: create, open, append to, read and delete them."""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Literal
from weakref import WeakValueDictionary

from carrel.conversation.attachments import OUTPUTS, TEXT_LIMIT, detach
from carrel.conversation.log_entries import encode, note_kind
from carrel.conversation.log_reader import Hint, SessionLogReader, VisibleMessages
from carrel.conversation.messages import (
    ConversationMessage,
    SessionMeta,
    flatten_message_text,
    user_text_message,
)
from carrel.conversation.replay import interrupted_message, unanswered_calls
from carrel.conversation.session_state import (
    DEFAULT_SESSION_TITLE,
    SessionState,
    as_given,
    checked_id,
    decode_meta,
    encode_meta,
    position_of,
    title_from,
    when_written,
)
from carrel.conversation.session_writer import SessionWriter, claimed
from carrel.errors import SessionNotFound, SessionTooNew, StorageError, StorageWriteError
from carrel.storage.base import MISSING, Expected, KeyedLock, LoopSemaphore, Stamp, Store, is_expected
from carrel.storage.files.store import FileStore

logger = logging.getLogger(__name__)

_locking = LoopSemaphore(32)
"""A lock is an open file, and thousands of sessions may be begun at the same moment."""

_MOST_WRITERS = 1000
"""For how many sessions it is remembered how to append to them; for another that is looked up again."""

Redact = Callable[[ConversationMessage], ConversationMessage]


class _Life:
    """A session from its making to its end, as long as an append to it is under way."""


class SessionRepository:
    """Creates, opens, appends to and deletes the sessions of a store."""

    def __init__(self, store: Store, prefix: str, *, sync: bool, redact: Redact | None, now: Callable[[], str]) -> None:
        self.store = store
        self.writers: dict[str, SessionWriter] = {}
        self.prefix = prefix
        self._sync = sync
        self._redact = redact
        self._now = now
        self._gone: set[str] = set()
        self._lives: WeakValueDictionary[str, _Life] = WeakValueDictionary()
        """What an append that is under way goes by: a delete ends the life of the session, and it must not go on."""
        self._order = KeyedLock()

    def folder(self, session_id: str) -> str:
        return f"{self.prefix}/{session_id}" if self.prefix else session_id

    def log_key(self, session_id: str) -> str:
        return f"{self.folder(session_id)}/messages.jsonl"

    def meta_key(self, session_id: str) -> str:
        return f"{self.folder(session_id)}/meta.json"

    def given_key(self, session_id: str) -> str:
        return f"{self.folder(session_id)}/created.jsonl"

    def reading(self, session_id: str) -> SessionLogReader:
        return SessionLogReader(self.store, self.folder(session_id))

    # --- making and removing ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session_lock(self, session_id: str) -> AsyncIterator[None]:
        """The lock under which a session is made, forked and deleted, so that none undoes half of the other."""
        async with _locking.turn():
            held = await self.store.lock(f"{self.folder(session_id)}/life")
            assert held is not None
            try:
                yield
            finally:
                await held.release()

    @asynccontextmanager
    async def import_lock(self) -> AsyncIterator[None]:
        """The lock of imports: two that import a file at once would both find that it is not here."""
        held = await self.store.lock(self.folder("imports/lock"))
        assert held is not None
        try:
            yield
        finally:
            await held.release()

    async def make(self, meta: SessionMeta) -> bool:
        """Put the session there; False when it is already."""
        session_id = meta["id"]
        async with self.session_lock(session_id):
            if await self.store.stamp(self.log_key(session_id)) is not None:
                return False
            # Unreadable metadata without a log is no session.
            stamp = await self.store.stamp(self.meta_key(session_id))
            if decode_meta(await self.store.get(self.meta_key(session_id)), session_id) is not None:
                return False
            meta |= {"message_count": 0, "total_tokens": 0, "log_seq": 0, "log_bytes": 0}
            # Before there is a session, so that it has what it was given from its first moment on.
            # A line and not an object: it is written once, and that takes a fifth of the time.
            await self.store.append(self.given_key(session_id), [as_given(meta)], sync=self._sync)
            self.make_output_folder(session_id)
            written = await self.store.put(self.meta_key(session_id), encode_meta(meta), expect=stamp or MISSING)
            if not written:
                return False  # the lock was lost, and another process has made it
            await self.store.append(self.log_key(session_id), [], sync=self._sync)
        self._gone.discard(session_id)
        self._keep(
            SessionWriter(self.store, self.folder(session_id), SessionState(meta), stamp=written, sync=self._sync)
        )
        return True

    def _keep(self, writer: SessionWriter) -> SessionWriter:
        """Have it at hand for the next append, in the place of the oldest ones that have nothing left to do."""
        self.writers[writer.meta["id"]] = writer
        excess = len(self.writers) - _MOST_WRITERS
        for session_id in [*islice(self.writers, max(excess, 0) * 2)]:
            if len(self.writers) > _MOST_WRITERS and self.writers[session_id].is_idle:
                del self.writers[session_id]
        return writer

    def make_output_folder(self, session_id: str) -> None:
        """Make `tool-output/`, where programs that use the session write; nothing where sessions are no folders."""
        if not isinstance(self.store, FileStore):
            return
        path = self.store.root / self.folder(session_id) / OUTPUTS
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            raise StorageWriteError(
                f"the folder {path} could not be made: {problem.strerror}; see who owns the folder above it and "
                "whether the disk is full"
            ) from problem

    async def log_stamps(self) -> dict[str, Stamp]:
        """The version of each session's log."""
        found = await self.store.scan(self.prefix, ("messages.jsonl",))
        return {key.rsplit("/", 2)[-2]: stamp for key, stamp in found.items()}

    async def delete(self, session_id: str, *, expect: Expected = None) -> bool:
        """Remove it; False if there was none, or its log is not of the expected version."""
        folder = self.folder(checked_id(session_id))
        writer: SessionWriter | None = None
        try:
            async with self.session_lock(session_id):
                found = await self.store.stamp(self.log_key(session_id))
                if not is_expected(expect, found):
                    return False
                self._lives.pop(session_id, None)
                writer = self.writers.pop(session_id, None)
                condition = None if expect is None else (self.log_key(session_id), expect)
                there = await self.store.delete(folder, expect=condition)
        finally:
            if writer is not None:
                await writer.close()
        self._gone.discard(session_id)
        return there

    async def close(self) -> None:
        while self.writers:
            await self.writers.popitem()[1].close()

    # --- writing ----------------------------------------------------------------------------------------------------

    async def append(
        self,
        session_id: str,
        messages: Sequence[ConversationMessage],
        draft: Callable[[], SessionMeta] | None = None,
        *,
        after: int | None = None,
    ) -> tuple[int, SessionWriter]:
        """Write messages in the order of the calls; with a draft the session is made when missing.

        Returns the number of the last entry and the writer: by now the session may be deleted, or the store closed.
        `SessionNotFound` if the session is missing, or was deleted after this call or this store knew it. With
        `after`, returns 0 and writes nothing unless that is the last entry."""
        life = self._life(session_id)
        messages = [self.redacted(message) for message in messages] if self._redact is not None else messages
        lines, files = _lines(messages)
        writer = self.writers.get(session_id)
        if writer is None or files or not self._order.is_free(session_id):
            async with self._order.hold(session_id):
                writer = self.writers.get(session_id) or await self._opened(session_id, messages, draft, life)
                for path, data in files.items():
                    await self.store.put(f"{writer.folder}/{path}", data, expect=MISSING)
        try:
            # Tasks that wait for this lock run only after the first step of this append, so the order stays.
            return await writer.append(messages, lines, self._now(), after=after), writer
        except KeyError:
            self.writers.pop(session_id, None)
            if self._lives.get(session_id) is life:
                self._gone.add(session_id)
            if files:
                await self._drop(session_id, files)
            raise _deleted(session_id) from None

    def _life(self, session_id: str) -> "_Life":
        life = self._lives.get(session_id)
        if life is None:
            life = self._lives[session_id] = _Life()
        return life

    async def _drop(self, session_id: str, files: Iterable[str]) -> None:
        """Remove what was written beside the log of a session that was deleted meanwhile, unless there is a new one."""
        async with self.session_lock(session_id):
            if await self._there(session_id) == (None, None):
                for path in files:
                    await self.store.delete(f"{self.folder(session_id)}/{path}")

    async def append_note(self, session_id: str, note: ConversationMessage) -> SessionMeta:
        """Append a note and write the metadata that it changes."""
        _, writer = await self.append(session_id, [note])
        await writer.flush()
        return writer.metadata()

    async def append_if_unchanged(self, session_id: str, event: ConversationMessage, *, since: int) -> int:
        """Write an event that was made from the log as it was after entry `since`.

        Returns 0 and writes nothing if there was a rewind or a compact after that. Later messages do not matter."""
        refused = False
        while True:
            looked_at = since
            async for seq, entry in self.reading(session_id).entries(since + 1):
                since = seq
                if entry.get("role") in ("compact", "rewind") and note_kind(entry) is None:
                    return 0
            if refused and since == looked_at:
                return 0  # nothing came, and yet that is not the last entry: it is another log by now
            written, _ = await self.append(session_id, [event], after=since)
            if written:
                return written
            refused = True

    def redacted(self, message: ConversationMessage) -> ConversationMessage:
        if self._redact is None or not isinstance(message, dict) or message.get("role") == "rewind":
            return message
        return self._redact(message)

    def redacted_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Metadata, as it may be written."""
        return {name: self._redacted_value(value) for name, value in fields.items()} if self._redact else fields

    def _redacted_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.redacted_text(value)
        if isinstance(value, list):
            return [self._redacted_value(item) for item in value]
        return self.redacted_fields(value) if isinstance(value, dict) else value

    def redacted_text(self, text: str) -> str:
        """A title or a label, as it may be written."""
        return text if self._redact is None else flatten_message_text(self.redacted(user_text_message(text)))

    async def _opened(
        self,
        session_id: str,
        messages: Sequence[ConversationMessage],
        draft: Callable[[], SessionMeta] | None,
        life: "_Life",
    ) -> SessionWriter:
        if self._lives.get(session_id) is not life:
            raise _deleted(session_id)
        meta, stamp = await self._there(session_id)
        if meta is None and stamp is None:
            if session_id in self._gone:
                raise _deleted(session_id)
            if draft is None:
                raise not_found(session_id)
            new = draft()
            if new["title"] == DEFAULT_SESSION_TITLE:
                new["title"] = next(filter(None, map(title_from, messages)), DEFAULT_SESSION_TITLE)
            if await self.make(new):
                return self.writers[session_id]
            return await self._opened(session_id, messages, None, life)
        if meta is None or stamp is None:
            await self._complete(session_id)
            return await self._opened(session_id, messages, draft, life)
        meta = await self.reading(session_id).caught_up(meta, stamp)
        self._gone.discard(session_id)
        state = SessionState(meta)
        return self._keep(
            SessionWriter(self.store, self.folder(session_id), state, log_bytes=stamp.size, sync=self._sync)
        )

    async def _there(self, session_id: str) -> tuple[SessionMeta | None, Stamp | None]:
        meta = decode_meta(await self.store.get(self.meta_key(session_id)), session_id)
        stamp = await self.store.stamp(self.log_key(session_id))
        return meta, stamp

    async def _complete(self, session_id: str) -> None:
        """Make the metadata or the log where there is but the other, unless it is another who makes or deletes it."""
        async with self.session_lock(session_id):
            found = await self.store.stamp(self.meta_key(session_id))
            meta, stamp = await self._there(session_id)
            if meta is None and stamp is not None:
                made = encode_meta((await self.rebuilt(session_id)).meta)
                await self.store.put(self.meta_key(session_id), made, expect=found or MISSING)
            elif meta is not None and stamp is None:
                await self.store.append(self.log_key(session_id), [], sync=self._sync)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def meta(self, session_id: str) -> SessionMeta | None:
        """The metadata, made again from the log when it cannot be read; None when there is no such session."""
        raw = await self.store.get(self.meta_key(checked_id(session_id)))
        stamp = await self.store.stamp(self.log_key(session_id))
        writer = self.writers.get(session_id)
        if writer is not None and raw is not None and stamp is not None and writer.is_current(stamp.size):
            return writer.metadata()
        meta = decode_meta(raw, session_id)
        if meta is None:
            return await self.rebuilt_meta(session_id) if stamp is not None else None
        return await self.reading(session_id).caught_up(meta, stamp)

    async def position(self, session_id: str) -> "tuple[int, int] | Literal[False] | None":
        """The end of the log as `meta.json` has it, None if it does not, False if there is no such session.

        The log is not read."""
        meta, stamp = await self._there(checked_id(session_id))
        if meta is None:
            return None if stamp is not None else False
        return position_of(meta)

    async def known_meta(self, session_id: str) -> SessionMeta:
        meta = await self.meta(session_id)
        if meta is None:
            raise not_found(session_id)
        return meta

    async def rebuilt_meta(self, session_id: str) -> SessionMeta:
        return (await self.rebuilt(session_id)).meta

    async def rebuilt(self, session_id: str) -> SessionState:
        """The metadata made again from the whole log."""
        stamp = await self.store.stamp(self.log_key(session_id))
        written = when_written(stamp) or self._now()
        state, reading = (
            SessionState.first(session_id, written, await self._given(session_id)),
            self.reading(session_id),
        )
        async for seq, entry, size in reading.since(0):
            state.apply(seq, entry, size)
        if state.needs_recount:
            await reading.recount(state)
        return state

    async def _given(self, session_id: str) -> SessionMeta | None:
        """The metadata as it was when the session was made, where that is known."""
        async for block in self.store.read_back(self.given_key(session_id)):
            try:
                return decode_meta(block.records[-1], session_id)
            except SessionTooNew:
                return None
        return None

    async def view(self, session_id: str) -> VisibleMessages:
        await self.known_meta(session_id)
        return await self.reading(session_id).view()

    async def repaired_view(self, session_id: str, hint: Hint = None) -> VisibleMessages:
        """The view after missing tool results were written, unless their calls are still in use."""
        view, looked_at = await self.reading(session_id).view(hint=hint), 0
        try:
            while (missing := unanswered_calls(view.messages)) and view.last_seq != looked_at:
                async with claimed(self.store, self.folder(session_id), missing) as is_ours:
                    if not is_ours:
                        return view
                    looked_at = view.last_seq
                    # Written only after what was looked at: another may have answered or repaired them meanwhile.
                    written, _ = await self.append(session_id, [interrupted_message(missing)], after=looked_at)
                view = await self.reading(session_id).view(hint=hint)
                if written:
                    break
        except (StorageError, SessionNotFound) as problem:
            logger.warning("session %s: the interrupted tool call is repaired in memory only: %s", session_id, problem)
        return view


def _lines(messages: Sequence[ConversationMessage]) -> tuple[list[bytes], dict[str, bytes]]:
    """The lines of the log, and the files that must be there before them."""
    lines: list[bytes] = []
    files: dict[str, bytes] = {}
    for message in messages:
        line = encode(message)
        if len(line) > TEXT_LIMIT:
            detached = detach(message)
            if detached.files:
                files |= detached.files
                line = encode(detached.message)
        lines.append(line)
    return lines, files


def not_found(session_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {session_id}; list_sessions() names those there are")


def _deleted(session_id: str) -> SessionNotFound:
    return SessionNotFound(
        f"session {session_id} was deleted meanwhile; nothing was written (create_session begins it anew)"
    )
