"""The groups of calls of codeset; one class serves both clients, because it only passes arguments on."""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import httpx2

from carrel.compat.codeset import types
from carrel.compat.codeset.errors import last_response
from carrel.compat.codeset.types import sessions as session_types

if TYPE_CHECKING:
    from carrel.compat.codeset.client import BaseClient

Timeout = httpx2.Timeout
DEFAULT_TIMEOUT = Timeout(timeout=300, connect=5.0)
POLL_INTERVAL = 3.0
"""The default of the original; here it means that the server holds its answer until there is a result."""

# --- arguments --------------------------------------------------------------------------------------------------------


class NotGiven:
    """The default of arguments for which None has a meaning."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NOT_GIVEN"


class Omit:
    """The default of arguments that are then not sent."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "omit"


NOT_GIVEN = not_given = NotGiven()
omit = Omit()

Seconds = float | Timeout | None | NotGiven


class RequestOptions(TypedDict, total=False):
    """What every call accepts, by keyword."""

    extra_headers: Mapping[str, str] | None
    extra_query: Mapping[str, object] | None
    extra_body: object | None
    timeout: Seconds


_OPTIONS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=NOT_GIVEN if name == "timeout" else None)
    for name in RequestOptions.__annotations__
]

Method = TypeVar("Method", bound=Callable[..., Any])


def calls(name: str, model: Any) -> Callable[[Method], Method]:
    """Make a method a call of carrel's client; its signature shows the options of a request one by one."""

    def decorate(method: Method) -> Method:
        declared = inspect.signature(method)
        named = [each for each in declared.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        signature = declared.replace(parameters=[*named, *_OPTIONS])

        @functools.wraps(method)
        def call(self: Resource, *args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(self, *args, **kwargs).arguments
            del arguments["self"]
            if arguments.get("poll_interval") == POLL_INTERVAL:
                del arguments["poll_interval"]
            given = {key: seconds(value) for key, value in arguments.items() if not isinstance(value, NotGiven | Omit)}
            return self._client.call(name, model, given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def seconds(value: Any) -> Any:
    """Return a time limit as a number, of an object with several limits the one for an answer; else the value."""
    return value.read if isinstance(value, Timeout) else value


def converted(model: Any, answer: Any) -> Any:
    """Return carrel's answer as a model of codeset; bytes stay as they are."""
    if model is None:
        return answer
    if isinstance(answer, builtins.list):
        return [converted(model, each) for each in answer]
    return model.model_validate(answer.model_dump(exclude_unset=True))


# --- calls ------------------------------------------------------------------------------------------------------------


class Resource:
    """A group of calls. On AsyncCodeset each returns a coroutine."""

    def __init__(self, client: BaseClient) -> None:
        self._client = client

    @property
    def with_raw_response(self) -> RawResponses:
        """The same calls; each returns an `APIResponse`."""
        return RawResponses(self, self._client.is_async)


class HealthResource(Resource):
    @calls("health.check", types.HealthCheckResponse)
    def check(self, **options: Unpack[RequestOptions]) -> Any: ...


class DatasetsResource(Resource):
    @calls("datasets.list", types.DatasetListResponseItem)
    def list(self, **options: Unpack[RequestOptions]) -> Any: ...


class SamplesResource(Resource):
    @calls("samples.list", types.SampleListResponse)
    def list(
        self,
        *,
        dataset: str | Omit | None = omit,
        page: int | Omit | None = omit,
        page_size: int | Omit | None = omit,
        search: str | Omit | None = omit,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    @calls("samples.download", None)
    def download(
        self, sample_id: str, *, dataset: str, version: int | Omit | None = omit, **options: Unpack[RequestOptions]
    ) -> Any:
        """Return the sample's files as the bytes of a .tar.gz."""


class VerifyResource(Resource):
    @calls("sessions.verify.start", session_types.VerifyStatusResponse)
    def start(
        self,
        session_id: str,
        *,
        poll_interval: float = POLL_INTERVAL,
        wait_for_completion: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    @calls("sessions.verify.status", session_types.VerifyStatusResponse)
    def status(self, job_id: str, *, session_id: str, **options: Unpack[RequestOptions]) -> Any: ...


class SessionsResource(Resource):
    def __init__(self, client: BaseClient) -> None:
        super().__init__(client)
        self.verify = VerifyResource(client)

    @calls("sessions.create", types.Session)
    def create(
        self,
        *,
        dataset: str,
        sample_id: str,
        ttl_minutes: int | Omit = omit,
        poll_interval: float = POLL_INTERVAL,
        wait_for_ready: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    @calls("sessions.retrieve", types.Session)
    def retrieve(self, session_id: str, **options: Unpack[RequestOptions]) -> Any: ...

    @calls("sessions.close", types.SessionCloseResponse)
    def close(self, session_id: str, **options: Unpack[RequestOptions]) -> Any: ...

    @calls("sessions.execute_command", types.Interaction)
    def execute_command(
        self,
        session_id: str,
        *,
        command: str,
        command_timeout: int | Omit = omit,
        poll_interval: float = POLL_INTERVAL,
        wait_for_completion: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    @calls("sessions.get_interaction", types.Interaction)
    def get_interaction(self, session_id: str, interaction_id: str, **options: Unpack[RequestOptions]) -> Any: ...

    @calls("sessions.str_replace", types.SessionStrReplaceResponse)
    def str_replace(
        self,
        session_id: str,
        *,
        file_path: str,
        str_to_insert: str,
        str_to_replace: str,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    # The last method, because after it `list` means this method.
    @calls("sessions.list", types.SessionListResponse)
    def list(self, **options: Unpack[RequestOptions]) -> Any: ...


# --- raw responses ----------------------------------------------------------------------------------------------------


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
