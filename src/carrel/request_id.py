"""The id of the HTTP request that the current task works for: in traces, logs and answers of a server."""

from __future__ import annotations

import re
from contextvars import ContextVar
from uuid import uuid4

current_request: ContextVar[str | None] = ContextVar("current_request", default=None)
"""None where no request is answered: in a program of its own, or when a server does something by itself."""

HEADER = b"x-request-id"
_VALID = re.compile(rb"[\w.-]{1,100}")


def request_id_from(sent: bytes) -> str:
    """Return the id that a client sent, or a new one if it sent none or an invalid one, and make it the current one."""
    text = sent.decode("ascii") if _VALID.fullmatch(sent) else uuid4().hex
    current_request.set(text)
    return text


def with_request_id(text: str) -> str:
    """Return a line of a log with the id of the current request, if there is one."""
    current = current_request.get()
    return f"{text} (request {current})" if current is not None else text
