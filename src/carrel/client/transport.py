"""What both clients share: requests, retry rules, time limits, and the parsing of answers."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from carrel.client.errors import retry_after
from carrel.errors import ConfigurationError, ServerFailed, ServerUnreachable, WaitedTooLong

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
FilePath = str | os.PathLike[str]
Progress = Callable[[int, int | None], object]
"""Called with the bytes so far, and all of them if that is known."""

HOLD = 20.0
"""Seconds that the server is asked to hold its answer until there is a result."""
NOT_HELD = 0.5
"""An answer that took less seconds was not held."""
HOLD_MARGIN = 30.0
"""Seconds that a server may hold an answer longer than it was asked to."""
CHUNK = 1 << 20
MAX_EVENT = 1 << 28
"""Bytes of one server-sent event; a result with all of its output is one."""
MAX_PAUSE = 8.0
"""Seconds between two attempts, if the server does not ask for more."""
KEEP_CONNECTION = 4.0
"""Seconds that an unused connection is kept: less than servers keep it, so that the client is the one to close it."""
NOT_STARTED = (429, 503)
"""The server has not started to process the request."""
UNCERTAIN = (500, 502, 504)
"""The server may have started to process the request, or even finished."""


class RequestOptions(TypedDict, total=False):
    """What every call accepts in addition to its own arguments."""

    timeout: float | None
    """Seconds for the whole call, including waiting; no limit by default."""
    extra_headers: Mapping[str, str] | None
    extra_query: Mapping[str, Any] | None
    extra_body: Mapping[str, Any] | None


class WaitOptions(RequestOptions, total=False):
    """What calls that wait for a result accept, too."""

    poll_interval: float | None
    """Seconds between two requests; by default, the server holds its answer until there is a result."""


class ClientOptions(TypedDict, total=False):
    """Settings of a client that can be changed for some calls."""

    timeout: float | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, Any] | None


@dataclass(frozen=True)
class Request:
    """One request, which may be sent several times."""

    method: str
    path: str
    action: str
    """What is requested, for error messages: `run a command in session ab12`."""
    query: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    content: bytes | Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """Whether sending it again is safe after it may have been processed."""
    deadline: float = float("inf")
    """On the monotonic clock; nothing waits beyond it."""
    hold: float | None = None
    """Seconds that the server is asked to hold its answer; None if it has nothing to hold."""
    poll_interval: float | None = None

    @property
    def time_left(self) -> float:
        """The seconds until the deadline."""
        return self.deadline - time.monotonic()

    def following(self, path: str, action: str) -> Request:
        """Return a GET request with the same options."""
        return replace(self, method="GET", path=path, action=action, json=None, content=None, repeatable=True)


def make_request(
    call: Callable[..., Any],
    options: Mapping[str, Any],
    method: str,
    path: str,
    action: str,
    *,
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """Make the request of a client's method; TypeError if `options` has a name that the method does not accept."""
    check_names(call, options)
    timeout, poll_interval = options.get("timeout"), options.get("poll_interval")
    check_seconds("timeout", timeout)
    check_seconds("poll_interval", poll_interval)
    extra_body = options.get("extra_body")
    return Request(
        method,
        path,
        action,
        query=without_none(query) | dict(options.get("extra_query") or {}),
        json=without_none(body) | dict(extra_body or {}) if body is not None or extra_body else None,
        headers={**fields.pop("headers", {}), **(options.get("extra_headers") or {})},
        deadline=float("inf") if timeout is None else time.monotonic() + timeout,
        poll_interval=poll_interval,
        **fields,
    )


def check_names(call: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for the first unknown option, with the name that was probably meant."""
    if not options:
        return
    parameters = dict(inspect.signature(call).parameters)
    kinds = {f"Unpack[{kind.__name__}]": kind for kind in (RequestOptions, WaitOptions, ClientOptions)}
    accepted = list(inspect.get_annotations(kinds[parameters.pop("options").annotation]))
    for name in options:
        if name not in accepted:
            names = [*parameters, *accepted]
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise TypeError(f"{call.__name__}() has no argument {name!r}; {hint}")


def check_seconds(name: str, value: object) -> None:
    """Raise ConfigurationError, which is a ValueError, for an invalid duration; None means no limit."""
    try:
        valid = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and float(value) >= 0)
    except OverflowError:  # an integer beyond all floats
        valid = False
    if not valid:
        raise ConfigurationError(f"{name} is {value!r}; it is a number of seconds from 0 on, or None")


# --- settings and retry rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of a client: time limit, retries, and what is sent with every request."""

    base: httpx2.URL
    timeout: float | None
    max_retries: int
    headers: Mapping[str, str] = field(repr=False)
    query: Mapping[str, Any]

    def replaced(self, options: ClientOptions) -> Settings:
        """Return the settings with some of them changed."""
        check_seconds("timeout", options.get("timeout"))
        return replace(
            self,
            timeout=options.get("timeout", self.timeout),
            max_retries=options.get("max_retries", self.max_retries),
            headers={**self.headers, **(options.get("default_headers") or {})},
            query={**self.query, **(options.get("default_query") or {})},
        )

    def url(self, request: Request) -> httpx2.URL:
        """Return the whole address, so that an http client given by the user keeps its own `base_url`."""
        path = self.base.raw_path.rstrip(b"/") + httpx2.URL(request.path).raw_path
        return self.base.copy_with(raw_path=path)

    def limits(self, request: Request) -> httpx2.Timeout:
        """Return the time limits of one attempt, which never exceed the deadline of the whole call."""
        if request.time_left <= 0:
            raise WaitedTooLong(f"{request.action}: the time limit of the call is over")
        limit = float("inf") if self.timeout is None else self.timeout
        if request.hold and self.timeout is not None:
            limit = min(limit, request.hold + HOLD_MARGIN)
        limit = min(limit, request.time_left)
        return (
            httpx2.Timeout(None, connect=5.0) if limit == float("inf") else httpx2.Timeout(limit, connect=min(5, limit))
        )

    def pause_after_error(self, problem: httpx2.TransportError, request: Request, attempt: int) -> float:
        """Return the seconds until the next attempt; raise if another one is not safe or not useful."""
        not_sent = isinstance(problem, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
        permanent = isinstance(problem, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError | httpx2.ProxyError)
        over = request.time_left <= 0
        if isinstance(problem, httpx2.TimeoutException) and over:
            raise WaitedTooLong(f"{request.action}: no answer within the time limit of the call") from problem
        if attempt < self.max_retries and not permanent and not over and (not_sent or request.repeatable):
            return pause(attempt)
        reason = str(problem) or type(problem).__name__
        if "WRONG_VERSION_NUMBER" in reason:
            reason += "; the server speaks http, so write http:// in base_url"
        elif isinstance(problem, httpx2.ConnectError):
            reason += "; check base_url, and that `carrel serve` runs there"
        uncertain = "" if not_sent or request.repeatable else "; it may have been processed, so it was not sent again"
        server = problem.request.url.netloc.decode()
        raise ServerUnreachable(f"{request.action}: no answer from {server}: {reason}{uncertain}") from problem

    def pause_after_answer(self, answer: httpx2.Response, request: Request, attempt: int) -> float | None:
        """Return the seconds until the next attempt, None if there is none: the answer is the result."""
        wanted = retry_after(answer.headers)
        status = answer.status_code
        again = status in NOT_STARTED or (request.repeatable and status in UNCERTAIN)
        # A pause that the server asks for has to fit into the caller's time limit, or else into a minute.
        longest = 60.0 if request.deadline == float("inf") else request.time_left
        if attempt >= self.max_retries or not again or (wanted or 0.0) >= longest:
            return None
        return pause(attempt, wanted)


def pause(attempt: int, wanted: float | None = None) -> float:
    """Return the seconds between two attempts."""
    if wanted is not None:
        return wanted + random.uniform(0, 0.1)
    return min(MAX_PAUSE, 0.1 * 2.0**attempt) * random.uniform(0.5, 1.0)


def make_settings(
    base_url: str | None,
    api_key: str | None,
    timeout: float | None,
    max_retries: int,
    headers: Mapping[str, str] | None,
    query: Mapping[str, Any] | None,
    http: httpx2.Client | httpx2.AsyncClient | None,
) -> Settings:
    """Make a client's settings from its arguments and the environment."""
    check_seconds("timeout", timeout)
    key = os.environ.get("CARREL_API_KEY") if api_key is None else api_key
    sent = {"Accept": "application/json", "User-Agent": "carrel"}
    if key is not None:
        if not key.isascii() or not key.isprintable() or not key.strip():
            raise ConfigurationError("api_key: expected a line of plain characters, as `carrel keys add` prints it")
        sent["Authorization"] = f"Bearer {key.strip()}"
    return Settings(_base_url(base_url, http), timeout, max_retries, sent | dict(headers or {}), dict(query or {}))


def _base_url(base_url: str | None, http: httpx2.Client | httpx2.AsyncClient | None) -> httpx2.URL:
    """Return the server's address: the argument, else that of the given http client, else from the environment."""
    own = str(http.base_url) if http is not None else ""
    text = base_url or own or os.environ.get("CARREL_BASE_URL") or "http://127.0.0.1:8765"
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as problem:
        raise ConfigurationError(f"base_url {text!r}: {problem}") from problem
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(f"base_url {text!r}: expected one like http://127.0.0.1:8765/api/v1")
    return url.copy_with(path="/api/v1") if url.path in ("", "/") else url


def http_settings(url: httpx2.URL) -> dict[str, Any]:
    """Return the settings of connections to this server; this machine is never reached through a proxy."""
    local = url.host == "localhost" or url.host.startswith("127.") or url.host == "::1"
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEEP_CONNECTION)
    if local and url.scheme == "http":
        # Loading the certificates of all authorities takes 50 ms, and none is needed here.
        return {"limits": limits, "trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    return {"limits": limits, "trust_env": not local}


# --- arguments and answers ------------------------------------------------------------------------------------------


def without_none(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return only the values that were given: the server has its own defaults."""
    return {name: value for name, value in (values or {}).items() if value is not None}


def url_part(name: str, value: str) -> str:
    """Return a name as one part of an address, whatever characters it has."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a name, got {value!r}")
    return "%2E" * len(value) if value in (".", "..") else quote(value, safe="")


def session_path(session_id: str) -> str:
    """Return the path of a session."""
    return f"/sessions/{url_part('session_id', session_id)}"


def path_text(path: FilePath, name: str = "path") -> str:
    """Return a path as text."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} is a text (str) or a path, and this is {path!r}")
    return os.fspath(path)


def file_url(session_id: str, path: FilePath) -> str:
    """Return the path of a session's file; the session resolves its dots, not the HTTP client."""
    names = path_text(path).split("/")
    quoted = (
        "%2E" * len(name) if name in (".", "..") else quote(name, safe="", errors="surrogateescape") for name in names
    )
    return f"{session_path(session_id)}/files/{'/'.join(quoted)}"


def command_body(
    command: str, timeout: float | None, stdin: str | None, cwd: FilePath | None, env: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the body of a request that runs a command."""
    check_seconds("command_timeout", timeout)
    folder = None if cwd is None else path_text(cwd, "cwd")
    return without_none({"command": command, "command_timeout": timeout, "stdin": stdin, "cwd": folder, "env": env})


def is_folder(answer: httpx2.Response) -> bool:
    """Return whether a path is a folder: it is answered with JSON, a file with bytes."""
    return str(answer.headers.get("content-type", "")).startswith("application/json")


def parse_json(text: bytes | str, request: Request) -> Any:
    """Parse JSON of an answer or an event."""
    try:
        return json.loads(text)
    except ValueError as problem:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise _not_understood(request, shown) from problem


def parse_as(model: type[M], data: Any, request: Request) -> M:
    """Parse an answer as a model."""
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        raise _not_understood(request, str(problem)) from problem


def _not_understood(request: Request, text: str) -> ServerFailed:
    return ServerFailed(f"{request.action}: this version of carrel does not understand the answer: {text[:500]}")


# --- what differs between the two clients ---------------------------------------------------------------------------


async_sleep = asyncio.sleep
sleep = time.sleep


async def async_call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that works with files, without blocking the event loop."""
    return await asyncio.to_thread(function, *arguments)


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; the counterpart of `async_call`."""
    return function(*arguments)


async def async_file_chunks(path: Path) -> AsyncGenerator[bytes]:
    """Read a file in chunks, without blocking the event loop."""
    chunks = file_chunks(path)
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield chunk


def file_chunks(path: Path) -> Generator[bytes]:
    """Read a file in chunks."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
