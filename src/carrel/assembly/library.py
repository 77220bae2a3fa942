"""A storage and an executor in, what a session has at hand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from errno import ENOENT
from pathlib import Path
from typing import Literal

from carrel.embedding import EmbedderOption
from carrel.execution.config import ContainerConfig, SubprocessConfig
from carrel.execution.executor import Executor, current_call, paused_clock
from carrel.library.deps import Deps
from carrel.library.search import LibrarySearch
from carrel.library.tools.approval import ApprovalRequest, Approver, Decision, asked
from carrel.library.tools.definition_files import tool_files
from carrel.library.tools.last_seen import LastSeen
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.processes import OnOutput, ProcessOutput, ProcessResult
from carrel.session import Library, StorageBackend
from carrel.storage.files.store import FileStore


async def read_library(
    storage: StorageBackend,
    executor: Executor,
    *,
    approve: Approver | None,
    on_error: Literal["raise", "skip"],
    embedder: EmbedderOption = None,
) -> Library:
    """What the storage has at hand for a session; tools of the executor's own `tools_path` come along."""
    config = getattr(executor, "config", None)
    own = getattr(config, "tools_path", None)
    secrets = Secrets()
    tools = ToolRegistry(
        files=[
            tool_files(store, prefix=prefix, secrets=secrets, sandbox=_Inside(executor), on_error=on_error)
            for store, prefix in [(storage.store, "tools"), *([(FileStore(Path(own)), "")] if own is not None else [])]
        ],
        approve=approve and _patient(approve),
        index=LibrarySearch(storage.store, "search/tools", embedder),
        secrets=secrets,
        last_seen=LastSeen(storage.store, secrets),
    )
    await tools.look()
    return Library(
        tools=tools,
        workflows=storage.get_workflow_library(),
        artifacts=storage.get_artifact_store(),
        deps=Deps(
            storage.store,
            executor,
            allow_runtime=getattr(config, "allow_runtime_deps", True),
            cut_off=lambda: _is_cut_off(executor),
            settings=getattr(config, "deps", ()),
            settings_file=getattr(config, "deps_file", None),
        ),
        secrets=secrets,
    )


def _is_cut_off(executor: Executor) -> bool:
    """Whether what its code asks for must not reach any network; asked late, for its settings may come at the start."""
    config = getattr(executor, "config", None)
    if not isinstance(config, SubprocessConfig | ContainerConfig):
        return False
    return not config.network and config.wheelhouse is None


def _patient(approve: Approver) -> Approver:
    """The same approver; a run waits for it as long as it takes, and has as much time left afterwards."""

    async def ask(request: ApprovalRequest) -> Decision:
        with paused_clock():
            return await asked(approve, request)

    return ask


class _Inside:
    """Runs the programs of tools that say `runs: sandbox` where the session's code runs."""

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
        # For code in a run, in whose turn the executor is until it has its answer.
        written = ProcessOutput(stream)
        ended = await call.run_command(argv, output=written.add, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        if ended.error is not None:
            missing = ended.exit_code == 127
            raise FileNotFoundError(ENOENT, ended.error, argv[0]) if missing else OSError(ended.error)
        return written.ended(ended.exit_code, timed_out=ended.timed_out)
