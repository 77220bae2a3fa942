"""The client: settings, and the groups of calls."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Self, Unpack

import httpx2

from carrel.client._async.resources import AsyncApprovals, AsyncDatasets, AsyncHealth, AsyncNodes, AsyncSamples
from carrel.client._async.sessions import AsyncSessions
from carrel.client._async.transport import AsyncTransport
from carrel.client.transport import ClientOptions, check_names, http_settings, make_settings


class AsyncClient:
    """A client of a carrel server.

    `base_url` (or CARREL_BASE_URL) and `api_key` (or CARREL_API_KEY) name the server and the key; `timeout` is in
    seconds, for one answer; `max_retries` is for requests that are safe to repeat; `default_headers` and
    `default_query` are sent with every request; `http_client` replaces the HTTP client. One client may be used by many
    tasks or threads, the synchronous one also inside a running event loop."""

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
        settings = make_settings(base_url, api_key, timeout, max_retries, default_headers, default_query, http_client)
        self.base_url = str(settings.base)
        http = http_client or httpx2.AsyncClient(**http_settings(settings.base))
        self._use(AsyncTransport(http, settings))

    def _use(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self.health = AsyncHealth(transport)
        self.datasets = AsyncDatasets(transport)
        self.samples = AsyncSamples(transport)
        self.sessions = AsyncSessions(transport)
        self.approvals = AsyncApprovals(transport)
        self.nodes = AsyncNodes(transport)

    def with_options(self, **options: Unpack[ClientOptions]) -> Self:
        """Return the same client with other settings, on the same connections."""
        check_names(self.with_options, options)
        other = copy(self)
        other._use(AsyncTransport(self._transport.http, self._transport.settings.replaced(options)))
        return other

    def __repr__(self) -> str:
        return f"AsyncClient(base_url={self.base_url!r})"

    async def close(self) -> None:
        """Close the connections; sessions go on."""
        await self._transport.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
