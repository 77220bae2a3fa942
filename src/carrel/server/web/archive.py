"""What the page shows: the sessions of a base folder, of a server, or of one user of a server, and runs of tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

from carrel.conversation.messages import SessionMeta
from carrel.conversation.replay import Numbered
from carrel.conversation.session_state import is_id
from carrel.errors import ResultsRefused, SessionError, SessionNotFound
from carrel.server.records import RecordStore
from carrel.server.session_manager import SessionManager
from carrel.server.web.rows import SessionRow, count_facets, facets_of, row_of, state_of, title_of
from carrel.server.web.tree import SHOWN, TreeNode, family_of, forked_at, ordered, points_of
from carrel.session import (
    Point,
    RecordedDiff,
    RecordedPoint,
    RecordedState,
    StorageBackend,
    compare_files,
    find_point,
    read_state,
    read_text,
    recorded_checkpoints,
    store_of,
)
from carrel.tasks import RunFolder, RunInfo, TaskResult
from carrel.wire.answers import CheckpointRecord, SessionRecord, SessionStatus, TraceRecord, WorkspaceDiff
from carrel.wire.verification import Job

PAGE_SIZE = 100
"""Sessions on one page of the list."""
WINDOW = 200
"""Entries of a conversation on one page."""
FILTERED_WINDOW = 1000
"""Entries that are looked at for a page that shows some kinds only."""
OUTLINED = 2000
"""Entries whose outline is on one page."""
MAX_COMPARED = 1000
"""Entries of each conversation that are compared, after those in common."""
_MAX_STEPS = 5000
"""Steps of a trace on one page."""
_LISTING_SECONDS = 2.0


@dataclass(frozen=True)
class SessionView:
    """A session with what is known of it without its conversation."""

    id: str
    meta: Mapping[str, Any]
    record: SessionRecord | None = None
    jobs: Sequence[Job] = ()

    @property
    def title(self) -> str:
        return title_of(self.meta, self.record) or self.id

    @property
    def state(self) -> str:
        return state_of(self.meta, self.record)

    @property
    def row(self) -> SessionRow:
        return row_of(self.id, self.meta, self.record)


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


@dataclass(frozen=True)
class FoundSessions:
    """A page of the list."""

    rows: list[SessionRow]
    has_more: bool
    counts: Mapping[str, Mapping[str, int]]
    """For each filter, how many sessions each of its values has, in all of the list."""


@dataclass(frozen=True)
class Listing:
    """All sessions, newest first."""

    metas: list[SessionMeta]
    counts: Mapping[str, Mapping[str, int]]
    made_at: float


class Archive:
    """The sessions in one storage. With `manager`, also what only a running server knows."""

    def __init__(
        self, storage: StorageBackend, manager: SessionManager | None = None, runs: Runs | None = None
    ) -> None:
        """With `runs`, their verdicts are those of the sessions of their attempts."""
        self.storage = storage
        self._runs = runs
        self.conversations = storage.get_session_store()
        self.records = manager.records if manager is not None else RecordStore(storage.store)
        self.manager = manager
        self._clock = time.monotonic
        self._listed: Listing | None = None
        self._listing_lock = asyncio.Lock()

    async def sessions(self, user: str | None, number: int, only: Mapping[str, str]) -> FoundSessions:
        """Return a page of the list, newest first. None is for all users. `only` are the filters: by name, a value."""
        if user is not None:
            status: Any = only.get("state") or None
            found = await self.records.list_sessions(user, status, page=number, page_size=PAGE_SIZE, cursor=None)
            rows = [await self._row_of(each, await self._meta(each.session_id), {}) for each in found.sessions]
            return FoundSessions(rows, found.has_more, {"state": await self._states_of(user)})
        listing = await self._listing()
        kept = listing.metas
        if only:
            kept = [meta for meta in kept if all(value in facets_of(meta).get(key, ()) for key, value in only.items())]
        shown = await self.conversations.counted(kept[(number - 1) * PAGE_SIZE : number * PAGE_SIZE])
        records = await self.records.get_sessions([meta["id"] for meta in shown])
        attempts = await self._attempts()
        rows = [await self._row_of(records.get(meta["id"]), meta, attempts) for meta in shown]
        return FoundSessions(rows, number * PAGE_SIZE < len(kept), listing.counts)

    async def _listing(self) -> Listing:
        """Return all sessions; for two seconds the same, because two files of each session are looked at."""
        async with self._listing_lock:
            if self._listed is None or self._clock() - self._listed.made_at > _LISTING_SECONDS:
                metas, traces = await asyncio.gather(self.conversations.list_sessions(), self.conversations.traces())
                if traces:
                    metas = sorted([*metas, *traces], key=lambda meta: str(meta.get("updated_at")), reverse=True)
                self._listed = Listing(metas, count_facets(metas), self._clock())
            return self._listed

    def changed(self) -> None:
        """Look at all sessions again for the next list, because one was changed."""
        self._listed = None

    async def _states_of(self, user: str) -> dict[str, int]:
        counts = {}
        for status in get_args(SessionStatus):
            found = await self.records.list_sessions(user, status, page=1, page_size=1, cursor=None)
            counts[status] = found.total_count
        return {status: count for status, count in counts.items() if count}

    async def _attempts(self) -> Mapping[str, JudgedAttempt]:
        return await self._runs.attempts() if self._runs is not None else {}

    async def _row_of(
        self, record: SessionRecord | None, meta: Mapping[str, Any], attempts: Mapping[str, JudgedAttempt]
    ) -> SessionRow:
        row = row_of(record.session_id if record is not None else meta["id"], meta, record)
        if (found := attempts.get(row.id)) is not None:
            return replace(row, title=found.title, outcome=str(found.job.outcome))
        if record is None or not record.dataset:
            return row
        jobs = [each for each in await self.records.operations(record.session_id) if isinstance(each, Job)]
        return replace(row, outcome=str(jobs[-1].outcome or jobs[-1].status)) if jobs else row

    async def search(self, user: str | None, words: str) -> list[SessionRow]:
        """Return the sessions whose conversation has these words or this meaning."""
        rows = []
        for hit in await self.conversations.search(words, 50):
            record = await self.records.get_session(hit.session_id)
            if user is None or (record is not None and record.user_id == user):
                row = row_of(hit.session_id, await self._meta(hit.session_id), record)
                rows.append(replace(row, found=hit.snippet, found_seq=hit.seq or 0))
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
        jobs = [each for each in operations if isinstance(each, Job)]
        if (found := (await self._attempts()).get(session_id)) is not None:
            return SessionView(session_id, {**meta, "title": found.title}, record, [*jobs, found.job])
        return SessionView(session_id, meta, record, jobs)

    async def _meta(self, session_id: str) -> Mapping[str, Any]:
        meta: Mapping[str, Any] | None = await self.conversations.find_meta(session_id)
        if meta is None and await self.records.store.stamp(f"sessions/{session_id}/trace.jsonl") is not None:
            return {"id": session_id, "title": "(only a trace)"}
        return meta or {}

    async def window(
        self,
        session_id: str,
        *,
        at: int | None = None,
        before: int | None = None,
        after: int | None = None,
        size: int = WINDOW,
    ) -> Window:
        """Return entries around one, before one, or after one, or the last ones."""
        last = await self.last_seq(session_id)
        if after is not None:
            first, end = after + 1, min(last, after + size)
        else:
            end = min(last, before - 1 if before is not None else at + size // 2 if at is not None else last)
            first = max(1, end - size + 1)
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

    async def tree(
        self, user: str | None, session_id: str, first: int | None, *, is_alone: bool = False
    ) -> tuple[list[TreeNode], int, int]:
        """Return the nodes of a tree on one page, the number of its first session, and the number of all sessions.

        `is_alone`: only the session itself."""
        metas = {meta["id"]: meta for meta in (await self._listing()).metas}
        family = family_of(metas, session_id)
        if is_alone:
            family = [(0, {"id": session_id, **await self._meta(session_id)})]
        records: Mapping[str, SessionRecord] = {}
        if user is not None:
            records = await self.records.get_sessions([meta["id"] for _, meta in family])
            family = [(d, m) for d, m in family if (r := records.get(m["id"])) is not None and r.user_id == user]
        if first is None:
            here = next((index for index, (_, meta) in enumerate(family) if meta["id"] == session_id), 0)
            first = here + 1 - SHOWN // 2
        first = max(1, min(first, len(family) - SHOWN + 1))
        shown = family[first - 1 : first - 1 + SHOWN]
        ids = [meta["id"] for _, meta in shown]
        if user is None:
            records = await self.records.get_sessions(ids)
        attempts = await self._attempts()
        sessions = [
            TreeNode(depth, "session", await self._row_of(records.get(meta["id"]), meta, attempts), forked_at(meta))
            for depth, meta in shown
        ]
        live = {node.session.id: await self._live_checkpoints(user, node.session) for node in sessions}
        stamps = await store_of(self.storage).stamps([f"sessions/{id_}/states.jsonl" for id_ in ids])
        points = {}
        for node, (_, meta), stamp in zip(sessions, shown, stamps, strict=True):
            recorded = await self.points(node.session.id) if stamp is not None else []
            points[node.session.id] = points_of(node, meta, recorded, live[node.session.id])
        return ordered(sessions, points), first, len(family)

    async def _live_checkpoints(self, user: str | None, row: SessionRow) -> list[CheckpointRecord]:
        """Return the checkpoints to which a session can be taken back."""
        if self.manager is None or user is None or row.state != "ready":
            return []
        await self.manager.flush_trace(row.id)
        try:
            return await self.manager.checkpoints(user, row.id)
        except SessionError:
            return []  # It is ending, or on another node.

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
        """Return what the session has changed; None if neither that was kept nor its files were recorded."""
        if self.manager is not None and user is not None and view.record is not None and view.record.is_live:
            return await self.manager.diff(user, view.id)
        return await self.records.get_diff(view.id)

    # --- points -----------------------------------------------------------------------------------------------------

    async def state(self, user: str | None, session_id: str, at: str) -> tuple[Point, RecordedState]:
        """Return a point of a session, and what was recorded up to it; PointNotFound."""
        if self.manager is not None and user is not None:
            await self.manager.flush_trace(session_id)
        point = await find_point(self.storage, session_id, at)
        return point, await read_state(store_of(self.storage), session_id, point)

    async def differing_files(self, a: RecordedState, b: RecordedState) -> RecordedDiff:
        return await compare_files(store_of(self.storage), a, b)

    async def text(self, state: RecordedState, path: str) -> bytes | None:
        """Return the text of a changed file at a point; None where it was not kept."""
        entry = state.files.get(path)
        return None if entry is None else await read_text(store_of(self.storage), state.session_id, entry[2])

    async def points(self, session_id: str) -> list[RecordedPoint]:
        """Return the checkpoints that were recorded, oldest first; some can be gone back to, others not any more."""
        return await recorded_checkpoints(store_of(self.storage), session_id)


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
class JudgedAttempt:
    """What a run knows of the session of an attempt."""

    title: str
    job: Job


@dataclass(frozen=True)
class Runs:
    """The runs of tasks in a folder."""

    folder: Path
    _read: dict[str, tuple[float, dict[str, JudgedAttempt]]] = field(default_factory=dict)
    """For each run, when its results were changed, and what they say, by session."""

    async def attempts(self) -> dict[str, JudgedAttempt]:
        """Return what the runs know of sessions, by their ids."""
        return await asyncio.to_thread(self._attempts)

    def _attempts(self) -> dict[str, JudgedAttempt]:
        found: dict[str, JudgedAttempt] = {}
        for path in self.folder.glob("*/results.jsonl"):
            changed = path.stat().st_mtime
            name, (read_at, known) = path.parent.name, self._read.get(path.parent.name, (0.0, {}))
            if read_at != changed:
                try:
                    results = RunFolder(path.parent).read_results()
                except ResultsRefused:
                    continue
                known = {each.session_id: _judged(name, each) for each in results if each.session_id}
                self._read[name] = changed, known
            found |= known
        return found

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


def _judged(run: str, result: TaskResult) -> JudgedAttempt:
    job = Job(
        job_id=run,
        session_id=result.session_id,
        sample_id=result.sample_id,
        status="completed",
        created_at=result.started_at,
        completed_at=result.started_at + timedelta(seconds=result.seconds),
        result=result.verdict,
    )
    return JudgedAttempt(f"{result.dataset} / {result.sample_id}, attempt {result.attempt}", job)
