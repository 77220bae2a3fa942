"""Executors of every kind, closed after each test, and a look at what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from carrel.execution.executor import Executor
from tests.execution.kinds import DIFFERENCES, IN_CONTAINERS, KINDS, make

Start = Callable[..., Executor]


class Here:
    """A handler with which code says how far it has come: `start(handlers={"here": here})`, `await here.came()`.

    `here()` returns at once; `here.wait()` when the test lets it go on.
    """

    def __init__(self) -> None:
        self._came, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._came.set()
        if name == "here.wait":
            await self.go_on.wait()

    async def came(self) -> None:
        await asyncio.wait_for(self._came.wait(), 60)
        self._came.clear()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "executor_kind" in metafunc.fixturenames:
        promises = [mark.args[0] for mark in metafunc.definition.iter_markers("promise")]
        kinds = [kind for kind in KINDS if not any((kind, promise) in DIFFERENCES for promise in promises)]
        at_length = "container" in kinds and metafunc.definition.name not in IN_CONTAINERS
        slow = [pytest.param("container", marks=pytest.mark.slow)] if at_length else []
        metafunc.parametrize("executor_kind", [*(kind for kind in kinds if kind != "container" or not slow), *slow])


@pytest.fixture
async def start(executor_kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    """`start(default_timeout=1, handlers={…})` gives an executor of the kind; all are closed after the test."""
    made: list[Executor] = []
    # What is interrupted stops at once; on a busy machine that may take longer than an executor waits by itself.
    patient = {"grace": 30.0}
    engine = {"docker_host": request.getfixturevalue("docker_engine")} if executor_kind == "container" else {}

    def begin(**settings: Any) -> Executor:
        executor = make(executor_kind, **{**patient, **engine, **settings})
        made.append(executor)
        return executor

    yield begin
    await asyncio.wait_for(asyncio.gather(*(executor.close() for executor in made)), 60)


@pytest.fixture
async def executor(start: Start, executor_kind: str) -> Executor:
    executor = start()
    if executor_kind == "container":
        # Tests look at it a moment after they have asked; a container takes longer to be there at all.
        await executor.start()
    return executor
