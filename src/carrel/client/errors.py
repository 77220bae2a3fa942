"""Answers of a server that report a failure, as exceptions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from carrel import errors
from carrel.errors import (
    CarrelError,
    CommandNotRun,
    KeyNotAccepted,
    NodeUncertain,
    NodeUnreachable,
    NotFoundThere,
    NotNow,
    RemoteError,
    RequestRefused,
    ServerFailed,
    TooMany,
)
from carrel.wire.answers import NOT_RUN, Interaction, SessionRecord

_BY_STATUS: dict[int, type[RemoteError]] = {
    400: RequestRefused,
    401: KeyNotAccepted,
    403: KeyNotAccepted,
    404: NotFoundThere,
    409: NotNow,
    413: RequestRefused,
    422: RequestRefused,
    429: TooMany,
}
_OF_NODES: dict[str, type[RemoteError]] = {"NodeUnreachable": NodeUnreachable, "NodeUncertain": NodeUncertain}
_BUILTINS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ValueError,
    TimeoutError,
)
MAX_DETAIL = 2000
"""Characters of the server's message in an exception."""


def error_from(status: int, body: bytes, headers: Mapping[str, str], action: str) -> Exception:
    """Return the exception for an answer that reports a failure; `action` says what was requested.

    If the server names the exception that the session raised, that one is returned, with a `RemoteError` as its cause.
    """
    detail, code = _parse(body)
    kind = _OF_NODES.get(code) or _BY_STATUS.get(status) or (ServerFailed if status >= 500 else RemoteError)
    text = _detail_text(detail) or f"no reason given (HTTP {status})"
    hint = " Give api_key= or set CARREL_API_KEY." if status == 401 else ""
    if status == 404 and text == "Not Found":
        hint = " There is no such route on this server; base_url is its address up to /api/v1."
    id_ = headers.get("x-request-id")
    # Only where the server's log may say more.
    mark = f" (request {id_})" if id_ and status >= 500 and id_ not in text else ""
    remote = kind(f"{action}: {text}{'' if text.endswith('.') or not hint else '.'}{hint}{mark}", status, detail)
    remote.retry_after = retry_after(headers)
    remote.request_id = id_
    own = None if status in (401, 429) or status >= 500 else exception_named(code)
    if own is None or isinstance(remote, own):
        return remote
    error = own(text)
    error.__cause__ = remote
    return error


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the server asks to wait, if it gives them."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def exception_named(code: str) -> type[Exception] | None:
    """Return the class of this name (`SetupFailed` or `setup_failed`) if it is one of carrel's or a known builtin."""
    name = code if not code.islower() else "".join(word.capitalize() for word in code.split("_"))
    own = getattr(errors, name, None) if name.isidentifier() else None
    if isinstance(own, type) and issubclass(own, CarrelError):
        return own
    return next((builtin for builtin in _BUILTINS if builtin.__name__ == name), None)


def check_usable(session: SessionRecord) -> None:
    """Raise the reason why a session cannot be used, if it cannot."""
    if session.is_live:
        return
    reason = session.error.message if session.error else f"it is {session.status}"
    sample = f" of {session.dataset}/{session.sample_id}" if session.sample_id else ""
    remote = RemoteError(f"session {session.session_id}{sample} cannot be used: {reason}")
    kind = exception_named(session.error.code) if session.error else None
    if kind is None:
        raise remote
    raise kind(reason) from remote


def check_ran(interaction: Interaction) -> Interaction:
    """Return the interaction; raise `CommandNotRun` if the command could not be run at all."""
    if interaction.exit_code == NOT_RUN:
        reason = interaction.message or "the server gives no reason"
        session = interaction.session_id
        raise CommandNotRun(f"run a command in session {session}: it could not be run at all: {reason}")
    return interaction


def _parse(body: bytes) -> tuple[Any, str]:
    try:
        data = json.loads(body)
    except ValueError:
        return body[:MAX_DETAIL].decode(errors="replace").strip(), ""
    if not isinstance(data, dict):
        return data, ""
    return data.get("detail", data.get("message")), str(data.get("code") or "")


def _detail_text(detail: Any) -> str:
    """Return a text as it is, a list of wrong fields as `body.command: Field required; …`."""
    if isinstance(detail, list):
        return "; ".join(map(_field_text, detail))[:MAX_DETAIL]
    if isinstance(detail, dict) and isinstance(detail.get("message"), str):
        return str(detail["message"])[:MAX_DETAIL]
    return str(detail)[:MAX_DETAIL] if detail else ""


def _field_text(problem: Any) -> str:
    if not isinstance(problem, dict):
        return str(problem)
    location = ".".join(map(str, problem.get("loc", ())))
    return f"{location}: {problem.get('msg', '')}" if location else str(problem.get("msg", problem))
