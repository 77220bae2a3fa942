"""A POST with an `Idempotency-Key` is done once: asked again, it is answered as it was the first time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import RequestRefused
from carrel.server.edge import answer
from carrel.storage.seam import Store

LOG = "server/answers.jsonl"
DAY = 24 * 3600.0
"""Seconds for which an answer is remembered."""
_LARGEST = 1024 * 1024
"""Bytes of an answer that is remembered whole; a larger one is not."""
_MOST = 50_000


class Once:
    """Answers with 2xx are kept in the store, so that a client may ask again after the server was killed, too."""

    def __init__(self, app: ASGIApp, store: Store) -> None:
        self._app = app
        self._store = store
        self._known: dict[str, dict[str, Any]] | None = None
        self._under_way: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"idempotency-key", b"")
        if scope["type"] != "http" or scope["method"] != "POST" or not given or "user" not in scope.get("state", {}):
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return
        name = _hash(scope["state"]["user"], scope["path"], given)
        content = _hash(scope.get("query_string", b""), body)
        while (other := self._under_way.get(name)) is not None:
            await other.wait()
        self._under_way[name] = done = asyncio.Event()
        # What is made gets its id from this, so that it is found, and not made again, where no answer was kept.
        scope["state"]["once"] = name
        try:
            known = (await self._answers()).get(name)
            if known is None:
                await self._first_time(name, content, scope, body, receive, send)
            elif known["content"] != content:
                await answer(send, 422, "this Idempotency-Key was used for another request", RequestRefused)
            else:
                replayed = [(b"idempotent-replayed", b"true")]
                await _send(send, known["status"], base64.b64decode(known["body"]), replayed)
        finally:
            del self._under_way[name]
            done.set()

    async def _first_time(
        self, name: str, content: str, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        status, sent, is_json, given_out = 0, bytearray(), False, False

        async def again() -> Message:
            nonlocal given_out
            if given_out:
                return await receive()
            given_out = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def told(message: Message) -> None:
            nonlocal status, is_json
            if message["type"] == "http.response.start":
                status = message["status"]
                is_json = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"application/json")
            elif len(sent) <= _LARGEST:
                sent.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                # Before it is sent: who saw the answer may rely on it.
                await self._keep(name, content, status, bytes(sent), is_json)
            await send(message)

        await self._app(scope, again, told)

    async def _keep(self, name: str, content: str, status: int, sent: bytes, is_json: bool) -> None:
        if not 200 <= status < 300 or not is_json or len(sent) > _LARGEST:
            return
        text = base64.b64encode(sent).decode("ascii")
        entry = {"name": name, "content": content, "status": status, "body": text, "at": time.time()}
        (await self._answers())[name] = entry
        await self._store.append(LOG, [orjson.dumps(entry)])

    async def _answers(self) -> dict[str, dict[str, Any]]:
        if self._known is None:
            known: dict[str, dict[str, Any]] = {}
            oldest = time.time() - DAY
            async for block in self._store.read(LOG):
                for line in block.records:
                    entry = orjson.loads(line)
                    if entry["at"] >= oldest:
                        known[entry["name"]] = entry
            self._known = self._known if self._known is not None else known
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return self._known


async def _whole(receive: Receive) -> bytes | None:
    """The body, or None when who asked has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
