"""SessionManager: creates the sessions of a server, finds them for their users, and ends them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta

from carrel.errors import (
    CarrelError,
    ConfigurationError,
    ExecutorClosed,
    ForkRefused,
    JobNotFound,
    ServerBusy,
    SessionExists,
    SessionNotFound,
    SessionNotReady,
    StorageError,
    TooManySessions,
)
from carrel.execution.config import SubprocessConfig
from carrel.execution.executor import Executor, OnOutput
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.library.tools.approval import ApprovalRequest, Approver, Decision
from carrel.server.approvals import ApprovalQueue
from carrel.server.executor_pool import ExecutorPool
from carrel.server.hosted_session import (
    HostedSession,
    HostedStorage,
    OpenWorkspace,
    OperationT,
    interrupted,
    read_diff,
    require_operation,
)
from carrel.server.records import AnswerStore, RecordStore, now, session_id_from
from carrel.server.settings import ServerSettings
from carrel.session import Checkpoint, Session, StorageBackend
from carrel.storage.base import Lock
from carrel.tasks.dataset import Datasets
from carrel.tasks.environment import prepare_sample
from carrel.tasks.sample import Sample
from carrel.wire.answers import (
    ApprovalRecord,
    CheckpointRecord,
    Interaction,
    RewoundSession,
    SessionRecord,
    TracePage,
    WorkspaceDiff,
)
from carrel.wire.requests import AnswerApproval, CreateSession, ForkSession, RunCommand
from carrel.wire.verification import ErrorInfo, Job

logger = logging.getLogger(__name__)

HOLD_SECONDS = 1.0
"""How long a GET of something unfinished is held: clients of this API repeat it only after 3 seconds."""
_LOCK = "server/lock"
_SWEEP_SECONDS = 3600.0
"""How often expired records are deleted."""


class SessionManager:
    """The sessions of one server. Every method that takes a user gives access to that user's sessions only."""

    def __init__(self, storage: StorageBackend, datasets: Datasets, settings: ServerSettings | None = None) -> None:
        self.storage = storage
        self.datasets = datasets
        self.settings = settings or ServerSettings()
        self.records = RecordStore(storage.store, self.settings.name)
        self.answers = AnswerStore(storage.store)
        self.approvals = ApprovalQueue(storage.store)
        self._hosted: dict[str, HostedSession] = {}
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        """Each waits until its session is over, and then ends it."""
        self._pool = ExecutorPool(self.settings.prewarmed)
        self._verifications = asyncio.Semaphore(self.settings.verifications)
        self._sweeper: asyncio.Task[None] | None = None
        self._lock: Lock | None = None
        self._closed = False

    # --- the life of the server -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the store, and end the sessions that an earlier process of this server left live.

        `ServerBusy` if another server uses the store."""
        store = self.storage.store
        self._lock = await store.lock(_LOCK, wait=False)
        if self._lock is None:
            owner = await store.lock_owner(_LOCK)
            raise ServerBusy(f"another server ({owner}) uses this store; stop it, or give this one another --store")
        await self.records.import_old_log()
        for record in await self.records.sessions_left_live():
            try:
                await self._settle(record)
            except StorageError as problem:
                logger.warning("session %s could not be ended in its records: %s", record.session_id, problem)
        self._sweeper = asyncio.create_task(self._sweep_regularly())

    async def _settle(self, record: SessionRecord) -> None:
        """End a session whose process is gone, with its operations."""
        for operation in await self.records.operations(record.session_id):
            if (ended := interrupted(operation)) is not None:
                await self.records.save_operation(ended)
        ended_at = now()
        changes = {
            # Clients that wait for a session to be ready stop waiting only for an error.
            "status": "error" if record.status == "creating" else "terminated",
            "error": ErrorInfo(
                code="interrupted", message="the server was stopped, and the session's processes with it"
            ),
            "closed_at": ended_at,
            "duration_seconds": (ended_at - record.created_at).total_seconds() if record.created_at else 0.0,
            "lifecycle": "ended",
        }
        await self.records.save_session(record.model_copy(update=changes))

    async def lost(self) -> None:
        """Wait until the store may be used by another server, which then ends the sessions of this one."""
        assert self._lock is not None
        await self._lock.lost.wait()

    async def shutdown(self) -> None:
        """End every session, with what runs in them. Calling it twice has no effect."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        reason = "the server was stopped"
        await asyncio.gather(*(self._end(hosted, reason) for hosted in list(self._hosted.values())))
        if self._supervisors:
            await asyncio.wait(list(self._supervisors.values()))
        await self._pool.close()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            await lock.release()

    # --- retention --------------------------------------------------------------------------------------------------

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self.sweep()
            except CarrelError as problem:
                logger.warning("old records could not be deleted: %s", problem)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Delete what is kept no longer: answers, and the records of sessions that ended long ago."""
        await self.records.save_unsaved()
        await self.answers.sweep()
        if self.settings.retention is None:
            return
        conversations = self.storage.get_session_store()
        async for record in self.records.sweep(now() - self.settings.retention):
            if record.session_id not in self._hosted:
                await conversations.delete_session(record.session_id)
                await self.approvals.delete(record.user_id, record.session_id)
                await self.records.delete_session(record)

    # --- creating sessions ------------------------------------------------------------------------------------------

    async def create(self, user: str, request: CreateSession, request_id: str | None = None) -> SessionRecord:
        """Begin to create a session; `wait_ready` waits for it. A request that is repeated gets the first session.

        DatasetNotFound, SampleNotFound, TooManySessions or ConfigurationError."""
        id_ = request.session_id or self._new_id(request_id)
        if request_id is not None and (earlier := await self._find(user, id_)) is not None:
            return earlier
        sample = None
        if request.dataset:
            dataset = await asyncio.to_thread(self.datasets.get, request.dataset)
            sample = dataset.sample(request.sample_id, request.version)
        elif request.network and not self.settings.network:
            raise ConfigurationError(
                "network: this server gives sessions no network; it would have to be started with --allow-network"
            )
        hosted = self._new(user, id_, sample, request.ttl_minutes)
        # The workspace is opened while the session is written; the supervisor begins when both are under way.
        hosted.open(lambda: self._open_workspace(user, id_, sample, request))
        try:
            await hosted.add()
        except BaseException:
            self._hosted.pop(id_, None)
            raise
        self._supervise(hosted)
        return hosted.record

    async def _find(self, user: str, session_id: str) -> SessionRecord | None:
        try:
            return await self.get(user, session_id)
        except SessionNotFound:
            return None

    def _new_id(self, request_id: str | None) -> str:
        return session_id_from(request_id) if request_id is not None else secrets.token_hex(16)

    def _new(
        self, user: str, session_id: str, sample: Sample | None, ttl_minutes: int, parent: str | None = None
    ) -> HostedSession:
        if self._closed:
            raise SessionNotReady("the server is being stopped")
        if session_id in self._hosted:
            raise SessionExists(f"there is a session {session_id!r} already")
        if self.live_count >= self.settings.max_sessions:
            raise TooManySessions(f"this server has {self.live_count} live sessions, which is its maximum")
        requested_at = now()
        record = SessionRecord(
            session_id=session_id,
            dataset=sample.dataset if sample is not None else "",
            sample_id=sample.sample_id if sample is not None else "",
            status="creating",
            requested_at=requested_at,
            expires_at=requested_at + timedelta(minutes=ttl_minutes),
            user_id=user,
            ttl_minutes=ttl_minutes,
            parent_session_id=parent,
        )
        hosted = HostedSession(record, self.records, verifications=self._verifications, hide_paths=self.hide_paths)
        self._hosted[session_id] = hosted
        return hosted

    async def _open_workspace(
        self, user: str, session_id: str, sample: Sample | None, request: CreateSession
    ) -> OpenWorkspace:
        executor: Executor
        approve: Approver | None = None
        if sample is None:
            network = bool(request.network)
            config = SubprocessConfig(
                default_timeout=None,
                sandbox=self.settings.sandbox,
                network=network,
                allow_runtime_deps=network,
                tools_path=self.settings.tools,
            )
            prepared, executor, approve = None, SubprocessExecutor(config), self._approver(user)
        else:
            prepared = await prepare_sample(sample, self.settings.cache_dir, sandbox=self.settings.sandbox)
            executor = await self._pool.take(prepared)
        session = Session(HostedStorage(self.storage), executor, session_id=session_id, approve=approve)
        try:
            await session.start()
            for path, text in request.files.items():
                await executor.write_file(path, text)
        except BaseException:
            await session.close()
            raise
        return OpenWorkspace(executor, session, prepared)

    def _approver(self, user: str) -> Approver:
        async def approve(request: ApprovalRequest) -> Decision:
            async def note(record: ApprovalRecord) -> None:
                await self.records.append_event(record.session_id, "approval", record)

            return await self.approvals.ask(user, request, note)

        return approve

    async def fork(
        self, user: str, session_id: str, request: ForkSession, request_id: str | None = None
    ) -> SessionRecord:
        """Create a session that starts as this one is now; ForkRefused changes nothing."""
        await self.get(user, session_id)
        id_ = self._new_id(request_id)
        if request_id is not None and (earlier := await self._find(user, id_)) is not None:
            return earlier
        origin = await self.hosted(user, session_id)
        workspace = origin.workspace()
        sample = workspace.session.sample
        fork = self._new(user, id_, sample, request.ttl_minutes or origin.record.ttl_minutes, session_id)
        session: Session | None = None
        try:
            session = await workspace.session.fork(storage=HostedStorage(self.storage), session_id=id_)
            _refuse_ending(fork)
            await fork.add()
            _refuse_ending(fork)
        except BaseException as problem:
            self._hosted.pop(id_, None)
            await fork.abandon()
            if session is not None:
                await session.close()
                await self.storage.get_session_store().delete_session(id_)
                await self.records.delete_session(fork.record)
            if isinstance(problem, ExecutorClosed):
                raise ForkRefused(f"the session could not be forked: {problem}") from problem
            raise
        open_workspace = OpenWorkspace(session.executor, session, workspace.prepared)

        async def opened() -> OpenWorkspace:
            return open_workspace

        fork.open(opened)
        self._supervise(fork)
        return fork.record

    async def checkpoints(self, user: str, session_id: str) -> list[CheckpointRecord]:
        """Return the checkpoints of a live session, oldest first."""
        points = (await self.hosted(user, session_id)).workspace().session.checkpoints()
        return list(map(checkpoint_record, points))

    async def checkpoint(self, user: str, session_id: str, label: str) -> CheckpointRecord:
        """Keep the conversation, variables and files of a session as they are now."""
        hosted = await self.hosted(user, session_id)
        point = checkpoint_record(await hosted.workspace().session.checkpoint(label))
        await hosted.note("checkpoint", {"id": point.id, "label": point.label, "messages": point.messages})
        return point

    async def rewind(self, user: str, session_id: str, to: str | int) -> RewoundSession:
        """Return a session to a checkpoint in conversation, variables and files; running commands end."""
        hosted = await self.hosted(user, session_id)
        point = checkpoint_record(await hosted.workspace().session.rewind(to))
        await hosted.note("rewind", {"id": point.id, "label": point.label, "messages": point.messages})
        return RewoundSession(**hosted.record.model_dump(), checkpoint=point)

    # --- finding sessions and what is in them -----------------------------------------------------------------------

    async def get(self, user: str, session_id: str) -> SessionRecord:
        """Return the record of a session; SessionNotFound also for another user's."""
        hosted = self._hosted.get(session_id)
        record = hosted.record if hosted is not None else await self.records.get_session(session_id)
        if record is None or record.user_id != user:
            raise SessionNotFound(f"there is no session {session_id!r}")
        return record

    async def hosted(self, user: str, session_id: str) -> HostedSession:
        """Return a live session; SessionNotReady if it has ended or is being closed."""
        record = await self.get(user, session_id)
        hosted = self._hosted.get(session_id)
        if hosted is None or hosted.ending is not None:
            raise SessionNotReady(f"the session is {record.status if hosted is None else hosted.ending}")
        return hosted

    async def wait_ready(self, user: str, session_id: str, seconds: float | None = None) -> SessionRecord:
        """Return the record when the session is ready or has failed, or as it is when the time is up."""
        record = await self.get(user, session_id)
        hosted = self._hosted.get(session_id)
        return record if hosted is None else await hosted.wait_ready(HOLD_SECONDS if seconds is None else seconds)

    @property
    def live_count(self) -> int:
        return sum(hosted.record.is_live for hosted in self._hosted.values())

    def hide_paths(self, text: str) -> str:
        """Remove the folders of the server from a message for its users."""
        for folder in (self.datasets.folder, self.settings.cache_dir):
            text = text.replace(f"{folder}/", "")
        return text

    async def diff(self, user: str, session_id: str) -> WorkspaceDiff:
        """Return the changes of a session's workspace; of one that has ended, as they were then."""
        record = await self.get(user, session_id)
        if session_id not in self._hosted:
            kept = await self.records.get_diff(session_id)
            if kept is None:
                raise SessionNotReady(f"the session is {record.status}, and its changes were not kept")
            return kept
        return await read_diff((await self.hosted(user, session_id)).executor())

    async def trace(self, user: str, session_id: str, after: int, limit: int) -> TracePage:
        """Return the steps of a session after this line of its trace."""
        await self.get(user, session_id)
        if (hosted := self._hosted.get(session_id)) is not None:
            await hosted.flush_trace()
        return await self.records.trace(session_id, after, limit)

    # --- commands and verifications ---------------------------------------------------------------------------------

    async def start_command(
        self, user: str, session_id: str, request: RunCommand, request_id: str | None, on_output: OnOutput | None = None
    ) -> Interaction:
        """Begin a command. A request that is repeated gets the first command."""
        return await self._start(
            user,
            session_id,
            Interaction,
            request_id,
            lambda hosted, id_: hosted.start_command(request, id_, on_output),
        )

    async def start_verification(self, user: str, session_id: str, request_id: str | None) -> Job:
        """Begin to verify a session. A request that is repeated gets the first verification."""
        return await self._start(user, session_id, Job, request_id, lambda hosted, id_: hosted.start_verification(id_))

    async def _start(
        self,
        user: str,
        session_id: str,
        kind: type[OperationT],
        request_id: str | None,
        start: Callable[[HostedSession, str | None], Awaitable[OperationT]],
    ) -> OperationT:
        await self.get(user, session_id)
        operation_id = None
        if request_id is not None:
            operation_id = f"{'int' if kind is Interaction else 'job'}_{request_id[:24]}"
            earlier = await self.records.get_operation(session_id, operation_id)
            if isinstance(earlier, kind):
                return earlier
        return await start(await self.hosted(user, session_id), operation_id)

    async def wait(
        self, user: str, session_id: str, kind: type[OperationT], operation_id: str, seconds: float | None = None
    ) -> OperationT:
        """Return an operation when it has ended or the time is up; InteractionNotFound or JobNotFound."""
        await self.get(user, session_id)
        hosted = self._hosted.get(session_id)
        if hosted is not None:
            return await hosted.wait(kind, operation_id, HOLD_SECONDS if seconds is None else seconds)
        return require_operation(kind, operation_id, await self.records.get_operation(session_id, operation_id))

    async def cancel(self, user: str, session_id: str, kind: type[OperationT], operation_id: str) -> OperationT:
        """Stop an operation and return it; one that has ended stays as it is."""
        operation = await self.wait(user, session_id, kind, operation_id, 0)
        hosted = self._hosted.get(session_id)
        if hosted is None:
            return operation
        await hosted.cancel(operation_id)
        return await self.wait(user, session_id, kind, operation_id, 0)

    async def output(self, user: str, session_id: str, job_id: str, stream: str, attempt: int | None) -> bytes:
        """Return the complete output of a verification in one of its runs; JobNotFound if there is none."""
        result = (await self.wait(user, session_id, Job, job_id, 0)).result
        number = attempt or (result.attempts if result is not None else 1) or 1
        kept = await self.records.get_output(session_id, job_id, f"{stream}-{number}.txt")
        if kept is None and result is not None and number == (result.attempts or 1) and stream != "report":
            kept = (result.stdout if stream == "stdout" else result.stderr).encode("utf-8", "backslashreplace")
        if kept is None:
            raise JobNotFound(f"no {stream} of run {number} of the verification {job_id!r} was kept")
        return kept

    async def answer_approval(self, user: str, approval_id: str, answer: AnswerApproval) -> ApprovalRecord:
        """Answer a tool call of one of the user's sessions; ApprovalAnswered if it has an answer already."""
        record = await self.approvals.answer(user, approval_id, user, answer)
        await self.records.append_event(record.session_id, "approval", record)
        return record

    # --- ending sessions --------------------------------------------------------------------------------------------

    async def close(self, user: str, session_id: str) -> SessionRecord:
        """End a session; one that has ended stays as it is."""
        record = await self.get(user, session_id)
        hosted = self._hosted.get(session_id)
        return record if hosted is None else await self._end(hosted, "its user closed it", closed=True)

    def _supervise(self, hosted: HostedSession) -> None:
        async def end_when_over() -> None:
            reason = await hosted.wait_over()
            await self._end(hosted, reason)

        task = asyncio.create_task(end_when_over())
        self._supervisors[hosted.id] = task
        task.add_done_callback(lambda _: self._supervisors.pop(hosted.id, None))

    async def _end(self, hosted: HostedSession, reason: str, *, closed: bool = False) -> SessionRecord:
        record = await hosted.close("closed" if closed else "terminated", reason)
        self._hosted.pop(record.session_id, None)
        return record


def checkpoint_record(point: Checkpoint) -> CheckpointRecord:
    """Return a checkpoint as an answer."""
    return CheckpointRecord(id=point.id, label=point.label, messages=point.message_count, made_at=point.created_at)


def _refuse_ending(hosted: HostedSession) -> None:
    """A session that was ended while it was created must not get a workspace: it would never be closed."""
    if hosted.ending is not None:
        raise SessionNotReady("the server is being stopped")
