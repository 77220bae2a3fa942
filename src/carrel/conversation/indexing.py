"""Keeps the search catalogue up to date with the logs of a Store: what changed is read, from where it was read last."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carrel.conversation.messages import ConversationMessage, SessionMeta
from carrel.conversation.metadata import DEFAULT_SESSION_TITLE, decode_meta, is_id, when_written
from carrel.conversation.nearest import Nearest, packed
from carrel.conversation.reading import LogReading
from carrel.conversation.searchable import Known, Reading, digest, own_parts
from carrel.errors import CatalogueBusy, CatalogueLost, SessionTooNew, StorageReadError
from carrel.meaning import Embedder
from carrel.storage.base import Stamp, Store
from carrel.storage.catalogue import Catalogue, Found, Update
from carrel.storage.derived_file import LOCK_WAIT

logger = logging.getLogger(__name__)

BATCH = 12 * 1024 * 1024
"""Bytes of logs that are written to the catalogue in one step."""

_IN_PLACE = 256 * 1024
_AT_ONCE = 16
_LOOK_AGAIN = 0.02
_TRIES = 3
_PASSES = 10


@dataclass
class _Batch:
    """Updates on their way into the catalogue, and the texts whose vectors they still wait for."""

    updates: list[Update] = field(default_factory=list)
    texts: list[tuple[Update, int, str]] = field(default_factory=list)
    size: int = 0


class _Found(NamedTuple):
    """A session as it is in the store now."""

    log: Stamp | None
    meta_stamp: Stamp | None
    meta: SessionMeta | None


class SessionIndex:
    """What the catalogue knows of each session. Nothing is read before the first `refresh`."""

    def __init__(self, store: Store, prefix: str, catalogue: Catalogue, embedder: Embedder | None) -> None:
        self.known: dict[str, Known] = {}
        self.nearest = Nearest(embedder.dimensions) if embedder is not None else None
        self._store = store
        self._prefix = prefix
        self._catalogue = catalogue
        self._embedder = embedder
        self._versions: dict[str, int] = {}
        self._edition: tuple[int, int] | None = None
        self._scanned: dict[str, Stamp] = {}
        self._is_anew = False
        self._refused: set[str] = set()
        self._turn = threading.Lock()

    def key(self, session_id: str, name: str = "messages.jsonl") -> str:
        return f"{self._folder(session_id)}/{name}"

    def log(self, session_id: str) -> LogReading:
        return LogReading(self._store, self._folder(session_id))

    def _folder(self, session_id: str) -> str:
        return f"{self._prefix}/{session_id}" if self._prefix else session_id

    async def refresh(self) -> None:
        """Read what is new. While another process keeps the catalogue, what it has must do, and a log line says so."""
        async with self._alone():
            for _ in range(_TRIES):
                try:
                    await self._catch_up()
                    return
                except CatalogueLost:
                    self._edition = None
                except CatalogueBusy as problem:
                    logger.warning("%s; searching what it has so far", problem)
                    self._edition = None
                    return
                except BaseException:
                    # What was read and not written must be read again.
                    self._edition = None
                    raise
        logger.warning("the search catalogue is lost again and again; searching what it has so far")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        # Asked again and again, because the others may run in other threads with loops of their own.
        while not self._turn.acquire(blocking=False):  # noqa: ASYNC110 - an Event belongs to one loop
            await asyncio.sleep(0.005)
        try:
            yield
        finally:
            self._turn.release()

    async def _catch_up(self) -> None:
        await self._meet_others()
        self._is_anew = False
        found = await self._store.scan(self._prefix, ("meta.json", "messages.jsonl"))
        names = self._changed_since_scan(found)
        for _ in range(_PASSES if names else 0):
            await self._read_all(names)
            names = self._refused | self._misplaced()
            if self._refused:
                await self._reload()
            if not names:
                break
        if self._is_anew:
            raise CatalogueLost("the search catalogue was begun anew by another process")
        self._scanned = found

    def _changed_since_scan(self, found: dict[str, Stamp]) -> set[str]:
        """Return the sessions that are not as the catalogue knows them."""
        if found == self._scanned:
            return set()
        names = {key.rsplit("/", 2)[-2] for key in found} | self.known.keys()
        return self._misplaced() | {
            name
            for name in names
            if is_id(name)
            and (
                (known := self.known.get(name)) is None
                or self._is_stale(known, found.get(self.key(name)), found.get(self.key(name, "meta.json")))
            )
        }

    @asynccontextmanager
    async def _filling(self) -> AsyncIterator[None]:
        """Alone among all processes; `CatalogueBusy` when another has been at it for longer than one should wait."""
        end = time.monotonic() + LOCK_WAIT
        with ExitStack() as filling:
            while True:
                try:
                    filling.enter_context(self._catalogue.file.filling())
                    break
                except CatalogueBusy:
                    if time.monotonic() >= end:
                        raise
                await asyncio.sleep(_LOOK_AGAIN)
            yield

    async def _meet_others(self) -> None:
        """Find out what other processes did to the catalogue."""
        if await asyncio.to_thread(self._catalogue.worn):
            logger.info("much of what the search catalogue holds is gone meanwhile; it is made anew")
            await asyncio.to_thread(self._catalogue.file.remake)
        if await asyncio.to_thread(self._catalogue.edition) != self._edition:
            await self._reload()

    async def _reload(self) -> None:
        before = self.known.keys()
        held = await asyncio.to_thread(self._catalogue.held, vectors=self.nearest is not None)
        self._edition = held.edition
        try:
            self.known = {name: Known.decoded(source.state) for name, source in held.sources.items()}
        except (TypeError, ValueError) as problem:
            await asyncio.to_thread(self._catalogue.file.remake)
            raise CatalogueLost(f"the search catalogue remembers what cannot be read: {problem}") from None
        self._versions = {name: source.version for name, source in held.sources.items()}
        if self.nearest is not None:
            await asyncio.to_thread(self._load_vectors, self.nearest, held.vectors)
        if not before <= self.known.keys():
            # Another process began the catalogue anew: sessions that did not change since are missing there too.
            self._scanned, self._is_anew = {}, True
        self._refused = set()

    def _load_vectors(self, nearest: Nearest, stored: list[tuple[Found, bytes]]) -> None:
        name = self._embedder.name if self._embedder is not None else ""
        nearest.load([item for item in stored if self.known[item[0].source].embedded_by == name])

    def _misplaced(self) -> set[str]:
        """Forks whose inherited part is indexed and should not be, or the other way round."""
        parts = own_parts(self.known)
        return {name for name, known in self.known.items() if known.own_from != parts.get(name, 1)}

    async def _read_all(self, names: Iterable[str]) -> None:
        ids = sorted(names)
        stale = await self._stale(ids)
        if not stale:
            return
        async with self._filling():
            if await asyncio.to_thread(self._catalogue.edition) != self._edition:
                await self._reload()
                stale = await self._stale(ids)
            await self._index(stale, own_parts(self.known))

    async def _stale(self, ids: list[str]) -> list[tuple[str, Stamp | None, Stamp | None]]:
        """The sessions of which the catalogue does not know all, and how their log and metadata are now."""
        logs = await self._store.stamps([self.key(id_) for id_ in ids])
        metas = await self._store.stamps([self.key(id_, "meta.json") for id_ in ids])
        parts = own_parts(self.known)
        stale: list[tuple[str, Stamp | None, Stamp | None]] = []
        for id_, log, meta in zip(ids, logs, metas, strict=True):
            known = self.known.get(id_)
            if known is None and log is None and meta is None:
                continue
            if known is None or self._is_stale(known, log, meta) or known.own_from != parts.get(id_, 1):
                stale.append((id_, log, meta))
        # The oldest first, so that the newest session is the newest in the catalogue.
        stale.sort(key=lambda item: (item[1].modified if item[1] else 0.0, item[0]))
        return stale

    def _is_stale(self, known: Known, log: Stamp | None, meta: Stamp | None) -> bool:
        if known.log != _plain(log) or known.meta != _plain(meta):
            return True
        return self._embedder is not None and (
            known.embedded_by != self._embedder.name or known.embedded_next < known.next_seq
        )

    async def _index(self, stale: list[tuple[str, Stamp | None, Stamp | None]], parts: dict[str, int]) -> None:
        pipe = _Pipe(self._embedded, self._written)
        raws = await self._store.get_many([self.key(id_, "meta.json") for id_, _, _ in stale])
        present = set(self.known) | {id_ for id_, log, _ in stale if log is not None}
        try:
            for (id_, log, meta_stamp), raw in zip(stale, raws, strict=True):
                try:
                    if log is None and meta_stamp is None:
                        pipe.batch.updates.append(self._gone(id_))
                    else:
                        meta = decode_meta(raw, id_)
                        if meta is not None:
                            meta = await self.log(id_).caught_up(meta, log)
                        await self._read(id_, _Found(log, meta_stamp, meta), parts, present, pipe)
                except (SessionTooNew, StorageReadError) as problem:
                    logger.warning("session %s is not searched: %s", id_, problem)
                await pipe.pass_on(BATCH)
            await pipe.pass_on(0)
        finally:
            await pipe.close()

    def _gone(self, id_: str) -> Update:
        self.known.pop(id_, None)
        return Update(id_, self._versions.pop(id_, 0), None)

    async def _read(self, id_: str, found: _Found, parts: dict[str, int], present: set[str], pipe: "_Pipe") -> None:
        known = self.known.get(id_)
        own_from = parts.get(id_, 1)
        first_time = known is None or not await self._goes_on(id_, known, found.log)
        forget = known is not None and (first_time or known.own_from != own_from)
        told_by_meta = first_time and _told_fork(found.meta, present)
        if known is None or forget:
            known = Known(own_from=told_by_meta or 1 if first_time else own_from)
        else:
            known = Known.decoded(known.encoded())
        reading = self._begun(known)
        known.log = None
        async for first_seq, records, whole in self._pieces(id_, reading):
            if sum(map(len, records)) > _IN_PLACE or whole:
                await asyncio.to_thread(reading.take, first_seq, records, whole)
            else:
                reading.take(first_seq, records)
            if first_time and not told_by_meta and reading.leave_to_parent(present):
                forget = forget or id_ in self.known
            if reading.size > BATCH:
                self._queue(id_, reading, pipe.batch, forget=forget)
                await pipe.pass_on(BATCH)
                reading, forget = Reading(known, reading.embed_from), False
        known.log, known.meta = _plain(found.log), _plain(found.meta_stamp)
        reading.describe(*_description(known, found.meta, found.log))
        self._queue(id_, reading, pipe.batch, forget=forget)

    async def _pieces(
        self, id_: str, reading: Reading
    ) -> AsyncIterator[tuple[int, list[bytes], dict[int, ConversationMessage]]]:
        """The new entries in order, with those that refer to long outputs put together, a few at a time."""
        log = self.log(id_)
        async for block in self._store.read(self.key(id_), reading.start):
            records, first = block.records, block.first_seq
            apart = reading.apart(first, records)
            if not apart:
                yield first, records, {}
                continue
            for start in range(0, len(records), _AT_ONCE):
                piece = records[start : start + _AT_ONCE]
                seqs = range(first + start, first + start + len(piece))
                yield seqs[0], piece, {seq: await log.with_outputs(apart[seq]) for seq in seqs if seq in apart}

    async def _goes_on(self, id_: str, known: Known, log: Stamp | None) -> bool:
        """Is the log the one that was read before, perhaps with more at its end?"""
        if known.log == _plain(log) or known.next_seq == 1:
            return True
        async for block in self._store.read(self.key(id_), known.next_seq - 1):
            return digest(block.records[0]) == known.tail
        return False

    def _begun(self, known: Known) -> Reading:
        if self._embedder is None:
            return Reading(known, None)
        outdated: list[int] = []
        if known.embedded_by != self._embedder.name:
            known.embedded_by, known.embedded_next = self._embedder.name, 1
            outdated, known.meanings = known.meanings, []
        return Reading(known, known.embedded_next, outdated)

    def _queue(self, id_: str, reading: Reading, batch: "_Batch", *, forget: bool) -> None:
        seen = self._versions.get(id_, 0)
        texts, vectors = reading.chosen()
        update = Update(id_, seen, reading.known.encoded(), forget, reading.documents, vectors)
        self.known[id_], self._versions[id_] = reading.known, seen + 1
        batch.updates.append(update)
        batch.texts += [(update, number, text) for number, text in texts]
        batch.size += reading.size + 1000

    async def _embedded(self, batch: "_Batch") -> None:
        if self._embedder is None or not batch.texts:
            return
        embedder = self._embedder
        vectors = await asyncio.to_thread(lambda: packed(embedder.embed([text for _, _, text in batch.texts])))
        for (update, number, _), vector in zip(batch.texts, vectors, strict=True):
            update.vectors[number] = vector

    async def _written(self, batch: "_Batch") -> None:
        refused = set(await asyncio.to_thread(self._catalogue.write, batch.updates))
        self._refused |= refused
        if self.nearest is not None:
            for update in batch.updates:
                if update.source not in refused and (update.vectors or update.forget or update.state is None):
                    self.nearest.apply(update.source, update.vectors, forget=update.forget or update.state is None)


class _Pipe:
    """Reading, embedding and writing side by side, a batch behind each other."""

    def __init__(
        self, embed: Callable[[_Batch], Coroutine[Any, Any, None]], write: Callable[[_Batch], Coroutine[Any, Any, None]]
    ) -> None:
        self.batch = _Batch()
        self._embed = embed
        self._write = write
        self._under_way: deque[asyncio.Task[None]] = deque()

    async def pass_on(self, at_least: int) -> None:
        """Send the batch on its way when it has that size; with 0, also wait until all have arrived."""
        if self.batch.updates and self.batch.size >= at_least:
            before = self._under_way[-1] if self._under_way else None
            self._under_way.append(asyncio.create_task(self._through(self.batch, before)))
            self.batch = _Batch()
        while len(self._under_way) > (2 if at_least else 0):
            await self._under_way.popleft()

    async def _through(self, batch: _Batch, before: asyncio.Task[None] | None) -> None:
        await self._embed(batch)
        if before is not None:
            await before
        await self._write(batch)

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)


def _told_fork(meta: SessionMeta | None, present: set[str]) -> int:
    """The entry at which a session is a fork of one that is there, as its metadata has it; 0 when it is none.

    Known before the log is read, so that nothing of a long one is indexed and forgotten again. Where the log says
    something else, the session is misplaced and read anew."""
    at = meta.get("forked_at_seq") if meta is not None and meta.get("parent_session_id") in present else None
    return at + 1 if type(at) is int else 0


def _plain(stamp: Stamp | None) -> list[float] | None:
    return list(stamp) if stamp is not None else None


def _description(known: Known, meta: SessionMeta | None, log: Stamp | None) -> tuple[str, str, bool]:
    """Title, time of the last change, and whether it is archived: from `meta.json`, else from the log."""
    if meta is None:
        title = known.derived.get("title") or known.derived.get("said_title") or DEFAULT_SESSION_TITLE
        return str(title), when_written(log), bool(known.derived.get("archived_at"))
    return meta["title"], meta["updated_at"], bool(meta.get("archived_at"))
