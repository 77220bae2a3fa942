"""Answers that the middlewares send themselves, before a route is reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from starlette.types import Send

PREFIX = "/api/v1"
Headers = Sequence[tuple[bytes, bytes]]


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Send a JSON text as the whole answer."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, status: int, detail: str, kind: type[Exception], headers: Headers = ()) -> None:
    """Send an error; `kind` is the class that carrel's client raises for it."""
    await send_json(send, status, orjson.dumps({"detail": detail, "code": kind.__name__}), headers)
