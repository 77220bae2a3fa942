"""The answers to POSTs with an Idempotency-Key, as objects in a Store."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from dataclasses import dataclass
from typing import Any

import orjson

from carrel.storage.base import Store

logger = logging.getLogger(__name__)

ANSWERS = "server/answers"
MAX_ANSWER_AGE = 24 * 3600.0
"""Seconds for which the answer to a POST with an Idempotency-Key is kept."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Bytes of all such answers in the store; when there are more, the oldest are deleted."""


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

    def __init__(self, store: Store, *, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._unswept = 0
        """Bytes written since the last sweep."""
        self._sweeping = asyncio.Lock()

    async def get(self, session_id: str, name: str) -> KeptAnswer | None:
        """Return the answer, unless it is too old or damaged."""
        data = await self._store.get(_answer_key(session_id, name))
        if data is None:
            return None
        try:
            answer = KeptAnswer.from_json(data)
        except (ValueError, KeyError, TypeError) as problem:
            logger.warning("%s is damaged and ignored: %s", _answer_key(session_id, name), problem)
            return None
        return answer if answer.created_at > time.time() - MAX_ANSWER_AGE else None

    async def keep(self, session_id: str, name: str, answer: KeptAnswer) -> None:
        data = answer.to_json()
        await self._store.put(_answer_key(session_id, name), data)
        self._unswept += len(data)
        if self._unswept > self._max_bytes // 4 and not self._sweeping.locked():
            await self.sweep()

    async def sweep(self) -> None:
        """Delete the answers that are too old, and the oldest of too many."""
        async with self._sweeping:
            self._unswept = 0
            oldest = time.time() - MAX_ANSWER_AGE
            total = 0
            found = await self._store.scan(ANSWERS)
            for key, stamp in sorted(found.items(), key=lambda item: item[1].modified, reverse=True):
                total += stamp.size
                if total > self._max_bytes or stamp.modified < oldest:
                    await self._store.delete(key)


def json_object(line: bytes) -> dict[str, Any]:
    """The line as a JSON object, else ValueError."""
    data = orjson.loads(line)
    if not isinstance(data, dict):
        raise ValueError("expected a JSON object")
    return data


def _answer_key(session_id: str, name: str) -> str:
    return f"{ANSWERS}/{session_id}/{name}"
