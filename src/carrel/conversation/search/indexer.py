"""Keep the search index up to date: read what was added to the logs since the last search, embed it and write it."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carrel.conversation.log_reader import SessionLogReader
from carrel.conversation.messages import ConversationMessage, SessionMeta
from carrel.conversation.search.documents import DocumentBuilder, IndexedSession, digest
from carrel.conversation.session_state import DEFAULT_SESSION_TITLE, decode_meta, is_id, when_written
from carrel.embedding import Embedder, NearestVectors, pack_vectors
from carrel.errors import CatalogueBusy, CatalogueLost, SessionTooNew, StorageReadError
from carrel.storage.base import Stamp, Store
from carrel.storage.text_index import LOCK_WAIT, DocumentRef, SourceUpdate, TextIndex

logger = logging.getLogger(__name__)

BATCH_BYTES = 12 * 1024 * 1024
"""Bytes of logs that are written to the index in one transaction."""

_THREAD_FROM_BYTES = 256 * 1024
_OUTPUTS_AT_ONCE = 16
_LOCK_POLL = 0.02
_ATTEMPTS = 3
_MOST_CHANGED = 1000


class _StoredSession(NamedTuple):
    """A session as it is in the store now; both stamps are None when it was deleted."""

    id: str
    log: Stamp | None
    meta: Stamp | None


class SessionIndexer:
    """Brings a `TextIndex` up to date with the sessions of a Store. Nothing is read before the first `refresh`."""

    def __init__(self, store: Store, prefix: str, index: TextIndex, embedder: Embedder | None) -> None:
        self.sessions: dict[str, IndexedSession] = {}
        self.vectors = SessionVectors(embedder.dimensions) if embedder is not None else None
        self._store = store
        self._prefix = prefix
        self._index = index
        self._embedder = embedder
        self._generation: tuple[int, int] | None = None
        self._scanned: dict[str, Stamp] = {}
        self._was_replaced = False
        self._mutex = threading.Lock()

    def key(self, session_id: str, name: str = "messages.jsonl") -> str:
        """Return the key of a session's log, or of another object in its folder."""
        return f"{self._folder(session_id)}/{name}"

    def log(self, session_id: str) -> SessionLogReader:
        """Return the reader of a session's log."""
        return SessionLogReader(self._store, self._folder(session_id))

    def _folder(self, session_id: str) -> str:
        return f"{self._prefix}/{session_id}" if self._prefix else session_id

    async def refresh(self) -> None:
        """Index what is new; while another process holds the index, log a warning and leave it as it is."""
        async with self._one_at_a_time():
            for _ in range(_ATTEMPTS):
                try:
                    await self._update()
                    return
                except CatalogueLost:
                    self._generation = None
                except CatalogueBusy as error:
                    logger.warning("%s; searching what is indexed so far", error)
                    self._generation = None
                    return
                except BaseException:
                    # What was read but not written must be read again.
                    self._generation = None
                    raise
        logger.warning("the search index was lost %d times in a row; searching what is indexed so far", _ATTEMPTS)

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        # Polled, because the others may run in other threads with event loops of their own.
        while not self._mutex.acquire(blocking=False):  # noqa: ASYNC110 - an asyncio.Event belongs to one loop
            await asyncio.sleep(0.005)
        try:
            yield
        finally:
            self._mutex.release()

    async def _update(self) -> None:
        if await asyncio.to_thread(self._index.needs_rebuild):
            logger.info("much of the search index belongs to deleted messages; building it again")
            await asyncio.to_thread(self._index.file.recreate)
        if await asyncio.to_thread(self._index.generation) != self._generation:
            await self._reload()
        self._was_replaced = False
        found = await self._store.scan(self._prefix, ("meta.json", "messages.jsonl"))
        if ids := self._changed_since_scan(found):
            await self._index_sessions(ids)
        if self._was_replaced:
            raise CatalogueLost("another process began the search index again")
        self._scanned = found

    def _changed_since_scan(self, found: dict[str, Stamp]) -> set[str]:
        """Return the sessions that differ from what is indexed."""
        if found == self._scanned:
            return set()
        ids = {id_ for key in found if is_id(id_ := key.rsplit("/", 2)[-2])} | self.sessions.keys()
        stored = (_StoredSession(id_, found.get(self.key(id_)), found.get(self.key(id_, "meta.json"))) for id_ in ids)
        return {session.id for session in stored if self._is_outdated(session)}

    @asynccontextmanager
    async def _write_lock(self) -> AsyncIterator[None]:
        """Hold the index's write lock; raises `CatalogueBusy` when another process holds it for `LOCK_WAIT`."""
        end = time.monotonic() + LOCK_WAIT
        with ExitStack() as lock:
            while True:
                try:
                    lock.enter_context(self._index.file.write_lock())
                    break
                except CatalogueBusy:
                    if time.monotonic() >= end:
                        raise
                await asyncio.sleep(_LOCK_POLL)
            yield

    async def _reload(self) -> None:
        """Read again what the index has, after another process changed it."""
        before = self.sessions.keys()
        contents = await asyncio.to_thread(self._index.contents, vectors=self.vectors is not None)
        self._generation = contents.generation
        try:
            self.sessions = {name: IndexedSession.decode(state) for name, state in contents.sources.items()}
        except (TypeError, ValueError) as error:
            await asyncio.to_thread(self._index.file.recreate)
            raise CatalogueLost(f"the search index has a state that cannot be read: {error}") from None
        if self.vectors is not None and self._embedder is not None:
            name = self._embedder.name
            usable = [item for item in contents.vectors if self.sessions[item[0].source].embedded_by == name]
            await asyncio.to_thread(self.vectors.load, usable)
        if not before <= self.sessions.keys():
            # Another process began the index again: sessions that did not change since are missing there too.
            self._scanned, self._was_replaced = {}, True

    async def _index_sessions(self, ids: Iterable[str]) -> None:
        outdated = await self._outdated(sorted(ids))
        if not outdated:
            return
        async with self._write_lock():
            if await asyncio.to_thread(self._index.generation) != self._generation:
                await self._reload()
                outdated = await self._outdated(sorted(ids))
            await self._read_and_write(outdated)

    async def _outdated(self, ids: list[str]) -> list[_StoredSession]:
        """Return those of the sessions that are not indexed as they are in the store now."""
        logs = await self._store.stamps([self.key(id_) for id_ in ids])
        metas = await self._store.stamps([self.key(id_, "meta.json") for id_ in ids])
        stored = [_StoredSession(*session) for session in zip(ids, logs, metas, strict=True)]
        outdated = [session for session in stored if self._is_outdated(session)]
        # The oldest first, so that the newest session is the newest in the index.
        outdated.sort(key=lambda session: (session.log.modified if session.log else 0.0, session.id))
        return outdated

    def _is_outdated(self, stored: _StoredSession) -> bool:
        known = self.sessions.get(stored.id)
        if known is None:
            return stored.log is not None or stored.meta is not None
        if known.log_stamp != _as_list(stored.log) or known.meta_stamp != _as_list(stored.meta):
            return True
        return self._embedder is not None and (
            known.embedded_by != self._embedder.name or known.embedded_next < known.next_seq
        )

    async def _read_and_write(self, sessions: list[_StoredSession]) -> None:
        batch = _Batch()
        for stored in sessions:
            try:
                if stored.log is None and stored.meta is None:
                    self.sessions.pop(stored.id, None)
                    batch.updates.append(SourceUpdate(stored.id, None))
                else:
                    await self._read(stored, batch)
            except (SessionTooNew, StorageReadError) as error:
                logger.warning("session %s is left out of the search: %s", stored.id, error)
        await self._write(batch)

    async def _read(self, stored: _StoredSession, batch: "_Batch") -> None:
        """Read the new entries of a session into the batch, which is written whenever it is full."""
        id_ = stored.id
        meta = decode_meta(await self._store.get(self.key(id_, "meta.json")), id_)
        if meta is not None:
            meta = await self.log(id_).caught_up(meta, stored.log)
        known = self.sessions.get(id_)
        replace = known is not None and not await self._is_continuation(known, stored)
        session = IndexedSession() if known is None or replace else IndexedSession.decode(known.encode())
        builder = self._builder(session)
        session.log_stamp = None
        async for first_seq, records, complete in self._new_entries(id_, builder):
            if sum(map(len, records)) > _THREAD_FROM_BYTES or complete:
                await asyncio.to_thread(builder.add, first_seq, records, complete)
            else:
                builder.add(first_seq, records)
            if builder.size > BATCH_BYTES:
                self._add(id_, builder, batch, replace=replace)
                await self._write(batch)
                builder, replace = DocumentBuilder(session, builder.embed_from), False
        session.log_stamp, session.meta_stamp = _as_list(stored.log), _as_list(stored.meta)
        builder.describe(*_description(session, meta, stored.log))
        self._add(id_, builder, batch, replace=replace)
        if batch.size > BATCH_BYTES:
            await self._write(batch)

    async def _new_entries(
        self, id_: str, builder: DocumentBuilder
    ) -> AsyncIterator[tuple[int, list[bytes], dict[int, ConversationMessage]]]:
        """Read new entries: number of the first, lines, and the entries completed by outputs from beside the log."""
        log = self.log(id_)
        async for block in self._store.read(self.key(id_), builder.start):
            records, first = block.records, block.first_seq
            detached = builder.detached_outputs(first, records)
            if not detached:
                yield first, records, {}
                continue
            for start in range(0, len(records), _OUTPUTS_AT_ONCE):
                piece = records[start : start + _OUTPUTS_AT_ONCE]
                seqs = range(first + start, first + start + len(piece))
                yield seqs[0], piece, {seq: await log.with_outputs(detached[seq]) for seq in seqs if seq in detached}

    async def _is_continuation(self, known: IndexedSession, stored: _StoredSession) -> bool:
        """Whether the log is the one that was read before, perhaps with more at its end."""
        if known.log_stamp == _as_list(stored.log) or known.next_seq == 1:
            return True
        async for block in self._store.read(self.key(stored.id), known.next_seq - 1):
            return digest(block.records[0]) == known.last_digest
        return False

    def _builder(self, session: IndexedSession) -> DocumentBuilder:
        if self._embedder is None:
            return DocumentBuilder(session, None)
        outdated: list[int] = []
        if session.embedded_by != self._embedder.name:
            session.embedded_by, session.embedded_next = self._embedder.name, 1
            outdated, session.embedded = session.embedded, []
        return DocumentBuilder(session, session.embedded_next, outdated)

    def _add(self, id_: str, builder: DocumentBuilder, batch: "_Batch", *, replace: bool) -> None:
        texts, vectors = builder.vector_changes()
        update = SourceUpdate(id_, builder.session.encode(), replace, builder.documents, vectors)
        self.sessions[id_] = builder.session
        batch.updates.append(update)
        batch.to_embed += [(update, number, text) for number, text in texts]
        batch.size += builder.size + 1000

    async def _write(self, batch: "_Batch") -> None:
        if self._embedder is not None and batch.to_embed:
            texts = [text for _, _, text in batch.to_embed]
            vectors = await asyncio.to_thread(_embed, self._embedder, texts)
            for (update, number, _), vector in zip(batch.to_embed, vectors, strict=True):
                update.vectors[number] = vector
        await asyncio.to_thread(self._index.write, batch.updates)
        for update in batch.updates:
            replace = update.replace or update.state is None
            if self.vectors is not None and (update.vectors or replace):
                self.vectors.update(update.source, update.vectors, replace=replace)
        batch.updates, batch.to_embed, batch.size = [], [], 0


@dataclass
class _Batch:
    """Updates to be written together, and the texts to embed before that."""

    updates: list[SourceUpdate] = field(default_factory=list)
    to_embed: list[tuple[SourceUpdate, int, str]] = field(default_factory=list)
    size: int = 0


class SessionVectors:
    """The packed vectors of all sessions and a search for the nearest; safe to use from any thread.

    A table of vectors can only be built whole, so new ones are searched apart until they are many."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._mutex = threading.Lock()
        self._packed: dict[DocumentRef, bytes] | None = None
        self._table: NearestVectors[DocumentRef] | None = None
        self._changed: set[DocumentRef] = set()
        """What was set or deleted since the table was built."""

    def load(self, vectors: Sequence[tuple[DocumentRef, bytes]]) -> None:
        """Replace all vectors."""
        with self._mutex:
            self._packed, self._table, self._changed = dict(vectors), None, set()

    def update(self, source: str, vectors: Mapping[int, bytes | None], *, replace: bool = False) -> None:
        """Set vectors of a source, or delete those that are None; with `replace`, first delete all it has."""
        with self._mutex:
            if self._packed is None:
                return
            changed = {DocumentRef(source, number): vector for number, vector in vectors.items()}
            for ref in [ref for ref in self._packed if ref.source == source] if replace else ():
                changed.setdefault(ref, None)
            for ref, vector in changed.items():
                if vector is None:
                    self._packed.pop(ref, None)
                else:
                    self._packed[ref] = vector
            self._changed |= changed.keys()

    def nearest(self, vector: Any, count: int, min_cosine: float) -> list[tuple[DocumentRef, float]]:
        """Return at most `count` documents and their cosines, the nearest first, none below `min_cosine`."""
        with self._mutex:
            if self._table is None or len(self._changed) > _MOST_CHANGED:
                self._table, self._changed = self._built(self._packed or ()), set()
            near = self._table.find(vector, count + len(self._changed), min_cosine)
            near = [item for item in near if item[0] not in self._changed]
            near += self._built(self._changed & (self._packed or {}).keys()).find(vector, count, min_cosine)
            return sorted(near, key=lambda item: (-item[1], item[0]))[:count]

    def _built(self, refs: Iterable[DocumentRef]) -> NearestVectors[DocumentRef]:
        keys, packed = list(refs), self._packed or {}
        return NearestVectors(keys, [packed[ref] for ref in keys], self._dimensions)


def _embed(embedder: Embedder, texts: list[str]) -> list[bytes]:
    return pack_vectors(embedder.embed(texts), embedder.dimensions)


def _as_list(stamp: Stamp | None) -> list[float] | None:
    return list(stamp) if stamp is not None else None


def _description(session: IndexedSession, meta: SessionMeta | None, log: Stamp | None) -> tuple[str, str, bool]:
    """Return title, time of the last change and whether it is archived: from `meta.json`, else from the log."""
    if meta is None:
        title = session.log_title or session.first_text or DEFAULT_SESSION_TITLE
        return title, when_written(log), session.log_archived
    return meta["title"], meta["updated_at"], bool(meta.get("archived_at"))
