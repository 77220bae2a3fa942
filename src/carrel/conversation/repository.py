"""The sessions of one store: create, open, append to, read and delete them."""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Literal, cast
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
    COUNTS,
    DEFAULT_SESSION_TITLE,
    SessionState,
    checked_id,
    decode_meta,
    encode_meta,
    is_too_new,
    position_of,
    title_from,
    when_written,
)
from carrel.conversation.session_writer import SessionWriter, claim_calls
from carrel.errors import SessionNotFound, SessionTooNew, StorageError, StorageReadError, StorageWriteError
from carrel.storage.base import MISSING, Expected, KeyedLock, LoopSemaphore, Stamp, Store, is_expected, locked
from carrel.storage.files.store import FileStore

logger = logging.getLogger(__name__)

_locking = LoopSemaphore(32)
"""Each lock is an open file, and thousands of sessions may be created at the same time."""

_MOST_WRITERS = 1000
"""How many writers are kept; for another session, its metadata is read again before an append."""

Redact = Callable[[ConversationMessage], ConversationMessage]


def redact_entry(entry: ConversationMessage, redact: Redact | None) -> ConversationMessage:
    """Return a log entry without secrets; a rewind has none."""
    if redact is None or not isinstance(entry, dict) or entry.get("role") == "rewind":
        return entry
    return redact(entry)


def redact_value(value: Any, redact: Redact | None) -> Any:
    """Return a text, or metadata, without secrets in its texts."""
    if redact is None:
        return value
    if isinstance(value, str):
        return flatten_message_text(redact(user_text_message(value)))
    if isinstance(value, list):
        return [redact_value(item, redact) for item in value]
    return {name: redact_value(item, redact) for name, item in value.items()} if isinstance(value, dict) else value


class _Incarnation:
    """Identifies a session between its creation and its deletion; exists while an append to it is running."""


class SessionRepository:
    """Creates, opens, appends to and deletes the sessions of a store."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        sync: bool,
        redact: Redact | None,
        output_files: bool = True,
        now: Callable[[], str],
    ) -> None:
        self.store = store
        self.writers: dict[str, SessionWriter] = {}
        self.prefix = prefix
        self._sync = sync
        self._redact = redact
        self._output_files = output_files
        self._now = now
        self._deleted_ids: set[str] = set()
        self._incarnations: WeakValueDictionary[str, _Incarnation] = WeakValueDictionary()
        """By session, for running appends: after a delete it is another one, and the append must fail."""
        self._order = KeyedLock()

    def folder(self, session_id: str) -> str:
        return f"{self.prefix}/{session_id}" if self.prefix else session_id

    def log_key(self, session_id: str) -> str:
        return f"{self.folder(session_id)}/messages.jsonl"

    def meta_key(self, session_id: str) -> str:
        return f"{self.folder(session_id)}/meta.json"

    def created_key(self, session_id: str) -> str:
        return f"{self.folder(session_id)}/created.jsonl"

    def reader(self, session_id: str) -> SessionLogReader:
        return SessionLogReader(self.store, self.folder(session_id))

    # --- creating and deleting ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session_lock(self, session_id: str) -> AsyncIterator[None]:
        """Hold the lock under which a session is created, forked and deleted."""
        async with _locking.turn(), locked(self.store, f"{self.folder(session_id)}/life"):
            yield

    async def create(self, meta: SessionMeta) -> bool:
        """Create the session; False if it exists."""
        session_id = meta["id"]
        async with self.session_lock(session_id):
            if await self.store.stamp(self.log_key(session_id)) is not None:
                return False
            # Unreadable metadata without a log is not a session.
            stamp = await self.store.stamp(self.meta_key(session_id))
            if decode_meta(await self.store.get(self.meta_key(session_id)), session_id) is not None:
                return False
            meta |= {"message_count": 0, "total_tokens": 0, "log_seq": 0, "log_bytes": 0}
            # First, so that lost metadata can be rebuilt from the beginning on. A log and not an object, because
            # that takes a fifth of the time.
            given = cast(SessionMeta, {name: value for name, value in meta.items() if name not in COUNTS})
            await self.store.append(self.created_key(session_id), [encode_meta(given, indent=False)], sync=self._sync)
            self.make_output_folder(session_id)
            written = await self.store.put(self.meta_key(session_id), encode_meta(meta), expect=stamp or MISSING)
            if not written:
                return False  # the lock was lost, and another process has created the session
            await self.store.append(self.log_key(session_id), [], sync=self._sync)
        self._deleted_ids.discard(session_id)
        self._remember(
            SessionWriter(self.store, self.folder(session_id), SessionState(meta), stamp=written, sync=self._sync)
        )
        return True

    def _remember(self, writer: SessionWriter) -> SessionWriter:
        """Keep a writer for the next append; the oldest idle ones are dropped."""
        self.writers[writer.meta["id"]] = writer
        excess = len(self.writers) - _MOST_WRITERS
        for session_id in [*islice(self.writers, max(excess, 0) * 2)]:
            if len(self.writers) > _MOST_WRITERS and self.writers[session_id].is_idle:
                del self.writers[session_id]
        return writer

    def make_output_folder(self, session_id: str) -> None:
        """Create `tool-output/`, where programs that use the session write; only in a FileStore."""
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
        """Return the version of each session's log."""
        found = await self.store.scan(self.prefix, ("messages.jsonl",))
        return {key.rsplit("/", 2)[-2]: stamp for key, stamp in found.items()}

    async def delete(self, session_id: str, *, expect: Expected = None) -> bool:
        """Delete the session; False if there is none, or its log is not of the expected version."""
        folder = self.folder(checked_id(session_id))
        writer: SessionWriter | None = None
        try:
            async with self.session_lock(session_id):
                found = await self.store.stamp(self.log_key(session_id))
                if not is_expected(expect, found):
                    return False
                self._incarnations.pop(session_id, None)
                writer = self.writers.pop(session_id, None)
                condition = None if expect is None else (self.log_key(session_id), expect)
                there = await self.store.delete(folder, expect=condition)
        finally:
            if writer is not None:
                await writer.close()
        self._deleted_ids.discard(session_id)
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
        """Write messages in the order of the calls; with a draft, a missing session is created.

        Returns the number of the last entry and the writer, because the session may be deleted or the store closed
        by then. `SessionNotFound` if the session is missing, or was deleted after this call began or this store had
        opened it. With `after`, returns 0 and writes nothing unless that is the last entry."""
        incarnation = self._incarnation(session_id)
        messages = [self.redacted(message) for message in messages] if self._redact is not None else messages
        lines, files = _lines(messages, self._output_files)
        writer = self.writers.get(session_id)
        if writer is None or files or not self._order.is_free(session_id):
            async with self._order.hold(session_id):
                writer = self.writers.get(session_id) or await self._open(session_id, messages, draft, incarnation)
                for path, data in files.items():
                    await self.store.put(f"{writer.folder}/{path}", data, expect=MISSING)
        try:
            # Tasks that wait for this lock run only after the first step of this append, so the order is kept.
            return await writer.append(messages, lines, self._now(), after=after), writer
        except KeyError:
            self.writers.pop(session_id, None)
            if self._incarnations.get(session_id) is incarnation:
                self._deleted_ids.add(session_id)
            if files:
                await self._remove_attachments(session_id, files)
            raise _deleted(session_id) from None

    def _incarnation(self, session_id: str) -> "_Incarnation":
        incarnation = self._incarnations.get(session_id)
        if incarnation is None:
            incarnation = self._incarnations[session_id] = _Incarnation()
        return incarnation

    async def _remove_attachments(self, session_id: str, files: Iterable[str]) -> None:
        """Remove attachments written for a session that was deleted meanwhile, unless it was created again."""
        async with self.session_lock(session_id):
            if await self._stored(session_id) == (None, None):
                for path in files:
                    await self.store.delete(f"{self.folder(session_id)}/{path}")

    async def append_note(self, session_id: str, note: ConversationMessage) -> SessionMeta:
        """Append a note and write the metadata that it changes."""
        _, writer = await self.append(session_id, [note])
        await writer.flush()
        return writer.metadata()

    async def append_if_unchanged(self, session_id: str, event: ConversationMessage, *, since: int) -> int:
        """Write an event that is based on the log as it was after entry `since`.

        Returns 0 and writes nothing if there was a rewind or a compact after that. Later messages do not matter."""
        refused = False
        while True:
            looked_at = since
            async for seq, entry in self.reader(session_id).entries(since + 1):
                since = seq
                if entry.get("role") in ("compact", "rewind") and note_kind(entry) is None:
                    return 0
            if refused and since == looked_at:
                return 0  # no new entry, and yet that is not the last one: the session was deleted and created again
            written, _ = await self.append(session_id, [event], after=since)
            if written:
                return written
            refused = True

    def redacted(self, message: ConversationMessage) -> ConversationMessage:
        return redact_entry(message, self._redact)

    def redacted_value(self, value: Any) -> Any:
        """Return a title, a label or metadata without secrets."""
        return redact_value(value, self._redact)

    async def _open(
        self,
        session_id: str,
        messages: Sequence[ConversationMessage],
        draft: Callable[[], SessionMeta] | None,
        incarnation: "_Incarnation",
    ) -> SessionWriter:
        if self._incarnations.get(session_id) is not incarnation:
            raise _deleted(session_id)
        meta, stamp = await self._stored(session_id)
        if meta is None and stamp is None:
            if session_id in self._deleted_ids:
                raise _deleted(session_id)
            if draft is None:
                raise not_found(session_id)
            new = draft()
            if new["title"] == DEFAULT_SESSION_TITLE:
                new["title"] = next(filter(None, map(title_from, messages)), DEFAULT_SESSION_TITLE)
            if await self.create(new):
                return self.writers[session_id]
            return await self._open(session_id, messages, None, incarnation)
        if meta is None or stamp is None:
            await self._complete(session_id)
            return await self._open(session_id, messages, draft, incarnation)
        meta = await self.reader(session_id).caught_up(meta, stamp)
        self._deleted_ids.discard(session_id)
        state = SessionState(meta)
        return self._remember(
            SessionWriter(self.store, self.folder(session_id), state, log_bytes=stamp.size, sync=self._sync)
        )

    async def _stored(self, session_id: str) -> tuple[SessionMeta | None, Stamp | None]:
        meta = decode_meta(await self.store.get(self.meta_key(session_id)), session_id)
        stamp = await self.store.stamp(self.log_key(session_id))
        return meta, stamp

    async def _complete(self, session_id: str) -> None:
        """Create whichever of metadata and log is missing, unless another process creates or deletes the session."""
        async with self.session_lock(session_id):
            found = await self.store.stamp(self.meta_key(session_id))
            meta, stamp = await self._stored(session_id)
            if meta is None and stamp is not None:
                made = encode_meta((await self.rebuilt(session_id)).meta)
                await self.store.put(self.meta_key(session_id), made, expect=found or MISSING)
            elif meta is not None and stamp is None:
                await self.store.append(self.log_key(session_id), [], sync=self._sync)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def meta(self, session_id: str) -> SessionMeta | None:
        """Return the metadata, rebuilt from the log if it cannot be read; None if there is no such session."""
        raw = await self.store.get(self.meta_key(checked_id(session_id)))
        stamp = await self.store.stamp(self.log_key(session_id))
        writer = self.writers.get(session_id)
        if writer is not None and raw is not None and stamp is not None and writer.is_current(stamp.size):
            return writer.metadata()
        meta = decode_meta(raw, session_id)
        if meta is None:
            return (await self.rebuilt(session_id)).meta if stamp is not None else None
        return await self.reader(session_id).caught_up(meta, stamp)

    async def position(self, session_id: str) -> "tuple[int, int] | Literal[False] | None":
        """Return the end of the log according to `meta.json`, None if that has none, False if there is no such session.

        The log is not read."""
        meta, stamp = await self._stored(checked_id(session_id))
        if meta is None:
            return None if stamp is not None else False
        return position_of(meta)

    async def require_meta(self, session_id: str) -> SessionMeta:
        meta = await self.meta(session_id)
        if meta is None:
            raise not_found(session_id)
        return meta

    async def rebuilt(self, session_id: str) -> SessionState:
        """Rebuild the metadata from the whole log."""
        stamp = await self.store.stamp(self.log_key(session_id))
        written = when_written(stamp) or self._now()
        state = SessionState.first(session_id, written, await self._created_meta(session_id))
        reading = self.reader(session_id)
        async for seq, entry, size in reading.since(0):
            state.apply(seq, entry, size)
        if state.needs_recount:
            await reading.recount(state)
        return state

    async def _created_meta(self, session_id: str) -> SessionMeta | None:
        """Return the metadata that the session was created with, if known."""
        async for block in self.store.read_back(self.created_key(session_id)):
            try:
                return decode_meta(block.records[-1], session_id)
            except SessionTooNew:
                return None
        return None

    async def counted(self, metas: Iterable[SessionMeta]) -> list[SessionMeta]:
        """Make the counts of messages and tokens exact; the part of a log that its metadata does not cover is read.

        One with an unreadable log, or of a newer format, stays unchanged."""
        metas = list(metas)
        known = [meta for meta in metas if not is_too_new(meta)]
        stamps = await self.store.stamps([self.log_key(meta["id"]) for meta in known])
        for meta, stamp in zip(known, stamps, strict=True):
            try:
                await self.reader(meta["id"]).count(meta, stamp)
            except StorageReadError as problem:
                logger.warning("session %s: its messages cannot be counted: %s", meta["id"], problem)
        return metas

    async def view(self, session_id: str) -> VisibleMessages:
        await self.require_meta(session_id)
        return await self.reader(session_id).view()

    async def repaired_view(self, session_id: str, hint: Hint = None) -> VisibleMessages:
        """Return the visible messages; results of interrupted tool calls are written first."""
        view, looked_at = await self.reader(session_id).view(hint=hint), 0
        try:
            while (missing := unanswered_calls(view.messages)) and view.last_seq != looked_at:
                async with claim_calls(self.store, self.folder(session_id), missing) as is_ours:
                    if not is_ours:
                        return view
                    looked_at = view.last_seq
                    # Only after the last entry that was read: another process may have added the results meanwhile.
                    written, _ = await self.append(session_id, [interrupted_message(missing)], after=looked_at)
                view = await self.reader(session_id).view(hint=hint)
                if written:
                    break
        except (StorageError, SessionNotFound) as problem:
            logger.warning("session %s: the interrupted tool call is repaired in memory only: %s", session_id, problem)
        return view


def _lines(messages: Sequence[ConversationMessage], output_files: bool) -> tuple[list[bytes], dict[str, bytes]]:
    """Return the lines for the log, and the files with long outputs to write before them, if wanted."""
    lines: list[bytes] = []
    files: dict[str, bytes] = {}
    for message in messages:
        line = encode(message)
        if output_files and len(line) > TEXT_LIMIT:
            detached = detach(message)
            if detached.files:
                files |= detached.files
                line = encode(detached.message)
        lines.append(line)
    return lines, files


def not_found(session_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {session_id}; list_sessions() returns all sessions")


def _deleted(session_id: str) -> SessionNotFound:
    return SessionNotFound(
        f"session {session_id} was deleted meanwhile; nothing was written (create_session creates it again)"
    )
