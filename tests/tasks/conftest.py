"""A sample, a cache and executors for one test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from carrel.tasks.environment import TaskExecutor, open_executor, prepare_sample
from carrel.tasks.sample import Sample
from tests.support.samples import calc

OpenSample = Callable[..., Awaitable[TaskExecutor]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def calc_sample(tmp_path: Path) -> Sample:
    """Python and pytest: `add` subtracts, `one` is right."""
    return calc(tmp_path / "calc")


@pytest.fixture
async def open_sample(cache: Path) -> AsyncIterator[OpenSample]:
    """`await open_sample(sample)` opens an executor on a sample; it is closed after the test."""
    opened: list[TaskExecutor] = []

    async def begin(sample: Sample, **more: Any) -> TaskExecutor:
        opened.append(await open_executor(await prepare_sample(sample, cache), **more))
        return opened[-1]

    yield begin
    await asyncio.wait_for(asyncio.gather(*(executor.close() for executor in opened)), 30)
