"""A library on a folder, and executors of every kind whose code finds it as `workflows`, `skills` and `artifacts`."""

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

IN_CONTAINERS = frozenset(
    ("test_data_comes_back_as_it_was_saved_here_and_on_the_host", "test_by_name_by_attribute_and_by_invoke")
)
"""The rest is tried in containers by `make soak`."""

NOT_IN_CONTAINERS = frozenset(
    (
        "test_a_frame_becomes_parquet_and_comes_back_as_a_frame",
        "test_without_pyarrow_it_is_said_what_to_install",
        "test_numbers_of_a_table_are_numbers",
        "test_a_figure_becomes_png",
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
class Inside:
    """One session's Python and the library it finds."""

    executor: Executor
    workflows: WorkflowLibrary
    artifacts: ArtifactStore
    calls: list[str]
    """The names of what was asked of the host, in order."""

    async def run(self, code: str, timeout: float | None = 60) -> ExecutionResult:
        return await self.executor.run(code, timeout=timeout)

    async def value(self, code: str) -> Any:
        """What the code comes to; it must not fail."""
        result = await self.run(code)
        assert result.error is None, result.error
        return result.value


Begin = Callable[..., Inside]


@pytest.fixture
async def begin(executor_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Begin]:
    """`begin(tools=handler)` gives a session; all that it began is closed after the test."""
    made: list[Inside] = []
    engine = {"docker_host": request.getfixturevalue("docker_engine")} if executor_kind == "container" else {}

    def beginning(**more: Handler) -> Inside:
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
        made.append(Inside(executor, workflows, artifacts, calls))
        return made[-1]

    yield beginning
    for inside in made:
        await asyncio.wait_for(inside.executor.close(), 60)
        await inside.workflows.close()
        await inside.artifacts.close()


@pytest.fixture
def inside(begin: Begin) -> Inside:
    return begin()
