"""What the routes share: their dependencies, and the HTTP status of each error."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from carrel.errors import (
    ApprovalNotFound,
    CarrelError,
    ConfigurationError,
    DatasetInvalid,
    DatasetNotFound,
    FilesRefused,
    ForkRefused,
    JobNotFound,
    KeyNotAccepted,
    MessageRefused,
    NodeUnreachable,
    NotFoundThere,
    PointNotFound,
    RequestRefused,
    SampleNotFound,
    SessionElsewhere,
    SessionNotFound,
    StorageError,
    TooManySessions,
)
from carrel.request_id import current_request, with_request_id
from carrel.server.auth import ApiKey
from carrel.server.middleware import Metrics
from carrel.server.records import now
from carrel.server.session_manager import SessionManager
from carrel.text import escape_surrogates
from carrel.wire.answers import Problem, SessionRecord
from carrel.wire.requests import parse_integer

MAX_WAIT = 60.0
"""Seconds for which `Prefer: wait=` can hold an answer."""
EVENT_STREAM = "text/event-stream"
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d+(?:\.\d+)?)", re.IGNORECASE)

bearer = HTTPBearer(auto_error=False, description="A key that `carrel keys add NAME` created.")
PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No key, or a wrong one."},
    403: {"model": Problem, "description": "This key may not do that."},
    404: {"model": Problem, "description": "Unknown, or another user's."},
    409: {"model": Problem, "description": "Not possible in the present state."},
    413: {"model": Problem, "description": "The request is too large."},
    421: {"model": Problem, "description": "Another node of the cluster has the session."},
    422: {"model": Problem, "description": "The body or a parameter is wrong; each field is named."},
    429: {"model": Problem, "description": "Too many requests or sessions; see Retry-After."},
    503: {"model": Problem, "description": "The store of the server does not work at the moment; see Retry-After."},
}


def problem(description: str) -> dict[str, Any]:
    """Describe an error of one route, instead of the general text of `PROBLEMS`."""
    return {"model": Problem, "description": description}


# All dependencies are async: FastAPI runs a plain function in a thread, which costs more than what these do.


async def _manager(request: Request) -> SessionManager:
    manager: SessionManager = request.app.state.manager
    return manager


async def _user(request: Request) -> str:
    user: str = request.state.user
    return user


async def _key(request: Request) -> ApiKey:
    key: ApiKey = request.state.key
    return key


async def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


async def _wait(
    prefer: Annotated[str | None, Header(description="`wait=SECONDS`: hold the answer")] = None,
) -> float | None:
    """Return the seconds of `Prefer: wait=SECONDS` (RFC 7240), or None."""
    found = _WAIT.search(prefer or "")
    return min(float(found[1]), MAX_WAIT) if found else None


async def _request_id(
    request: Request,
    key: Annotated[str | None, Header(alias="Idempotency-Key", max_length=500, description="Do it once")] = None,
) -> str | None:
    """Return what the ids of created objects are derived from, for a request that may be repeated."""
    return getattr(request.state, "request_id", None)


async def _wants_events(request: Request) -> bool:
    """Return whether the client wants events instead of one answer at the end."""
    return EVENT_STREAM in request.headers.get("accept", "")


async def _file_path(request: Request, path: str) -> str:
    """Return the path of a file; bytes that are not UTF-8 are in it as in Python's file names."""
    if "\ufffd" not in path:
        return path
    # Decoding the URL has lost such bytes.
    raw = request.scope.get("raw_path", b"").partition(b"/files/")[2]
    return os.fsdecode(unquote_to_bytes(raw)) if raw else path


ManagerDep = Annotated[SessionManager, Depends(_manager)]
UserDep = Annotated[str, Depends(_user)]
FilePathDep = Annotated[str, Depends(_file_path)]
KeyDep = Annotated[ApiKey, Depends(_key)]
WaitDep = Annotated[float | None, Depends(_wait)]
RequestIdDep = Annotated[str | None, Depends(_request_id)]
MetricsDep = Annotated[Metrics, Depends(_metrics)]
WantsEventsDep = Annotated[bool, Depends(_wants_events)]


def with_duration(record: SessionRecord) -> SessionRecord:
    """Return a session's record with its duration so far."""
    if record.duration_seconds is not None or record.created_at is None:
        return record
    return record.model_copy(update={"duration_seconds": (now() - record.created_at).total_seconds()})


# --- errors ---------------------------------------------------------------------------------------------------------


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with `{"detail": …, "code": …}` and a status."""
    app.add_exception_handler(CarrelError, _carrel_error)
    app.add_exception_handler(OSError, _file_error)
    app.add_exception_handler(RequestValidationError, _wrong_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _carrel_error(request: Request, problem: Exception) -> JSONResponse:
    match problem:
        case DatasetNotFound():
            # Without the folder of the datasets, which is not the users' business.
            return _error(404, DatasetNotFound(problem.public_message))
        case SessionNotFound() | PointNotFound() | SampleNotFound() | JobNotFound() | ApprovalNotFound():
            return _error(404, problem)
        case NodeUnreachable():
            return _error(503, problem, {"Retry-After": "1"})
        case SessionElsewhere():
            return _error(421, problem)
        case TooManySessions():
            return _error(429, problem, {"Retry-After": "5"})
        case DatasetInvalid() | FilesRefused():
            manager: SessionManager = request.app.state.manager
            return _conflict(type(problem)(manager.hide_paths(str(problem))))
        case ConfigurationError() | MessageRefused():
            return _error(422, problem)
        case StorageError() | ForkRefused(__cause__=StorageError()):
            return _error(503, problem, {"Retry-After": "5"})
        case _:
            return _conflict(problem)


async def _file_error(request: Request, problem: Exception) -> JSONResponse:
    """Answer an error of a file in a workspace; carrel's own errors that are OSErrors do not come here."""
    if isinstance(problem, FileNotFoundError | NotADirectoryError):
        return _error(404, problem)
    return _conflict(problem)


_NO_JSON = "the Content-Type of the body is not JSON; send `Content-Type: application/json` with it"


async def _wrong_body(request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, RequestValidationError)
    found = escape_surrogates([_fault(error) for error in problem.errors()])
    if "json" not in request.headers.get("content-type", "application/json"):
        found = [{"loc": ["header", "content-type"], "msg": _NO_JSON, "type": "content_type"}]
    return JSONResponse({"detail": found, "code": "RequestRefused"}, 422)


def _fault(error: dict[str, Any]) -> dict[str, Any]:
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        message = f"the body is not JSON: {error['ctx']['error']}"
    return {"loc": error["loc"], "msg": message, "type": error["type"]}


class JsonRoute(APIRoute):
    """A route that answers every body that is not valid JSON with 422, whatever Python's parser raises."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, parse_int=parse_integer)
        except UnicodeDecodeError as problem:
            raise json.JSONDecodeError("it is not UTF-8", "", problem.start) from None
        except RecursionError:
            raise json.JSONDecodeError("it is nested too deeply", "", 0) from None


async def _http_error(request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, HTTPException)
    kind = {403: KeyNotAccepted, 404: NotFoundThere}.get(problem.status_code, RequestRefused)
    body = {"detail": problem.detail, "code": kind.__name__}
    return JSONResponse(body, problem.status_code, headers=dict(problem.headers or {}))


async def _bug(request: Request, problem: Exception) -> JSONResponse:
    """Answer an unexpected error; its traceback is in the server's log."""
    # This handler stands outside of the middlewares.
    id_ = current_request.get() or ""
    detail = with_request_id("a bug in carrel; see the server's log")
    return JSONResponse({"detail": detail, "code": type(problem).__name__}, 500, headers={"X-Request-Id": id_})


def _conflict(problem: Exception) -> JSONResponse:
    # The codeset client repeats a 409 by itself, which would not help.
    return _error(409, problem, {"X-Should-Retry": "false"})


def _error(status: int, problem: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = type(problem).__name__
    return JSONResponse({"detail": escape_surrogates(str(problem)) or kind, "code": kind}, status, headers=headers)
