"""Pure: from what a server refused to the error that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from carrel import errors
from carrel.errors import (
    CarrelError,
    KeyNotAccepted,
    NotFoundThere,
    NotNow,
    RemoteError,
    RequestRefused,
    ServerFailed,
    TooMany,
)

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
_BUILTINS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ValueError,
    TimeoutError,
)
LONGEST = 2000
"""Characters of a server's own words in a message."""


def failure(status: int, body: bytes, headers: Mapping[str, str], asked: str) -> Exception:
    """The error for an answer that is none; `asked` says in words what was wanted.

    Where the server names the error that a session raised, that one is raised here too, with the other as its cause.
    """
    detail, code = _told(body)
    kind = _BY_STATUS.get(status) or (ServerFailed if status >= 500 else RemoteError)
    text = _in_words(detail) or f"no reason given (HTTP {status})"
    hint = " Give api_key= or set CARREL_API_KEY." if status == 401 else ""
    told = kind(f"{asked}: {text}{'' if text.endswith('.') or not hint else '.'}{hint}", status, detail)
    told.retry_after = retry_after(headers)
    own = None if status in (401, 429) or status >= 500 else named(code)
    if own is None or isinstance(told, own):
        return told
    found = own(text)
    found.__cause__ = told
    return found


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, when it says so in seconds."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _told(body: bytes) -> tuple[Any, str]:
    try:
        said = json.loads(body)
    except ValueError:
        return body[:LONGEST].decode(errors="replace").strip(), ""
    if not isinstance(said, dict):
        return said, ""
    return said.get("detail", said.get("message")), str(said.get("code") or "")


def _in_words(detail: Any) -> str:
    """A text as it is, a list of wrong fields as `body.command: Field required; …`."""
    if isinstance(detail, list):
        return "; ".join(map(_field, detail))[:LONGEST]
    if isinstance(detail, dict) and isinstance(detail.get("message"), str):
        return str(detail["message"])[:LONGEST]
    return str(detail)[:LONGEST] if detail else ""


def _field(problem: Any) -> str:
    if not isinstance(problem, dict):
        return str(problem)
    where = ".".join(map(str, problem.get("loc", ())))
    return f"{where}: {problem.get('msg', '')}" if where else str(problem.get("msg", problem))


def named(code: str) -> type[Exception] | None:
    """The class of this name (`SetupFailed` or `setup_failed`), when it is an error of ours or a plain one."""
    name = code if not code.islower() else "".join(word.capitalize() for word in code.split("_"))
    ours = getattr(errors, name, None) if name.isidentifier() else None
    if isinstance(ours, type) and issubclass(ours, CarrelError):
        return ours
    return next((builtin for builtin in _BUILTINS if builtin.__name__ == name), None)
