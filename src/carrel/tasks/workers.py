"""Many of the same, some at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def in_parallel(work: Callable[[Item], Awaitable[Result]], items: Sequence[Item], workers: int) -> list[Result]:
    """The results in the order of the items; when one raises or the caller is cancelled, the others end too."""
    turn = asyncio.Semaphore(workers)

    async def one(item: Item) -> Result:
        async with turn:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return [task.result() for task in tasks]
