"""HostedSession: one live session of a server, with the commands and verifications that run in it."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeVar

from carrel.errors import (
    CarrelError,
    ExecutorClosed,
    InteractionNotFound,
    JobNotFound,
    SessionNotReady,
    SetupFailed,
    StorageError,
    WorkspaceLost,
)
from carrel.execution import temp_dirs
from carrel.execution.executor import CommandResult, ExecutionResult, Executor, OnOutput
from carrel.server.records import EventKind, Operation, RecordStore, now
from carrel.server.settling import not_run
from carrel.session import Checkpoint, MemoryStorage, Session, StorageBackend
from carrel.tasks.environment import PreparedSample
from carrel.tasks.verification.verifier import SHOWN_OUTPUT
from carrel.text import escape_surrogates
from carrel.wire.answers import (
    CheckpointRecord,
    FileChangeRecord,
    Interaction,
    SessionRecord,
    SessionStatus,
    WorkspaceDiff,
)
from carrel.wire.requests import RunCommand
from carrel.wire.verification import ErrorInfo, Job, VerificationResult

logger = logging.getLogger(__name__)

OperationT = TypeVar("OperationT", Interaction, Job)
_RUN_IN_BACKGROUND = '(/bin/sh -c "$1" >"$2" 2>&1 </dev/null; echo $? >"$2.exit") & echo $!'
_MAX_SETUP_OUTPUT = 20_000
"""Characters of a failed set-up's output in a session's error."""
_MAX_KEPT_DIFF = 16 * 1024 * 1024
"""Characters of the diff that is kept of a session that has ended."""
_KEEP_DIFF_SECONDS = 10.0
"""How long the end of a session waits for its diff."""


class HostedStorage(MemoryStorage):
    """The storage of a hosted session: conversation, trace and state in the server's store, the library in memory."""

    def __init__(self, kept: StorageBackend, *, durable: bool = False) -> None:
        super().__init__()
        self._kept = kept
        self.state_base = getattr(kept, "state_base", None) if durable else None
        self.trace_store = kept.store

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> Any:
        return self._kept.get_session_store(durability)


@dataclass(frozen=True)
class OpenWorkspace:
    """What a ready session consists of; closing its `session` closes the executor."""

    executor: Executor
    session: Session
    prepared: PreparedSample | None = None
    """The sample of the session, if it has one."""


class HostedSession:
    """A session from its creation to its end. Its records are written as they change.

    It ends when the server calls `close`; `wait_over` says when it should."""

    def __init__(
        self,
        record: SessionRecord,
        records: RecordStore,
        *,
        verifications: asyncio.Semaphore,
        hide_paths: Callable[[str], str] = str,
        resumes: bool = False,
    ) -> None:
        """`verifications` limits how many run at once; `hide_paths` removes the server's folders from a message;
        `resumes` is set for a session that was paused."""
        self.record = record
        self._resumes = resumes
        self._records = records
        self._verifications = verifications
        self._hide_paths = hide_paths
        self._workspace: OpenWorkspace | None = None
        self._opening: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[Operation]] = {}
        """The operations that have not ended, by id."""
        self._changed = asyncio.Event()
        """Set when the session may be over for a new reason."""
        self._added = asyncio.Event()
        """Set when the first record of the session was written; later ones wait for it."""
        self._abandoned = False
        self._ending: tuple[SessionStatus, str] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.record.session_id

    # --- from creation to end ---------------------------------------------------------------------------------------

    def open(self, opening: Callable[[], Awaitable[OpenWorkspace]]) -> None:
        """Begin to open the workspace; `wait_ready` waits for it."""
        self._opening = asyncio.create_task(self._open(opening))

    async def _open(self, opening: Callable[[], Awaitable[OpenWorkspace]]) -> None:
        try:
            self._workspace = await opening()
        except (CarrelError, OSError, ValueError) as problem:
            message = str(problem) or type(problem).__name__
            if isinstance(problem, SetupFailed) and problem.output:
                message += f"\n{problem.output[-_MAX_SETUP_OUTPUT:]}"
            await self._fail(_error_code(problem), message)
            return
        finally:
            if self._workspace is None and self.record.status == "creating" and self._ending is None:
                await self._fail("failed", "carrel failed while it opened the session")
            self._changed.set()
        receipt = self._workspace.prepared.files.receipt if self._workspace.prepared is not None else None
        created_at = now()
        expires_at = created_at + timedelta(minutes=self.record.ttl_minutes)
        await self._update(status="ready", created_at=created_at, expires_at=expires_at, receipt=receipt)

    async def _fail(self, code: str, message: str) -> None:
        error = ErrorInfo(code=code, message=escape_surrogates(self._hide_paths(message)))
        lifecycle = "paused" if self._resumes else "ended"
        await self._update(status="error", error=error, closed_at=now(), lifecycle=lifecycle)

    async def _update(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        self._changed.set()
        await self._added.wait()
        if not self._abandoned:
            await self._records.save_session(self.record)

    async def add(self) -> None:
        """Write the first record of the session. If that fails, the session ends, and nothing is written about it."""
        try:
            await (self._records.reopen_session if self._resumes else self._records.add_session)(self.record)
        except BaseException:
            await self.abandon()
            raise
        self._added.set()

    async def abandon(self) -> None:
        """End a session that could not be created; nothing more is written about it."""
        self._abandoned = True
        self._ending = ("terminated", "it could not be created")
        self._added.set()
        await self._cancel_opening()
        await self._close_workspace()

    async def wait_ready(self, timeout: float | None) -> SessionRecord:
        """Return the record when the session is ready or has failed, or as it is when the time is up."""
        if self._opening is not None:
            await asyncio.wait({self._opening}, timeout=timeout)
        return self.record

    async def wait_over(self) -> str:
        """Return why the session is over, as soon as it is: it expired, failed to open, or its processes died.

        A verification that has begun is not cut off by the end of the session's time."""
        while True:
            self._changed.clear()
            lost = self._lost()
            if lost or self.record.status not in ("creating", "ready"):
                return lost
            if self.is_expired and not self._runs_verification():
                return "its time was over"
            seconds: float | None = None
            if self.record.status == "ready" and not self.is_expired:
                seconds = (self.record.expires_at - now()).total_seconds()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    def _lost(self) -> str:
        """Return what was lost if the processes of the session died: a new workspace would be another session."""
        return getattr(self._workspace.executor, "lost", "") if self._workspace is not None else ""

    def _runs_verification(self) -> bool:
        return any(operation_id.startswith("job") for operation_id in self._running)

    @property
    def is_expired(self) -> bool:
        return self.record.status == "ready" and self.record.expires_at <= now()

    @property
    def ending(self) -> SessionStatus | None:
        """The status that the session will have, once its end has begun."""
        return self._ending[0] if self._ending is not None else None

    async def extend(self, expires_at: datetime, ttl_minutes: int) -> SessionRecord:
        """Set a new end; SessionNotReady if the session is over or being closed."""
        self.workspace()
        await self._update(expires_at=expires_at, ttl_minutes=ttl_minutes)
        return self.record

    @staticmethod
    def not_ready(status: SessionStatus, error: ErrorInfo | None) -> SessionNotReady:
        """Return the error for a session that is being created or has ended, with the reason."""
        return SessionNotReady(f"the session is {status}{f': {error.message}' if error else ''}")

    def executor(self) -> Executor:
        """Return the executor; SessionNotReady says why there is none."""
        if self.ending is not None or self._workspace is None or self.record.status != "ready":
            raise self.not_ready(self.ending or self.record.status, self.record.error)
        return self._workspace.executor

    def workspace(self) -> OpenWorkspace:
        """Return the workspace for something new; SessionNotReady also if the session's time is over."""
        self.executor()
        if self.is_expired:
            raise SessionNotReady("the session's time is over; only a verification that had begun continues")
        assert self._workspace is not None
        return self._workspace

    async def close(self, status: SessionStatus, reason: str) -> SessionRecord:
        """End the session and everything in it. Calling it twice has no effect."""
        if self._closing is None:
            self._ending = (status, reason)
            self._closing = asyncio.create_task(self._close(status, reason))
        await asyncio.shield(self._closing)
        return self.record

    async def _close(self, status: SessionStatus, reason: str) -> None:
        await self._cancel_opening()
        await asyncio.gather(*(self.cancel(operation_id) for operation_id in list(self._running)))
        if self._workspace is not None and not self._lost():
            await self._keep_diff(self._workspace.executor)
        await self._close_workspace()
        if self.record.status == "error":
            return
        is_paused = self.record.durable and (self._workspace is not None or self._resumes)
        if is_paused:
            status = "closed"
        elif self.record.status == "creating" and status == "terminated":
            # Clients that wait for the session to be ready stop waiting only for an error.
            status = "error"
        ended_at, started_at = now(), self.record.created_at
        await self._update(
            status=status,
            error=None if status == "closed" else ErrorInfo(code="terminated", message=reason),
            closed_at=ended_at,
            duration_seconds=(ended_at - started_at).total_seconds() if started_at is not None else 0.0,
            lifecycle="paused" if is_paused else "ended",
        )

    async def _cancel_opening(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening})

    async def _keep_diff(self, executor: Executor) -> None:
        try:
            async with asyncio.timeout(_KEEP_DIFF_SECONDS):
                diff = await read_diff(executor)
            if len(diff.diff) > _MAX_KEPT_DIFF:
                diff = diff.model_copy(update={"diff": diff.diff[:_MAX_KEPT_DIFF], "truncated": True})
            await self._records.put_diff(self.id, diff)
        except (CarrelError, OSError, ValueError) as problem:
            logger.warning("the diff of session %s was not kept: %s", self.id, str(problem) or "it took too long")

    async def _close_workspace(self) -> None:
        if self._workspace is None:
            return
        try:
            session = self._workspace.session
            await (session.pause() if self.record.durable and not self._abandoned else session.close())
        except (CarrelError, OSError) as problem:
            logger.warning("the workspace of session %s was not closed completely: %s", self.id, problem)

    # --- operations -------------------------------------------------------------------------------------------------

    async def start_command(
        self, request: RunCommand, operation_id: str | None = None, on_output: OnOutput | None = None
    ) -> Interaction:
        """Queue a command; `wait` waits for its end."""
        session = self.workspace().session
        interaction = Interaction(
            interaction_id=operation_id or f"int_{secrets.token_hex(12)}",
            session_id=self.id,
            created_at=now(),
            command=request.command,
        )
        await self._records.add_operation(interaction)
        self._start(interaction.interaction_id, self._run_command(session, interaction, request, on_output))
        return interaction

    async def start_verification(self, operation_id: str | None = None) -> Job:
        """Begin to verify the workspace as it is now; `wait` waits for the verdict."""
        workspace = self.workspace()
        if workspace.prepared is None:
            raise SessionNotReady("this session was not created from a sample, so it cannot be verified")
        started_at = now()
        job = Job(
            job_id=operation_id or f"job_{secrets.token_hex(12)}",
            session_id=self.id,
            sample_id=self.record.sample_id,
            status="pending",
            created_at=started_at,
            started_at=started_at,
        )
        await self._records.add_operation(job)
        self._start(job.job_id, self._run_verification(workspace.session, job))
        return job

    def _start(self, operation_id: str, work: Awaitable[Operation]) -> None:
        async def run() -> Operation:
            try:
                return await work
            finally:
                del self._running[operation_id]
                self._changed.set()

        self._running[operation_id] = asyncio.create_task(run())

    async def wait(self, kind: type[OperationT], operation_id: str, timeout: float | None) -> OperationT:
        """Return an operation when it has ended or the time is up; InteractionNotFound or JobNotFound."""
        task = self._running.get(operation_id)
        if task is not None:
            await asyncio.wait({task}, timeout=timeout)
            if task.done() and not task.cancelled():
                return require_operation(kind, operation_id, task.result())
        return require_operation(kind, operation_id, await self._records.get_operation(self.id, operation_id))

    async def cancel(self, operation_id: str) -> None:
        """Stop an operation and wait for its end; one that has ended stays as it is."""
        task = self._running.get(operation_id)
        if task is not None:
            # A task that is cancelled before its first step would end without a record.
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})

    async def _run_command(
        self, session: Session, interaction: Interaction, request: RunCommand, on_output: OnOutput | None
    ) -> Interaction:
        output = f"/tmp/background-{interaction.interaction_id}.log"
        words = [shell(), "-c", request.command]
        if request.background:
            words = [shell(), "-c", _RUN_IN_BACKGROUND.replace("/bin/sh", shell()), shell(), request.command, output]
        changes = not_run("carrel failed while the command ran")
        try:
            result = await session.execute_command(
                words,
                timeout=request.command_timeout,
                cwd=request.cwd,
                env=request.env,
                stdin=request.stdin,
                on_output=on_output,
                name=request.command,
            )
            changes = _command_ended(result, request)
            if request.background and result.success:
                message = f"it writes to {output}"
                changes |= {"pid": int(result.stdout), "output": output, "stdout": "", "message": message}
        except (CarrelError, OSError, ValueError) as problem:
            changes = not_run(self._whynot_run(problem))
        except asyncio.CancelledError:
            changes = not_run(self._why_cancelled())
        finally:
            # Whatever happens, an operation gets an end.
            interaction = interaction.model_copy(update=changes)
            await self._records.save_operation(interaction)
        return interaction

    def _why_cancelled(self) -> str:
        if self._ending is not None:
            return f"the session was {self._ending[0]} while the command ran: {self._ending[1]}"
        return "the command was stopped"

    def _whynot_run(self, problem: Exception) -> str:
        if isinstance(problem, ExecutorClosed) and self._ending is not None:
            return self._why_cancelled()
        if isinstance(problem, WorkspaceLost):
            return f"the session's processes died while the command ran: {problem}"
        return f"the command could not be run to its end: {problem}"

    async def _run_verification(self, session: Session, job: Job) -> Job:
        error = ErrorInfo(code="failed", message="carrel failed during the verification")
        finished = job.model_copy(update={"status": "error", "error": error, "completed_at": now()})
        try:
            async with self._verifications:
                job = job.model_copy(update={"status": "running", "started_at": now()})
                await self._records.save_operation(job)
                finished = _job_ended(job, await self._verify(session, job.job_id))
        except asyncio.CancelledError:
            finished = job.model_copy(update={"status": "cancelled", "completed_at": now()})
        finally:
            await self._records.save_operation(finished)
        return finished

    async def _verify(self, session: Session, job_id: str) -> VerificationResult:
        folder = temp_dirs.new_folder("verification")
        try:
            result = await session.verify(keep=folder)
            result.evidence = [self._hide_paths(line) for line in result.evidence]
            for file in sorted(folder.iterdir()):
                # The result contains the output of the last run, up to a limit.
                text = await asyncio.to_thread(file.read_bytes)
                if result.attempts > 1 or len(text) > SHOWN_OUTPUT:
                    await self._records.put_output(self.id, job_id, file.name, text)
            return result
        finally:
            await asyncio.to_thread(temp_dirs.remove, folder)

    # --- events -----------------------------------------------------------------------------------------------------

    async def note(self, kind: EventKind, event: dict[str, Any]) -> None:
        """Write an event of what was done; an error would make the caller do it again."""
        try:
            await self._records.append_event(self.id, kind, {"at": now().isoformat(), **event})
        except StorageError as problem:
            logger.warning("session %s: its log lacks that a %s was done: %s", self.id, kind, problem)

    async def note_run(self, code: str, result: ExecutionResult) -> None:
        """Write the event of a run of code."""
        first_line = code.strip().partition("\n")[0][:200]
        self._changed.set()
        await self.note("run", {"code": first_line, "error_type": result.error_type, "duration": result.duration})

    async def flush_trace(self) -> None:
        """Write the steps that have ended to the trace."""
        if self._workspace is not None:
            await self._workspace.session.flush_trace()


async def read_diff(executor: Executor) -> WorkspaceDiff:
    """Return everything that a workspace has changed since its start."""
    changes = await executor.changed_files()
    records = [FileChangeRecord(path=each.path, kind=each.kind, size=each.size) for each in changes]
    return WorkspaceDiff(diff=await executor.diff() if changes else "", changes=records)


def require_operation(kind: type[OperationT], operation_id: str, found: Operation | None) -> OperationT:
    """Return the operation; InteractionNotFound or JobNotFound if it is missing or of the other kind."""
    if isinstance(found, kind):
        return found
    if kind is Interaction:
        raise InteractionNotFound(f"the session has no interaction {operation_id!r}")
    raise JobNotFound(f"the session has no verification {operation_id!r}")


@lru_cache(maxsize=1)
def shell() -> str:
    """Return bash if there is one: clients of this API write their commands for it."""
    return "/bin/bash" if shutil.which("/bin/bash") else "/bin/sh"


def _error_code(problem: Exception) -> str:
    """Return `setup_failed` for `SetupFailed`, and `os_error` for `OSError`."""
    name = type(problem).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _command_ended(result: CommandResult, request: RunCommand) -> dict[str, Any]:
    message = "the command ended"
    if result.timed_out:
        message = f"the time limit of {request.command_timeout:g} s was reached"
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "execution_time_seconds": float(result.duration),
        "success": result.success,
        "timed_out": result.timed_out,
        "status": "completed",
        "message": message,
    }


def _job_ended(job: Job, result: VerificationResult) -> Job:
    shown = escape_surrogates(result.shown().model_dump())
    shown |= {"tool": "test_suite" if result.tool == "test_suite" else None, "verifier": result.tool}
    changes: dict[str, Any] = {
        "status": "completed",
        "completed_at": now(),
        "result": VerificationResult(**shown),
    }
    if result.outcome == "infrastructure_failed":
        message = "\n".join(shown["evidence"]) or "the verification could not be run"
        changes |= {"status": "error", "error": ErrorInfo(code="infrastructure_failed", message=message)}
    return job.model_copy(update=changes)


def checkpoint_record(point: Checkpoint) -> CheckpointRecord:
    """Return a checkpoint as an answer."""
    return CheckpointRecord(id=point.id, label=point.label, messages=point.message_count, made_at=point.created_at)
