"""Write to one session: append to its log, keep its metadata current, hold its open tool calls."""

import asyncio
import hashlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from carrel.conversation.log_reader import SessionLogReader
from carrel.conversation.messages import ConversationMessage, SessionMeta, tool_calls_of, tool_results_of
from carrel.conversation.session_state import (
    SessionState,
    decode_meta,
    encode_meta,
    later,
    position_of,
)
from carrel.errors import SessionTooNew, StorageError
from carrel.storage.base import KeyedLock, Lock, Stamp, Store, process_name

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

FLUSH_SECONDS = 1.0
"""How long `meta.json` may lag behind the log while a session is busy."""


class SessionWriter:
    """Appends to the log of one session and updates `meta.json` within a second."""

    def __init__(
        self,
        store: Store,
        folder: str,
        state: SessionState,
        *,
        log_bytes: int = 0,
        stamp: Stamp | None = None,
        sync: bool,
    ) -> None:
        """`log_bytes`: how long the log is; `stamp`: the version of `meta.json` that holds this state, if known."""
        self.created_from = state.meta
        self.folder = folder
        self._store = store
        self._sync = sync
        self._log = f"{folder}/messages.jsonl"
        self._state = state
        """May lack entries of other processes; then it does not cover the last entry, and a flush reads `meta.json`."""
        self._stamp = stamp
        self._last_appended = state.last_seq if state.log_bytes == log_bytes else None
        self._unwritten_from: int | None = None
        """The first entry appended here that `meta.json` does not cover."""
        self._appended_in_flush: list[tuple[int, ConversationMessage, int]] | None = None
        """Entries that are appended while a flush reads those of other processes."""
        self._fields: dict[str, Any] = {}
        """Fields to write that are in no entry of the log."""
        self._flushed_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_loop: asyncio.AbstractEventLoop | None = None
        self._flushing: set[asyncio.Task[Any]] = set()
        self._turns = KeyedLock()
        self._queued_in: asyncio.AbstractEventLoop | None = None
        """The loop of a flush that has not started yet; it will include everything appended until then."""
        self._open_calls = OpenCalls(store, folder)
        self._appending = 0

    @property
    def meta(self) -> SessionMeta:
        return self._state.meta

    async def append(
        self,
        entries: Sequence[ConversationMessage],
        lines: Sequence[bytes],
        now: str,
        *,
        after: int | None = None,
    ) -> int:
        """Write the lines and return the sequence number of the last; `KeyError` if the session was deleted.

        `after`: returns 0 and writes nothing unless this is the last entry."""
        calls = [id_ for entry in entries for id_ in tool_calls_of(entry)]
        self._appending += 1
        try:
            if calls:
                await self._open_calls.lock(calls)
            seq = await self._store.append(self._log, lines, sync=self._sync, create=False, after=after)
        except BaseException:
            await self._open_calls.release(calls)
            raise
        finally:
            self._appending -= 1
        if after is not None and not seq:
            await self._open_calls.release(calls)
            return 0
        is_titled = self._apply(entries, lines, seq, now)
        if self._open_calls:
            await self._open_calls.release([id_ for entry in entries for id_ in tool_results_of(entry)])
        if is_titled:
            await self._flush_quietly()  # the message is written, whatever becomes of this
        else:
            self._flush_later()
        return seq

    def _apply(self, entries: Sequence[ConversationMessage], lines: Sequence[bytes], seq: int, now: str) -> bool:
        """Update the metadata in memory; return whether the title changed."""
        title = self.meta["title"]
        self.meta["updated_at"] = now
        for number, (entry, line) in enumerate(zip(entries, lines, strict=True), seq - len(entries) + 1):
            self._state.apply(number, entry, len(line) + 1)
            if self._appended_in_flush is not None:
                self._appended_in_flush.append((number, entry, len(line) + 1))
        self._last_appended = seq
        if self._unwritten_from is None:
            self._unwritten_from = seq - len(entries) + 1
        return self.meta["title"] != title

    def set(self, name: str, value: Any) -> None:
        """Set a field that is only in the metadata; the next flush writes it."""
        cast(dict[str, Any], self.meta)[name] = self._fields[name] = value

    @property
    def is_idle(self) -> bool:
        """Whether it can be forgotten: it has no open call and nothing left to write."""
        is_due = self._timer is not None and self._timer_loop is not None and not self._timer_loop.is_closed()
        return not (self._open_calls or self._appending or is_due or self._flushing or self._fields)

    def _flush_later(self) -> None:
        loop = asyncio.get_running_loop()
        if self._queued_in is loop or (self._timer is not None and self._timer_loop is loop):
            return
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._flush_soon()
        else:
            self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        # If the loop ends before, nothing is lost: the metadata can be rebuilt from the log.
        self._timer_loop = loop
        self._timer = loop.call_later(FLUSH_SECONDS, self._flush_soon)

    def _flush_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer_loop is loop:
            # Otherwise it could fire when the store is closed.
            self._timer.cancel()
            self._timer = None
        self._queued_in = loop
        self._start(self._flush_quietly()).add_done_callback(self._end_flush)

    def _end_flush(self, flushed: "asyncio.Task[None]") -> None:
        self._queued_in = None
        if flushed.cancelled() and self._timer is None:
            # All tasks of the loop were cancelled, perhaps before this one started.
            self._set_timer(flushed.get_loop())

    def _start(self, flushing: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        task = asyncio.ensure_future(flushing)
        self._flushing.add(task)
        task.add_done_callback(self._flushing.discard)
        return task

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except (StorageError, RuntimeError) as problem:
            # RuntimeError: the loop is being shut down. The metadata can be rebuilt from the log.
            logger.warning("the metadata of session %s lags behind its log: %s", self.meta["id"], problem)

    def metadata(self) -> SessionMeta:
        """Return a copy of the metadata."""
        return self.meta.copy()

    def is_current(self, log_bytes: int) -> bool:
        """Return whether the metadata covers all of a log of this length, also entries of other processes."""
        return self._covers_all and self._state.log_bytes == log_bytes

    @property
    def _covers_all(self) -> bool:
        return self._last_appended is not None and self._last_appended == self._state.last_seq

    async def flush(self) -> None:
        """Write the metadata, unless the session was deleted meanwhile; keep what other processes set in it.

        If the caller is cancelled, the write continues without it."""
        problem = await asyncio.shield(self._start(self._flush_alone()))
        if problem is not None:
            raise problem

    async def _flush_alone(self) -> Exception | None:
        """Write the metadata; an error is returned, not raised, because the caller may be cancelled."""
        try:
            async with self._turns.hold("flush"):  # each flush starts from what the one before it wrote
                self._queued_in, self._flushed_at = None, time.monotonic()
                while not await self._flush():
                    pass
        except (StorageError, RuntimeError) as problem:
            return problem
        return None

    async def _flush(self) -> bool:
        """Write the metadata over the version that was read; False if another process has replaced it meanwhile."""
        key = f"{self.folder}/meta.json"
        stamp = await self._store.stamp(key)
        written = None
        if stamp is not None and not (stamp == self._stamp and self._covers_all):
            written = await self._store.get(key)
            if written is None:
                stamp = None
        if stamp is None:
            # The session was deleted; one that is created later under this id is another one.
            self._fields, self._unwritten_from = {}, None
            return True
        fields, state = self._fields.copy(), self._state
        self._appended_in_flush = []
        try:
            if written is not None:
                try:
                    stored = decode_meta(written, self.meta["id"])
                except SessionTooNew:
                    return True  # a newer carrel writes this session now; do not change its metadata
                state = await self._merged(stored, fields)
            if state.needs_recount:
                state = state.copy()
                await SessionLogReader(self._store, self.folder).recount(state)
            covered = state.last_seq
            replaced = await self._store.put(key, encode_meta(state.meta), expect=stamp)
            if replaced is None:
                return False
            self._stamp = replaced
            self._fields = {name: value for name, value in self._fields.items() if value is not fields.get(name)}
            if state is not self._state:
                for seq, entry, size in self._appended_in_flush:
                    state.apply(seq, entry, size)
                    state.meta["updated_at"] = self.meta["updated_at"]
                cast(dict[str, Any], state.meta).update(self._fields)
                self._state = state
        finally:
            self._appended_in_flush = None
        is_behind = self._last_appended is not None and covered is not None and self._last_appended > covered
        self._unwritten_from = covered + 1 if is_behind and covered is not None else None
        return True

    async def _merged(self, stored: SessionMeta | None, fields: dict[str, Any]) -> SessionState:
        """Apply the log entries that the stored metadata does not cover, and these fields, to it."""
        if stored is not None and "log_seq" in stored:
            state = SessionState(stored)
        else:
            # Another program wrote it, or it is unreadable: use the position in the log that is known here.
            state = self._state.copy()
            state.meta.update(stored or {})
        log = await self._store.stamp(self._log)
        if log is not None and log.size < state.log_bytes:
            state.reset()  # a server that was restarted may have lost the end of the log
        covered = state.last_seq
        starts = [covered, None if self._unwritten_from is None else self._unwritten_from - 1]
        start = min((seq for seq in starts if seq is not None), default=None)
        if start is not None:
            last = start
            async for seq, entry, size in SessionLogReader(self._store, self.folder).since(
                start, position_of(state.meta)
            ):
                state.apply(seq, entry, size)
                last = seq
            if covered is None and log is not None:
                state.meta |= {"log_seq": last, "log_bytes": log.size}
        if "updated_at" not in fields:
            state.meta["updated_at"] = later(self.meta["updated_at"], state.meta["updated_at"])
        cast(dict[str, Any], state.meta).update(fields)
        if self._last_appended is None:
            self._last_appended = state.last_seq
        return state

    async def release_calls(self) -> None:
        """Release the locks of all open tool calls."""
        await self._open_calls.release_all()

    async def close(self) -> None:
        await self._flush_due()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._flushing if task.get_loop() is loop), return_exceptions=True)
        await self._flush_due()  # of a flush that was cancelled
        await self.release_calls()

    async def _flush_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            await self._flush_quietly()


# --- open tool calls --------------------------------------------------------------------------------------------------
# A call without a result holds a lock, so that no reader declares it interrupted.

_tasks: "weakref.WeakValueDictionary[str, asyncio.Task[object]]" = weakref.WeakValueDictionary()
"""The task of this process that appended each open call, by the key of its lock."""


class OpenCalls:
    """The calls of one session that were appended here and have no result yet."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._locks: dict[str, Lock | None] = {}
        """By call; None if another writer holds the lock, which has the same effect."""

    def __bool__(self) -> bool:
        return bool(self._locks)

    async def lock(self, calls: Iterable[str]) -> None:
        """Lock the calls; must be called before they are written."""
        for call in calls:
            key = call_key(self._folder, call)
            task = asyncio.current_task()
            if task is not None:
                _tasks[key] = task
            if self._locks.get(call) is None:
                lock = await self._store.lock(key, wait=False)
                if lock is not None and self._locks.get(call) is not None:
                    await lock.release()
                else:
                    self._locks[call] = lock

    async def release(self, calls: Iterable[str]) -> None:
        """Release calls that have their results or were not written."""
        for call in calls:
            if call in self._locks:
                lock = self._locks.pop(call)
                _tasks.pop(call_key(self._folder, call), None)
                if lock is not None:
                    await lock.release()

    async def release_all(self) -> None:
        await self.release(list(self._locks))


def call_key(folder: str, call: str) -> str:
    """Return the key of a call's lock; one per call, because several programs may have open calls in one session."""
    digest = hashlib.sha256(call.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{folder}/tool-call-{digest}"


async def any_open(store: Store, folder: str, calls: Sequence[str]) -> bool:
    """Return whether any process or task still holds one of these calls."""
    for call in calls:
        if await store.lock_owner(call_key(folder, call)) is not None:
            return True
    return False


@asynccontextmanager
async def claim_calls(store: Store, folder: str, calls: Sequence[str]) -> AsyncIterator[bool]:
    """Hold the locks of calls to declare them interrupted; gives False if one of them is still in use.

    A call is in use if another living process appended it, or another task of this process that is not done. The
    current task would not load the session while it waits for the result, so its own calls are interrupted."""
    locks: list[Lock] = []
    try:
        for call in calls:
            key = call_key(folder, call)
            lock = await store.lock(key, wait=False)
            if lock is not None:
                locks.append(lock)
            elif await _is_in_use(store, key):
                yield False
                return
        yield True
    finally:
        for lock in locks:
            await lock.release()


async def _is_in_use(store: Store, key: str) -> bool:
    holder = await store.lock_owner(key)
    task = _tasks.get(key)
    if holder is None or holder != process_name():
        return True  # None: it was released just now, so its result is being written
    if task is None or task.done() or task.get_loop().is_closed():
        return False
    return task is not asyncio.current_task()
