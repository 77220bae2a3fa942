"""List sessions; what did not change since the last list is not read again."""

import logging
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from carrel.conversation.log_reader import collector_paused
from carrel.conversation.messages import SessionMeta
from carrel.conversation.repository import SessionRepository
from carrel.conversation.session_state import (
    date_of,
    decode_meta,
    is_id,
    is_too_new,
    last_change,
    later,
    new_meta,
    when_written,
)
from carrel.errors import ConfigurationError, SessionNotFound, SessionTooNew, StorageReadError
from carrel.storage.base import KeyedLock, Stamp

logger = logging.getLogger(__name__)


class SessionListing:
    """The metadata of all sessions, newest first, also of those that cannot be read."""

    def __init__(self, logs: SessionRepository) -> None:
        self._logs = logs
        self._store = logs.store
        self._prefix = logs.prefix
        self._order = KeyedLock()
        """Of several concurrent lists the first reads everything, the others what has changed since."""
        self._stamps_seen: dict[str, Stamp] = {}
        self._metas: dict[str, SessionMeta] = {}
        self._log_sizes: dict[str, int] = {}
        """The size of each log when its session was last read."""
        self._sorted: list[SessionMeta] | None = None

    async def metas(self) -> list[SessionMeta]:
        """Return copies, which the caller may change."""
        async with self._order.hold("list"):
            await self._catch_up()
        with collector_paused:
            if self._sorted is None:
                self._sorted = sorted(self._metas.values(), key=last_change, reverse=True)
            metas = [meta.copy() for meta in self._sorted]
        written = False
        for index, meta in enumerate(metas):
            if meta["id"] in self._logs.writers:
                metas[index] = self._as_written(meta, self._log_sizes[meta["id"]])
                written = True
        if written:
            metas.sort(key=last_change, reverse=True)
        return metas

    def _as_written(self, meta: SessionMeta, log_size: int) -> SessionMeta:
        """Return the metadata with what the writer in this process has not written yet."""
        writer = self._logs.writers.get(meta["id"])
        if writer is not None and writer.is_current(log_size):
            return writer.metadata()
        if writer is not None:
            meta["updated_at"] = later(meta["updated_at"], writer.meta["updated_at"])
        return meta

    async def _catch_up(self) -> None:
        """Read what has changed. State is updated at the end in one step, because this may be cancelled."""
        before, now = self._stamps_seen, await self._store.scan(self._prefix, ("meta.json", "messages.jsonl"))
        if now == before:
            return
        changed = [key for key, stamp in now.items() if before.get(key) != stamp]
        changed += before.keys() - now.keys()
        names = list(dict.fromkeys(key.rsplit("/", 2)[-2] for key in changed))
        if names:
            found = await self._read(names, now)
            for id_ in names:
                self._metas.pop(id_, None)
            self._metas |= {id_: meta for id_, (meta, _) in found.items() if meta is not None}
            self._log_sizes |= {id_: size for id_, (_, size) in found.items()}
            self._sorted = None
        self._stamps_seen = now

    async def _read(self, names: Iterable[str], now: dict[str, Stamp]) -> dict[str, tuple[SessionMeta | None, int]]:
        """Return the metadata of each session and the size of its log; an unreadable session does not affect others."""
        ids = [name for name in names if is_id(name)]
        try:
            return await self._read_together(ids, now)
        except StorageReadError as problem:
            if len(ids) == 1:
                return {ids[0]: (_unreadable(ids[0], problem), 0)}
        found: dict[str, tuple[SessionMeta | None, int]] = {}
        for id_ in ids:
            found |= await self._read([id_], now)
        return found

    async def _read_together(self, ids: list[str], now: dict[str, Stamp]) -> dict[str, tuple[SessionMeta | None, int]]:
        raws = await self._store.get_many(list(map(self._logs.meta_key, ids)))
        stamps = [now.get(self._logs.log_key(id_)) for id_ in ids]
        with collector_paused:
            decoded = list(map(self._decoded, ids, raws, stamps))
        found: dict[str, tuple[SessionMeta | None, int]] = {}
        for id_, meta, raw, stamp in zip(ids, decoded, raws, stamps, strict=True):
            # Without metadata, look at the log again: the session may have been deleted since the scan.
            if raw is not None or (stamp and await self._store.stamp(self._logs.log_key(id_))):
                meta = await self._listed(id_, meta, stamp)
            found[id_] = meta, stamp.size if stamp else 0
        return found

    def _decoded(self, id_: str, raw: bytes | None, stamp: Stamp | None) -> SessionMeta | None:
        """Return the stored metadata, or None if it must be rebuilt."""
        try:
            return decode_meta(raw, id_)
        except SessionTooNew as problem:
            meta = new_meta(id_, now=when_written(stamp), title=f"({problem})")
            meta["message_format_version"] = problem.version
            return meta

    async def _listed(self, id_: str, meta: SessionMeta | None, stamp: Stamp | None) -> SessionMeta | None:
        """Return the metadata to show in a list; of the log, only the part that the metadata does not cover is read."""
        try:
            if meta is None:
                return (await self._logs.rebuilt(id_)).meta
            return meta if is_too_new(meta) else await self._logs.reader(id_).caught_up(meta, stamp)
        except StorageReadError as problem:
            return meta or _unreadable(id_, problem)

    async def untouched_for(self, age: timedelta, *, now: str, keep_labelled: bool) -> list[SessionMeta]:
        """Return sessions and traces not changed for this long; those of a newer format are left out and logged."""
        if not isinstance(age, timedelta) or age < timedelta(0):
            raise ConfigurationError(
                f"older_than must be a timedelta of 0 or more, such as timedelta(days=30), not {age!r:.60}"
            )
        try:
            border = (date_of(now) or datetime.now(UTC)) - age
        except OverflowError:
            return []
        every = [*await self.metas(), *await self.traces()]
        old = [meta for meta in every if (date := date_of(meta["updated_at"])) is not None and date < border]
        newer = [meta["id"] for meta in old if is_too_new(meta)]
        if newer:
            logger.warning("not pruned, because a newer carrel wrote them: %s", ", ".join(newer))
        return [meta for meta in old if not is_too_new(meta) and not (keep_labelled and meta.get("labels"))]

    async def traces(self) -> list[SessionMeta]:
        """Return the folders that contain only a trace, with the time of its last change."""
        found = await self._store.scan(self._prefix, ("trace.jsonl",))
        traces = {key.rsplit("/", 2)[-2]: stamp for key, stamp in found.items()}
        # Those that the last list has found have a conversation.
        ids = [id_ for id_ in traces if is_id(id_) and id_ not in self._metas]
        metas = await self._store.stamps(list(map(self._logs.meta_key, ids)))
        logs = await self._store.stamps(list(map(self._logs.log_key, ids)))
        return [
            new_meta(id_, now=when_written(traces[id_]), title="(only a trace)")
            for id_, meta, log in zip(ids, metas, logs, strict=True)
            if meta is None and log is None
        ]

    async def resolve(self, text: str, *, traces: bool) -> str:
        """Return the id for a full id, the beginning of exactly one, or "last"; else raise `SessionNotFound`."""
        ids = await self._store.folders(self._prefix)
        found = [text] if text in ids else [id_ for id_ in ids if text and id_.startswith(text)]
        only_traced = {meta["id"] for meta in await self.traces()}
        matching = [id_ for id_ in found if traces or id_ not in only_traced]
        if text == "last" and text not in matching:
            metas = await self.metas()
            if not metas:
                raise SessionNotFound("there are no sessions yet")
            return metas[0]["id"]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise SessionNotFound(
                f"{len(matching)} sessions begin with {text!r}: {', '.join(matching[:5])}…; give more of the id"
            )
        if found:
            raise SessionNotFound(
                f"session {found[0]} has no messages, only a trace; `carrel sessions delete {found[0]}` removes it"
            )
        raise SessionNotFound(f"no session begins with {text!r}; `carrel sessions list` shows them all")


def _unreadable(id_: str, problem: StorageReadError) -> SessionMeta:
    """Return the metadata shown for an unreadable session; without a date, so that it is never pruned."""
    return new_meta(id_, now="", title=f"({problem})")
