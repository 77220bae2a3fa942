"""`carrel task run --server`: the samples of a server, and sessions there in which agents make their attempts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

from carrel.client import AsyncClient
from carrel.client._async.remote_session import AsyncRemoteSession
from carrel.errors import CarrelError, SampleNotFound
from carrel.tasks import Sample
from carrel.wire.answers import Interaction
from carrel.wire.requests import MAX_TTL_MINUTES
from carrel.wire.verification import Job

_MAX_WORKERS = 1000
_OVERHEAD_MINUTES = 60
"""Of a session, beyond the time limit of the agent: preparation and verification."""


class RemoteSamples:
    """The samples of a dataset on a server, and sessions with them."""

    def __init__(self, url: str, dataset: str) -> None:
        self._client = AsyncClient(base_url=url)
        self._dataset = dataset

    async def samples(self, names: Sequence[str]) -> list[Sample]:
        """Return the samples of these names, or all of them."""
        listed = await self._client.samples.list(dataset=self._dataset)
        found = {each.sample_id: Sample.model_validate(each.model_dump(exclude_none=True)) for each in listed.samples}
        if unknown := [name for name in names if name not in found]:
            raise SampleNotFound(f"the dataset {self._dataset!r} of the server has no sample {unknown[0]!r}")
        return [found[name] for name in names] if names else list(found.values())

    async def workers(self) -> int:
        """Return how many sessions the server has room for."""
        nodes = await self._client.nodes.list()
        return min(max(1, sum(node.free_slots for node in nodes)), _MAX_WORKERS)

    async def open(self, sample: Sample, env: Mapping[str, str], seconds: float | None) -> RemoteAttempt:
        """Create a session that lives as long as the attempt may take."""
        limit = sample.agent_timeout or seconds
        minutes = MAX_TTL_MINUTES if limit is None else math.ceil(limit / 60) + _OVERHEAD_MINUTES
        session = await self._client.sessions.create(
            dataset=sample.dataset, sample_id=sample.sample_id, ttl_minutes=min(minutes, MAX_TTL_MINUTES)
        )
        return RemoteAttempt(session, env)

    async def close(self) -> None:
        await self._client.close()


class RemoteAttempt:
    """A session on a server, with the agent's variables in each command."""

    def __init__(self, session: AsyncRemoteSession, env: Mapping[str, str]) -> None:
        self.id = session.id
        self._session = session
        self._env = env

    async def execute_command(self, command: str, *, timeout: float | None = 300) -> Interaction:
        return await self._session.execute_command(command, timeout=timeout, env=self._env or None)

    async def diff(self) -> str:
        return await self._session.diff()

    async def verify(self) -> Job:
        return await self._session.verify()

    async def close(self) -> None:
        # What the attempt found counts, also if its node is lost by now.
        with contextlib.suppress(CarrelError):
            await self._session.close()
