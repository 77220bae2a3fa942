"""Workspaces: opens the sessions that a server hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from carrel.execution.config import SubprocessConfig
from carrel.execution.executor import Executor
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.library.tools.approval import ApprovalRequest, Approver, Decision
from carrel.server.approvals import ApprovalQueue
from carrel.server.executor_pool import ExecutorPool
from carrel.server.hosted_session import HostedStorage, OpenWorkspace
from carrel.server.records import RecordStore
from carrel.server.settings import ServerSettings
from carrel.session import Session, StorageBackend
from carrel.tasks.environment import prepare_sample, sample_executor
from carrel.tasks.sample import Sample
from carrel.wire.answers import ApprovalRecord
from carrel.wire.requests import CreateSession


class Workspaces:
    """Opens workspaces as the settings of the server say; tool calls in them ask their users."""

    def __init__(
        self,
        storage: StorageBackend,
        settings: ServerSettings,
        pool: ExecutorPool,
        approvals: ApprovalQueue,
        records: RecordStore,
        pause: Callable[[str], Awaitable[Any]],
    ) -> None:
        """`pause` is called with the id of a session that another process asks for."""
        self._storage = storage
        self._settings = settings
        self._pool = pool
        self._approvals = approvals
        self._records = records
        self._pause = pause

    async def open(self, user: str, session_id: str, sample: Sample | None, request: CreateSession) -> OpenWorkspace:
        """Open a session with the workspace of a sample, or with an empty one."""
        executor: Executor
        approve: Approver | None = None
        durable = request.durable
        if sample is None:
            network = bool(request.network)
            config = SubprocessConfig(
                default_timeout=None,
                sandbox=self._settings.sandbox,
                network=network,
                allow_runtime_deps=network,
                tools_path=self._settings.tools,
            )
            prepared, executor, approve = None, SubprocessExecutor(config), self._approver(user)
        else:
            prepared = await prepare_sample(sample, self._settings.cache_dir, sandbox=self._settings.sandbox)
            # The state of a durable session must be known before its executor starts.
            executor = sample_executor(sample, prepared=prepared) if durable else await self._pool.take(prepared)
        session = Session(
            HostedStorage(self._storage, durable=durable),
            executor,
            session_id=session_id,
            persist=durable,
            approve=approve,
            record=self._settings.record,
        )
        session.on_pause_request = lambda: self._pause(session_id)
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
                await self._records.append_event(record.session_id, "approval", record)

            return await self._approvals.ask(user, request, note)

        return approve
