"""`with_raw_response`: calls that return the HTTP answer as well."""

import functools
from collections.abc import Callable
from typing import Any

import httpx2

from carrel.compat.codeset.errors import last_response


class APIResponse:
    """The last HTTP answer of a call, and what the call returns."""

    def __init__(self, response: httpx2.Response | None, parsed: Any) -> None:
        assert response is not None, "every call has an answer"
        self.http_response = response
        self.status_code = response.status_code
        self.headers = response.headers
        self._parsed = parsed

    def parse(self) -> Any:
        return self._parsed


class AsyncAPIResponse(APIResponse):
    async def parse(self) -> Any:
        return self._parsed


class RawResponses:
    """The calls of a client or a resource; each returns an `APIResponse`."""

    def __init__(self, target: Any, is_async: bool) -> None:
        self._target = target
        self._is_async = is_async

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return RawResponses(found, self._is_async)
        return _raw_async(found) if self._is_async else _raw(found)


def _raw(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def raw(*arguments: Any, **options: Any) -> APIResponse:
        parsed = call(*arguments, **options)
        return APIResponse(last_response.get(), parsed)

    return raw


def _raw_async(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    async def raw(*arguments: Any, **options: Any) -> AsyncAPIResponse:
        parsed = await call(*arguments, **options)
        return AsyncAPIResponse(last_response.get(), parsed)

    return raw
