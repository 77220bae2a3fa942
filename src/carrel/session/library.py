"""The library of a session: tools, workflows, artifacts and packages, read from its storage.

Loaded with the first session that starts: it is slow to import, and `import carrel` must not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from carrel.embedding import EmbedderOption
from carrel.execution.config import ContainerConfig, SubprocessConfig
from carrel.execution.executor import Executor, paused_clock
from carrel.library.artifacts import ArtifactStore
from carrel.library.dependencies import Dependencies
from carrel.library.prompt import library_prompt
from carrel.library.search import LibrarySearch
from carrel.library.store_sync import copy_library
from carrel.library.tools.approval import ApprovalRequest, Approver, Decision, ask_approver
from carrel.library.tools.definition_files import ToolFiles
from carrel.library.tools.python import register
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.workflows import WorkflowLibrary
from carrel.processes import OnOutput, ProcessOutput, ProcessResult
from carrel.session.storage import StorageBackend
from carrel.storage.files.store import FileStore

__all__ = ["SandboxRunner", "SessionLibrary", "copy_library", "library_prompt", "read_library", "register"]


@dataclass
class SessionLibrary:
    """The tools, workflows, artifacts and dependencies of one session."""

    tools: ToolRegistry
    workflows: WorkflowLibrary
    artifacts: ArtifactStore
    deps: Dependencies


async def read_library(
    storage: StorageBackend,
    executor: Executor,
    *,
    approve: Approver | None,
    on_error: Literal["raise", "skip"],
    secrets: Secrets,
    embedder: EmbedderOption = None,
    session_id: str = "",
) -> SessionLibrary:
    """Read the library of a session from its storage, and tools from the executor's `tools_path`."""
    config = getattr(executor, "config", None)
    tools_path = getattr(config, "tools_path", None)
    tools = ToolRegistry(
        files=[
            ToolFiles(store, prefix=prefix, secrets=secrets, sandbox=SandboxRunner(executor), on_error=on_error)
            for store, prefix in [
                (storage.store, "tools"),
                *([(FileStore(Path(tools_path)), "")] if tools_path is not None else []),
            ]
        ],
        approve=approve and _pause_clock_while_asking(approve),
        search=LibrarySearch(storage.store, "search/tools", embedder),
        secrets=secrets,
        session_id=session_id,
    )
    await tools.reload()
    return SessionLibrary(
        tools=tools,
        workflows=storage.get_workflow_library(),
        artifacts=storage.get_artifact_store(),
        deps=Dependencies(
            storage.store,
            executor,
            allow_runtime=getattr(config, "allow_runtime_deps", True),
            cut_off=lambda: _has_no_index(executor),
            settings=getattr(config, "deps", ()),
            settings_file=getattr(config, "deps_file", None),
        ),
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
            return await ask_approver(approve, request)

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
        on_output: OnOutput | None = None,
    ) -> ProcessResult:
        output = ProcessOutput(on_output)

        def add(piece: Any) -> None:
            output.add(piece.stream, piece.text)

        result = await self._executor.exec(
            list(argv),
            timeout=timeout,
            cwd=cwd,
            env=env,
            stdin=stdin,
            text=False,
            on_output=add,
            keep_background=False,
        )
        return output.result(result.exit_code, timed_out=result.timed_out)
