"""Settling: the end, in the records, of sessions whose processes are gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from carrel.errors import StorageError
from carrel.server.records import Operation, RecordStore, now
from carrel.session.durable import read_record
from carrel.wire.answers import NOT_RUN, Interaction, SessionRecord
from carrel.wire.verification import ErrorInfo

logger = logging.getLogger(__name__)

_SETTLED_AT_ONCE = 16


async def settle_left(records: RecordStore, error: ErrorInfo) -> int:
    """End the sessions in the records that a server has left live, and return how many were there.

    Those that cannot be written are left for another time."""
    some = asyncio.Semaphore(_SETTLED_AT_ONCE)

    async def settle_one(record: SessionRecord) -> None:
        try:
            async with some:
                await settle(records, record, error)
        except StorageError as problem:
            logger.warning("session %s could not be ended in its records: %s", record.session_id, problem)

    left = await records.sessions_left_live()
    await asyncio.gather(*map(settle_one, left))
    return len(left)


async def settle(records: RecordStore, record: SessionRecord, error: ErrorInfo) -> None:
    """End a session whose processes are gone in its records, with its operations; a durable one is paused."""
    for operation in await records.operations(record.session_id):
        if (ended := interrupted(operation, f"{error.message} while it ran")) is not None:
            await records.save_operation(ended)
    ended_at = now()
    is_paused = record.durable and await read_record(records.store, record.session_id) is not None
    # Clients that wait for a session to be ready stop waiting only for an error.
    status = "error" if record.status == "creating" and not is_paused else "terminated"
    changes = {
        "status": "closed" if is_paused and error.code == "interrupted" else status,
        "error": error,
        "closed_at": ended_at,
        "duration_seconds": (ended_at - record.created_at).total_seconds() if record.created_at else 0.0,
        "lifecycle": "paused" if is_paused else "ended",
    }
    await records.save_session(record.model_copy(update=changes))


def interrupted(operation: Operation, reason: str) -> Operation | None:
    """Return how an operation ends that a server was killed during; None if it had ended."""
    if isinstance(operation, Interaction):
        return operation.model_copy(update=not_run(reason)) if operation.status == "pending" else None
    if operation.is_finished:
        return None
    error = ErrorInfo(code="interrupted", message=reason)
    return operation.model_copy(update={"status": "error", "error": error, "completed_at": now()})


def not_run(reason: str) -> dict[str, Any]:
    """Return the fields of a command that has no result."""
    nothing = {"stdout": "", "stderr": "", "execution_time_seconds": 0.0}
    return {"exit_code": NOT_RUN, "success": False, "status": "error", "message": reason, **nothing}
