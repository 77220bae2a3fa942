"""What routes have in common: who asks, how long they wait, and what an error becomes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from carrel.errors import (
    CarrelError,
    ConfigurationError,
    DatasetInvalid,
    DatasetNotFound,
    ExecutionError,
    FilesRefused,
    ForkRefused,
    JobNotFound,
    KeyNotAccepted,
    MessageRefused,
    NotFoundThere,
    RequestRefused,
    SampleNotFound,
    SessionNotFound,
    SessionNotReady,
    StorageError,
    TooManySessions,
)
from carrel.server.front_desk import FrontDesk
from carrel.server.keys import KnownKey
from carrel.server.metrics import Metrics
from carrel.wire.answers import Problem, SessionRecord
from carrel.wire.odd_values import escape_surrogates, parse_integer

LONGEST_WAIT = 60.0
EVENTS = "text/event-stream"
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d+(?:\.\d+)?)", re.IGNORECASE)

bearer = HTTPBearer(auto_error=False, description="A key that `carrel keys add NAME` has made.")
PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No key, or a wrong one."},
    403: {"model": Problem, "description": "What this key may not do."},
    404: {"model": Problem, "description": "Unknown, or another user's."},
    409: {"model": Problem, "description": "Not in a state for this."},
    413: {"model": Problem, "description": "More than may be sent at once."},
    422: {"model": Problem, "description": "The body or a parameter is wrong; each field is named."},
    429: {"model": Problem, "description": "Too many; Retry-After says when to try again."},
}


# Async, all of them: FastAPI gives a plain function a thread, and that costs more than what it does.


async def _desk(request: Request) -> FrontDesk:
    desk: FrontDesk = request.app.state.desk
    return desk


async def _user(request: Request) -> str:
    user: str = request.state.user
    return user


async def _key(request: Request) -> KnownKey:
    key: KnownKey = request.state.key
    return key


async def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


async def _wait(
    prefer: Annotated[str | None, Header(description="`wait=SECONDS`: hold the answer")] = None,
) -> float | None:
    """What `Prefer: wait=SECONDS` asks for (RFC 7240), or None."""
    found = _WAIT.search(prefer or "")
    return min(float(found[1]), LONGEST_WAIT) if found else None


async def _once(
    request: Request,
    key: Annotated[str | None, Header(alias="Idempotency-Key", max_length=500, description="Do it once")] = None,
) -> str | None:
    """From which the id of what is made is taken, for a request that may come again."""
    return getattr(request.state, "once", None)


async def _wants_events(request: Request) -> bool:
    """Whether who asks wants events, and not one answer at the end."""
    return EVENTS in request.headers.get("accept", "")


async def _file_path(request: Request, path: str) -> str:
    """The path of a file; bytes that are not UTF-8 are in it as Python has them in names of files."""
    if "\ufffd" not in path:
        return path
    # Decoding the address has lost such bytes.
    raw = request.scope.get("raw_path", b"").partition(b"/files/")[2]
    return os.fsdecode(unquote_to_bytes(raw)) if raw else path


Desk = Annotated[FrontDesk, Depends(_desk)]
User = Annotated[str, Depends(_user)]
FilePath = Annotated[str, Depends(_file_path)]
Key = Annotated[KnownKey, Depends(_key)]
Wait = Annotated[float | None, Depends(_wait)]
Once = Annotated[str | None, Depends(_once)]
Counts = Annotated[Metrics, Depends(_metrics)]
WantsEvents = Annotated[bool, Depends(_wants_events)]


def lasting(session: SessionRecord) -> SessionRecord:
    """With how long it has lasted so far."""
    if session.duration_seconds is not None or session.created_at is None:
        return session
    seconds = (datetime.now(UTC) - session.created_at).total_seconds()
    return session.model_copy(update={"duration_seconds": seconds})


def answer_errors(app: FastAPI) -> None:
    """Every error as `{"detail": …}` with the number that says whose turn it is."""
    app.add_exception_handler(CarrelError, _carrel_error)
    app.add_exception_handler(OSError, _file_error)
    app.add_exception_handler(RequestValidationError, _wrong_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _carrel_error(request: Request, problem: Exception) -> JSONResponse:
    match problem:
        case DatasetNotFound():
            # Where the server keeps its datasets is its own matter.
            return _told(404, DatasetNotFound(problem.public_message))
        case SessionNotFound() | SampleNotFound() | JobNotFound():
            return _told(404, problem)
        case TooManySessions():
            return _told(429, problem, {"Retry-After": "5"})
        case DatasetInvalid() | FilesRefused():
            desk: FrontDesk = request.app.state.desk
            return conflict(type(problem)(desk.without_folders(str(problem))))
        case SessionNotReady() | ForkRefused() | ExecutionError():
            return conflict(problem)
        case ConfigurationError() | MessageRefused():
            return _told(422, problem)
        case StorageError():
            return _told(503, problem, {"Retry-After": "5"})
        case _:
            return conflict(problem)


async def _file_error(request: Request, problem: Exception) -> JSONResponse:
    """Of a file in a place; carrel's own errors that are also OSError have been told by then."""
    if isinstance(problem, FileNotFoundError | NotADirectoryError):
        return _told(404, problem)
    return conflict(problem)


_NO_JSON = "the body is said to be something else than JSON; send `Content-Type: application/json` with it"


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
    """A route whose faulty JSON is always a 422, whatever Python's own parser says of it."""

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
    told = {"detail": problem.detail, "code": kind.__name__}
    return JSONResponse(told, problem.status_code, headers=dict(problem.headers or {}))


async def _bug(request: Request, problem: Exception) -> JSONResponse:
    """It is in the server's log, too; who asked cannot do anything about it."""
    return JSONResponse({"detail": "a bug in carrel; the server's log has it", "code": type(problem).__name__}, 500)


def conflict(problem: Exception) -> JSONResponse:
    # Clients of this wire try a 409 again by themselves, which helps nobody here.
    return _told(409, problem, {"X-Should-Retry": "false"})


def _told(status: int, problem: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = type(problem).__name__
    return JSONResponse({"detail": escape_surrogates(str(problem)) or kind, "code": kind}, status, headers=headers)
