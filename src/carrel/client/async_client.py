"""AsyncClient: a server's sessions from a program that waits with asyncio."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Self

import httpx2

from carrel.client.line import AsyncLine, Wire, address, headers_for, http_settings
from carrel.client.offers import DatasetOffers, HealthCheck, SampleOffers
from carrel.client.sessions import Sessions
from carrel.client.verbs import AsyncRemoteSession


class AsyncClient:
    """Settings: `base_url` (or CARREL_BASE_URL) and `api_key` (or CARREL_API_KEY); `timeout` in seconds for one answer
    of the server; `max_retries` of what is safe to ask again; `default_headers`; `http_client`, to bring your own."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 300.0,
        max_retries: int = 4,
        default_headers: Mapping[str, str] | None = None,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        url = address(base_url)
        self.base_url = str(url)
        key = os.environ.get("CARREL_API_KEY") if api_key is None else api_key
        http = http_client or httpx2.AsyncClient(**http_settings(url))
        http.base_url = url
        self._wire = Wire(
            AsyncLine(http), timeout=timeout, retries=max_retries, headers=headers_for(key, default_headers)
        )
        self.health = HealthCheck(self._wire)
        self.datasets = DatasetOffers(self._wire)
        self.samples = SampleOffers(self._wire)
        self.sessions: Sessions[AsyncRemoteSession] = Sessions(self._wire, AsyncRemoteSession.of)

    def __repr__(self) -> str:
        return f"AsyncClient(base_url={self.base_url!r})"

    async def close(self) -> None:
        """Let go of the connections; sessions go on."""
        await self._wire.line.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
