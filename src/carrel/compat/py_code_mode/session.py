"""The session of py_code_mode: its names and shapes, on a session of carrel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from carrel import errors
from carrel.compat.py_code_mode.artifacts import artifact_dict, by_age, checked_name, read_index
from carrel.compat.py_code_mode.errors import ArtifactNotFoundError
from carrel.compat.py_code_mode.execution import (
    BaseExecutor,
    Executor,
    InProcessConfig,
    InProcessExecutor,
    SubprocessConfig,
    SubprocessExecutor,
)
from carrel.compat.py_code_mode.skills import skill_errors, workflow_dict
from carrel.compat.py_code_mode.storage import FileStorage, StorageBackend
from carrel.compat.py_code_mode.types import ExecutionResult
from carrel.session.session import Session as CarrelSession

__all__ = ["Session"]

_PACKAGE = "carrel.compat.py_code_mode"

P = ParamSpec("P")
T = TypeVar("T")


def accepts_base_path(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Accept `base_path=`, as older versions call it, for the parameter `base`."""

    @functools.wraps(function)
    def call(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if "base_path" in kwargs:
            kwargs["base"] = kwargs.pop("base_path")
        return function(cls, *args, **kwargs)

    return call


class Session:
    """Runs code that calls tools, skills, artifacts and packages; the default is carrel's sandbox."""

    def __init__(
        self, storage: StorageBackend, executor: Executor | None = None, sync_deps_on_start: bool = False
    ) -> None:
        if not isinstance(storage, StorageBackend):
            raise TypeError(f"storage must be a FileStorage or RedisStorage of {_PACKAGE}, not {storage!r:.60}")
        if executor is not None and not isinstance(executor, Executor):
            raise TypeError(f"executor must be a SubprocessExecutor or another of {_PACKAGE}, not {executor!r:.60}")
        self._storage = storage
        self._executor: Executor = executor or SubprocessExecutor()
        self._sync_deps_on_start = sync_deps_on_start
        self._started = False
        self._closed = False

    @classmethod
    @accepts_base_path
    def from_base(
        cls,
        base: Path | str,
        *,
        timeout: float | None = 30.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
    ) -> Self:
        """Return a session on a folder; unlike in the original, its code runs in a sandbox."""
        settings = SubprocessConfig(
            allow_runtime_deps=allow_runtime_deps, deps=extra_deps and tuple(extra_deps), default_timeout=timeout
        )
        return cls(_folder(base), SubprocessExecutor(settings), sync_deps_on_start)

    @classmethod
    def inprocess(
        cls,
        base_path: Path | str,
        *,
        timeout: float | None = 30.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
    ) -> Self:
        """Return a session whose code runs in this process, without any isolation."""
        settings = InProcessConfig(
            allow_runtime_deps=allow_runtime_deps, deps=extra_deps and tuple(extra_deps), default_timeout=timeout
        )
        return cls(_folder(base_path), InProcessExecutor(config=settings), sync_deps_on_start)

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
    ) -> Self:
        settings = SubprocessConfig(
            allow_runtime_deps=allow_runtime_deps,
            deps=extra_deps and tuple(extra_deps),
            default_timeout=timeout,
            python_version=python_version,
            cache_venv=cache_venv,
        )
        return cls(_folder(base_path), SubprocessExecutor(settings), sync_deps_on_start)

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> StorageBackend:
        return self._storage

    async def start(self) -> None:
        """Prepare the session to run code; also done on first use."""
        if self._started:
            return
        if self._closed:
            raise RuntimeError("Session is closed")
        await self._executor.start(self._storage)
        self._started = True
        if self._sync_deps_on_start:
            await self._executor.sync_deps()

    async def close(self) -> None:
        self._closed = True
        await self._executor.close()

    async def reset(self) -> None:
        """Clear the variables."""
        await (await self._started_executor()).reset()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def supports(self, capability: str) -> bool:
        return capability in self.supported_capabilities()

    def supported_capabilities(self) -> set[str]:
        """Return what is possible now: nothing before the start and after the end."""
        return set(self._executor.supported_capabilities()) if self._started and not self._closed else set()

    async def _started_executor(self) -> Executor:
        await self.start()
        return self._executor

    async def _carrel(self) -> CarrelSession:
        executor = await self._started_executor()
        if not isinstance(executor, BaseExecutor):
            raise TypeError(f"skills and artifacts need an executor of {_PACKAGE}, not {executor!r:.60}")
        return executor.started_session

    # --- code and tools -----------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        """Run code; an error is in the result."""
        if self._closed:
            return ExecutionResult(None, "", "Session is closed")
        return await (await self._started_executor()).run(code, timeout)

    async def list_tools(self) -> list[dict[str, Any]]:
        return await (await self._started_executor()).list_tools()

    async def search_tools(self, query: str, limit: int = 10) -> list[dict[str, Any]]:
        return await (await self._started_executor()).search_tools(query, limit)

    # --- workflows ----------------------------------------------------------------------------------------------------

    async def list_workflows(self) -> list[dict[str, Any]]:
        return [workflow_dict(each) for each in await (await self._carrel()).list_workflows()]

    async def search_workflows(self, query: str, limit: int = 5) -> list[dict[str, Any]]:
        return [workflow_dict(each) for each in await (await self._carrel()).search_workflows(query, limit)]

    async def get_workflow(self, name: str) -> dict[str, Any] | None:
        """Return the workflow with its source; None if there is none."""
        found = await (await self._carrel()).get_workflow(name)
        return None if found is None else workflow_dict(found)

    async def add_workflow(self, name: str, source: str, description: str) -> dict[str, Any]:
        """Store source that defines `run`; ValueError or SyntaxError if it is not valid."""
        session = await self._carrel()
        with skill_errors(name):
            return workflow_dict({**await session.add_workflow(name, source, description), "source": source})

    async def remove_workflow(self, name: str) -> bool:
        return await (await self._carrel()).remove_workflow(name)

    list_skills, search_skills, get_skill = list_workflows, search_workflows, get_workflow
    add_skill, remove_skill = add_workflow, remove_workflow

    # --- artifacts ----------------------------------------------------------------------------------------------------

    async def list_artifacts(self) -> list[dict[str, Any]]:
        """Return all artifacts in the order of their first save."""
        index = self._artifact_index()
        found = [artifact_dict(each, index) for each in await (await self._carrel()).list_artifacts()]
        return sorted(found, key=by_age)

    async def save_artifact(
        self, name: str, data: Any, description: str = "", metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        checked_name(name)
        return artifact_dict(await (await self._carrel()).save_artifact(name, data, description, metadata), {})

    def _artifact_index(self) -> dict[str, Any]:
        return read_index(self._storage.root / "artifacts") if isinstance(self._storage, FileStorage) else {}

    async def load_artifact(self, name: str) -> Any:
        try:
            return await (await self._carrel()).load_artifact(name)
        except errors.ArtifactNotFoundError as problem:
            raise ArtifactNotFoundError(name) from problem

    async def delete_artifact(self, name: str) -> None:
        await (await self._carrel()).delete_artifact(name)

    # --- packages -----------------------------------------------------------------------------------------------------

    async def list_deps(self) -> list[str]:
        return await (await self._started_executor()).list_deps()

    async def add_dep(self, package: str) -> dict[str, Any]:
        return await (await self._started_executor()).add_dep(package)

    async def remove_dep(self, package: str) -> dict[str, Any]:
        return await (await self._started_executor()).remove_dep(package)

    async def sync_deps(self) -> dict[str, Any]:
        return await (await self._started_executor()).sync_deps()


def _folder(base: Path | str) -> FileStorage:
    """Return the storage in a folder, which is made with its `tools/`."""
    storage = FileStorage(base)
    storage.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    (storage.root / "tools").mkdir(exist_ok=True)
    return storage
