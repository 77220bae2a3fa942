"""Executors of every kind, closed after each test, and a look at what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from carrel.execution.executor import Executor
from tests.execution.kinds import DIFFERENCES, KINDS, make

Start = Callable[..., Executor]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "executor_kind" in metafunc.fixturenames:
        promises = [mark.args[0] for mark in metafunc.definition.iter_markers("promise")]
        kinds = [kind for kind in KINDS if not any((kind, promise) in DIFFERENCES for promise in promises)]
        metafunc.parametrize("executor_kind", kinds)


@pytest.fixture
async def start(executor_kind: str) -> AsyncIterator[Start]:
    """`start(default_timeout=1, handlers={…})` gives an executor of the kind; all are closed after the test."""
    made: list[Executor] = []

    def begin(**settings: Any) -> Executor:
        executor = make(executor_kind, **settings)
        made.append(executor)
        return executor

    yield begin
    await asyncio.wait_for(asyncio.gather(*(executor.close() for executor in made)), 30)


@pytest.fixture
async def executor(start: Start) -> Executor:
    return start()
