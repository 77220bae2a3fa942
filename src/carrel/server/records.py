"""What a server remembers, as objects and logs in a Store: the records of its sessions, and answers to POSTs.

    server/sessions/<id>/record.json        the session as it is now
    server/sessions/<id>/log.jsonl          everything that happened in it: commands, verdicts, runs, changes of state
    server/sessions/<id>/diff.json          what it had changed when it ended
    server/sessions/<id>/<job>/…            the complete output of a verification
    server/live/<server>/<id>               a session that this server has created and not ended
    server/answers/<session>/<name>         the answer to a POST with an Idempotency-Key
    server/lists/<user>/<list>/<day>.<n>.jsonl   ids of sessions; see `SessionLists`
    sessions/<id>/                          conversation and trace

Nothing is read at the start but the list of live sessions; everything else is read by its id."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel

from carrel.errors import SessionElsewhere, SessionExists, StorageError
from carrel.server.answers import ANSWERS, json_object
from carrel.server.session_lists import SessionLists
from carrel.storage.base import MISSING, Block, KeyedLock, Store
from carrel.text import json_bytes
from carrel.wire.answers import (
    Interaction,
    SessionPage,
    SessionRecord,
    SessionStatus,
    TracePage,
    TraceRecord,
    WorkspaceDiff,
)
from carrel.wire.verification import Job

logger = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Interaction | Job
EventKind = Literal["session", "interaction", "job", "run", "file", "checkpoint", "rewind", "approval"]

_OLD_LOG = "server/sessions.jsonl"
"""Where versions up to 0.1 kept all sessions."""
SESSION_ID = re.compile(r"[\w.-]{1,200}")
_READ_AT_ONCE = 16
_INDEXED_SESSIONS = 200
"""Sessions for which it is remembered where in their log each operation is."""


class RecordStore:
    """The records of sessions, their events, operations and outputs."""

    def __init__(self, store: Store, server: str = "main") -> None:
        """`server` names the server whose live sessions are marked as its own."""
        self.store = store
        self._server = server
        self._live = f"server/live/{server}"
        self._lists = SessionLists(store)
        self._operation_index: OrderedDict[str, dict[str, int]] = OrderedDict()
        """For each session's log, the line of the newest record of each operation."""
        self._unwritten: dict[str, dict[str, Operation]] = {}
        """Records of operations that could not be written yet, by session and id."""
        self._unsaved: dict[str, SessionRecord] = {}
        """Records of sessions that could not be written yet."""
        self._uncertain: dict[str, SessionRecord | None] = {}
        """Sessions whose creation or reopening failed while it was written, each with its record before, if any."""
        self._turns = KeyedLock()

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def add_session(self, record: SessionRecord) -> None:
        """Write a new session; `SessionExists` if there is one with this id."""
        id_ = record.session_id
        if await self.store.stamp(_record_key(id_)) is not None:
            raise SessionExists(f"there is a session {id_!r} already")
        try:
            # The mark is first: a session that was written without one would never be ended after a crash.
            await self.store.put(f"{self._live}/{id_}", b"{}")
            if await self.store.put(_record_key(id_), record.model_dump_json().encode(), expect=MISSING) is None:
                raise SessionExists(f"there is a session {id_!r} already")
            await self.append_event(id_, "session", record)
            await self._lists.add(record.user_id, "all", id_)
        except SessionExists:
            await self.store.delete(f"{self._live}/{id_}")
            raise
        except BaseException:
            await self._undo(id_, None)
            raise

    async def reopen_session(self, record: SessionRecord) -> None:
        """Write that a paused session is live again; SessionElsewhere if another node has opened it meanwhile."""
        id_ = record.session_id
        key, mark = _record_key(id_), f"{self._live}/{id_}"
        stamp = await self.store.stamp(key)
        before = _read_record(id_, await self.store.get(key))
        is_elsewhere = before is not None and before.is_live and before.node != record.node
        if is_elsewhere:
            raise SessionElsewhere(f"session {id_} was opened on another node")
        try:
            await self.store.put(mark, b"{}")
            if await self.store.put(key, record.model_dump_json().encode(), expect=stamp or MISSING) is None:
                await self.store.delete(mark)
                raise SessionElsewhere(f"session {id_} was opened on another node")
            self._unsaved.pop(id_, None)
            await self.append_event(id_, "session", record)
        except SessionElsewhere:
            raise
        except BaseException:
            await self._undo(id_, before)
            raise

    async def _undo(self, session_id: str, before: SessionRecord | None) -> None:
        """Remove what was written of a session that could not be written completely; later, if that fails too."""
        self._uncertain[session_id] = before
        try:
            await self._finish_undo(session_id)
        except StorageError as problem:
            logger.warning("session %s is removed later: %s", session_id, problem)

    async def _finish_undo(self, session_id: str) -> None:
        async with self._turns.hold(session_id):
            if session_id not in self._uncertain:
                return
            before, key = self._uncertain[session_id], _record_key(session_id)
            stamp = await self.store.stamp(key)
            found = _read_record(session_id, await self.store.get(key))
            if stamp is not None and found is not None and found.is_live and found.node in (None, self._server):
                if before is not None:
                    await self.store.put(key, before.model_dump_json().encode(), expect=stamp)
                    await self._append(session_id, "session", before)
                elif await self.store.delete(key, expect=(key, stamp)):
                    await self.store.delete(_log(session_id))
            await self.store.delete(f"{self._live}/{session_id}")
            self._operation_index.pop(session_id, None)
            del self._uncertain[session_id]

    async def save_session(self, record: SessionRecord) -> None:
        """Write how a session is now. If that fails, the record is kept in memory and written later."""
        self._unsaved[record.session_id] = record
        try:
            await self._save(record)
        except StorageError as problem:
            logger.warning("session %s could not be written: %s", record.session_id, problem)

    @property
    def has_unsaved(self) -> bool:
        """Whether something could not be written yet."""
        return bool(self._unsaved or self._unwritten or self._uncertain)

    async def save_unsaved(self) -> None:
        """Write what could not be written before; StorageError if it still cannot."""
        for session_id in list(self._uncertain):
            await self._finish_undo(session_id)
        for session_id in list(self._unwritten):
            await self._write_unwritten(session_id)
        for record in list(self._unsaved.values()):
            await self._save(record)

    async def ensure_saved(self, session_id: str) -> None:
        """Write a record that could not be written before; StorageError if it still cannot."""
        if (record := self._unsaved.get(session_id)) is not None:
            await self._save(record)

    async def _save(self, record: SessionRecord) -> None:
        async with self._turns.hold(record.session_id):
            if self._unsaved.get(record.session_id, record) is record:  # Else a newer one is written after this.
                await self._write(record)

    async def _write(self, record: SessionRecord) -> None:
        id_ = record.session_id
        await self.store.put(_record_key(id_), record.model_dump_json().encode())
        await self.append_event(id_, "session", record)
        if not record.is_live:
            since = (record.requested_at or record.expires_at).date()
            if record.durable:  # It may have ended before.
                await self._lists.add_missing(record.user_id, record.status, id_, since)
            else:
                await self._lists.add(record.user_id, record.status, id_)
            await self.store.delete(f"{self._live}/{id_}")
        if self._unsaved.get(id_) is record:
            del self._unsaved[id_]

    async def get_session(self, session_id: str) -> SessionRecord | None:
        if (unsaved := self._unsaved.get(session_id)) is not None:
            return unsaved
        if SESSION_ID.fullmatch(session_id) is None:
            return None
        await self._finish_undo(session_id)
        data = await self.store.get(_record_key(session_id))
        return _read_record(session_id, data)

    async def get_sessions(self, ids: list[str]) -> dict[str, SessionRecord]:
        """Return the records of those that there are, by id."""
        return {record.session_id: record for record in await self._get_sessions(ids)}

    async def _get_sessions(self, ids: list[str]) -> list[SessionRecord]:
        """Return the records of those that there are, in this order."""
        ids = [id_ for id_ in ids if SESSION_ID.fullmatch(id_) is not None]  # Not those of damaged lines.
        found = await self.store.get_many([_record_key(id_) for id_ in ids])
        records = [self._unsaved.get(id_) or _read_record(id_, data) for id_, data in zip(ids, found, strict=True)]
        return [record for record in records if record is not None]

    async def list_sessions(
        self, user: str, status: SessionStatus | None, *, page: int, page_size: int, cursor: str | None
    ) -> SessionPage:
        """Return a page of a user's sessions, newest first: by its number, or from the `cursor` of the page before."""
        if status in ("creating", "ready"):
            marks = [key.rpartition("/")[2] for key in await self.store.list("server/live")]
            live = [each for each in await self._get_sessions(marks) if (each.user_id, each.status) == (user, status)]
            live.sort(key=lambda each: each.requested_at or each.expires_at, reverse=True)
            shown = live[(page - 1) * page_size : page * page_size]
            return SessionPage(sessions=shown, total_count=len(live), has_more=page * page_size < len(live))
        found = await self._lists.page(user, status or "all", (page - 1) * page_size, page_size, cursor)
        records = await self._get_sessions(found.ids)
        return SessionPage(
            # A durable session that was resumed is in the list of its earlier status too.
            sessions=[record for record in records if status in (None, record.status)],
            total_count=found.total_count,
            has_more=found.next_cursor is not None,
            next_cursor=found.next_cursor,
        )

    async def sessions_left_live(self) -> list[SessionRecord]:
        """Return the sessions that this server had not ended when its process ended.

        The marks of those that were never written, or completely ended, are removed."""
        some = asyncio.Semaphore(_READ_AT_ONCE)

        async def look(key: str) -> SessionRecord | None:
            async with some:
                return await self._left_live(key)

        found = await asyncio.gather(*map(look, await self.store.list(self._live)))
        return [record for record in found if record is not None]

    async def _left_live(self, key: str) -> SessionRecord | None:
        id_ = key.rpartition("/")[2]
        record = await self.get_session(id_)
        if record is None:
            await self.store.delete(session_folder(id_))
        elif record.node in (None, self._server):  # Else another node has opened it.
            since = (record.requested_at or record.expires_at).date()
            await self._lists.add_missing(record.user_id, "all", id_, since)
            if record.is_live:
                return record
            # Perhaps only a part of it was written.
            await self._append(id_, "session", record)
            await self._lists.add_missing(record.user_id, record.status, id_, since)
        await self.store.delete(key)
        return None

    async def has_left_live(self) -> bool:
        """Return whether this server has sessions that are not ended completely."""
        return bool(await self.store.list(self._live))

    async def delete_session(self, record: SessionRecord) -> None:
        """Remove everything that is known of a session; lists that name it are cleaned by `SessionLists.sweep`."""
        id_ = record.session_id
        for key in (f"sessions/{id_}", f"{ANSWERS}/{id_}", f"{self._live}/{id_}", session_folder(id_)):
            await self.store.delete(key)
        self._operation_index.pop(id_, None)
        self._unwritten.pop(id_, None)
        self._unsaved.pop(id_, None)

    async def sweep(self, before: datetime) -> AsyncIterator[SessionRecord]:
        """Yield the sessions that ended before this moment, for the caller to delete; then clean the lists."""

        async def is_left(session_id: str) -> bool:
            return (
                SESSION_ID.fullmatch(session_id) is not None
                and await self.store.stamp(_record_key(session_id)) is not None
            )

        for user in await self._lists.users():
            async for session_id in self._lists.ids_until(user, before.date()):
                record = await self.get_session(session_id)
                if record is not None and not record.is_live and (record.closed_at or record.expires_at) < before:
                    yield record
            await self._lists.clean(user, before.date(), is_left)

    # --- events -----------------------------------------------------------------------------------------------------

    async def append_event(self, session_id: str, kind: EventKind, event: BaseModel | dict[str, Any]) -> int:
        """Add a line to the session's log and return its number. Lines that could not be written before come first."""
        await self._write_unwritten(session_id)
        return await self._append(session_id, kind, event)

    async def _append(self, session_id: str, kind: EventKind, event: BaseModel | dict[str, Any]) -> int:
        data = event.model_dump(mode="json") if isinstance(event, BaseModel) else event
        return await self.store.append(_log(session_id), [json_bytes({"type": kind, **data})])

    async def events(
        self, session_id: str, from_seq: int, *, follow: bool
    ) -> AsyncGenerator[tuple[int, dict[str, Any]]]:
        """Yield the events with their numbers; with `follow`, also those that come later."""
        log = _log(session_id)
        if not follow:
            async for block in self.store.read(log, from_seq):
                for event in parse_lines(log, block, json_object):
                    yield event
            return
        async for seq, line in self.store.watch(log, from_seq):
            for event in parse_lines(log, Block(seq, [line]), json_object):
                yield event

    async def trace(self, session_id: str, after: int, limit: int) -> TracePage:
        """Return the steps of a session after this line."""
        lines: list[TraceRecord] = []
        log = f"sessions/{session_id}/trace.jsonl"
        async for block in self.store.read(log, after + 1):
            for seq, line in parse_lines(log, block, json_object):
                if len(lines) == limit:
                    return TracePage(lines=lines, has_more=True)
                lines.append(TraceRecord(seq=seq, **line))
        return TracePage(lines=lines)

    # --- operations: commands and verifications ---------------------------------------------------------------------

    async def add_operation(self, operation: Operation) -> None:
        """Write an operation that begins."""
        await self._write_unwritten(operation.session_id)
        await self._append_operation(operation)

    async def _append_operation(self, operation: Operation) -> None:
        index = await self._index(operation.session_id)
        kind: EventKind = "interaction" if isinstance(operation, Interaction) else "job"
        seq = await self._append(operation.session_id, kind, operation)
        # Meanwhile the index may have been removed, and read again.
        self._operation_index.get(operation.session_id, index)[_id_of(operation)] = seq

    async def _write_unwritten(self, session_id: str) -> None:
        waiting = self._unwritten.get(session_id, {})
        for operation in list(waiting.values()):
            await self._append_operation(operation)
            if waiting.get(_id_of(operation)) is operation:
                del waiting[_id_of(operation)]
        if session_id in self._unwritten and not waiting:
            del self._unwritten[session_id]

    async def save_operation(self, operation: Operation) -> None:
        """Write how an operation is now. If that fails, it is kept in memory and written with the next event."""
        try:
            await self.add_operation(operation)
        except (StorageError, KeyError) as problem:
            self._unwritten.setdefault(operation.session_id, {})[_id_of(operation)] = operation
            logger.warning("the log of session %s could not be written: %s", operation.session_id, problem)

    async def ensure_written(self, session_id: str, operation_id: str) -> None:
        """Write an operation that could not be written before; StorageError if it still cannot."""
        if operation_id in self._unwritten.get(session_id, {}):
            await self._write_unwritten(session_id)

    async def get_operation(self, session_id: str, operation_id: str) -> Operation | None:
        if (unwritten := self._unwritten.get(session_id, {}).get(operation_id)) is not None:
            return unwritten
        seq = (await self._index(session_id)).get(operation_id)
        if seq is None:
            return None
        async for block in self.store.read(_log(session_id), seq):
            return _read_operation(block.records[0])
        return None

    async def operations(self, session_id: str) -> list[Operation]:
        """Return the operations of a session in the order in which they began, each as it was last."""
        found: dict[str, Operation] = {}
        async for block in self.store.read(_log(session_id)):
            for _, operation in parse_lines(_log(session_id), block, _read_operation):
                if operation is not None:
                    found[_id_of(operation)] = operation
        return list(found.values())

    async def _index(self, session_id: str) -> dict[str, int]:
        index = self._operation_index.get(session_id)
        if index is None:
            index = {}
            async for block in self.store.read(_log(session_id)):
                for seq, operation in parse_lines(_log(session_id), block, _read_operation):
                    if operation is not None:
                        index[_id_of(operation)] = seq
            index = self._operation_index.setdefault(session_id, index)
        self._operation_index.move_to_end(session_id)
        while len(self._operation_index) > _INDEXED_SESSIONS:
            self._operation_index.popitem(last=False)
        return index

    # --- outputs ----------------------------------------------------------------------------------------------------

    async def put_output(self, session_id: str, job_id: str, name: str, text: bytes) -> None:
        """Keep the complete output of a verification, of which its result contains only a part."""
        await self.store.put(f"{session_folder(session_id)}/{job_id}/{name}", text)

    async def get_output(self, session_id: str, job_id: str, name: str) -> bytes | None:
        return await self.store.get(f"{session_folder(session_id)}/{job_id}/{name}")

    async def put_diff(self, session_id: str, diff: WorkspaceDiff) -> None:
        """Keep what a session had changed when it ended."""
        await self.store.put(f"{session_folder(session_id)}/diff.json", diff.model_dump_json().encode())

    async def get_diff(self, session_id: str) -> WorkspaceDiff | None:
        data = await self.store.get(f"{session_folder(session_id)}/diff.json")
        return WorkspaceDiff.model_validate_json(data) if data is not None else None

    # --- earlier versions -------------------------------------------------------------------------------------------

    async def import_old_log(self) -> None:
        """Take over the sessions of a server that kept all of them in one log."""
        found: dict[str, SessionRecord] = {}
        async for block in self.store.read(_OLD_LOG):
            for _, line in parse_lines(_OLD_LOG, block, json_object):
                if "forgotten" in line:
                    found.pop(str(line["forgotten"]), None)
                elif (record := _read_record(str(line.get("session_id")), orjson.dumps(line))) is not None:
                    found[record.session_id] = record
        for record in found.values():
            if await self.store.stamp(_record_key(record.session_id)) is None:
                await self.add_session(record)
                if not record.is_live:
                    await self._save(record)
        await self.store.delete(_OLD_LOG)


def session_id_from(request_id: str) -> str:
    """Return the id of the session that a request creates."""
    return request_id[:32]


def parse_lines(log: str, block: Block, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
    """The records of a block with their numbers; one that cannot be parsed is reported and left out."""
    for number, line in enumerate(block.records, block.first_seq):
        try:
            yield number, parse(line)
        except (ValueError, KeyError, TypeError) as problem:
            reason = str(problem).partition("\n")[0][:200] or type(problem).__name__
            logger.warning("%s, line %d is damaged and ignored: %s", log, number, reason)


def session_folder(session_id: str) -> str:
    """Return the key below which the records of a session are."""
    return f"server/sessions/{session_id}"


def _record_key(session_id: str) -> str:
    return f"{session_folder(session_id)}/record.json"


def _log(session_id: str) -> str:
    return f"{session_folder(session_id)}/log.jsonl"


def _read_record(session_id: str, data: bytes | None) -> SessionRecord | None:
    """Return a record; one that is damaged is reported, and only its session is missing."""
    if data is None or SESSION_ID.fullmatch(session_id) is None:
        return None
    try:
        return SessionRecord.model_validate_json(data)
    except ValueError as problem:
        logger.warning("the record of session %s is damaged and ignored: %s", session_id, str(problem)[:200])
        return None


def _id_of(operation: Operation) -> str:
    return operation.interaction_id if isinstance(operation, Interaction) else operation.job_id


def _read_operation(line: bytes) -> Operation | None:
    data = json_object(line)
    match data.pop("type", None):
        case "interaction":
            return Interaction.model_validate(data)
        case "job":
            return Job.model_validate(data)
        case _:
            return None


def now() -> datetime:
    """The present moment, in UTC."""
    return datetime.now(UTC)
