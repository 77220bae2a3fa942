"""The groups of calls of codeset; one class serves both clients, because it only passes arguments on."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from carrel.compat.codeset import types
from carrel.compat.codeset.options import NOT_GIVEN, Omit, Seconds, given, omit
from carrel.compat.codeset.raw_response import RawResponses
from carrel.compat.codeset.types import sessions as session_types

if TYPE_CHECKING:
    from carrel.compat.codeset.client import BaseClient

Headers = Mapping[str, str] | None
Query = Mapping[str, object] | None

POLL_INTERVAL = 3.0
"""The default of the original; here it means that the server holds its answer until there is a result."""


class Resource:
    """A group of calls. On AsyncCodeset each returns a coroutine."""

    def __init__(self, client: BaseClient) -> None:
        self._client = client

    @property
    def with_raw_response(self) -> RawResponses:
        """The same calls; each returns an `APIResponse`."""
        return RawResponses(self, self._client.is_async)

    def _call(self, name: str, model: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        return self._client.call(name, model, given(arguments) | given(options))


def _options(headers: Headers, query: Query, body: object, timeout: Seconds, poll_interval: float = 3.0) -> Any:
    interval = None if poll_interval == POLL_INTERVAL else poll_interval
    options = {"extra_headers": headers, "extra_query": query, "extra_body": body, "poll_interval": interval}
    return {name: value for name, value in options.items() if value is not None} | {"timeout": timeout}


class HealthResource(Resource):
    def check(
        self,
        *,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("health.check", types.HealthCheckResponse, {}, options)


class DatasetsResource(Resource):
    def list(
        self,
        *,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("datasets.list", types.DatasetListResponseItem, {}, options)


class SamplesResource(Resource):
    def list(
        self,
        *,
        dataset: str | Omit | None = omit,
        page: int | Omit | None = omit,
        page_size: int | Omit | None = omit,
        search: str | Omit | None = omit,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {"dataset": dataset, "page": page, "page_size": page_size, "search": search}
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("samples.list", types.SampleListResponse, arguments, options)

    def download(
        self,
        sample_id: str,
        *,
        dataset: str,
        version: int | Omit | None = omit,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        """Return the sample's files as the bytes of a .tar.gz."""
        arguments = {"sample_id": sample_id, "dataset": dataset, "version": version}
        return self._call(
            "samples.download", None, arguments, _options(extra_headers, extra_query, extra_body, timeout)
        )


class VerifyResource(Resource):
    def start(
        self,
        session_id: str,
        *,
        poll_interval: float = POLL_INTERVAL,
        wait_for_completion: bool = True,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {"session_id": session_id, "wait_for_completion": wait_for_completion}
        options = _options(extra_headers, extra_query, extra_body, timeout, poll_interval)
        return self._call("sessions.verify.start", session_types.VerifyStatusResponse, arguments, options)

    def status(
        self,
        job_id: str,
        *,
        session_id: str,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {"job_id": job_id, "session_id": session_id}
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("sessions.verify.status", session_types.VerifyStatusResponse, arguments, options)


class SessionsResource(Resource):
    def __init__(self, client: BaseClient) -> None:
        super().__init__(client)
        self.verify = VerifyResource(client)

    def create(
        self,
        *,
        dataset: str,
        sample_id: str,
        ttl_minutes: int | Omit = omit,
        poll_interval: float = POLL_INTERVAL,
        wait_for_ready: bool = True,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {
            "dataset": dataset,
            "sample_id": sample_id,
            "ttl_minutes": ttl_minutes,
            "wait_for_ready": wait_for_ready,
        }
        options = _options(extra_headers, extra_query, extra_body, timeout, poll_interval)
        return self._call("sessions.create", types.Session, arguments, options)

    def retrieve(
        self,
        session_id: str,
        *,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("sessions.retrieve", types.Session, {"session_id": session_id}, options)

    def close(
        self,
        session_id: str,
        *,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("sessions.close", types.SessionCloseResponse, {"session_id": session_id}, options)

    def execute_command(
        self,
        session_id: str,
        *,
        command: str,
        command_timeout: int | Omit = omit,
        poll_interval: float = POLL_INTERVAL,
        wait_for_completion: bool = True,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {
            "session_id": session_id,
            "command": command,
            "command_timeout": command_timeout,
            "wait_for_completion": wait_for_completion,
        }
        options = _options(extra_headers, extra_query, extra_body, timeout, poll_interval)
        return self._call("sessions.execute_command", types.Interaction, arguments, options)

    def get_interaction(
        self,
        session_id: str,
        interaction_id: str,
        *,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {"session_id": session_id, "interaction_id": interaction_id}
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("sessions.get_interaction", types.Interaction, arguments, options)

    def str_replace(
        self,
        session_id: str,
        *,
        file_path: str,
        str_to_insert: str,
        str_to_replace: str,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        arguments = {
            "session_id": session_id,
            "file_path": file_path,
            "str_to_insert": str_to_insert,
            "str_to_replace": str_to_replace,
        }
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("sessions.str_replace", types.SessionStrReplaceResponse, arguments, options)

    # The last method, because after it `list` means this method.
    def list(
        self,
        *,
        extra_headers: Headers = None,
        extra_query: Query = None,
        extra_body: object | None = None,
        timeout: Seconds = NOT_GIVEN,
    ) -> Any:
        options = _options(extra_headers, extra_query, extra_body, timeout)
        return self._call("sessions.list", types.SessionListResponse, {}, options)


def converted(model: Any, answer: Any) -> Any:
    """Return carrel's answer as a model of codeset; bytes stay as they are."""
    if model is None:
        return answer
    if isinstance(answer, builtins.list):
        return [converted(model, each) for each in answer]
    return model.model_validate(answer.model_dump(exclude_unset=True))
