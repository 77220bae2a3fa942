"""Answers the calls that running code makes: tools, workflows, artifacts and packages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any, Literal

from carrel.embedding import EmbedderOption
from carrel.errors import ExecutorClosed
from carrel.execution.config import ContainerConfig, SubprocessConfig
from carrel.execution.executor import Executor, Handler, current_call, paused_clock
from carrel.library.artifacts import ArtifactStore
from carrel.library.deps import Deps
from carrel.library.search import LibrarySearch
from carrel.library.tools.approval import ApprovalRequest, Approver, Decision, asked
from carrel.library.tools.definition_files import tool_files
from carrel.library.tools.last_seen import LastSeen
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.workflows import WorkflowLibrary
from carrel.processes import OnOutput, ProcessOutput, ProcessResult
from carrel.session.storage import StorageBackend
from carrel.storage.files.store import FileStore
from carrel.tracing import Kind, StepRecorder, note_sizes

CALL_NAMES = ("tools", "tools._names", "workflows", "skills", "artifacts", "deps")
"""The names under which code makes calls."""

WOULD_WAIT = (
    "a tool that the session's code is waiting for made this call, which would wait for that code in turn; "
    "make it before or after the run, or in the code itself (a tool with `runs: sandbox` runs its program beside it)"
)


def unavailable_handlers() -> dict[str, Handler]:
    """Return handlers for an executor that starts before it has a session; each call fails."""

    async def refuse(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raise ExecutorClosed(f"{name} cannot be answered: the session has not started yet")

    return dict.fromkeys(CALL_NAMES, refuse)


@dataclass
class SessionLibrary:
    """The tools, workflows, artifacts and dependencies of one session."""

    tools: ToolRegistry
    workflows: WorkflowLibrary
    artifacts: ArtifactStore
    deps: Deps
    secrets: Secrets


class CallHandlers:
    """Answers the calls of one session's code and records them as steps."""

    def __init__(
        self, get_library: Callable[[], Awaitable[SessionLibrary]], steps: StepRecorder, executor: Executor
    ) -> None:
        self._get_library = get_library
        self._steps = steps
        self._executor = executor
        self._sees_files: bool | None = None

    def handlers(self) -> dict[str, Handler]:
        """Return a handler for each of CALL_NAMES."""
        answers: list[Handler] = [self.call_tool] * 2 + [self.call_workflow] * 2 + [self.call_artifact, self.call_deps]
        return dict(zip(CALL_NAMES, answers, strict=True))

    def code_waits_for_caller(self) -> bool:
        """Return whether the session's code is waiting for a handler that runs in the current task."""
        call = current_call.get()
        return call is not None and call.active and call.executor is self._executor

    async def call_tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        tools = (await self._get_library()).tools
        if await tools.is_question(name):
            return await tools.handle(name, args, kwargs)
        call = current_call.get()
        write = call.write if call is not None else None
        with self._steps.step("tool", name.removeprefix("tools."), self._steps.running) as step:
            return note_sizes(step, [args, kwargs], await tools.handle(name, args, kwargs, stream=write))

    async def call_workflow(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer one of the two calls that the worker makes for a workflow: at its start and at its end."""
        value = await (await self._get_library()).workflows.handle(name, args, kwargs)
        verb = name.rpartition(".")[2]
        if verb == "begin":
            self._steps.start_workflow(str(args[0]))
        elif verb == "ended":
            self._steps.end_workflow(str(args[0]), kwargs.get("error"))
        return value

    async def call_artifact(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        artifacts = (await self._get_library()).artifacts
        if self._sees_files is None:
            capabilities = await asyncio.to_thread(self._executor.supported_capabilities)
            # An executor without any capability does not report them.
            self._sees_files = bool(capabilities) and "filesystem_isolation" not in capabilities
        return await artifacts.handle(name, args, kwargs, sees_files=self._sees_files)

    async def call_deps(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        deps = (await self._get_library()).deps
        verb = name.rpartition(".")[2]
        if verb not in ("add", "remove", "sync"):
            return await deps.handle(name, args, kwargs)
        what = str(args[0]) if args else "requirements.txt"
        kind: Kind = "uninstall" if verb == "remove" else "install"
        return await self._steps.install(kind, what, deps.handle(name, args, kwargs), self._steps.running)


async def read_library(
    storage: StorageBackend,
    executor: Executor,
    *,
    approve: Approver | None,
    on_error: Literal["raise", "skip"],
    embedder: EmbedderOption = None,
) -> SessionLibrary:
    """Read the library of a session from its storage, and tools from the executor's `tools_path`."""
    config = getattr(executor, "config", None)
    tools_path = getattr(config, "tools_path", None)
    secrets = Secrets()
    tools = ToolRegistry(
        files=[
            tool_files(store, prefix=prefix, secrets=secrets, sandbox=SandboxRunner(executor), on_error=on_error)
            for store, prefix in [
                (storage.store, "tools"),
                *([(FileStore(Path(tools_path)), "")] if tools_path is not None else []),
            ]
        ],
        approve=approve and _pause_clock_while_asking(approve),
        index=LibrarySearch(storage.store, "search/tools", embedder),
        secrets=secrets,
        last_seen=LastSeen(storage.store, secrets),
    )
    await tools.look()
    return SessionLibrary(
        tools=tools,
        workflows=storage.get_workflow_library(),
        artifacts=storage.get_artifact_store(),
        deps=Deps(
            storage.store,
            executor,
            allow_runtime=getattr(config, "allow_runtime_deps", True),
            cut_off=lambda: _has_no_index(executor),
            settings=getattr(config, "deps", ()),
            settings_file=getattr(config, "deps_file", None),
        ),
        secrets=secrets,
    )


def _has_no_index(executor: Executor) -> bool:
    """Return whether packages must not be downloaded for this session.

    Called late, because some executors get their settings at the start."""
    config = getattr(executor, "config", None)
    if not isinstance(config, SubprocessConfig | ContainerConfig):
        return False
    return not config.network and config.wheelhouse is None


def _pause_clock_while_asking(approve: Approver) -> Approver:
    """Wrap an approver so that the run's time limit does not pass while it decides."""

    async def approve_with_paused_clock(request: ApprovalRequest) -> Decision:
        with paused_clock():
            return await asked(approve, request)

    return approve_with_paused_clock


class SandboxRunner:
    """Runs the programs of tools with `runs: sandbox` in the session's workspace."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stream: OnOutput | None = None,
    ) -> ProcessResult:
        call = current_call.get()
        if call is None or not call.active or call.executor is not self._executor:
            result = await self._executor.exec(list(argv), timeout=timeout, cwd=cwd, env=env, stdin=stdin)
            if stream is not None:
                stream(result.stdout)
            return ProcessResult(result.exit_code, result.stdout.encode(), result.stderr, 0, result.timed_out)
        # The run that made this call blocks `exec` until it has its answer, so use the run's own way.
        output = ProcessOutput(stream)
        ended = await call.run_command(argv, output=output.add, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        if ended.error is not None:
            missing = ended.exit_code == 127
            raise FileNotFoundError(ENOENT, ended.error, argv[0]) if missing else OSError(ended.error)
        return output.ended(ended.exit_code, timed_out=ended.timed_out)
