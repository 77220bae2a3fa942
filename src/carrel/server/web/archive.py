"""What the page shows: the sessions of a base folder, of a server, or of one user of a server, and runs of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.conversation.messages import SessionMeta
from carrel.conversation.replay import Numbered
from carrel.conversation.session_state import is_id
from carrel.errors import ResultsRefused, SessionNotFound
from carrel.server.records import RecordStore
from carrel.server.session_manager import SessionManager
from carrel.session import StorageBackend
from carrel.tasks import RunFolder, RunInfo, TaskResult
from carrel.wire.answers import SessionRecord, TraceRecord, WorkspaceDiff
from carrel.wire.verification import Job

PAGE_SIZE = 100
"""Sessions on one page of the list."""
WINDOW = 200
"""Entries of a conversation on one page."""
MAX_COMPARED = 1000
"""Entries of each conversation that are compared, after those in common."""
_MAX_STEPS = 5000
"""Steps of a trace on one page."""


@dataclass(frozen=True)
class SessionRow:
    """A session in the list."""

    id: str
    title: str
    state: str
    updated_at: str
    model: str = ""
    messages: int | None = None
    tokens: int | None = None
    parent: str = ""
    found: str = ""
    """The part of the conversation that a search has found, and the number of its entry."""
    found_seq: int = 0


@dataclass(frozen=True)
class SessionView:
    """A session with what is known of it without its conversation."""

    id: str
    meta: Mapping[str, Any]
    record: SessionRecord | None = None
    jobs: Sequence[Job] = ()

    @property
    def title(self) -> str:
        return _title(self.meta, self.record) or self.id

    @property
    def state(self) -> str:
        return _state(self.meta, self.record)

    @property
    def row(self) -> SessionRow:
        return _row(self.id, self.meta, self.record)


@dataclass(frozen=True)
class Window:
    """Some entries of a log, in order."""

    entries: list[Numbered]
    last_seq: int
    """Of the whole log."""

    @property
    def first(self) -> int:
        return self.entries[0][0] if self.entries else 1

    @property
    def last(self) -> int:
        return self.entries[-1][0] if self.entries else 0


class Archive:
    """The sessions in one storage. With `manager`, also what only a running server knows."""

    def __init__(self, storage: StorageBackend, manager: SessionManager | None = None) -> None:
        self.conversations = storage.get_session_store()
        self.records = manager.records if manager is not None else RecordStore(storage.store)
        self.manager = manager

    async def sessions(self, user: str | None, number: int) -> tuple[list[SessionRow], bool]:
        """Return a page of the list, newest first, and whether there is another one. None is for all users."""
        if user is None:
            metas = [*await self.conversations.list_sessions(), *await self.conversations.traces()]
            metas.sort(key=lambda meta: str(meta.get("updated_at")), reverse=True)
            shown = await self.conversations.counted(metas[(number - 1) * PAGE_SIZE : number * PAGE_SIZE])
            rows = [_row(meta["id"], meta, await self.records.get_session(meta["id"])) for meta in shown]
            return rows, number * PAGE_SIZE < len(metas)
        found = await self.records.list_sessions(user, None, page=number, page_size=PAGE_SIZE, cursor=None)
        rows = [_row(each.session_id, await self._meta(each.session_id), each) for each in found.sessions]
        return rows, found.has_more

    async def search(self, user: str | None, words: str) -> list[SessionRow]:
        """Return the sessions whose conversation has these words or this meaning."""
        rows = []
        for hit in await self.conversations.search(words, 50):
            record = await self.records.get_session(hit.session_id)
            if user is None or (record is not None and record.user_id == user):
                row = _row(hit.session_id, await self._meta(hit.session_id), record)
                rows.append(SessionRow(**{**vars(row), "found": hit.snippet, "found_seq": hit.seq or 0}))
        return rows

    async def session(self, user: str | None, session_id: str) -> SessionView:
        """Return a session; SessionNotFound also for another user's."""
        if not is_id(session_id):
            raise SessionNotFound(f"there is no session {session_id!r}")
        record = await self.records.get_session(session_id)
        if record is not None and self.manager is not None and user is not None:
            record = await self.manager.get(user, session_id)
        if user is not None and (record is None or record.user_id != user):
            raise SessionNotFound(f"there is no session {session_id!r}")
        meta = await self._meta(session_id)
        if record is None and not meta:
            raise SessionNotFound(f"there is no session {session_id!r}")
        operations = await self.records.operations(session_id) if record is not None else []
        return SessionView(session_id, meta, record, [each for each in operations if isinstance(each, Job)])

    async def _meta(self, session_id: str) -> Mapping[str, Any]:
        meta: Mapping[str, Any] | None = await self.conversations.find_meta(session_id)
        if meta is None and await self.records.store.stamp(f"sessions/{session_id}/trace.jsonl") is not None:
            return {"id": session_id, "title": "(only a trace)"}
        return meta or {}

    async def window(self, session_id: str, *, at: int | None = None, before: int | None = None) -> Window:
        """Return entries around one, or before one, or the last ones."""
        last = await self.last_seq(session_id)
        end = min(last, before - 1 if before is not None else at + WINDOW // 2 if at is not None else last)
        first = max(1, end - WINDOW + 1)
        entries: list[Numbered] = []
        if end >= first:
            async for seq, entry in self.conversations.iter_entries(session_id, first):
                entries.append((seq, entry))
                if seq >= end:
                    break
        return Window(entries, last)

    async def entries(self, session_id: str, until: int | None = None) -> AsyncGenerator[Numbered]:
        """Yield the entries of a conversation, up to one; none without a conversation."""
        if await self.last_seq(session_id):
            async for seq, entry in self.conversations.iter_entries(session_id):
                if until is not None and seq > until:
                    return
                yield seq, entry

    async def last_seq(self, session_id: str) -> int:
        """Return the number of the last entry; 0 without a conversation."""
        try:
            return await self.conversations.last_seq(session_id)
        except SessionNotFound:
            return 0

    async def family(self, user: str | None, session_id: str) -> list[tuple[int, SessionRow]]:
        """Return the session, its ancestors and all their forks, each with its depth."""
        metas = {meta["id"]: meta for meta in await self.conversations.list_sessions()}
        root, seen = session_id, {session_id}
        while (parent := metas.get(root, {}).get("parent_session_id")) in metas and parent not in seen:
            root = str(parent)
            seen.add(root)
        children: dict[str, list[SessionMeta]] = {}
        for meta in sorted(metas.values(), key=lambda meta: str(meta.get("created_at"))):
            children.setdefault(str(meta.get("parent_session_id")), []).append(meta)
        found: list[tuple[int, SessionRow]] = []
        waiting = [(0, metas.get(root, {"id": root}))]
        while waiting:
            depth, meta = waiting.pop()
            record = await self.records.get_session(meta["id"])
            if user is None or (record is not None and record.user_id == user):
                found.append((depth, _row(meta["id"], meta, record)))
            waiting += [(depth + 1, child) for child in reversed(children.pop(meta["id"], []))]
        return found

    async def trace(self, user: str | None, session_id: str) -> list[tuple[int, TraceRecord]]:
        """Return the steps of a session, each with its depth: a call stands below the run that made it."""
        if self.manager is not None and user is not None:
            lines = (await self.manager.trace(user, session_id, 0, _MAX_STEPS)).lines
        else:
            lines = (await self.records.trace(session_id, 0, _MAX_STEPS)).lines
        lines.sort(key=lambda line: str(getattr(line, "started_at", "")))
        ids = {getattr(line, "id", None) for line in lines}
        depths: dict[Any, int] = {}
        found = []
        for line in lines:
            parent = getattr(line, "parent", None)
            depth = depths.get(parent, 0) + 1 if parent in ids and parent is not None else 0
            depths[getattr(line, "id", None)] = depth
            found.append((depth, line))
        return found

    async def diff(self, user: str | None, view: SessionView) -> WorkspaceDiff | None:
        """Return what the session has changed; None if it was not kept."""
        if self.manager is not None and user is not None and view.record is not None and view.record.is_live:
            return await self.manager.diff(user, view.id)
        return await self.records.get_diff(view.id)


async def differing_entries(
    a: Archive, a_id: str, a_until: int | None, b: Archive, b_id: str, b_until: int | None
) -> tuple[int, list[Numbered], list[Numbered]]:
    """Return how many entries two conversations have in common at their start, and the entries of each after that.

    At most `MAX_COMPARED` of each are returned."""
    logs = [archive.entries(id_, until) for archive, id_, until in ((a, a_id, a_until), (b, b_id, b_until))]
    common = 0
    rest: tuple[list[Numbered], list[Numbered]] = ([], [])
    async with aclosing(logs[0]) as one, aclosing(logs[1]) as two:
        while True:
            pair = [await anext(log, None) for log in (one, two)]
            if pair[0] is None or pair[0] != pair[1]:
                break
            common += 1
        for log, found, first in zip((one, two), rest, pair, strict=True):
            while first is not None and len(found) < MAX_COMPARED:
                found.append(first)
                first = await anext(log, None)
    return common, *rest


@dataclass(frozen=True)
class Runs:
    """The runs of tasks in a folder."""

    folder: Path

    async def all(self) -> list[tuple[str, RunInfo]]:
        """Return the runs, newest first; one that cannot be read is left out."""
        return await asyncio.to_thread(self._all)

    def _all(self) -> list[tuple[str, RunInfo]]:
        found = []
        for path in sorted(self.folder.glob("*/run.json"), reverse=True):
            try:
                found.append((path.parent.name, RunFolder(path.parent).read_info()))
            except ResultsRefused:
                continue
        return found

    async def one(self, name: str) -> tuple[RunInfo, list[TaskResult]]:
        """Return a run with its results; ResultsRefused if there is none."""
        if "/" in name or name in ("", ".", ".."):
            raise ResultsRefused(f"there is no run {name!r}")
        run = RunFolder(self.folder / name)
        return await asyncio.to_thread(run.read_info), await asyncio.to_thread(run.read_results)


def _row(session_id: str, meta: Mapping[str, Any], record: SessionRecord | None) -> SessionRow:
    updated = meta.get("updated_at") or (record.requested_at.isoformat() if record and record.requested_at else "")
    parent = meta.get("parent_session_id") or (record.parent_session_id if record is not None else "")
    return SessionRow(
        id=session_id,
        title=_title(meta, record) or "Untitled",
        state=_state(meta, record),
        updated_at=str(updated),
        model=str(meta.get("model") or ""),
        messages=meta.get("message_count"),
        tokens=meta.get("total_tokens"),
        parent=str(parent or ""),
    )


def _title(meta: Mapping[str, Any], record: SessionRecord | None) -> str:
    if record is not None and record.dataset:
        return f"{record.dataset} / {record.sample_id}"
    return str(meta.get("title") or "")


def _state(meta: Mapping[str, Any], record: SessionRecord | None) -> str:
    if record is not None:
        return record.status
    return "archived" if meta.get("archived_at") else ""
