"""A POST with an `Idempotency-Key` is done once: when it is repeated, it gets the answer it got the first time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import time
from dataclasses import dataclass

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import RequestRefused
from carrel.server.api_keys import ApiKey
from carrel.server.logs import json_object
from carrel.server.responses import PREFIX, send_error, send_json
from carrel.storage.base import Store

logger = logging.getLogger(__name__)

FOLDER = "server/answers"
_SESSION_ID = re.compile(r"[\w.-]{1,200}")
MAX_AGE = 24 * 3600.0
"""Seconds for which an answer is kept."""
MAX_ANSWER = 1024 * 1024
"""Bytes of an answer that is kept; a larger one is not."""
MAX_TOTAL = 16 * 1024 * 1024
"""Bytes of all answers in the store; when there are more, the oldest are deleted."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer to a POST."""

    content: str
    """The digest of the request."""
    status: int
    body: bytes
    created_at: float
    """Seconds since the epoch."""

    def to_json(self) -> bytes:
        body = base64.b64encode(self.body).decode("ascii")
        return orjson.dumps(
            {"content": self.content, "status": self.status, "body": body, "created_at": self.created_at}
        )

    @classmethod
    def from_json(cls, data: bytes) -> KeptAnswer:
        fields = json_object(data)
        body = base64.b64decode(fields["body"])
        return cls(str(fields["content"]), int(fields["status"]), body, float(fields["created_at"]))


class AnswerStore:
    """The answers of the last day in a Store, one object each: `server/answers/<session>/<name>`.

    They are deleted with the session, after a day, and when all of them together are too large."""

    def __init__(self, store: Store, *, max_total: int = MAX_TOTAL) -> None:
        self._store = store
        self._max_total = max_total
        self._unswept = 0
        """Bytes written since the last sweep."""
        self._sweeping = asyncio.Lock()

    async def get(self, session_id: str, name: str) -> KeptAnswer | None:
        """Return the answer, unless it is too old or damaged."""
        data = await self._store.get(_key(session_id, name))
        if data is None:
            return None
        try:
            answer = KeptAnswer.from_json(data)
        except (ValueError, KeyError, TypeError) as problem:
            logger.warning("%s is damaged and ignored: %s", _key(session_id, name), problem)
            return None
        return answer if answer.created_at > time.time() - MAX_AGE else None

    async def keep(self, session_id: str, name: str, answer: KeptAnswer) -> None:
        data = answer.to_json()
        await self._store.put(_key(session_id, name), data)
        self._unswept += len(data)
        if self._unswept > self._max_total // 4 and not self._sweeping.locked():
            await self.sweep()

    async def sweep(self) -> None:
        """Delete the answers that are too old, and the oldest of too many."""
        async with self._sweeping:
            self._unswept = 0
            oldest = time.time() - MAX_AGE
            total = 0
            found = await self._store.scan(FOLDER)
            for key, stamp in sorted(found.items(), key=lambda item: item[1].modified, reverse=True):
                total += stamp.size
                if total > self._max_total or stamp.modified < oldest:
                    await self._store.delete(key)


class IdempotencyMiddleware:
    """Keeps answers with a status of 2xx. The ids of what a request creates are derived from its key.

    `scope["state"]["request_id"]` has the name that such ids begin with: a command that was begun is found by it, also
    if its answer was not kept."""

    def __init__(self, app: ASGIApp, answers: AnswerStore) -> None:
        self._app = app
        self._answers = answers
        self._running: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"idempotency-key", b"")
        if scope["type"] != "http" or scope["method"] != "POST" or not given or "key" not in scope.get("state", {}):
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        key: ApiKey = scope["state"]["key"]
        # The limits are part of the name, so that no key gets an answer that it could not get by itself.
        name = _digest(key.name, scope["path"], given, *([key.limits] if key.limits else []))
        content = _digest(scope.get("query_string", b""), body)
        while (running := self._running.get(name)) is not None:
            await running.wait()
        self._running[name] = done = asyncio.Event()
        scope["state"]["request_id"] = name
        session_id = _session_of(scope["path"], name)
        try:
            kept = await self._answers.get(session_id, name)
            if kept is None:
                await self._answer(session_id, name, content, scope, body, receive, send)
            elif kept.content != content:
                await send_error(send, 422, "this Idempotency-Key was used for another request", RequestRefused)
            else:
                await send_json(send, kept.status, kept.body, [(b"idempotent-replayed", b"true")])
        finally:
            del self._running[name]
            done.set()

    async def _answer(
        self, session_id: str, name: str, content: str, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        status, sent, is_json, was_read = 0, bytearray(), False, False

        async def receive_again() -> Message:
            nonlocal was_read
            if was_read:
                return await receive()
            was_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_and_keep(message: Message) -> None:
            nonlocal status, is_json
            if message["type"] == "http.response.start":
                status = message["status"]
                is_json = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"application/json")
            elif len(sent) <= MAX_ANSWER:
                sent.extend(message.get("body", b""))
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and 200 <= status < 300 and is_json and len(sent) <= MAX_ANSWER:
                # Before it is sent: a client that has seen the answer may rely on it.
                await self._answers.keep(session_id, name, KeptAnswer(content, status, bytes(sent), time.time()))
            await send(message)

        await self._app(scope, receive_again, send_and_keep)


def session_id_from(request_id: str) -> str:
    """Return the id of the session that a request creates."""
    return request_id[:32]


def _session_of(path: str, request_id: str) -> str:
    """Return the session that a POST is about: the one in its path, or the one that it creates."""
    parts = path.removeprefix(PREFIX).strip("/").split("/")
    if parts[0] == "sessions" and parts[1:2] and parts[2:] != ["fork"]:
        return parts[1] if _SESSION_ID.fullmatch(parts[1]) and parts[1].strip(".") else "unknown"
    return session_id_from(request_id)


def _key(session_id: str, name: str) -> str:
    return f"{FOLDER}/{session_id}/{name}"


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, or None if the client has disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()
