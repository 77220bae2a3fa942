"""A POST with an `Idempotency-Key` is done once: asked again, it is answered as it was the first time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.errors import RequestRefused
from carrel.server.edge import PREFIX, answer
from carrel.server.keys import KnownKey
from carrel.server.logs import finish_rewriting, json_object, parse_lines, rewrite
from carrel.storage.base import Store

LOG = "server/answers.jsonl"
DAY = 24 * 3600.0
"""Seconds for which an answer is remembered."""
LARGEST = 1024 * 1024
"""Bytes of an answer that is remembered; a larger one is not."""
MOST_BYTES = 16 * 1024 * 1024
"""Bytes of all answers that are remembered; beyond that the oldest are dropped. The log has at most twice as many."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a POST was answered with."""

    name: str
    """Of user, route and key; the same for a request that is sent again."""
    session_id: str
    """The session that it is about; the answer is deleted with it."""
    content: str
    """The hash of what was sent."""
    status: int
    body: bytes
    at: float
    """Seconds since the epoch."""

    @property
    def size(self) -> int:
        """About how many bytes it takes in memory and in the log."""
        return 400 + len(self.body) * 4 // 3

    def line(self) -> bytes:
        """The answer as a line of the log."""
        body = base64.b64encode(self.body).decode("ascii")
        entry = {"name": self.name, "session_id": self.session_id, "content": self.content}
        return orjson.dumps({**entry, "status": self.status, "body": body, "at": self.at})

    @classmethod
    def of_line(cls, line: bytes) -> Answer:
        """An answer from a line of the log; those of earlier versions do not tell the session."""
        entry = json_object(line)
        body = base64.b64decode(entry["body"])
        status, at = int(entry["status"]), float(entry["at"])
        return cls(str(entry["name"]), str(entry.get("session_id", "")), str(entry["content"]), status, body, at)


class Answers:
    """The answers of the last day in a log, as far as `most` bytes go, so that they outlive a kill."""

    def __init__(self, store: Store, *, most: int = MOST_BYTES) -> None:
        self._store = store
        self._most = most
        self._known: OrderedDict[str, Answer] = OrderedDict()
        """Oldest first."""
        self._bytes = 0
        self._log_bytes = 0
        self._writing = asyncio.Lock()

    async def open(self, sessions: Collection[str]) -> None:
        """Read the log; `sessions` are those that are remembered."""
        await finish_rewriting(self._store, LOG)
        async for block in self._store.read(LOG):
            for _, found in parse_lines(LOG, block, Answer.of_line):
                self._log_bytes += found.size
                self._remember(found)
        await self.tidy(sessions)

    def get(self, name: str) -> Answer | None:
        """The answer of this name, if it is not too old."""
        found = self._known.get(name)
        return found if found is not None and found.at > time.time() - DAY else None

    async def keep(self, found: Answer) -> None:
        """Remember an answer; the oldest make room for it."""
        self._remember(found)
        async with self._writing:
            if self._known.get(found.name) is found:
                await self._store.append(LOG, [found.line()])
                self._log_bytes += found.size
        if self._log_bytes > 2 * self._most:
            await self._rewrite()

    async def tidy(self, sessions: Collection[str]) -> None:
        """Delete answers that are too old or about other sessions than these, in memory and on the disk."""
        oldest = time.time() - DAY
        gone = [each.name for each in self._known.values() if each.session_id not in sessions or each.at < oldest]
        for name in gone:
            self._drop(name)
        if gone or self._log_bytes > self._bytes:
            await self._rewrite()

    def _remember(self, found: Answer) -> None:
        self._drop(found.name)
        self._known[found.name] = found
        self._bytes += found.size
        oldest = time.time() - DAY
        while self._known and (self._bytes > self._most or next(iter(self._known.values())).at < oldest):
            self._drop(next(iter(self._known)))

    def _drop(self, name: str) -> None:
        if (gone := self._known.pop(name, None)) is not None:
            self._bytes -= gone.size

    async def _rewrite(self) -> None:
        async with self._writing:
            kept = list(self._known.values())
            await rewrite(self._store, LOG, [each.line() for each in kept])
            self._log_bytes = sum(each.size for each in kept)


class Once:
    """Answers with 2xx are kept in the store, so that a client may ask again after the server was killed, too."""

    def __init__(self, app: ASGIApp, answers: Answers) -> None:
        self._app = app
        self._answers = answers
        self._under_way: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"idempotency-key", b"")
        if scope["type"] != "http" or scope["method"] != "POST" or not given or "key" not in scope.get("state", {}):
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return
        key: KnownKey = scope["state"]["key"]
        # With what the key is limited to, so that no key is given an answer that it could not get by itself.
        name = _hash(key.name, scope["path"], given, *([key.limits] if key.limits else []))
        content = _hash(scope.get("query_string", b""), body)
        while (other := self._under_way.get(name)) is not None:
            await other.wait()
        self._under_way[name] = done = asyncio.Event()
        # What is made gets its id from this, so that it is found, and not made again, where no answer was kept.
        scope["state"]["once"] = name
        try:
            known = self._answers.get(name)
            if known is None:
                await self._first_time(name, content, scope, body, receive, send)
            elif known.content != content:
                await answer(send, 422, "this Idempotency-Key was used for another request", RequestRefused)
            else:
                replayed = [(b"idempotent-replayed", b"true")]
                await _send(send, known.status, known.body, replayed)
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
            elif len(sent) <= LARGEST:
                sent.extend(message.get("body", b""))
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and 200 <= status < 300 and is_json and len(sent) <= LARGEST:
                # Before it is sent: who saw the answer may rely on it.
                session_id = session_of(scope["path"], bytes(sent))
                await self._answers.keep(Answer(name, session_id, content, status, bytes(sent), time.time()))
            await send(message)

        await self._app(scope, again, told)


def session_of(path: str, body: bytes) -> str:
    """The session that a POST is about: the one in its path, or the one that was made."""
    parts = path.removeprefix(PREFIX).strip("/").split("/")
    if parts[0] == "sessions" and parts[1:2] and parts[2:] != ["fork"]:
        return parts[1]
    try:
        return str(json_object(body).get("session_id", ""))
    except ValueError:
        return ""


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
