"""Approvals: calls of tools that wait for a person, kept in the store until they are answered.

server/approvals/<user>/pending/<session>/<id>.json     waits, or was answered a moment ago
server/approvals/<user>/answered/<session>/<id>.json    was answered, or is no longer needed"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from carrel.errors import ApprovalAnswered, ApprovalNotFound, StorageError
from carrel.library.tools.approval import ApprovalRequest, Approve, Decision, Refuse
from carrel.storage.base import Stamp, Store
from carrel.text import escape_surrogates
from carrel.wire.answers import ApprovalRecord, ApprovalStatus
from carrel.wire.requests import AnswerApproval

logger = logging.getLogger(__name__)

FOLDER = "server/approvals"
_ID = re.compile(r"([\w.-]{1,200})\.([0-9a-f]{32})")
_POLL_SECONDS = 1.0
"""How often a waiting call looks for an answer that was given to another server."""

Noted = Callable[[ApprovalRecord], Awaitable[None]]


class ApprovalQueue:
    """Asks the users of a server, and takes their answers: of two answers to one approval, one is accepted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, asyncio.Event] = {}
        """Set when an approval for which a call waits here was answered here."""

    async def ask(self, user: str, request: ApprovalRequest, on_change: Noted) -> Decision:
        """Keep the request, wait for its answer and return it. `on_change` gets the record when it is new or answered.

        If the caller stops waiting, the approval is expired."""
        arguments = escape_surrogates(request.arguments)
        record = ApprovalRecord(
            id=f"{request.session_id}.{request.id}",
            session_id=request.session_id,
            tool=request.tool,
            arguments=arguments,
            created_at=request.created_at,
        )
        await self._store.put(_key(user, "pending", record.id), record.model_dump_json().encode())
        await on_change(record)
        self._waiting[record.id] = event = asyncio.Event()
        try:
            while record.status == "pending":
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await event.wait()
                found = await self._find(user, record.id)
                if found is None:
                    return Refuse("the approval was deleted")
                record = found[0]
        except asyncio.CancelledError:
            await asyncio.shield(self._expire(user, record.id, on_change))
            raise
        finally:
            del self._waiting[record.id]
        if record.status != "approved":
            return Refuse(record.reason)
        # Without changed arguments the call keeps its own, also those that JSON cannot carry.
        return Approve(record.arguments if record.arguments != arguments else None)

    async def _expire(self, user: str, approval_id: str, on_change: Noted) -> None:
        try:
            changes = {"status": "expired", "answered_at": datetime.now(UTC), "reason": "the call no longer waits"}
            await on_change(await self._settle(user, approval_id, changes))
        except (ApprovalAnswered, ApprovalNotFound, StorageError) as problem:
            logger.warning("approval %s was not marked as expired: %s", approval_id, problem)

    async def answer(self, user: str, approval_id: str, answered_by: str, answer: AnswerApproval) -> ApprovalRecord:
        """Answer an approval; ApprovalAnswered if it has an answer, ApprovalNotFound if the user has none such."""
        changes: dict[str, Any] = {
            "status": "approved" if answer.decision == "approve" else "refused",
            "answered_at": datetime.now(UTC),
            "answered_by": answered_by,
            "reason": answer.reason,
        }
        if answer.arguments is not None:
            changes["arguments"] = answer.arguments
        record = await self._settle(user, approval_id, changes)
        if approval_id in self._waiting:
            self._waiting[approval_id].set()
        return record

    async def _settle(self, user: str, approval_id: str, changes: dict[str, Any]) -> ApprovalRecord:
        found = await self._find(user, approval_id)
        if found is None:
            raise ApprovalNotFound(f"there is no approval {approval_id!r}")
        record, stamp = found
        if record.status != "pending":
            raise ApprovalAnswered(f"the approval is {record.status} already")
        record = record.model_copy(update=changes)
        data = record.model_dump_json().encode()
        # The first to replace the pending record has answered; a second answer finds it changed.
        if stamp is None or await self._store.put(_key(user, "pending", approval_id), data, expect=stamp) is None:
            raise ApprovalAnswered("the approval was answered at the same moment")
        await self._store.put(_key(user, "answered", approval_id), data)
        await self._store.delete(_key(user, "pending", approval_id))
        return record

    async def _find(self, user: str, approval_id: str) -> tuple[ApprovalRecord, Stamp | None] | None:
        """Return an approval, and the version of its pending record if it has one."""
        if _ID.fullmatch(approval_id) is None:
            return None
        pending = _key(user, "pending", approval_id)
        stamp = await self._store.stamp(pending)
        data = await self._store.get(pending) if stamp is not None else None
        if data is None:
            stamp, data = None, await self._store.get(_key(user, "answered", approval_id))
        record = _read(data)
        return (record, stamp) if record is not None else None

    async def list(self, user: str, status: ApprovalStatus | None) -> list[ApprovalRecord]:
        """Return a user's approvals, oldest first."""
        folder = f"{FOLDER}/{user}/pending" if status == "pending" else f"{FOLDER}/{user}"
        found = {
            record.id: record
            for data in await self._store.get_many(await self._store.list(folder))
            if (record := _read(data)) is not None and status in (None, record.status)
        }
        return sorted(found.values(), key=lambda record: record.created_at)

    async def delete(self, user: str, session_id: str) -> None:
        """Remove the approvals of a session."""
        for state in ("pending", "answered"):
            await self._store.delete(f"{FOLDER}/{user}/{state}/{session_id}")


def _key(user: str, state: str, approval_id: str) -> str:
    session_id, _, number = approval_id.rpartition(".")
    return f"{FOLDER}/{user}/{state}/{session_id}/{number}.json"


def _read(data: bytes | None) -> ApprovalRecord | None:
    if data is None:
        return None
    try:
        return ApprovalRecord.model_validate_json(data)
    except ValueError as problem:
        logger.warning("a damaged approval is ignored: %s", str(problem)[:200])
        return None
