"""Session: one agent's conversation, interpreter and workspace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack, cast
from uuid import uuid4
from weakref import WeakValueDictionary

from carrel import tasks
from carrel.embedding import EmbedderOption, choose_embedder
from carrel.errors import ConfigurationError, ExecutorClosed, SessionNotFound, ToolCallError
from carrel.execution.config import (
    ContainerConfig,
    InProcessConfig,
    SandboxMode,
    SubprocessConfig,
    check_executor,
)
from carrel.execution.executor import (
    ExecutionResult,
    Executor,
    KeepsState,
    Output,
    Variable,
)
from carrel.execution.results import closed_result, failed_result
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.library.tools.secrets import Secrets
from carrel.session.call_handlers import CLOSED, WOULD_WAIT, CallHandlers, LibraryAccess, library_module
from carrel.session.checkpoints import Checkpoint, Checkpoints, ConversationBranch, fork_refused
from carrel.session.durable import (
    STOP_SECONDS,
    DurableState,
    Resumed,
    SavedState,
    read_record_file,
    resume_note,
    why_not_durable,
)
from carrel.session.library_methods import SessionLibraryMethods
from carrel.session.options import (
    ContainerOptions,
    SandboxOptions,
    SessionOptions,
    check_ttl,
    options_of,
    split_options,
)
from carrel.session.recording import RECORDED, Recorded, Recording
from carrel.session.storage import MemoryStorage, StorageBackend, check_id, check_storage, store_of
from carrel.session.workspace import SessionWorkspace
from carrel.text import html_table
from carrel.tracing import Step, StepRecorder, TraceLog, otel_exporter

if TYPE_CHECKING:
    from carrel.conversation.models.conversation import Conversation
    from carrel.library.tools.approval import Approver
    from carrel.tasks import Receipt, Sample, VerificationResult


class Session(SessionWorkspace, SessionLibraryMethods):
    """A conversation, an interpreter and a workspace for one agent.

    Runs of one session queue in order; different sessions are independent. `run` and `stream` never raise for what
    the code does; the other methods raise errors of `carrel.errors`."""

    _open: ClassVar[WeakValueDictionary[str, Session]] = WeakValueDictionary()
    """The sessions of this process that are not closed, by id."""

    # --- constructors -----------------------------------------------------------------------------------------------

    def __init__(
        self,
        storage: StorageBackend,
        executor: Executor | None = None,
        sync_deps_on_start: bool = False,
        *,
        owns_storage: bool = False,
        expires_after: float | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        approve: Approver | None = None,
        session_id: str | None = None,
        conversation: Conversation | None = None,
        embedder: EmbedderOption = None,
        persist: bool | None = None,
        record: Collection[Recorded] = RECORDED,
    ) -> None:
        """The default executor is the sandboxed SubprocessExecutor.

        The storage stays open when the session closes, unless the session `owns_storage`. The session closes itself
        `expires_after` so many seconds, but never during a verification."""
        check_storage(storage)
        base = getattr(storage, "base", None)
        if executor is None:
            executor = SubprocessExecutor(SubprocessConfig(base=base))
        check_executor(executor, base)
        if session_id:
            check_id(session_id)
        if embedder is not None:
            choose_embedder(embedder)  # Refuse an invalid one now, not at the first search.

        self.storage = storage
        self.executor = executor
        self.conversation = conversation
        """The typed conversation, if the session holds one; see `converse`."""
        self.id = session_id or (conversation.id if conversation is not None else uuid4().hex)
        self._resumed: Resumed | None = None
        self._persist = persist if persist is not None else session_id is not None
        self._durable: DurableState | None = None
        self._not_durable = why_not_durable(storage, executor) if self._persist else ""
        if self._persist and not self._not_durable:
            self._durable = DurableState(storage, self.id, cast(KeepsState, executor), self._obey_pause_request)
        elif persist:
            raise ConfigurationError(f"this session cannot be durable (persist=True): {self._not_durable}")
        self._status: Literal["paused", "closed"] = "closed"
        self.on_pause_request: Callable[[], Awaitable[Any]] | None = None
        """Called instead of `pause` when another process asks for the session."""
        self._resume_note = ""
        """For the first result of a session that continues an earlier one."""
        self._embedder = embedder if embedder is not None else getattr(storage, "embedder", None)
        self._approve = approve
        self._on_error: Literal["raise", "skip"] = on_error
        self._sync_deps_on_start = sync_deps_on_start
        self._expires_after = expires_after
        self._owns_storage = owns_storage
        self._sharing: set[Session] = {self}
        """This session and the forks on its storage; the last of them to close closes a storage that they own."""
        secrets = Secrets()
        self._library = LibraryAccess(
            storage,
            executor,
            approve=approve,
            on_error=on_error,
            embedder=self._embedder,
            secrets=secrets,
            session_id=self.id,
        )
        self._trace_log = TraceLog(store_of(storage), f"sessions/{self.id}/trace.jsonl")
        exporter = otel_exporter(self.id)
        self._steps = StepRecorder(
            [self._trace_log] if exporter is None else [self._trace_log, exporter],
            last_message=self._last_message,
            redact=secrets.redact,
        )
        self._record = record
        self._recording = Recording(self.id, storage, executor, record, secrets.redact)
        self._call_handlers = CallHandlers(self._library, self._steps, executor)
        self._branch = ConversationBranch(self.id, storage, lambda: self.conversation)
        self._checkpoints = Checkpoints(executor, self._branch)
        self._run_lock = asyncio.Lock()
        self._start_lock = asyncio.Lock()
        self._conversation_lock = asyncio.Lock()
        self._verify_lock = asyncio.Lock()
        self._is_fork = False
        self._started = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None
        Session._open[self.id] = self

    @classmethod
    def from_base(
        cls,
        base: Path | str,
        *,
        timeout: float | None = 30.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        **settings: Unpack[SandboxOptions],
    ) -> Self:
        """A sandboxed session on a folder, which is created if it is missing."""
        return cls.subprocess(
            base,
            timeout=timeout,
            extra_deps=extra_deps,
            allow_runtime_deps=allow_runtime_deps,
            sync_deps_on_start=sync_deps_on_start,
            **settings,
        )

    @classmethod
    def subprocess(
        cls,
        base_path: Path | str,
        *,
        timeout: float | None = 60.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        python_version: str | None = None,
        cache_venv: bool = True,
        **settings: Unpack[SandboxOptions],
    ) -> Self:
        """A sandboxed session on a folder, with a choice of the Python version and its virtualenv."""
        storage, options, common = split_options(base_path, settings, SandboxOptions)
        config = SubprocessConfig(
            base=storage.base_path,
            default_timeout=timeout,
            deps=extra_deps or (),
            allow_runtime_deps=allow_runtime_deps,
            python_version=python_version,
            cache_venv=cache_venv,
            **options,
        )
        return cls(storage, SubprocessExecutor(config), sync_deps_on_start, owns_storage=True, **common)

    @classmethod
    def inprocess(
        cls,
        base_path: Path | str,
        *,
        timeout: float | None = 30.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        workspace: Path | str | None = None,
        wheelhouse: Path | str | None = None,
        **settings: Unpack[SessionOptions],
    ) -> Self:
        """A session on a folder whose code runs in this process, without any isolation."""
        from carrel.execution.in_process import InProcessExecutor  # noqa: PLC0415 -- most programs do not use it

        storage, _, common = split_options(base_path, settings, SessionOptions)
        config = InProcessConfig(
            base=storage.base_path,
            default_timeout=timeout,
            deps=extra_deps or (),
            allow_runtime_deps=allow_runtime_deps,
            workspace=workspace,
            wheelhouse=wheelhouse,
        )
        return cls(storage, InProcessExecutor(config), sync_deps_on_start, owns_storage=True, **common)

    @classmethod
    def container(
        cls,
        base_path: Path | str,
        *,
        image: str | None = None,
        timeout: float | None = 60.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        **settings: Unpack[ContainerOptions],
    ) -> Self:
        """A session on a folder whose code runs in a Docker or Podman container; see `ContainerConfig`."""
        from carrel.execution.container_executor import ContainerExecutor  # noqa: PLC0415 -- as InProcessExecutor

        storage, options, common = split_options(base_path, settings, ContainerOptions)
        config = ContainerConfig(
            base=storage.base_path,
            image=image,
            default_timeout=timeout,
            deps=extra_deps or (),
            allow_runtime_deps=allow_runtime_deps,
            **options,
        )
        return cls(storage, ContainerExecutor(config), sync_deps_on_start, owns_storage=True, **common)

    @classmethod
    def for_sample(
        cls,
        dataset: str,
        sample_id: str,
        *,
        datasets: Path | str | None = None,
        ttl_minutes: float | None = 30,
        storage: StorageBackend | None = None,
        cache: Path | str | None = None,
        sandbox: SandboxMode | None = None,
        **settings: Unpack[SessionOptions],
    ) -> Self:
        """A session on a sample: its repository as the workspace, its packages, its limits; see `verify`.

        `datasets` is the folder with the dataset (default: `$CARREL_HOME/datasets`, and the demo). The session closes
        itself after `ttl_minutes`; None keeps it open."""
        check_ttl(ttl_minutes)
        sample = tasks.Datasets(datasets).get(dataset).sample(sample_id)
        executor = tasks.sample_executor(sample, Path(cache).expanduser() if cache else None, sandbox=sandbox)
        seconds = None if ttl_minutes is None else ttl_minutes * 60
        return cls(storage or MemoryStorage(), executor, expires_after=seconds, **settings)

    @classmethod
    def resume(cls, base: Path | str, session_id: str, **settings: Any) -> Self:
        """Continue the session with this id on a folder, with the settings that it had.

        SessionNotFound if there is none. `settings` replace those that it had, as in the constructors; environment
        variables (`env`) are not kept, and are given again."""
        record = read_record_file(Path(base).expanduser(), check_id(session_id))
        kind, options = options_of(record.settings)
        make: dict[str, Callable[..., Self]] = {"inprocess": cls.inprocess, "container": cls.container}
        return make.get(kind, cls.subprocess)(base, **{**options, **settings, "session_id": session_id})

    @classmethod
    def attach(cls, session_id: str) -> Session:
        """Return the session with this id that is open in this process; SessionNotFound if there is none.

        Of several with the same id (in different storages) it is the one that was opened last."""
        session = cls._open.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session with the id {session_id!r} is open in this process")
        return session

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Prepare the session to run code; also done on first use. Calling it twice has no effect."""
        async with self._start_lock:
            self._refuse_closed()
            if self._started:
                return
            if not self._is_fork:  # A fork has the library of a session in which it was valid: read it when needed.
                await self._library.get()
            self.executor.handlers.update(self._call_handlers.handlers())
            if self._durable is not None:
                await self._durable.open()
            try:
                await self.executor.start()
                if self._sync_deps_on_start:
                    await self._steps.install("install", "requirements.txt", (await self._library.get()).deps.sync())
                await self._resume()
            except BaseException:
                if self._durable is not None:
                    await self._durable.release()
                raise
            self._started = True
            if self._expires_after is not None:
                self._expiry = asyncio.create_task(self._expire(self._expires_after))

    async def _resume(self) -> None:
        """Load the variables of the session that this one continues, and find out what is there of it."""
        if self._durable is None:
            if self._not_durable:
                self._resumed = Resumed(await self._count_messages(), reason=self._not_durable)
            return
        if not self._durable.was_there:
            self._resumed = await self._durable.resume(self._count_messages)
            return
        if self._durable.was_moved:
            deps = (await self._library.get()).deps
            if await deps.list():
                await self._steps.install("install", "requirements.txt", deps.sync())
        with self._steps.step("resume", self.id) as step:
            self._resumed = await self._durable.resume(self._count_messages)
            assert self._resumed is not None
            step.facts |= {"variables": len(self._resumed.variables), "missing": self._resumed.missing}
            if self._resumed.reason:
                step.facts["reason"] = self._resumed.reason
        self._resume_note = resume_note(self._resumed)

    async def _count_messages(self) -> int:
        if await store_of(self.storage).stamp(f"sessions/{self.id}/messages.jsonl") is None:
            return 0
        return (await self._branch.checkpoint("")).message_count

    @property
    def resumed(self) -> Resumed | None:
        """After the start: what this session has of an earlier one with its id; None if it is new."""
        return self._resumed

    async def save(self) -> SavedState:
        """Save the variables of a durable session now; its files are kept at any moment.

        Returns which were saved, and why others were not. After StateNotSaved those that were saved before are
        unchanged. Waits for a run that is under way."""
        await self._ensure_usable()
        if self._durable is None:
            raise ConfigurationError(
                f"this session is not durable, so it cannot be saved: {self._not_durable or 'it has no session_id'}"
            )
        await self._branch.save()
        return await self._durable.save()

    async def pause(self) -> str:
        """Save and close a durable session, and return its id: a later session with this id continues it.

        Running code is interrupted, and running commands end. What could not be saved is in the `resumed` of the later
        session."""
        if self._durable is None:
            raise ConfigurationError(
                f"this session is not durable, so it cannot be paused: {self._not_durable or 'it has no session_id'}"
            )
        if not self._closed:
            self._status = "paused"
            if self._run_lock.locked() and await self.interrupt():
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS), self._run_lock:
                        pass
        await self.close()
        return self.id

    async def _obey_pause_request(self) -> None:
        await (self.on_pause_request or self.pause)()

    async def close(self) -> None:
        """End everything that belongs to the session. Calling it twice has no effect; both calls wait for the end.

        A durable session is saved first, unless code is running."""
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        self._closed = True
        self._library.refuse_calls()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # Cancelling the caller does not cancel the closing: a half-closed session would leave processes behind.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if Session._open.get(self.id) is self:
            del Session._open[self.id]
        async with AsyncExitStack() as stack:
            self._sharing.discard(self)
            if self._owns_storage and not self._sharing:
                stack.push_async_callback(self.storage.close)
            stack.push_async_callback(self._trace_log.flush)
            stack.push_async_callback(self._library.close)
            if self._durable is not None:
                stack.push_async_callback(self._durable.close, self._status)
            stack.push_async_callback(self.executor.close)
            if self._durable is not None and self._started:
                await self._save_last(self._durable)
            await self._recording.close(is_busy=self._run_lock.locked(), is_paused=self._status == "paused")

    async def _save_last(self, durable: DurableState) -> None:
        with self._steps.step("pause" if self._status == "paused" else "close", self.id) as step:
            await self._branch.save()
            record = await durable.save_last(self._run_lock.locked)
            step.facts |= {"variables": len(record.variables), "missing": record.missing}
            if record.not_saved:
                step.facts["reason"] = record.not_saved

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._verify_lock:
            await self.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def reset(self) -> None:
        """Clear the variables; library, files and conversation stay."""
        await self._ensure_usable()
        await self.executor.reset()
        self._note_change()
        await self._recording.note("reset")

    def supports(self, capability: str) -> bool:
        """Return whether a capability is active on this machine now."""
        return capability in self.supported_capabilities()

    def supported_capabilities(self) -> set[str]:
        """Return the names of all capabilities that are active on this machine now."""
        found = self.executor.supported_capabilities()
        return found | {"checkpoint", "rewind"} if "fork" in found and isinstance(self.executor, Executor) else found

    def _state(self) -> str:
        return "closed" if self._closed else "started" if self._started else "not started"

    def __repr__(self) -> str:
        return f"<Session {self.id!r} ({type(self.executor).__name__}, {self.storage!r}, {self._state()})>"

    def _repr_html_(self) -> str:
        rows = [("executor", type(self.executor).__name__), ("storage", repr(self.storage)), ("state", self._state())]
        if self.sample is not None:
            rows.append(("sample", f"{self.sample.dataset}/{self.sample.sample_id}"))
        if self.conversation is not None:
            rows.append(("conversation", self.conversation.title))
        return html_table(f"Session {self.id}", rows)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ExecutorClosed(CLOSED)

    async def _ensure_usable(self) -> None:
        """Start the session; refuse a call that would wait for itself."""
        if self._call_handlers.code_waits_for_caller():
            raise ToolCallError(WOULD_WAIT)
        await self.start()

    # --- conversation -----------------------------------------------------------------------------------------------

    async def converse(self, title: str = "New Session", **fields: Any) -> Conversation:
        """Return the session's typed conversation, created or opened in its storage if it holds none yet."""
        async with self._conversation_lock:
            if self.conversation is None:
                self.conversation = await self._branch.open(title, fields)
        return self.conversation

    def _last_message(self) -> str | None:
        messages = self.conversation.messages if self.conversation is not None else None
        return messages[-1].id if messages else None

    # --- branching --------------------------------------------------------------------------------------------------

    async def fork(self, *, storage: StorageBackend | None = None, session_id: str | None = None) -> Self:
        """Return another live session with the same conversation, variables and files; from then on they are apart.

        Workflows, artifacts and the list of packages belong to the storage, which both use; with a `storage` of its
        own the fork starts with a copy of them. `ForkRefused` says what could not be forked and why, and then nothing
        has changed."""
        await self._ensure_usable()
        async with self._run_lock:
            self._refuse_closed()
            id_ = check_id(session_id) if session_id is not None else uuid4().hex
            await self._recording.note("fork", fork=id_)
            with fork_refused("forked"):
                executor = await self.executor.fork()
                async with AsyncExitStack() as undo:
                    undo.push_async_callback(executor.close)
                    typed = storage is not None and storage.get_session_store() is not self.storage.get_session_store()
                    conversation = await self._branch.fork(id_, undo, typed=typed)
                    if storage is not None:
                        await library_module().copy_library(self.storage.store, storage.store)
                    fork = self._copy_with(storage or self.storage, executor, id_, conversation)
                    undo.push_async_callback(fork.close)
                    await fork.start()
                    undo.pop_all()
        if storage is None:
            fork._owns_storage, fork._sharing = self._owns_storage, self._sharing
            fork._sharing.add(fork)
        return fork

    def _copy_with(
        self, storage: StorageBackend, executor: Executor, session_id: str, conversation: Conversation | None
    ) -> Self:
        """Return a session with the same settings, for a fork."""
        copy = type(self)(
            storage,
            executor,
            expires_after=self._expires_after,
            session_id=session_id,
            persist=False,
            conversation=conversation,
            approve=self._approve,
            on_error=self._on_error,
            embedder=self._embedder,
            record=self._record,
        )
        copy._recording.begin_as_fork(self._recording, self.id)
        copy._library.add_tools_of(self._library)
        copy._is_fork = True
        return copy

    async def checkpoint(self, label: str = "") -> Checkpoint:
        """Keep the conversation, variables and files as they are now, to return to while the session is open.

        `ForkRefused` says what could not be kept and why, and then nothing has changed."""
        if not isinstance(label, str):
            raise TypeError(f"label must be a str, not {label!r}")
        await self._ensure_usable()
        async with self._run_lock:
            self._refuse_closed()
            with self._steps.step("checkpoint", label) as step:
                point = await self._checkpoints.create(label)
                step.facts |= {"checkpoint": point.id, "messages": point.message_count}
                await self._recording.note("checkpoint", step, point=point.id, label=label, seq=point.seq)
        return point

    async def rewind(self, to: Checkpoint | str | int) -> Checkpoint:
        """Return to a checkpoint, named by itself, its id, its label or its number of messages.

        The log keeps what happened in between, and all checkpoints stay, later ones too. Running commands end.
        Workflows, artifacts and packages belong to the storage and stay as they are. `ForkRefused` says what could not
        be taken back and why, and then nothing has changed."""
        await self._ensure_usable()
        async with self._run_lock:
            self._refuse_closed()
            point = self._checkpoints.find(to)
            with self._steps.step("rewind", point.label) as step:
                step.facts |= {"checkpoint": point.id, "messages": point.message_count}
                await self._checkpoints.rewind(point)
                self._note_change()
                await self._recording.note("rewind", step, point=point.id, label=point.label, seq=point.seq)
        return point

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first; none when the session is closed."""
        return [] if self._closed else self._checkpoints.all()

    async def drop_checkpoint(self, point: Checkpoint | str | int) -> Checkpoint:
        """Remove a checkpoint with its process and its copy of the changed files, and return what it was."""
        return await self._checkpoints.drop(point)

    # --- samples ----------------------------------------------------------------------------------------------------

    @property
    def sample(self) -> Sample | None:
        """The sample this session was created from, if any."""
        sample: Sample | None = getattr(self.executor, "sample", None)
        return sample

    @property
    def receipt(self) -> Receipt | None:
        """What was removed from the sample's files, such as later commits; None before the start."""
        prepared = getattr(self.executor, "prepared", None)
        receipt: Receipt | None = prepared.files.receipt if prepared is not None else None
        return receipt

    async def verify(self, keep: Path | None = None) -> VerificationResult:
        """Grade the workspace as it is now, in a copy that the session's code never sees.

        Never raises for what was done in the workspace: the outcome says so. `keep` is a folder for the complete
        output. ConfigurationError when the session was not created from a sample."""
        executor = self.executor
        if self.sample is None or not isinstance(executor, (tasks.SampleExecutor, tasks.ContainerSampleExecutor)):
            raise ConfigurationError(
                "this session was not created from a sample, so it cannot be verified; use Session.for_sample"
            )
        await self.start()
        async with self._verify_lock:
            with self._steps.step("verify", self.sample.sample_id) as step:
                result = await tasks.verify(
                    self.sample, executor, cache=executor.cache, keep=keep, prepared=executor.prepared
                )
                step.facts |= {"verdict": result.outcome}
                await self._recording.note("verify", step, outcome=result.outcome)
        return result

    # --- code -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        """Run code; always returns a result, never raises and never hangs."""
        if self._call_handlers.code_waits_for_caller():
            return failed_result("ToolCallError", WOULD_WAIT)
        async with self._run_lock:
            problem = await self._start_problem()
            if problem is not None:
                return problem
            with self._steps.run(code) as step:
                self._recording.begin_run(step)
                result = await self.executor.run(code, timeout)
                self._note_result(step, result)
            self._recording.end_run(step, is_lost=result.state == "lost")
            return result

    async def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        """Run code and yield its output as it comes, the result last. Closing the iterator stops the code."""
        if self._call_handlers.code_waits_for_caller():
            yield failed_result("ToolCallError", WOULD_WAIT)
            return
        async with self._run_lock:
            problem = await self._start_problem()
            if problem is not None:
                yield problem
                return
            with self._steps.run(code) as step:
                self._recording.begin_run(step)
                async with aclosing(self.executor.stream(code, timeout)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, ExecutionResult):
                            self._note_result(step, piece)
                            self._recording.end_run(step, is_lost=piece.state == "lost")
                        yield piece

    def _note_result(self, step: Step, result: ExecutionResult) -> None:
        if self._resume_note and result.state == "kept":
            result.state, result.state_reason = "restored", self._resume_note
        self._resume_note = ""
        step.sizes |= {"stdout": len(result.stdout), "stderr": len(result.stderr)}
        if result.state != "kept":
            step.facts |= {"state": result.state}
        if result.error is not None:
            step.mark_failed(result.error_type or "Error", result.error)
        self._note_change()

    def _note_change(self) -> None:
        """The variables may have changed: a durable session saves them soon."""
        if self._durable is not None:
            self._durable.note_change()

    async def _start_problem(self) -> ExecutionResult | None:
        """Start the session; return what prevented it as a result."""
        if self._closed:
            return closed_result()
        if not self._started:
            try:
                await self.start()
            except Exception as problem:  # noqa: BLE001 -- `run` never raises
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
        return None

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; False when none was running. The variables survive."""
        return await self.executor.interrupt()

    async def flush_trace(self) -> None:
        """Write the steps that have ended to the trace, and what was recorded; otherwise that is done shortly after."""
        await self._trace_log.flush()
        await self._recording.flush(is_busy=self._run_lock.locked())

    async def variables(self) -> list[Variable]:
        """Return the variables that the code has made, at most 1,000; waits for a run that is under way."""
        await self._ensure_usable()
        async with self._run_lock:
            return await self.executor.variables()

    async def set_variables(self, **variables: Any) -> None:
        """Set variables of the code to data: the types that `run` can return."""
        await self._ensure_usable()
        async with self._run_lock:
            await self.executor.set_variables(variables)
            self._note_change()
            self._recording.mark_changed()

    async def trace(self) -> list[dict[str, Any]]:
        """Return the steps of this session so far, one dict each, oldest first."""
        await self.flush_trace()
        return [line async for line in self._trace_log.read()]
