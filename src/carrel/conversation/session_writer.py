"""One session that is being written: its log, its metadata, and its open tool calls."""

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
    """Appends to one session. The log is the truth; `meta.json` follows within a second."""

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
        """May lack what others wrote; then it does not cover the last entry, and a flush begins from `meta.json`."""
        self._stamp = stamp
        self._last_appended = state.last_seq if state.log_bytes == log_bytes else None
        self._unwritten_from: int | None = None
        """The first entry appended here that `meta.json` does not cover."""
        self._meanwhile: list[tuple[int, ConversationMessage, int]] | None = None
        """What is appended while a flush reads what others wrote."""
        self._fields: dict[str, Any] = {}
        """Fields to write that no entry of the log has."""
        self._flushed_at = time.monotonic()
        self._later: asyncio.TimerHandle | None = None
        self._later_in: asyncio.AbstractEventLoop | None = None
        self._flushing: set[asyncio.Task[Any]] = set()
        self._turns = KeyedLock()
        self._in_line: asyncio.AbstractEventLoop | None = None
        """The loop in which a flush has not begun yet: it will write what is appended until then too."""
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
        """Write the lines; returns the sequence number of the last. `KeyError` when the session was deleted.

        `after`: returns 0 and writes nothing unless this is the last entry."""
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
        is_titled = self._apply(entries, lines, seq, now)
        if self._open_calls:
            await self._open_calls.end([id_ for entry in entries for id_ in tool_results_of(entry)])
        if is_titled:
            await self._flush_quietly()  # the message is written, whatever becomes of this
        else:
            self._flush_later()
        return seq

    def _apply(self, entries: Sequence[ConversationMessage], lines: Sequence[bytes], seq: int, now: str) -> bool:
        """Bring the metadata up to date in memory; True when the title changed."""
        title = self.meta["title"]
        self.meta["updated_at"] = now
        for number, (entry, line) in enumerate(zip(entries, lines, strict=True), seq - len(entries) + 1):
            self._state.apply(number, entry, len(line) + 1)
            if self._meanwhile is not None:
                self._meanwhile.append((number, entry, len(line) + 1))
        self._last_appended = seq
        if self._unwritten_from is None:
            self._unwritten_from = seq - len(entries) + 1
        return self.meta["title"] != title

    def set(self, name: str, value: Any) -> None:
        """Set a field that stands in the metadata alone; the next flush writes it."""
        cast(dict[str, Any], self.meta)[name] = self._fields[name] = value

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost without it: no open call, and nothing that is still to be written."""
        is_due = self._later is not None and self._later_in is not None and not self._later_in.is_closed()
        return not (self._open_calls or self._appending or is_due or self._flushing or self._fields)

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
            # All tasks of the loop were cancelled, perhaps before this one could begin.
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

    def metadata(self) -> SessionMeta:
        """A copy of the metadata."""
        return self.meta.copy()

    def is_current(self, log_bytes: int) -> bool:
        """Whether the metadata covers all of a log of this length, also what others wrote."""
        return self._covers_all and self._state.log_bytes == log_bytes

    @property
    def _covers_all(self) -> bool:
        return self._last_appended is not None and self._last_appended == self._state.last_seq

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
        written = None
        if stamp is not None and not (stamp == self._stamp and self._covers_all):
            written = await self._store.get(key)
            if written is None:
                stamp = None
        if stamp is None:
            # Deleted; a session of this name that is created later has nothing to do with this one.
            self._fields, self._unwritten_from = {}, None
            return True
        fields, state = self._fields.copy(), self._state
        self._meanwhile = []
        try:
            if written is not None:
                try:
                    stored = decode_meta(written, self.meta["id"])
                except SessionTooNew:
                    return True  # a newer carrel has taken it over; what it wrote is left alone
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
                for seq, entry, size in self._meanwhile:
                    state.apply(seq, entry, size)
                    state.meta["updated_at"] = self.meta["updated_at"]
                cast(dict[str, Any], state.meta).update(self._fields)
                self._state = state
        finally:
            self._meanwhile = None
        is_behind = self._last_appended is not None and covered is not None and self._last_appended > covered
        self._unwritten_from = covered + 1 if is_behind and covered is not None else None
        return True

    async def _merged(self, stored: SessionMeta | None, fields: dict[str, Any]) -> SessionState:
        """What `meta.json` holds, with the log entries that it does not cover, and these fields."""
        if stored is not None and "log_seq" in stored:
            state = SessionState(stored)
        else:
            # Another program wrote it, or nothing can be read of it: the position in the log is the one known here.
            state = self._state.copy()
            state.meta.update(stored or {})
        log = await self._store.stamp(self._log)
        if log is not None and log.size < state.log_bytes:
            state.start_again()  # a server that was restarted may have lost the end of the log
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


# --- open tool calls --------------------------------------------------------------------------------------------------
# A call that waits for its result holds a lock, so that no reader declares it interrupted.

_tasks: "weakref.WeakValueDictionary[str, asyncio.Task[object]]" = weakref.WeakValueDictionary()
"""The task of this process that appended each open call, by the key of its lock."""


class OpenCalls:
    """The calls of one session that were appended here and have no result yet."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._locks: dict[str, Lock | None] = {}
        """By call; None where another holds the lock, which serves the same purpose."""

    def __bool__(self) -> bool:
        return bool(self._locks)

    async def begin(self, calls: Iterable[str]) -> None:
        """To be called before the calls are written."""
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

    async def end(self, calls: Iterable[str]) -> None:
        """They have their results, or were not written."""
        for call in calls:
            if call in self._locks:
                lock = self._locks.pop(call)
                _tasks.pop(call_key(self._folder, call), None)
                if lock is not None:
                    await lock.release()

    async def end_all(self) -> None:
        await self.end(list(self._locks))


def call_key(folder: str, call: str) -> str:
    """The lock of one call: several programs may wait for calls of the same session, and settle at different times."""
    digest = hashlib.sha256(call.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{folder}/tool-call-{digest}"


async def any_open(store: Store, folder: str, calls: Sequence[str]) -> bool:
    """Whether any process or task still holds one of these calls."""
    for call in calls:
        if await store.lock_owner(call_key(folder, call)) is not None:
            return True
    return False


@asynccontextmanager
async def claimed(store: Store, folder: str, calls: Sequence[str]) -> AsyncIterator[bool]:
    """Hold the calls to declare them interrupted; False when one of them is still in use.

    In use is a call of another process that is alive, and one of this process as long as the task that appended it
    is not done and is not the one that asks here: it would not load the session while it waits for the result."""
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
        return True  # None: released in this moment, so its result is being written
    if task is None or task.done() or task.get_loop().is_closed():
        return False
    return task is not asyncio.current_task()
