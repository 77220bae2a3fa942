"""The two clients of codeset, on those of carrel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self

import httpx2

from carrel.client import AsyncClient as CarrelAsyncClient
from carrel.client import Client as CarrelClient
from carrel.compat.codeset.errors import codeset_errors, last_response
from carrel.compat.codeset.resources import (
    DEFAULT_TIMEOUT,
    NOT_GIVEN,
    DatasetsResource,
    HealthResource,
    NotGiven,
    RawResponses,
    SamplesResource,
    Seconds,
    SessionsResource,
    converted,
    seconds,
)

DEFAULT_MAX_RETRIES = 0


class BaseClient:
    """What both clients share: settings, and the groups of calls."""

    is_async: ClassVar[bool]
    _client_class: ClassVar[Any]
    _http_class: ClassVar[type]

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | httpx2.URL | None = None,
        timeout: Seconds = NOT_GIVEN,
        max_retries: int = DEFAULT_MAX_RETRIES,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, object] | None = None,
        http_client: Any = None,
    ) -> None:
        if http_client is not None and not isinstance(http_client, self._http_class):
            raise TypeError(f"http_client must be an httpx2.{self._http_class.__name__}, not {http_client!r:.60}")
        if api_key is None:
            api_key = os.environ.get("CODESET_API_KEY", os.environ.get("CARREL_API_KEY"))
        self.api_key = api_key
        self.timeout = DEFAULT_TIMEOUT if isinstance(timeout, NotGiven) else timeout
        self.max_retries = max_retries
        self._headers = dict(default_headers or {})
        self._query = dict(default_query or {})
        base_url = base_url or os.environ.get("CODESET_BASE_URL")
        self._client = self._client_class(
            base_url=None if base_url is None else str(base_url),
            api_key=self.api_key,
            timeout=seconds(self.timeout),
            max_retries=max_retries,
            default_headers=self._headers,
            default_query=self._query,
            http_client=http_client,
        )
        self._http = self._client._transport.http
        self.base_url = httpx2.URL(self._client.base_url.rstrip("/") + "/")
        self._note_answers()
        self.health = HealthResource(self)
        self.datasets = DatasetsResource(self)
        self.samples = SamplesResource(self)
        self.sessions = SessionsResource(self)

    @property
    def with_raw_response(self) -> RawResponses:
        """The same calls; each returns an `APIResponse`."""
        return RawResponses(self, self.is_async)

    def copy(
        self,
        *,
        api_key: str | None = None,
        base_url: str | httpx2.URL | None = None,
        timeout: Seconds = NOT_GIVEN,
        http_client: Any = None,
        max_retries: int | NotGiven = NOT_GIVEN,
        default_headers: Mapping[str, str] | None = None,
        set_default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, object] | None = None,
        set_default_query: Mapping[str, object] | None = None,
    ) -> Self:
        """Return a client with other settings, on the same connections; `set_…` replaces the defaults."""
        return type(self)(
            api_key=api_key or self.api_key,
            base_url=base_url or self.base_url,
            timeout=self.timeout if isinstance(timeout, NotGiven) else timeout,
            http_client=http_client or self._http,
            max_retries=self.max_retries if isinstance(max_retries, NotGiven) else max_retries,
            default_headers=_merged("headers", self._headers, default_headers, set_default_headers),
            default_query=_merged("query", self._query, default_query, set_default_query),
        )

    with_options = copy

    def call(self, name: str, model: Any, arguments: dict[str, Any]) -> Any:
        """Make one call of carrel's client, and convert its answer and its errors."""
        raise NotImplementedError

    def _method(self, name: str, arguments: Mapping[str, Any]) -> Any:
        headers = {**self._headers, **(arguments.get("extra_headers") or {})}
        if self.api_key is None and not any(header.lower() == "authorization" for header in headers):
            raise TypeError("no API key: give api_key=, or set CODESET_API_KEY or CARREL_API_KEY")
        return attrgetter(name)(self._client)

    def _note_answers(self) -> None:
        note = _note_answer_async if self.is_async else _note_answer
        hooks = self._http.event_hooks
        if note not in hooks["response"]:
            self._http.event_hooks = {**hooks, "response": [*hooks["response"], note]}


class Codeset(BaseClient):
    """A client of a carrel server that blocks."""

    is_async = False
    _client_class = CarrelClient
    _http_class = httpx2.Client

    def call(self, name: str, model: Any, arguments: dict[str, Any]) -> Any:
        method = self._method(name, arguments)
        with codeset_errors():
            return converted(model, method(**arguments))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCodeset(BaseClient):
    """A client of a carrel server whose calls are awaited."""

    is_async = True
    _client_class = CarrelAsyncClient
    _http_class = httpx2.AsyncClient

    async def call(self, name: str, model: Any, arguments: dict[str, Any]) -> Any:
        method = self._method(name, arguments)
        with codeset_errors():
            return converted(model, await method(**arguments))

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _merged(name: str, mine: dict[str, Any], more: Any, instead: Any) -> dict[str, Any]:
    if more is not None and instead is not None:
        raise ValueError(f"give default_{name} or set_default_{name}, not both")
    return dict(instead) if instead is not None else {**mine, **(more or {})}


def _note_answer(response: httpx2.Response) -> None:
    last_response.set(response)


async def _note_answer_async(response: httpx2.Response) -> None:
    last_response.set(response)
