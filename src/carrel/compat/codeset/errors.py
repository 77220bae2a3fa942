"""The error classes of codeset; each is also the one that carrel raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx2

from carrel.errors import (
    CommandNotRun,
    KeyNotAccepted,
    NotFoundThere,
    NotNow,
    RemoteError,
    RequestRefused,
    ServerFailed,
    ServerUnreachable,
    TooMany,
    WaitedTooLong,
)

last_response: ContextVar[httpx2.Response | None] = ContextVar("the last answer to a call", default=None)


class CodesetError(Exception):
    """The base of these errors."""


class APIError(CodesetError, RemoteError):
    """A request failed; `body` is the JSON of the answer, else its text, else None."""

    def __init__(self, message: str, request: Any, *, body: object | None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError, ServerFailed):
    """The answer is not what was expected."""

    def __init__(self, response: Any, body: object | None, *, message: str | None = None) -> None:
        super().__init__(message or "the answer of the server is not valid", response.request, body=body)
        self.response = response
        self.status_code = response.status_code


class APIStatusError(APIError):
    """The answer of the server is an error."""

    def __init__(self, message: str, *, response: Any, body: object | None) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code


class APIConnectionError(APIError, ServerUnreachable):
    """The server did not answer."""

    def __init__(self, *, message: str = "Connection error.", request: Any) -> None:
        super().__init__(message, request, body=None)


class APITimeoutError(APIConnectionError):
    """The server did not answer in time."""

    def __init__(self, request: Any) -> None:
        super().__init__(message="Request timed out.", request=request)


class BadRequestError(APIStatusError, RequestRefused):
    """HTTP 400."""


class AuthenticationError(APIStatusError, KeyNotAccepted):
    """HTTP 401."""


class PermissionDeniedError(APIStatusError, KeyNotAccepted):
    """HTTP 403."""


class NotFoundError(APIStatusError, NotFoundThere):
    """HTTP 404."""


class ConflictError(APIStatusError, NotNow):
    """HTTP 409."""


class UnprocessableEntityError(APIStatusError, RequestRefused):
    """HTTP 422."""


class RateLimitError(APIStatusError, TooMany):
    """HTTP 429."""


class InternalServerError(APIStatusError, ServerFailed):
    """HTTP 5xx."""


class CommandNotRunError(CodesetError, CommandNotRun):
    """A command could not be run at all."""


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


@contextmanager
def codeset_errors() -> Iterator[None]:
    """Raise carrel's errors of one call as those of codeset."""
    last_response.set(None)
    try:
        yield
    except WaitedTooLong as problem:
        if isinstance(problem.__cause__, httpx2.TimeoutException):
            raise TimeoutError(str(problem)) from problem
        raise
    except CommandNotRun as problem:
        raise CommandNotRunError(str(problem)) from problem
    except Exception as problem:
        # An error of the session that the server names has the answer as its cause.
        remote = problem if isinstance(problem, RemoteError) else problem.__cause__
        if not isinstance(remote, RemoteError) or isinstance(remote, APIError):
            raise
        raise _translated(problem, remote) from problem


def _translated(problem: Exception, remote: RemoteError) -> Exception:
    response, cause = last_response.get(), remote.__cause__
    if isinstance(cause, httpx2.TransportError):
        if isinstance(cause, httpx2.TimeoutException):
            return APITimeoutError(cause.request)
        return APIConnectionError(message=str(problem), request=cause.request)
    if response is None:
        return problem
    if response.status_code < 400:
        return APIResponseValidationError(response, body_of(response), message=str(problem))
    kind = _BY_STATUS.get(response.status_code)
    kind = kind or (InternalServerError if response.status_code >= 500 else APIStatusError)
    error = kind(str(problem), response=response, body=body_of(response))
    error.detail, error.retry_after = remote.detail, remote.retry_after
    return error


def body_of(response: httpx2.Response) -> object | None:
    """Return the JSON of an answer, else its text, else None."""
    try:
        body: object = response.json()
    except ValueError:
        return response.text or None
    return body
