"""Retention: deletes what a server keeps no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta

from carrel.errors import CarrelError, SandboxUnavailable, SessionBusy, StorageError
from carrel.server.answers import AnswerStore
from carrel.server.approvals import ApprovalQueue
from carrel.server.records import RecordStore, now
from carrel.session import StorageBackend
from carrel.session.durable import delete_state

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 3600.0
"""How often expired records are deleted."""
_SAVE_SECONDS = 5.0
"""How often it is tried to write what could not be written."""


class Retention:
    """Deletes old answers, and sessions that ended longer ago than `age`, once an hour; None keeps sessions."""

    def __init__(
        self,
        storage: StorageBackend,
        records: RecordStore,
        answers: AnswerStore,
        approvals: ApprovalQueue,
        age: timedelta | None,
        live: Collection[str],
    ) -> None:
        """`live` shows the ids of the sessions that are open now, which are kept."""
        self._storage = storage
        self._records = records
        self._answers = answers
        self._approvals = approvals
        self._age = age
        self._live = live
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._sweep_regularly()), asyncio.create_task(self._save_regularly())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self.sweep()
            except CarrelError as problem:
                logger.warning("old records could not be deleted: %s", problem)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            with suppress(StorageError):  # It was reported when it could not be written for the first time.
                await self._records.save_unsaved()

    async def sweep(self) -> None:
        """Delete what is kept no longer: answers, and the records of sessions that ended long ago."""
        await self._records.save_unsaved()
        await self._answers.sweep()
        if self._age is None:
            return
        conversations = self._storage.get_session_store()
        async for record in self._records.sweep(now() - self._age):
            if record.session_id not in self._live:
                try:
                    # First: the folder of the conversation has the names of a container's volumes.
                    await delete_state(self._storage, record.session_id)
                except (SandboxUnavailable, SessionBusy) as problem:
                    logger.warning("%s", problem)
                    continue
                await conversations.delete_session(record.session_id)
                await self._approvals.delete(record.user_id, record.session_id)
                await self._records.delete_session(record)
