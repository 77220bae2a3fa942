"""A library in a folder, and executors of every kind whose code uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from carrel.execution.executor import ExecutionResult, Executor, Handler
from carrel.library.artifacts import ArtifactStore
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.files.store import FileStore
from tests.execution.kinds import KINDS, make

IN_CONTAINERS = frozenset(("test_data_are_loaded_as_they_were_saved", "test_call_by_attribute_and_by_invoke"))
"""The other tests run in containers with `make soak`."""

NOT_IN_CONTAINERS = frozenset(
    (
        "test_a_data_frame_is_saved_as_parquet",
        "test_without_pyarrow_the_error_says_what_to_install",
        "test_numpy_numbers",
        "test_a_figure_is_saved_as_png",
    )
)
"""The image that the tests pack has no NumPy, no pandas and no matplotlib."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "executor_kind" in metafunc.fixturenames:
        name = metafunc.definition.name
        slow = [] if name in IN_CONTAINERS else [pytest.mark.slow]
        kinds = [kind for kind in KINDS if kind != "container" or name not in NOT_IN_CONTAINERS]
        marked = [pytest.param(kind, marks=slow if kind == "container" else []) for kind in kinds]
        metafunc.parametrize("executor_kind", marked)


@dataclass
class CodeSession:
    """One session's Python and the library it finds."""

    executor: Executor
    workflows: WorkflowLibrary
    artifacts: ArtifactStore
    calls: list[str]
    """The names of the calls of the host, in order."""

    async def run(self, code: str, timeout: float | None = 60) -> ExecutionResult:
        return await self.executor.run(code, timeout=timeout)

    async def value(self, code: str) -> Any:
        """Return the value of code that must not fail."""
        result = await self.run(code)
        assert result.error is None, result.error
        return result.value


Begin = Callable[..., CodeSession]


@pytest.fixture
async def begin(executor_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Begin]:
    """`begin(tools=handler)` starts a session, which is closed after the test."""
    made: list[CodeSession] = []
    engine = {"docker_host": request.getfixturevalue("docker_engine")} if executor_kind == "container" else {}

    def beginning(**more: Handler) -> CodeSession:
        store = FileStore(tmp_path / "base")
        workflows, artifacts, calls = WorkflowLibrary(store), ArtifactStore(store), list[str]()

        def noting(handler: Handler) -> Handler:
            async def handle(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
                calls.append(name)
                return await handler(name, args, kwargs)

            return handle

        handlers = {"workflows": workflows.handle, "skills": workflows.handle, "artifacts": artifacts.handle, **more}
        noted = {name: noting(handler) for name, handler in handlers.items()}
        executor = make(executor_kind, handlers=noted, grace=30.0, **engine)
        made.append(CodeSession(executor, workflows, artifacts, calls))
        return made[-1]

    yield beginning
    for session in made:
        await asyncio.wait_for(session.executor.close(), 60)
        await session.workflows.close()
        await session.artifacts.close()


@pytest.fixture
def session(begin: Begin) -> CodeSession:
    return begin()
