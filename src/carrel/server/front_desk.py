"""All sessions of a server: who may have which, how many there are, and how each ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from carrel.errors import (
    CarrelError,
    ConfigurationError,
    ExecutorClosed,
    ForkRefused,
    InteractionNotFound,
    JobNotFound,
    ServerBusy,
    SessionNotFound,
    SessionNotReady,
    StorageError,
    TooManySessions,
)
from carrel.execution.config import SandboxMode, SubprocessConfig
from carrel.execution.executor import Executor
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.server.ledger import Kind, Ledger
from carrel.server.live_task import LiveTask, Opened, interrupted
from carrel.server.once import Answers
from carrel.server.warm_places import WarmPlaces
from carrel.session import MemoryStorage, Session, StorageBackend, fork_conversation, unavailable_handlers
from carrel.storage.base import Lock
from carrel.tasks.dataset import Datasets
from carrel.tasks.environment import open_executor, prepare_sample
from carrel.tasks.sample import Sample
from carrel.wire.answers import Interaction, SessionRecord
from carrel.wire.requests import CreateSession, ForkSession
from carrel.wire.verification import ErrorInfo, Job

logger = logging.getLogger(__name__)

HELD = 1.0
"""Seconds that the first question about something unfinished is held: clients of this wire ask again only after 3."""
_LOCK = "server/lock"
_FORGETS_EVERY = 3600.0
"""Seconds between two looks at what may be forgotten."""
_ID = 32
"""Hexadecimal digits of a session's id."""


@dataclass(frozen=True)
class Rules:
    """What sessions of this server may be."""

    max_sessions: int = 200
    """Alive at one time, of all users together."""
    sandbox: SandboxMode | None = "required"
    network: bool = False
    """Whether a session of no sample may have the host's network."""
    warm: int = 4
    """Places kept open for samples that are asked for again and again; 0 for none."""
    keep_days: float | None = None
    """Days for which what ended is remembered; None is for ever."""
    judges: int = max(2, os.cpu_count() or 2)
    """Verifications at one time."""


class FrontDesk:
    """Every way to a session leads through here, and asks whose it is."""

    def __init__(self, storage: StorageBackend, datasets: Datasets, cache: Path, rules: Rules) -> None:
        self.storage = storage
        self.datasets = datasets
        self.cache = cache
        self.rules = rules
        self.ledger = Ledger(storage.store)
        self.answers = Answers(storage.store)
        self._live: dict[str, LiveTask] = {}
        self._warm = WarmPlaces(rules.warm)
        self._judges = asyncio.Semaphore(rules.judges)
        self._ends: set[asyncio.Task[SessionRecord]] = set()
        self._forgetting: asyncio.Task[None] | None = None
        self._lock: Lock | None = None
        self._closed = False

    # --- the server's own life --------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take over the data; what an earlier server left half done is told as what it is."""
        self._lock = await self.storage.store.lock(_LOCK, wait=False)
        if self._lock is None:
            who = await self.storage.store.lock_owner(_LOCK)
            raise ServerBusy(f"another server ({who}) works on this data; give this one another --data")
        await self.ledger.open()
        for session in list(self.ledger.sessions.values()):
            if session.status in ("creating", "ready"):
                try:
                    await self._settle(session)
                except StorageError as problem:
                    logger.warning("session %s was not ended in its log: %s", session.session_id, problem)
        await self._forget_old()
        await self.answers.open(self.ledger.sessions.keys())
        self._forgetting = asyncio.create_task(self._forget_for_ever())

    async def _forget_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_FORGETS_EVERY)
            try:
                await self._forget_old()
                await self.answers.tidy(self.ledger.sessions.keys())
            except CarrelError as problem:
                logger.warning("old sessions could not be forgotten: %s", problem)

    async def _forget_old(self) -> None:
        """Of sessions that ended so long ago: their records, interactions, jobs, logs and conversations."""
        if self.rules.keep_days is None:
            return
        before = datetime.now(UTC) - timedelta(days=self.rules.keep_days)
        conversations = self.storage.get_session_store()
        for session in list(self.ledger.sessions.values()):
            ended = session.closed_at or session.expires_at
            if session.status not in ("creating", "ready") and session.session_id not in self._live and ended < before:
                await conversations.delete_session(session.session_id)
                await self.ledger.forget(session.session_id)

    async def _settle(self, session: SessionRecord) -> None:
        for what in await self.ledger.all_of(session.session_id):
            if (ended := interrupted(what)) is not None:
                kind: Kind = "interaction" if isinstance(ended, Interaction) else "job"
                await self.ledger.note(session.session_id, kind, ended)
        now = datetime.now(UTC)
        # "error" and not "terminated" for one that was being made: who waits for it to be ready gives up on that.
        changes = {
            "status": "error" if session.status == "creating" else "terminated",
            "error": ErrorInfo(code="interrupted", message="the server was stopped; the session's place is gone"),
            "closed_at": now,
            "duration_seconds": (now - session.created_at).total_seconds() if session.created_at else 0.0,
        }
        await self.ledger.keep(session.model_copy(update=changes))

    async def close(self) -> None:
        """End every session; what ran in them is told as stopped. Twice is harmless."""
        self._closed = True
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.wait({self._forgetting})
        await asyncio.gather(*(self._end(task, "the server was stopped") for task in list(self._live.values())))
        if self._ends:
            await asyncio.wait(self._ends)
        await self._warm.close()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            await lock.release()

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def create(self, user: str, asked: CreateSession, once: str | None = None) -> SessionRecord:
        """A session of the user's; SampleNotFound, DatasetNotFound, TooManySessions or ConfigurationError.

        What was asked for `once` and is there already is not made again."""
        if (known := self._known(once)) is not None:
            return known
        sample = None
        if asked.dataset or asked.sample_id:
            if not (asked.dataset and asked.sample_id):
                raise ConfigurationError("dataset and sample_id go together; a session of no sample has neither")
            if asked.network is not None:
                raise ConfigurationError("network: the sample says whether it has one")
            dataset = await asyncio.to_thread(self.datasets.get, asked.dataset)
            sample = dataset.sample(asked.sample_id, asked.version)
        elif asked.network and not self.rules.network:
            raise ConfigurationError(
                "network: this server gives none; it would need to be started with --allow-network"
            )
        task = self._new(user, sample, asked.ttl_minutes, once)
        # The place is made while the session is written down; the task begins when this one waits, not before.
        task.open(lambda: self._opened(sample, asked))
        try:
            await self.ledger.keep(task.session)
        except BaseException:
            self._live.pop(task.session.session_id, None)
            self.ledger.lose(task.session.session_id)
            await task.abandon()
            raise
        return task.session

    def _known(self, once: str | None) -> SessionRecord | None:
        return self.ledger.sessions.get(once[:_ID]) if once is not None else None

    def _new(
        self, user: str, sample: Sample | None, minutes: int, once: str | None, parent: str | None = None
    ) -> LiveTask:
        self._make_room()
        now = datetime.now(UTC)
        session = SessionRecord(
            session_id=once[:_ID] if once is not None else secrets.token_hex(_ID // 2),
            dataset=sample.dataset if sample is not None else "",
            sample_id=sample.sample_id if sample is not None else "",
            status="creating",
            requested_at=now,
            expires_at=now + timedelta(minutes=minutes),
            user_id=user,
            ttl_minutes=minutes,
            parent_session_id=parent,
        )
        task = LiveTask(session, sample, self.ledger, self._judges, self._is_over, self.without_folders)
        self._live[session.session_id] = task
        return task

    def _make_room(self) -> None:
        if self._closed:
            raise SessionNotReady("the server is being stopped")
        for id_, task in list(self._live.items()):
            if task.session.status not in ("creating", "ready"):
                del self._live[id_]
        if len(self._live) >= self.rules.max_sessions:
            raise TooManySessions(f"{len(self._live)} sessions are alive, and this server has room for no more")

    async def _opened(self, sample: Sample | None, asked: CreateSession) -> Opened:
        executor: Executor
        if sample is None:
            config = SubprocessConfig(
                default_timeout=None,
                sandbox=self.rules.sandbox,
                network=bool(asked.network),
                allow_runtime_deps=bool(asked.network),
            )
            prepared, executor = None, SubprocessExecutor(config)
        else:
            prepared = await prepare_sample(sample, self.cache, sandbox=self.rules.sandbox)
            executor = self._warm.take(prepared) or await open_executor(prepared, handlers=unavailable_handlers())
        code = Session(MemoryStorage(), executor)
        try:
            await code.start()
            for path, text in asked.files.items():
                await executor.write_file(path, text)
        except BaseException:
            await code.close()
            raise
        return Opened(executor, code, prepared)

    async def fork(self, user: str, session_id: str, asked: ForkSession, once: str | None = None) -> SessionRecord:
        """Another session that begins as this one is now; ForkRefused changes nothing."""
        self.session(user, session_id)
        if (known := self._known(once)) is not None:
            return known
        origin = self.live(user, session_id)
        opened = origin.opened
        minutes = asked.ttl_minutes or origin.session.ttl_minutes
        fork = self._new(user, origin.sample, minutes, once, session_id)
        id_ = fork.session.session_id
        try:
            code = await opened.code.fork(storage=MemoryStorage())
        except BaseException as problem:
            self._live.pop(id_, None)
            if isinstance(problem, ExecutorClosed):
                raise ForkRefused(f"the session could not be forked: {problem}") from problem
            raise
        conversations = self.storage.get_session_store()
        try:
            _refuse_ended(fork)
            await fork_conversation(conversations, session_id, id_)
            await self.ledger.keep(fork.session)
            _refuse_ended(fork)
        except BaseException:
            self._live.pop(id_, None)
            self.ledger.lose(id_)
            await code.close()
            await conversations.delete_session(id_)
            raise

        async def at_once() -> Opened:
            return Opened(code.executor, code, opened.prepared)

        fork.open(at_once)
        return fork.session

    def session(self, user: str, session_id: str) -> SessionRecord:
        """As it stands; SessionNotFound also for somebody else's."""
        session = self.ledger.sessions.get(session_id)
        if session is None or session.user_id != user:
            raise SessionNotFound(f"there is no session {session_id!r}")
        return session

    def sessions_of(self, user: str) -> list[SessionRecord]:
        """Newest first."""
        return [session for session in reversed(self.ledger.sessions.values()) if session.user_id == user]

    def live(self, user: str, session_id: str) -> LiveTask:
        """One that is not over; SessionNotReady when it is."""
        session = self.session(user, session_id)
        task = self._live.get(session_id)
        if task is None or task.ending is not None:
            raise SessionNotReady(f"the session is {session.status if task is None else task.ending}")
        return task

    def without_folders(self, text: str) -> str:
        """What somebody elsewhere is told: where the server keeps its datasets and its cache is its own matter."""
        for folder in (self.datasets.folder, self.cache.absolute()):
            text = text.replace(f"{folder}/", "")
        return text

    def under_way(self, session_id: str) -> LiveTask | None:
        return self._live.get(session_id)

    @property
    def alive(self) -> int:
        return sum(task.session.status in ("creating", "ready") for task in self._live.values())

    async def close_session(self, user: str, session_id: str) -> SessionRecord:
        """End it; one that has ended stays as it is."""
        session = self.session(user, session_id)
        task = self._live.get(session_id)
        if task is None:
            return session
        closed = await task.close("closed", "it was asked to")
        self._live.pop(session_id, None)
        return closed

    def _is_over(self, task: LiveTask, why: str) -> None:
        end = asyncio.get_running_loop().create_task(self._end(task, why))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    async def _end(self, task: LiveTask, why: str) -> SessionRecord:
        session = await task.close("terminated", why)
        self._live.pop(session.session_id, None)
        return session

    # --- how things stand -------------------------------------------------------------------------------------------

    async def ready(self, session: SessionRecord, seconds: float) -> SessionRecord:
        """When its place is ready or could not be made, or as it stands when the time is up."""
        task = self._live.get(session.session_id)
        return self.ledger.sessions[session.session_id] if task is None else await task.ready(seconds)

    async def interaction(self, session_id: str, interaction_id: str, wait: float | None = None) -> Interaction:
        """Once it has ended or the time is up; the first time that is a moment, where none was named.

        InteractionNotFound when there is none."""
        task = self._live.get(session_id)
        if task is not None:
            return await task.interaction(interaction_id, _held(task, interaction_id, wait))
        found = await self.ledger.interaction(session_id, interaction_id)
        if found is None:
            raise InteractionNotFound(f"the session has no interaction {interaction_id!r}")
        return found

    async def job(self, session_id: str, job_id: str, wait: float | None = None) -> Job:
        """The same of a verification."""
        task = self._live.get(session_id)
        if task is not None:
            return await task.job(job_id, _held(task, job_id, wait))
        found = await self.ledger.job(session_id, job_id)
        if found is None:
            raise JobNotFound(f"the session has no verification {job_id!r}")
        return found

    async def output(self, session_id: str, job_id: str, stream: str, attempt: int | None) -> bytes:
        """All that a verification wrote in one of its runs; JobNotFound where there is nothing."""
        result = (await self.job(session_id, job_id, 0.0)).result
        number = attempt or (result.attempts if result is not None else 1) or 1
        kept = await self.ledger.output(session_id, job_id, f"{stream}-{number}.txt")
        if kept is None and result is not None and number == (result.attempts or 1) and stream != "report":
            kept = (result.stdout if stream == "stdout" else result.stderr).encode("utf-8", "backslashreplace")
        if kept is None:
            raise JobNotFound(f"no {stream} of run {number} of the verification {job_id!r} was kept")
        return kept


def _refuse_ended(task: LiveTask) -> None:
    """A session that was ended while its place was made must not get one: it would never be closed."""
    if task.ending is not None:
        raise SessionNotReady("the server is being stopped")


def _held(task: LiveTask, what: str, wait: float | None) -> float:
    if wait is not None:
        return wait
    return HELD if task.first_time(what) else 0.0
