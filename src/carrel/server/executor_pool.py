"""Executors that are started in advance, for samples that are requested repeatedly."""

from __future__ import annotations

from carrel.execution.warm_pool import WarmPool
from carrel.session import unavailable_handlers
from carrel.tasks.environment import (
    ContainerPool,
    ContainerSampleExecutor,
    PreparedSample,
    SampleExecutor,
    sample_executor,
)

Started = SampleExecutor | ContainerSampleExecutor


class ExecutorPool:
    """Keeps an executor of each sample, and a container of each image, that are requested repeatedly."""

    def __init__(self, max_executors: int) -> None:
        self._executors: WarmPool[Started] = WarmPool(max_executors)
        self._containers = ContainerPool(max_executors)

    async def take(self, prepared: PreparedSample) -> Started:
        """Return a started executor that belongs to the caller from now on."""
        return await self._executors.take(_name(prepared), lambda: self._start(prepared))

    async def _start(self, prepared: PreparedSample) -> Started:
        """Start an executor on a private copy of the sample's workspace; a session takes it over later."""
        executor = sample_executor(prepared.sample, prepared=prepared, containers=self._containers)
        executor.handlers.update(unavailable_handlers())
        try:
            await executor.start()
        except BaseException:
            await executor.close()
            raise
        return executor

    def samples(self) -> list[str]:
        """Return `dataset/sample_id` of the samples for which an executor waits."""
        return sorted({name.partition("@")[0] for name in self._executors.ready_names()})

    async def close(self) -> None:
        """Close all executors that were not taken."""
        await self._executors.close()
        await self._containers.close()


def _name(prepared: PreparedSample) -> str:
    """Return a name that is equal for executors that start alike.

    The settings name the folder of the files, and its name is their digest; the sample decides how it is verified."""
    return f"{prepared.sample.dataset}/{prepared.sample.sample_id}@{prepared.sample.version} {prepared.config!r}"
