"""How often each workflow was called and how its last failure went, in one small file that all sessions share."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

import orjson

from carrel.errors import StorageError
from carrel.storage.base import MISSING, Store

_LONGEST = 2000
"""What is kept of an error's text."""
_LONGEST_TIME = 365 * 86400.0
"""Seconds; a call that is said to have taken longer did not."""
_log = logging.getLogger("carrel.library")

_MOST = 2**53

Counts = dict[str, Any]


def no_use() -> Counts:
    return {"calls": 0, "failures": 0, "seconds": 0.0, "last_used": None, "last_error": None}


class Usage:
    """Counts what it is told at once, and writes it down soon after, many at a time."""

    def __init__(self, store: Store, key: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._key = key
        self._now = now
        self._new: dict[str, Counts] = {}
        self._writing: asyncio.Task[None] | None = None

    def count(self, name: str, *, calls: int = 0, seconds: float = 0.0, error: str | None = None) -> None:
        """What comes from inside is taken as far as it can be: a time that is none counts as no time."""
        at = self._now().isoformat(timespec="milliseconds")
        seconds = min(float(seconds), _LONGEST_TIME) if seconds > 0 else 0.0  # not so for NaN either
        counts = self._new.setdefault(name, no_use())
        counts["calls"] += calls
        counts["seconds"] += seconds
        counts["last_used"] = at
        if error is not None:
            counts["failures"] += 1
            counts["last_error"] = {"at": at, "message": _whole(error[:_LONGEST])}
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def of(self, name: str) -> Counts:
        await self.written()
        return (await self._kept()).get(name) or no_use()

    async def written(self) -> None:
        """Wait until what was counted is kept."""
        if self._writing is not None and self._writing.get_loop() is asyncio.get_running_loop():
            # Whoever is cancelled here takes nobody's counts along.
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        while self._new:
            new, self._new = self._new, {}
            try:
                while True:
                    stamp = await self._store.stamp(self._key)
                    kept = await self._kept()
                    for name, counts in new.items():
                        kept[name] = _sum(kept.get(name) or no_use(), counts)
                    data = orjson.dumps(kept, option=orjson.OPT_INDENT_2)
                    if await self._store.put(self._key, data, expect=stamp or MISSING):
                        break
            except StorageError as problem:
                _log.warning("the use of %s was not counted: %s", ", ".join(sorted(new)), problem)

    async def _kept(self) -> dict[str, Counts]:
        data = await self._store.get(self._key)
        try:
            kept = orjson.loads(data) if data else {}
        except ValueError as problem:
            _log.warning("%s cannot be read (%s); counting begins anew", self._key, problem)
            kept = {}
        if not isinstance(kept, dict):
            _log.warning("%s cannot be read (it is no object); counting begins anew", self._key)
            return {}
        return {name: _mended(counts) for name, counts in kept.items()}


def _whole(text: str) -> str:
    """The text as it can be written: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _mended(counts: Any) -> Counts:
    """What was kept of one workflow, with nothing in the place of what is no number, text or error."""
    mended = no_use()
    if not isinstance(counts, dict):
        return mended
    for name in ("calls", "failures", "seconds"):
        if isinstance(counts.get(name), (int, float)) and not isinstance(counts[name], bool):
            number = min(max(counts[name], 0), _MOST)
            mended[name] = number if name == "seconds" else int(number)
    if isinstance(counts.get("last_used"), str):
        mended["last_used"] = counts["last_used"]
    if isinstance(counts.get("last_error"), dict):
        mended["last_error"] = counts["last_error"]
    return mended


def _sum(kept: Counts, new: Counts) -> Counts:
    both = no_use() | kept
    for name in ("calls", "failures", "seconds"):
        both[name] += new[name]
    both["seconds"] = round(both["seconds"], 6)
    both["last_used"] = new["last_used"]
    both["last_error"] = new["last_error"] or both["last_error"]
    return both
