"""Sessions that continue: which process has one open, when it is saved, and what a later one with the same id gets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from carrel.errors import (
    ExecutionError,
    SandboxUnavailable,
    SessionBusy,
    SessionNotFound,
    SessionOwner,
    StateNotSaved,
    StorageError,
    StorageUnavailable,
)
from carrel.execution import temp_dirs
from carrel.execution.config import ContainerConfig
from carrel.execution.docker_engine import connect
from carrel.execution.durable import volumes_of_state
from carrel.execution.executor import BasicExecutor, KeepsState, SavedVariables
from carrel.session.options import settings_of
from carrel.session.storage import StorageBackend, store_of
from carrel.session.stored_state import StoredState
from carrel.storage.base import MISSING, Lock, Missing, Stamp, Store
from carrel.storage.files.store import FileStore
from carrel.text import count_variables

logger = logging.getLogger(__name__)

SAVE_DELAY = 1.0
"""Seconds after a run until the variables are saved."""
_SAVE_SHARE = 5.0
"""How many times longer than the last save took the next one waits, so that saving takes a fifth of a processor."""
STOP_SECONDS = 2.0
"""How long the end of a session waits for code that was interrupted."""
_STORE_SECONDS = 1.0
"""How long a store that does not answer is left alone."""
_PAUSE_SECONDS = 60.0
"""How long another process has to save and close a session that it was asked to pause."""
_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a session with the id of an earlier one has of that."""

    messages: int = 0
    """The visible messages of the conversation."""
    files: bool = False
    """Whether the files of the workspace and the home are there."""
    variables: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """By name, why a variable is not there."""
    reason: str = ""
    """Why files or variables are not there at all."""
    saved_at: datetime | None = None
    """When the variables were saved."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """What was saved of a session's variables; its files are kept at any moment."""

    variables: list[str]
    missing: dict[str, str]
    """By name, why a variable was not saved."""
    saved_at: datetime


Status = Literal["open", "paused", "closed"]


@dataclass
class StateRecord:
    """What is known of a durable session, in `sessions/ID/workspace-state/session.json`."""

    status: Status = "open"
    host: str = ""
    pid: int = 0
    since: str = ""
    """When the process opened it that has it open, or had it last."""
    saved_at: str = ""
    variables: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    not_saved: str = ""
    """Why the variables were not saved when that was tried last."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of its executor, for `Session.resume`."""
    place: str = ""
    """The folder with the newest files, in a store that several machines share."""
    stored: dict[str, Any] = field(default_factory=dict)
    """What of files and variables is in such a store; see `StoredState`."""
    format: int = 1

    @classmethod
    def read(cls, data: bytes | None) -> StateRecord | None:
        """None where there is none; an empty record for one that cannot be read: a session can always be opened."""
        if data is None:
            return None
        try:
            found = json.loads(data)
            known = cls()
            for name, value in found.items():
                if name in cls.__dataclass_fields__ and isinstance(value, type(getattr(known, name))):
                    setattr(known, name, value)
        except (ValueError, AttributeError):
            return cls(not_saved="the record of the session was damaged")
        return known

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def saved_time(self) -> datetime | None:
        with suppress(ValueError):
            return datetime.fromisoformat(self.saved_at)
        return None


def state_key(session_id: str, name: str) -> str:
    """The key of something that belongs to the state of a session."""
    return f"sessions/{session_id}/workspace-state/{name}"


def state_base(storage: StorageBackend) -> Path | None:
    """The folder on this machine's disk below which the sessions of a storage keep their files."""
    base: Path | None = getattr(storage, "state_base", None)
    return base


async def read_record(store: Store, session_id: str) -> StateRecord | None:
    return StateRecord.read(await store.get(state_key(session_id, "session.json")))


def read_record_file(base: Path, session_id: str) -> StateRecord:
    """The record of a session in a folder; SessionNotFound if there is neither one nor a conversation."""
    try:
        return StateRecord.read((base / state_key(session_id, "session.json")).read_bytes()) or StateRecord()
    except FileNotFoundError:
        if (base / "sessions" / session_id / "messages.jsonl").exists():
            return StateRecord()
        raise SessionNotFound(f"there is no session {session_id!r} in {base}") from None


def resume_note(resumed: Resumed) -> str:
    """What the first result of a session says that continues an earlier one."""
    saved = f" as of {resumed.saved_at:%Y-%m-%d %H:%M:%S} UTC" if resumed.saved_at is not None else ""
    note = f"the session continues, with {count_variables(len(resumed.variables))}{saved}"
    if resumed.reason:
        note += f"; {resumed.reason}"
    if resumed.missing:
        shown = [f"{name} ({why})" for name, why in list(resumed.missing.items())[:20]]
        note += f"; not kept: {', '.join(shown)}{', …' if len(resumed.missing) > 20 else ''}"
    return note


async def owner_of(store: Store, session_id: str) -> SessionOwner | None:
    """The process that has a durable session open, or None."""
    name = await store.lock_owner(state_key(session_id, "open"))
    if name is None:
        return None
    host, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    record = await read_record(store, session_id)
    since = None
    if record is not None and str(record.pid) == pid:
        with suppress(ValueError):
            since = datetime.fromisoformat(record.since)
    return SessionOwner(host, int(pid) if pid.isdigit() else 0, since)


def busy(session_id: str, owner: SessionOwner | None) -> SessionBusy:
    """The error for a session that another process has open."""
    error = SessionBusy(
        f"the session {session_id!r} is open in {owner or 'another process'}; close or pause it there "
        f"(`carrel sessions pause {session_id}`), or use another id"
    )
    error.session_id, error.owner = session_id, owner
    return error


async def request_pause(store: Store, session_id: str, seconds: float = _PAUSE_SECONDS) -> bool:
    """Ask the process that has a session open to save and close it, and wait for that; False if none had it open.

    SessionBusy if it does not within so many seconds."""
    owner = await owner_of(store, session_id)
    if owner is None:
        return False
    await store.append(state_key(session_id, "requests.jsonl"), [b'{"op":"pause"}'])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await owner_of(store, session_id) is None:
            return True
        await asyncio.sleep(0.1)
    raise busy(session_id, owner)


async def delete_state(storage: StorageBackend, session_id: str, *, seconds: float = 0.0) -> None:
    """Remove the files and variables of a durable session; SessionBusy if a process has it open.

    In a shared store the lock of a killed process is free only some `seconds` later."""
    store, base = store_of(storage), state_base(storage)
    end = time.monotonic() + seconds
    while (lock := await store.lock(state_key(session_id, "open"), wait=False)) is None:
        if time.monotonic() >= end:
            raise busy(session_id, await owner_of(store, session_id))
        await asyncio.sleep(0.2)
    try:
        if base is not None:
            folder = base / "sessions" / session_id / "workspace-state"
            await asyncio.to_thread(remove_volumes, session_id, folder)
            await asyncio.to_thread(temp_dirs.remove, folder)
        await store.delete(f"sessions/{session_id}/workspace-state")
    finally:
        await lock.release()


def remove_volumes(session_id: str, folder: Path) -> None:
    """Remove what a session in a container has on its engine; SandboxUnavailable if that is not possible now."""
    address, volumes = volumes_of_state(folder)
    if not volumes:
        return
    try:
        engine = connect(address)
        for name in volumes:
            engine.remove_volume(name)
    except ExecutionError as problem:
        raise SandboxUnavailable(
            f"the files of the session {session_id!r} are in the volumes {' and '.join(volumes)} of the engine at "
            f"{address}, and could not be removed: {problem}"
        ) from None


def why_not_durable(storage: StorageBackend, executor: BasicExecutor) -> str:
    """Why sessions with these cannot be durable; empty if they can."""
    if state_base(storage) is None:
        return f"{type(storage).__name__} ends with this process; use a FileStorage, RedisStorage or PostgresStorage"
    if not isinstance(executor, KeepsState):
        return f"{type(executor).__name__} cannot keep files and variables; use a SubprocessExecutor"
    config = getattr(executor, "config", None)
    if isinstance(config, ContainerConfig) and not isinstance(store_of(storage), FileStore):
        return (
            f"the files of a container stay on its engine, where {type(storage).__name__} has no part of them; use a "
            "FileStorage, or a SubprocessExecutor"
        )
    return ""


class DurableState:
    """The state of one session, while a process has it open."""

    def __init__(
        self, storage: StorageBackend, session_id: str, executor: KeepsState, pause: Callable[[], Awaitable[Any]]
    ) -> None:
        """`pause` is called when another process asks for it, or has taken over the session."""
        base = state_base(storage)
        assert base is not None
        self._store = store_of(storage)
        self._id = session_id
        self._executor = executor
        self._pause = pause
        self.folder = (base / "sessions" / session_id / "workspace-state").absolute()
        limit = getattr(getattr(getattr(executor, "config", None), "limits", None), "disk", None)
        most = int(limit * 1.2) if isinstance(limit, int) else None
        self._stored: StoredState | None = None
        """Where several machines share the store."""
        if not isinstance(self._store, FileStore):
            self._stored = StoredState(self._store, state_key(session_id, "")[:-1], self.folder, most)
        self.was_moved = False
        """Whether its files come from another machine."""
        self._not_here = ""
        """Why the files of the earlier session are not here."""
        self._stamp: Stamp | Missing | None = None
        """The version of the record, in a store that several machines share."""
        self._record = StateRecord()
        self._before: StateRecord | None = None
        self._lock: Lock | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._changed = False
        self._timer: asyncio.TimerHandle | None = None
        self._saving = asyncio.Lock()
        self._delay = SAVE_DELAY
        self._closing = False

    # --- opening ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the session for this process, before the executor starts; SessionBusy names the owner."""
        lock = await self._store.lock(state_key(self._id, "open"), wait=False)
        if lock is None:
            raise busy(self._id, await owner_of(self._store, self._id))
        self._lock = lock
        try:
            self.was_moved, self._not_here = False, ""
            if self._stored is not None:
                self._stamp = await self._store.stamp(state_key(self._id, "session.json")) or MISSING
            self._before = await read_record(self._store, self._id)
            if self._before is None and self.folder.exists():
                self._before = StateRecord(not_saved="the record of the session was lost")
            self._executor.keep_state(self.folder)
            before = self._before or StateRecord()
            self._record = StateRecord(
                host=socket.gethostname(),
                pid=os.getpid(),
                since=_now(),
                saved_at=before.saved_at,
                variables=before.variables,
                missing=before.missing,
                settings=settings_of(self._executor),
                stored=before.stored,
            )
            if self._stored is not None:
                await self._bring_here(self._stored, before)
            await self._write_record()
            await self._store.delete(state_key(self._id, "requests.jsonl"))
        except BaseException:
            await self.release()
            raise
        self._tasks = [asyncio.create_task(self._obey_requests()), asyncio.create_task(self._watch_lock(lock))]

    async def _bring_here(self, stored: StoredState, before: StateRecord) -> None:
        """Fetch the state if the newest one is not in this machine's folder."""
        self._record.place = await asyncio.to_thread(stored.place)
        if self._before is None or before.place == self._record.place:
            return
        self.was_moved = True
        self._not_here = await stored.fetch(before.stored)
        if not before.stored:
            self._not_here = (
                f"its files and variables are on {before.host or 'another machine'}, where it was not saved, paused or "
                "closed"
            )

    async def release(self) -> None:
        """Give the session up without saving anything."""
        self._stop()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            await lock.release()

    def _stop(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []

    async def resume(self, count_messages: Callable[[], Awaitable[int]]) -> Resumed | None:
        """Load what was saved into the started executor; None for a session that is new."""
        self._closing = False
        messages = await count_messages()
        if self._before is None:
            reason = "the conversation was there, but no files or variables of it were kept"
            return Resumed(messages, reason=reason) if messages else None
        loaded = await self._executor.load()
        missing, reason = dict(self._before.missing), ""
        if loaded is not None:
            missing = {**dict(loaded.missing)}
            reason = missing.pop("*", "")
        elif self._before.not_saved:
            reason = f"the variables were never saved: {self._before.not_saved}"
        elif self._before.status == "open" and not self._before.saved_at:
            reason = "its process ended before the variables were saved for the first time"
        gone = self._not_here or str(getattr(self._executor, "lost", ""))
        reason = gone or reason
        return Resumed(
            messages,
            files=not gone,
            variables=list(loaded.kept) if loaded is not None else [],
            missing=missing,
            reason=reason,
            saved_at=self._before.saved_time if loaded is not None else None,
        )

    @property
    def was_there(self) -> bool:
        """Whether it continues another session."""
        return self._before is not None

    async def _obey_requests(self) -> None:
        while True:
            with suppress(StorageError):
                async for _, record in self._store.watch(state_key(self._id, "requests.jsonl"), 1):
                    if record == b'{"op":"pause"}':
                        self._tasks.append(asyncio.ensure_future(self._pause()))
                        return
            await asyncio.sleep(_STORE_SECONDS)

    async def _watch_lock(self, lock: Lock | None) -> None:
        while lock is not None:
            await lock.lost.wait()
            lock = self._lock = await self._take_again()
        logger.error("the session %s was taken over by another process; it ends here, and is not saved", self._id)
        self._closing = True
        self._tasks.append(asyncio.ensure_future(self._pause()))

    async def _take_again(self) -> Lock | None:
        """Take the lock once more, unless another process has opened the session since it was lost."""
        lock: Lock | None = None
        while True:
            with suppress(StorageError):
                lock = self._lock = lock or await self._store.lock(state_key(self._id, "open"), wait=False)
                if lock is None or await self._own_stamp() is not None:
                    return lock
                await lock.release()
                return None
            await asyncio.sleep(_STORE_SECONDS)

    async def _own_stamp(self) -> Stamp | None:
        """Return the version of the record if this process has written it, else None."""
        stamp = await self._store.stamp(state_key(self._id, "session.json"))
        found, mine = await read_record(self._store, self._id), self._record
        is_own = found is not None and (found.host, found.pid, found.since) == (mine.host, mine.pid, mine.since)
        return stamp if is_own else None

    # --- saving -----------------------------------------------------------------------------------------------------

    def note_change(self) -> None:
        """The variables may have changed: save them soon."""
        self._changed = True
        if self._timer is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._begin_saving)

    def _begin_saving(self) -> None:
        self._timer = None
        task = asyncio.create_task(self._save_soon())
        self._tasks = [other for other in self._tasks if not other.done()] + [task]

    async def _save_soon(self) -> None:
        if not self._changed or self._closing:
            return
        try:
            # Shielded: a save that is cut off in the middle would leave the executor's turn to a cancelled task.
            await asyncio.shield(asyncio.ensure_future(self._save_variables(may_block=False)))
        except (ExecutionError, StorageError, OSError) as problem:
            if not self._closing:
                logger.warning("session %s: %s", self._id, problem)

    async def save(self) -> SavedState:
        """Save the variables, and send the state to a store that several machines share."""
        try:
            return await self._save_variables()
        finally:
            await self._send()

    async def _send(self) -> None:
        if self._stored is None or self._lock is None:
            return
        async with self._saving:
            self._record.stored = await self._stored.send()
            await self._write_record()
            await self._stored.remove_unused(self._record.stored)

    async def _send_last(self) -> None:
        """Send the state as soon as the store can be reached: without it, another machine gets an earlier state."""
        until = time.monotonic() + _PAUSE_SECONDS
        while True:
            try:
                return await self._send()
            except StorageUnavailable:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_STORE_SECONDS)

    async def _save_variables(self, *, may_block: bool = True) -> SavedState:
        """Save the variables; StateNotSaved leaves those that were saved before."""
        async with self._saving:
            began = time.monotonic()
            self._changed = False
            try:
                saved = await self._executor.save(may_block=may_block)
            except StateNotSaved as problem:
                self._record.not_saved = str(problem)
                await self._write_record()
                raise
            self._delay = max(SAVE_DELAY, _SAVE_SHARE * (time.monotonic() - began))
            return await self._note_saved(saved)

    async def _note_saved(self, saved: SavedVariables) -> SavedState:
        record = self._record
        record.saved_at, record.not_saved = _now(), ""
        record.variables, record.missing = list(saved.kept), dict(saved.missing)
        await self._write_record()
        return SavedState(record.variables, record.missing, record.saved_time or _EPOCH)

    async def save_last(self, is_running: Callable[[], bool]) -> StateRecord:
        """Save before the executor is closed, if something changed; what prevents it is noted for the next session."""
        self._closing = True
        if self._lock is None:
            return self._record
        if is_running():
            self._record.not_saved = "code was running when the session was closed"
        elif self._changed or self._saving.locked():
            try:
                await self._save_variables()
            except (ExecutionError, StorageError, OSError) as problem:
                self._record.not_saved = str(problem)
                logger.warning("session %s: %s", self._id, problem)
        return self._record

    async def close(self, status: Status) -> None:
        """Give the session up, after its executor was closed."""
        self._stop()
        if self._lock is None:
            return
        try:
            self._record.status = status
            try:
                await self._send_last()
            except (StateNotSaved, StorageError, OSError) as problem:
                self._record.not_saved = str(problem)
                logger.warning("session %s: %s", self._id, problem)
            await self._write_record()
            await self._store.delete(state_key(self._id, "requests.jsonl"))
        finally:
            await self.release()

    async def _write_record(self) -> None:
        if self._lock is None:
            return
        key, data = state_key(self._id, "session.json"), self._record.encode()
        stamp = await self._store.put(key, data, expect=self._stamp)
        if stamp is None and (own := await self._own_stamp()) is not None:
            # A write that seemed to have failed has arrived.
            stamp = await self._store.put(key, data, expect=own)
        if self._stored is not None:
            if stamp is None:
                # Another machine has opened it: this one was not heard of for longer than its lease.
                self._lock = None
                raise busy(self._id, await owner_of(self._store, self._id))
            self._stamp = stamp


def _now() -> str:
    return datetime.now(UTC).isoformat()
