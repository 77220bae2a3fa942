"""The executor of a sample's place: its files, packages and set-up are made ready when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from carrel.execution.config import SandboxMode, SubprocessConfig
from carrel.execution.live_session import LiveSession
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.tasks.place import Prepared, make_ready
from carrel.tasks.sample import Sample


class SampleExecutor(SubprocessExecutor):
    """As its parent, in the sample's workspace. Starting raises FilesRefused, EnvironmentFailed or SetupFailed."""

    def __init__(self, sample: Sample, cache: Path | None = None, *, sandbox: SandboxMode | None = None) -> None:
        super().__init__(SubprocessConfig(default_timeout=None, sandbox=sandbox, network=sample.environment.network))
        self.sample = sample
        self.cache = cache
        self.prepared: Prepared | None = None
        """What the place was opened on, once it is."""

    def _twin(self) -> Self:
        twin = type(self)(self.sample, self.cache)
        twin.config, twin.prepared, twin.handlers = self.config, self.prepared, dict(self.handlers)
        return twin

    async def _started(self) -> LiveSession:
        if self.prepared is None:
            self.prepared = await make_ready(self.sample, self.cache, sandbox=self.config.sandbox)
            self.config, self.holds = self.prepared.config, self.prepared
        return await super()._started()
