"""Lists of session ids by user: all of them, and those that ended in each way. Read from the end, page by page."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime

from carrel.errors import ConfigurationError
from carrel.storage.base import Stamp, Store

LISTS = ("all", "closed", "terminated", "error")
_CURSOR = re.compile(r"(\d{4}-\d\d-\d\d\.\d+):(\d{1,15})")
_COUNTED = 10_000
"""Segments whose length is remembered."""


@dataclass
class IdPage:
    """A page of ids, newest first."""

    ids: list[str]
    total_count: int
    next_cursor: str | None


class SessionLists:
    """Logs of ids, one for each user, list and day: `server/lists/<user>/<list>/<day>.<n>.jsonl`.

    A segment for each day makes cleaning cheap: it rewrites one day, or deletes it. Ids are added to segment 0000 of
    the day; a rewritten segment gets the next free number."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: OrderedDict[str, tuple[Stamp | None, int]] = OrderedDict()

    async def add(self, user: str, name: str, session_id: str) -> None:
        today = datetime.now(UTC).date().isoformat()
        await self._store.append(f"{_folder(user, name)}/{today}.0000.jsonl", [session_id.encode()])

    async def add_missing(self, user: str, name: str, session_id: str, since: date) -> None:
        """Add an id unless the list has it since this day: after a crash that is not known."""
        for key in await self._store.list(_folder(user, name)):
            if _segment(key) >= since.isoformat():
                async for block in self._store.read(key):
                    if session_id.encode() in block.records:
                        return
        await self.add(user, name, session_id)

    async def page(self, user: str, name: str, skip: int, size: int, cursor: str | None) -> IdPage:
        """Return up to `size` ids after the newest `skip`, or after those of the page that ended with `cursor`."""
        ids: list[str] = []
        last: str | None = None
        next_cursor = None
        async for position, session_id in self._back(user, name, skip, cursor):
            if len(ids) == size:
                next_cursor = last
                break
            last = position
            ids.append(session_id)
        total = sum([await self._count(key) for key in await self._store.list(_folder(user, name))])
        return IdPage(ids, total, next_cursor)

    async def _back(self, user: str, name: str, skip: int, cursor: str | None) -> AsyncIterator[tuple[str, str]]:
        """Yield the ids from the newest to the oldest, each with the cursor for those before it."""
        before = _read_cursor(cursor) if cursor is not None else None
        for key in sorted(await self._store.list(_folder(user, name)), reverse=True):
            segment = _segment(key)
            before_seq: int | None = None
            if before is not None:
                if segment > before[0]:
                    continue
                before_seq = before[1] if segment == before[0] else None
            elif skip:
                count = await self._count(key)
                if skip >= count:
                    skip -= count
                    continue
                before_seq, skip = count - skip + 1, 0
            async for block in self._store.read_back(key, before_seq):
                for seq, record in reversed(list(enumerate(block.records, block.first_seq))):
                    yield f"{segment}:{seq}", record.decode("utf-8", "replace")

    async def _count(self, key: str) -> int:
        stamp = await self._store.stamp(key)
        known = self._counts.pop(key, None)
        if known is None or known[0] != stamp:
            known = (stamp, sum([block.count async for block in self._store.read(key)]))
        self._counts[key] = known
        if len(self._counts) > _COUNTED:
            self._counts.popitem(last=False)
        return known[1]

    # --- retention --------------------------------------------------------------------------------------------------

    async def users(self) -> list[str]:
        return await self._store.folders("server/lists")

    async def ids_until(self, user: str, last_day: date) -> AsyncIterator[str]:
        """Yield the ids of the sessions that were created up to this day, oldest first."""
        for key in sorted(await self._store.list(_folder(user, "all"))):
            if _segment(key).partition(".")[0] > last_day.isoformat():
                return
            async for block in self._store.read(key):
                for record in block.records:
                    yield record.decode("utf-8", "replace")

    async def clean(self, user: str, last_day: date, is_left: Callable[[str], Awaitable[bool]]) -> None:
        """Drop the ids of deleted sessions from all segments up to this day."""
        for name in LISTS:
            keys = sorted(await self._store.list(_folder(user, name)))
            free = 1 + max([int(_segment(key).partition(".")[2]) for key in keys], default=0)
            for key in keys:
                day = _segment(key).partition(".")[0]
                if day > last_day.isoformat():
                    break
                stamp = await self._store.stamp(key)
                ids = [
                    record.decode("utf-8", "replace")
                    async for block in self._store.read(key)
                    for record in block.records
                ]
                left = [id_ for id_ in ids if await is_left(id_)]
                if len(left) == len(ids):
                    continue
                # The new segment is there before the old one goes. If an id was added meanwhile, the old one stays.
                rewritten = f"{_folder(user, name)}/{day}.{free:04}.jsonl"
                free += 1
                if left:
                    await self._store.append(rewritten, [id_.encode() for id_ in left])
                if not await self._store.delete(key, expect=(key, stamp)) and left:
                    await self._store.delete(rewritten)


def _folder(user: str, name: str) -> str:
    return f"server/lists/{user}/{name}"


def _segment(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".jsonl")


def _read_cursor(cursor: str) -> tuple[str, int]:
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise ConfigurationError(f"cursor: {cursor[:100]!r} is not the next_cursor of a page")
    return found[1], int(found[2])
