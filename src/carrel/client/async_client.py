"""AsyncClient: a server's sessions from a program that waits with asyncio."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from typing import Any, Self, Unpack

import httpx2

from carrel.client.line import AsyncLine, Options, Wire, address, headers_for, http_settings
from carrel.client.offers import DatasetOffers, HealthCheck, SampleOffers
from carrel.client.sessions import Sessions
from carrel.client.verbs import AsyncRemoteSession


class AsyncClient:
    """Settings: `base_url` (or CARREL_BASE_URL) and `api_key` (or CARREL_API_KEY); `timeout` in seconds for one answer
    of the server; `max_retries` of what is safe to ask again; `default_headers` and `default_query` for every request;
    `http_client`, to bring your own."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 300.0,
        max_retries: int = 4,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, Any] | None = None,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        url = address(base_url, http_client)
        self.base_url = str(url)
        key = os.environ.get("CARREL_API_KEY") if api_key is None else api_key
        http = http_client or httpx2.AsyncClient(**http_settings(url))
        headers = headers_for(key, default_headers)
        self._use(
            Wire(AsyncLine(http, url), timeout=timeout, retries=max_retries, headers=headers, query=default_query)
        )

    def _use(self, wire: Wire) -> None:
        self._wire = wire
        self.health = HealthCheck(wire)
        self.datasets = DatasetOffers(wire)
        self.samples = SampleOffers(wire)
        self.sessions: Sessions[AsyncRemoteSession] = Sessions(wire, AsyncRemoteSession.of)

    def with_options(self, **options: Unpack[Options]) -> Self:
        """The same client with other settings, on the same connections."""
        other = copy(self)
        other._use(self._wire.with_options(options))
        return other

    def __repr__(self) -> str:
        return f"AsyncClient(base_url={self.base_url!r})"

    async def close(self) -> None:
        """Let go of the connections; sessions go on."""
        await self._wire.line.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
