"""SessionManager: creates the sessions of a server, finds them for their users, and ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from contextvars import Context
from datetime import timedelta

from carrel.errors import (
    ConfigurationError,
    ExecutorClosed,
    ForkRefused,
    JobNotFound,
    NodeLost,
    NodeUnreachable,
    SessionElsewhere,
    SessionExists,
    SessionNotFound,
    SessionNotReady,
    TooManySessions,
)
from carrel.execution.executor import FileEntry, OnOutput
from carrel.request_id import current_request
from carrel.server.answers import AnswerStore
from carrel.server.approvals import ApprovalQueue
from carrel.server.executor_pool import ExecutorPool
from carrel.server.hosted_session import (
    HostedSession,
    HostedStorage,
    OpenWorkspace,
    OperationT,
    checkpoint_record,
    read_diff,
    require_operation,
)
from carrel.server.node import NODE_LOST, Node, StoreLock, node_lost_error
from carrel.server.records import RecordStore, now, session_id_from
from carrel.server.retention import Retention
from carrel.server.settings import ServerSettings
from carrel.server.settling import settle_left
from carrel.server.workspaces import Workspaces
from carrel.session import (
    RecordedState,
    Session,
    StorageBackend,
    compare_files,
    find_point,
    read_recorded,
    read_state,
    store_of,
)
from carrel.session.durable import delete_state, read_record
from carrel.tasks.dataset import Datasets
from carrel.tasks.sample import Sample
from carrel.version import __version__
from carrel.wire.answers import (
    ApprovalRecord,
    CheckpointRecord,
    FileChangeRecord,
    Interaction,
    NodeInfo,
    RewoundSession,
    SessionRecord,
    TracePage,
    WorkspaceDiff,
)
from carrel.wire.requests import AnswerApproval, CreateSession, ForkSession, RunCommand
from carrel.wire.verification import ErrorInfo, Job

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 15.0
"""How long closing a paused session waits for the lock of the node that had it, if that was killed."""
HOLD_SECONDS = 1.0
"""How long a GET of something unfinished is held: clients of this API repeat it only after 3 seconds."""


class SessionManager:
    """The sessions of one server. Every method that takes a user gives access to that user's sessions only."""

    def __init__(
        self,
        storage: StorageBackend,
        datasets: Datasets,
        settings: ServerSettings | None = None,
        node: Node | None = None,
    ) -> None:
        """`node` makes it part of a cluster; its lease guards the writes of `storage`."""
        self.node = node
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
        self._workspaces = Workspaces(
            storage, self.settings, self._pool, self.approvals, self.records, self._pause_hosted
        )
        self._verifications = asyncio.Semaphore(self.settings.verifications)
        self._retention = Retention(
            storage, self.records, self.answers, self.approvals, self.settings.retention, self._hosted.keys()
        )
        self._lock = StoreLock(storage.store)
        self._closed, self._started_at = False, now()

    # --- the life of the server -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the store, and end the sessions that an earlier process of this server left live.

        `ServerBusy` if another server uses the store."""
        await (self._lock.take() if self.node is None else self.node.check_store())
        await self.records.import_old_log()
        await settle_left(self.records, self._left_live_error())
        self._retention.start()

    def _left_live_error(self) -> ErrorInfo:
        if self.node is not None:
            return node_lost_error(self.settings.name)
        return ErrorInfo(code="interrupted", message="the server was stopped, and the session's processes with it")

    async def lost(self) -> None:
        """Wait until the store may be used by another server, which then ends the sessions of this one."""
        await (self._lock.lost() if self.node is None else self.node.over())

    async def shutdown(self) -> None:
        """End every session, with what runs in them. Calling it twice has no effect."""
        self._closed = True
        await self._retention.close()
        if self.node is not None:
            await self.node.prepare_end()
        await self.end_all("the server was stopped")
        if self._supervisors:
            await asyncio.wait(list(self._supervisors.values()))
        await self._pool.close()
        await self._lock.release()

    async def end_all(self, reason: str) -> None:
        """End every session; new ones can be created."""
        await asyncio.gather(*(self._end(hosted, reason) for hosted in list(self._hosted.values())))

    async def sweep(self) -> None:
        """Delete what is kept no longer: answers, and the records of sessions that ended long ago."""
        await self._retention.sweep()

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
        hosted = self._new(user, id_, sample, request.ttl_minutes, durable=request.durable)
        return await self._open(hosted, user, sample, request)

    async def _open(
        self, hosted: HostedSession, user: str, sample: Sample | None, request: CreateSession
    ) -> SessionRecord:
        # The workspace is opened while the session is written; the supervisor begins when both are under way.
        hosted.open(lambda: self._workspaces.open(user, hosted.id, sample, request))
        try:
            await hosted.add()
        except BaseException:
            self._hosted.pop(hosted.id, None)
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
        self,
        user: str,
        session_id: str,
        sample: Sample | None,
        ttl_minutes: int,
        parent: str | None = None,
        *,
        durable: bool = False,
    ) -> HostedSession:
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
            node=self.node.name if self.node is not None else None,
            durable=durable,
        )
        return self._host(record)

    def _host(self, record: SessionRecord, *, resumes: bool = False) -> HostedSession:
        if self._closed:
            raise SessionNotReady("the server is being stopped")
        if self.node is not None and self.node.is_draining:
            raise NodeUnreachable(f"node {self.node.name} is being drained and takes no new sessions")
        if record.session_id in self._hosted:
            raise SessionExists(f"there is a session {record.session_id!r} already")
        if self.live_count >= self.settings.max_sessions:
            raise TooManySessions(f"this server has {self.live_count} live sessions, which is its maximum")
        hosted = HostedSession(
            record, self.records, verifications=self._verifications, hide_paths=self.hide_paths, resumes=resumes
        )
        self._hosted[record.session_id] = hosted
        return hosted

    async def pause(self, user: str, session_id: str) -> SessionRecord:
        """Save and close a durable session; one that is paused stays as it is."""
        record = await self.get(user, session_id)
        self._refuse_elsewhere(record)
        hosted = self._hosted.get(session_id)
        if not record.durable:
            raise SessionNotReady("the session is not durable, so it cannot be paused; create one with `durable: true`")
        if hosted is not None:
            record = await self._end(hosted, "its user paused it", closed=True)
        elif record.error is not None and record.error.code == NODE_LOST:
            raise NodeLost(f"session {session_id}: {record.error.message}; it can be resumed as of its last pause")
        if record.lifecycle != "paused":
            raise SessionNotReady(f"the session is {record.status} and has no stored state, so it cannot be paused")
        if self.node is not None:  # What is answered must be known to the others, should this node be lost.
            await self.records.ensure_saved(session_id)
        return record

    async def _pause_hosted(self, session_id: str) -> None:
        """Another process has asked for the session, or taken it over."""
        current_request.set(None)
        hosted = self._hosted.get(session_id)
        if hosted is not None:
            await self._end(hosted, "another process paused it", closed=True)

    async def resume(self, user: str, session_id: str) -> SessionRecord:
        """Begin to open a paused session again; `wait_ready` waits for it. One that is live stays as it is."""
        record = await self.get(user, session_id)
        if session_id in self._hosted:
            return record
        if record.is_live:
            return (await self.hosted(user, session_id)).record  # SessionElsewhere if another node has it.
        if record.lifecycle != "paused":
            raise SessionNotReady(f"the session is {record.status} and has no stored state, so it cannot be resumed")
        sample = None
        if record.dataset:
            dataset = await asyncio.to_thread(self.datasets.get, record.dataset)
            sample = dataset.sample(record.sample_id)
        state = await read_record(self.storage.store, session_id)
        network = None
        if sample is None and state is not None:
            network = bool(state.settings.get("network")) and self.settings.network
        if (live := self._hosted.get(session_id)) is not None:
            return live.record  # It was resumed meanwhile.
        until = now() + timedelta(minutes=record.ttl_minutes)
        changes = {"status": "creating", "lifecycle": "live", "error": None, "closed_at": None, "expires_at": until}
        if self.node is not None:
            changes["node"] = self.node.name
        hosted = self._host(record.model_copy(update=changes), resumes=True)
        request = CreateSession(
            dataset=record.dataset, sample_id=record.sample_id, network=network, durable=True, session_id=None
        )
        return await self._open(hosted, user, sample, request)

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
        self._refuse_elsewhere(record)
        if hosted is None and record.error is not None and record.error.code == NODE_LOST:
            raise NodeLost(f"session {session_id}: {record.error.message}")
        if hosted is None or hosted.ending is not None:
            raise HostedSession.not_ready((hosted and hosted.ending) or record.status, record.error)
        return hosted

    def _refuse_elsewhere(self, record: SessionRecord) -> None:
        if record.is_live and record.node not in (None, self.settings.name) and record.session_id not in self._hosted:
            raise SessionElsewhere(f"session {record.session_id} is on node {record.node}")

    async def wait_ready(self, user: str, session_id: str, seconds: float | None = None) -> SessionRecord:
        """Return the record when the session is ready or has failed, or as it is when the time is up."""
        record = await self.get(user, session_id)
        hosted = self._hosted.get(session_id)
        return record if hosted is None else await hosted.wait_ready(HOLD_SECONDS if seconds is None else seconds)

    def info(self, url: str) -> NodeInfo:
        """Describe this server as a node."""
        is_open = not self._closed and (self.node is None or self.node.state == "ready")
        return NodeInfo(
            name=self.settings.name,
            url=url,
            state=self.node.state if self.node is not None else "ready",
            sessions=self.live_count,
            free_slots=max(0, self.settings.max_sessions - self.live_count) if is_open else 0,
            samples=self._pool.samples(),
            version=__version__,
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
            started_at=self._started_at,
        )

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

    async def state(self, user: str, session_id: str, at: str) -> RecordedState:
        """Return what was recorded of a session up to a point; PointNotFound."""
        await self.get(user, session_id)
        await self.flush_trace(session_id)
        point = await find_point(self.storage, session_id, at)
        return await read_state(store_of(self.storage), session_id, point)

    async def recorded_diff(self, user: str, session_id: str, first: str, last: str) -> WorkspaceDiff:
        """Return how the files differ from one point to another, by what was recorded."""
        states = [await self.state(user, session_id, at) for at in (first, last)]
        found = await compare_files(store_of(self.storage), *states)
        changes = [FileChangeRecord(path=each.path, kind=each.kind, size=each.size) for each in found.changes]
        return WorkspaceDiff(diff=found.diff, changes=changes)

    async def recorded_file(self, user: str, session_id: str, path: str, at: str) -> bytes | list[FileEntry]:
        """Return the content of a file at a point, or the changed files below a folder; FileNotFoundError."""
        state = await self.state(user, session_id, at)
        return await read_recorded(store_of(self.storage), state, path, at)

    async def trace(self, user: str, session_id: str, after: int, limit: int) -> TracePage:
        """Return the steps of a session after this line of its trace."""
        await self.get(user, session_id)
        await self.flush_trace(session_id)
        return await self.records.trace(session_id, after, limit)

    async def flush_trace(self, session_id: str) -> None:
        """Write what a live session has noted so far."""
        if (hosted := self._hosted.get(session_id)) is not None:
            await hosted.flush_trace()

    # --- commands and verifications ---------------------------------------------------------------------------------

    async def start_command(
        self, user: str, session_id: str, request: RunCommand, request_id: str | None, on_output: OnOutput | None = None
    ) -> Interaction:
        """Begin a command. A request that is repeated gets the first command."""
        return await self._start(
            user, session_id, Interaction, request_id, lambda hosted, id_: hosted.start_command(request, id_, on_output)
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
            operation = await hosted.wait(kind, operation_id, HOLD_SECONDS if seconds is None else seconds)
            if self.node is not None:
                # What was answered must be known to the others, should this node be lost.
                await self.records.ensure_written(session_id, operation_id)
            return operation
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
        """End a session; one that has ended stays as it is. A durable one is paused, and ended the second time."""
        record = await self.get(user, session_id)
        self._refuse_elsewhere(record)
        hosted = self._hosted.get(session_id)
        if hosted is not None:
            record = await self._end(hosted, "its user closed it", closed=True)
        elif record.lifecycle == "paused":
            await delete_state(self.storage, session_id, seconds=_LOCK_SECONDS)
            node = self.node.name if self.node is not None else record.node  # the one that has ended it
            record = record.model_copy(update={"lifecycle": "ended", "node": node})
            await self.records.save_session(record)
        if self.node is not None:  # What is answered must be known to the others, should this node be lost.
            await self.records.ensure_saved(session_id)
        return record

    def _supervise(self, hosted: HostedSession) -> None:
        async def end_when_over() -> None:
            reason = await hosted.wait_over()
            await self._end(hosted, reason)

        # Its context is empty: the end of a session is no part of the request that created it.
        task = asyncio.create_task(end_when_over(), context=Context())
        self._supervisors[hosted.id] = task
        task.add_done_callback(lambda _: self._supervisors.pop(hosted.id, None))

    async def _end(self, hosted: HostedSession, reason: str, *, closed: bool = False) -> SessionRecord:
        record = await hosted.close("closed" if closed else "terminated", reason)
        self._hosted.pop(record.session_id, None)
        return record


def _refuse_ending(hosted: HostedSession) -> None:
    """A session that was ended while it was created must not get a workspace: it would never be closed."""
    if hosted.ending is not None:
        raise SessionNotReady("the server is being stopped")
