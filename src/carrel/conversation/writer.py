"""One session that is being written: its log, its metadata, and its open tool calls."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar, cast

from carrel.conversation.entries import aside_of
from carrel.conversation.messages import (
    ConversationMessage,
    SessionMeta,
    goes_on,
    meta_of,
    tool_calls_of,
    tool_results_of,
)
from carrel.conversation.metadata import (
    COUNTS,
    DEFAULT_SESSION_TITLE,
    SUMS,
    apply_aside,
    catch_up,
    decode_meta,
    encode_meta,
    has_sums,
    later,
    title_from,
)
from carrel.conversation.open_calls import OpenCalls
from carrel.conversation.reading import LogReading
from carrel.conversation.replay import Numbered
from carrel.conversation.usage import tokens_of
from carrel.errors import SessionTooNew, StorageError
from carrel.storage.base import KeyedLock, Store

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

FLUSH_SECONDS = 1.0
"""How long `meta.json` may lag behind the log while a session is busy."""


class Writer:
    """Appends to one session. The log is the truth; `meta.json` follows within a second."""

    def __init__(self, store: Store, folder: str, meta: SessionMeta, *, log_bytes: int, sync: bool) -> None:
        self.meta = meta
        self.folder = folder
        self._store = store
        self._sync = sync
        self._log = f"{folder}/messages.jsonl"
        self._counted = has_sums(meta, log_bytes)
        self._own: set[str] = set()
        self._told: list[Numbered] = []
        """What was set here since the metadata was last written, and the asides that say something about it."""
        self._flushed_at = time.monotonic()
        self._later: asyncio.TimerHandle | None = None
        self._later_in: asyncio.AbstractEventLoop | None = None
        self._flushing: set[asyncio.Task[Any]] = set()
        self._turns = KeyedLock()
        self._in_line: asyncio.AbstractEventLoop | None = None
        """The loop in which a flush has not begun yet: it will write what is said meanwhile too."""
        self._open_calls = OpenCalls(store, folder)
        self._appending = 0

    async def append(
        self,
        entries: Sequence[ConversationMessage],
        lines: Sequence[bytes],
        now: str,
        *,
        shown: int | None = None,
        after: int | None = None,
    ) -> int:
        """Write the lines; returns the sequence number of the last. `KeyError` when the session was deleted.

        `shown`: how many messages are visible afterwards, from a caller who cuts or compacts and has counted;
        `after`: 0 and nothing written unless this is the last entry."""
        calls = [id_ for entry in entries for id_ in tool_calls_of(entry)]
        self._appending += 1
        try:
            if calls:
                await self._open_calls.begin(calls)
            seq = await self._store.append(self._log, lines, sync=self._sync, create=False, after=after)
        except BaseException:
            await self._open_calls.end(calls)
            raise
        finally:
            self._appending -= 1
        if after is not None and not seq:
            await self._open_calls.end(calls)
            return 0
        titled = self._note(entries, lines, seq, now, shown)
        if self._open_calls:
            await self._open_calls.end([id_ for entry in entries for id_ in tool_results_of(entry)])
        if titled:
            await self._flush_quietly()  # the message is written, whatever becomes of this
        else:
            self._flush_later()
        return seq

    def _note(
        self, entries: Sequence[ConversationMessage], lines: Sequence[bytes], seq: int, now: str, shown: int | None
    ) -> bool:
        """Bring the metadata up to date in memory; True when the title changed."""
        meta = self.meta
        meta["updated_at"] = now
        if self._counted and seq == meta["log_seq"] + len(lines):
            meta["log_seq"] = seq
            meta["log_bytes"] += sum(map(len, lines)) + len(lines)
        else:
            self._counted = False
        before = meta["title"]
        for number, entry in enumerate(entries, seq - len(entries) + 1):
            role, aside = entry.get("role"), aside_of(entry)
            if aside in (None, "usage") and (usage := meta_of(entry).get("usage")):
                meta["total_tokens"] = meta.get("total_tokens", 0) + tokens_of(usage).total_tokens
            if aside is not None:
                self._apply(number, entry)
                continue
            if role in ("rewind", "compact"):
                self._counted = self._counted and shown is not None
                meta["message_count"] = shown or 0
            else:
                meta["message_count"] = meta.get("message_count", 0) + (not goes_on(entry))
            if meta["title"] == DEFAULT_SESSION_TITLE and (title := title_from(entry)):
                meta["title"] = title
                self._own.add("title")
        return meta["title"] != before

    def _apply(self, number: int, entry: ConversationMessage) -> None:
        apply_aside(cast(dict[str, Any], self.meta), number, entry)
        self._told.append((number, entry))

    def set(self, name: str, value: Any) -> None:
        """Set a field that stands in the metadata alone; the next flush writes it."""
        cast(dict[str, Any], self.meta)[name] = value
        self._own.add(name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be missed without it: no open call, and nothing that is not written yet."""
        is_due = self._later is not None and self._later_in is not None and not self._later_in.is_closed()
        return not (self._open_calls or self._appending or is_due or self._flushing or self._own or self._told)

    def _flush_later(self) -> None:
        loop = asyncio.get_running_loop()
        if self._in_line is loop or (self._later is not None and self._later_in is loop):
            return
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._flush_soon()
        else:
            self._flush_in_a_while(loop)

    def _flush_in_a_while(self, loop: asyncio.AbstractEventLoop) -> None:
        # A loop that ends before then takes the timer with it; the log has all that matters.
        self._later_in = loop
        self._later = loop.call_later(FLUSH_SECONDS, self._flush_soon)

    def _flush_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._later is not None and self._later_in is loop:
            # Left alone, it could go off when the store is closed.
            self._later.cancel()
            self._later = None
        self._in_line = loop
        self._begin(self._flush_quietly()).add_done_callback(self._out_of_line)

    def _out_of_line(self, flushed: "asyncio.Task[None]") -> None:
        self._in_line = None
        if flushed.cancelled() and self._later is None:
            # By somebody who cancels all there is, perhaps before it could begin.
            self._flush_in_a_while(flushed.get_loop())

    def _begin(self, flushing: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        task = asyncio.ensure_future(flushing)
        self._flushing.add(task)
        task.add_done_callback(self._flushing.discard)
        return task

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except (StorageError, RuntimeError) as problem:
            # RuntimeError: the loop is being shut down. The log has all that matters.
            logger.warning("the metadata of session %s lags behind its log: %s", self.meta["id"], problem)

    def told(self) -> SessionMeta:
        """The metadata, without sums that are not known to be right."""
        if self._counted:
            return self.meta.copy()
        return cast(SessionMeta, {name: value for name, value in self.meta.items() if name not in SUMS})

    def knows_all(self, log_bytes: int) -> bool:
        """Whether the metadata here has what the log says: nobody else has written to it since."""
        return self.meta.get("log_bytes") == log_bytes

    async def flush(self) -> None:
        """Write the metadata, unless the session was deleted meanwhile. What another process set there stays.

        A caller that is cancelled does not wait for it, and it goes on."""
        problem = await asyncio.shield(self._begin(self._flush_alone()))
        if problem is not None:
            raise problem

    async def _flush_alone(self) -> Exception | None:
        """What went wrong is returned: who would hear of it may be cancelled, and the next flush does it again."""
        try:
            async with self._turns.hold("flush"):  # of several, each begins with what the one before it wrote
                self._in_line, self._flushed_at = None, time.monotonic()
                while not await self._flush():
                    pass
        except (StorageError, RuntimeError) as problem:
            return problem
        return None

    async def _flush(self) -> bool:
        """Write the metadata over the version that was read; False if another process has replaced it meanwhile."""
        key = f"{self.folder}/meta.json"
        stamp = await self._store.stamp(key)
        written = await self._store.get(key)
        if stamp is None or written is None:
            # Deleted; and a session of this name that is made anew has nothing to do with this one.
            self._own, self._told = set(), []
            return True
        try:
            there = decode_meta(written, self.meta["id"])
        except SessionTooNew:
            return True  # a newer carrel has taken it over; what it wrote is left alone
        own, told = self._own, self._told
        self._own, self._told = set(), []
        try:
            if there is not None:
                await self._meet(there, own, told)
            if await self._store.put(key, encode_meta(self.told()), expect=stamp):
                return True
        except BaseException:
            self._own, self._told = own | self._own, told + self._told
            raise
        self._own, self._told = own | self._own, told + self._told
        return False

    async def _meet(self, there: SessionMeta, own: AbstractSet[str], told: list[Numbered]) -> None:
        """Take over what others set and said, beside what is `own` here; the last word that the log has counts."""
        after, news, mark = there.get("log_seq"), list[Numbered](), dict[str, int]()
        if told or (after is not None and not self._counted):
            # Not always from where the metadata was: a server that was restarted may have lost the end of the log.
            start = min(seq for seq in (after, *(seq - 1 for seq, _ in told)) if seq is not None)
            stamp = await self._store.stamp(self._log)
            untitled = there["title"] == DEFAULT_SESSION_TITLE
            last_seq, news = await LogReading(self._store, self.folder).news(start, entitling=untitled)
            mark = {"log_seq": last_seq, "log_bytes": stamp.size if stamp is not None else 0}
        if there["title"] != DEFAULT_SESSION_TITLE or (mark and after is not None):
            own = own - {"title"}  # what a message gave it: somebody has named it, or the log says which was the first
        meta = cast(dict[str, Any], self.meta)
        for name in ("labels", "pins"):
            meta.pop(name, None)  # what asides add to: begun from what is there, or it would be added twice
        if "updated_at" not in own:
            own = own | {"updated_at"}
            meta["updated_at"] = later(meta["updated_at"], there["updated_at"])
        meta.update({name: value for name, value in there.items() if name not in own and name not in COUNTS})
        catch_up(self.meta, [*news, *self._told])
        if not self._counted:
            meta.update(mark)

    async def let_go(self) -> None:
        """Wait for no tool call any more."""
        await self._open_calls.end_all()

    async def close(self) -> None:
        await self._flush_what_is_due()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._flushing if task.get_loop() is loop), return_exceptions=True)
        await self._flush_what_is_due()  # of one of those that was cancelled
        await self.let_go()

    async def _flush_what_is_due(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
            await self._flush_quietly()
