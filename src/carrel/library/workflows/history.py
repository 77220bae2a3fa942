"""The versions of workflows, and how often each was called."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import orjson

from carrel.errors import KeyMissing, StorageError
from carrel.library.workflows.source import without_description
from carrel.storage.base import MISSING, Store

_HEAD = re.compile(rb'\{"name":("[^"]*"),"digest":"(\w*)"')
"""How each record begins; the rest, with the source, is parsed only where it is needed."""
_LONGEST_ERROR = 2000
_LONGEST_CALL = 365 * 86400.0
"""Seconds; a longer duration that the sandbox reports is not true."""
_MOST = 2**53
_logger = logging.getLogger("carrel.library")


class Version(NamedTuple):
    """A state of a workflow."""

    name: str
    digest: str
    """Of its text; empty if it was removed."""
    text: str
    files: str = ""
    """Where the folder of a removed skill was copied to."""


class WorkflowHistory:
    """A log of versions, and which version of each workflow is the newest in it."""

    def __init__(self, store: Store, key: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._key = key
        self._now = now
        self._newest: dict[str, str] = {}
        self._read_to = 0

    async def add(self, versions: Sequence[Version]) -> None:
        """Append the versions that are not the newest of their workflow already.

        The caller holds the library's lock; a caller that has lost it appends nothing twice or in the wrong order."""
        at = self._now().isoformat(timespec="milliseconds")
        while True:
            await self._read_new()
            records: list[bytes] = []
            newest: dict[str, str] = {}
            for version in versions:
                before = newest.get(version.name, self._newest.get(version.name, ""))
                if before != version.digest:
                    change = "removed" if not version.digest else "edited" if before else "added"
                    records.append(_to_record(version, change, at))
                    newest[version.name] = version.digest
            if not records or await self._append(records):
                self._newest |= newest
                return
            self._newest, self._read_to = {}, 0

    async def has(self, version: Version) -> bool:
        """Whether a version is the newest of its workflow."""
        if self._newest.get(version.name) != version.digest:
            await self._read_new()
        return self._newest.get(version.name) == version.digest

    async def versions(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a workflow, the oldest first."""
        found: list[dict[str, Any]] = []
        start = b'{"name":' + orjson.dumps(name) + b","
        async for block in self._store.read(self._key):
            for record in block.records:
                if not record.startswith(start):
                    continue
                try:
                    found.append(_from_record(len(found) + 1, orjson.loads(record)))
                except (ValueError, KeyError) as error:
                    _logger.warning("%s: a version of %s cannot be read: %s", self._key, name, error)
        return found

    async def _append(self, records: Sequence[bytes]) -> bool:
        """Return False if the log has changed since it was read."""
        try:
            return bool(await self._store.append(self._key, records, after=self._read_to))
        except KeyMissing:
            return False

    async def _read_new(self) -> None:
        async for block in self._store.read(self._key, self._read_to + 1):
            for record in block.records:
                found = _HEAD.match(record)
                if found is not None:
                    self._newest[orjson.loads(found[1])] = found[2].decode()
            self._read_to = block.last_seq


def _to_record(version: Version, change: str, at: str) -> bytes:
    record = {"name": version.name, "digest": version.digest, "at": at, "change": change, "text": version.text}
    return orjson.dumps({**record, "files": version.files} if version.files else record)


def _from_record(number: int, record: dict[str, Any]) -> dict[str, Any]:
    source, description = without_description(record["text"])
    version = {
        "version": number,
        "at": record["at"],
        "change": record["change"],
        "description": description,
        "source": source,
    }
    return {**version, "files": str(record["files"])} if record.get("files") else version


def _no_calls() -> dict[str, Any]:
    return {"calls": 0, "failures": 0, "seconds": 0.0, "last_used": None, "last_error": None}


class CallCounts:
    """How often each workflow was called and its last error, in one small file that all sessions share."""

    def __init__(self, store: Store, key: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._key = key
        self._now = now
        self._unsaved: dict[str, dict[str, Any]] = {}
        self._saving: asyncio.Task[None] | None = None

    def count(self, name: str, *, calls: int = 0, seconds: float = 0.0, error: str | None = None) -> None:
        """Count a call, or the end of one; saved in the background."""
        at = self._now().isoformat(timespec="milliseconds")
        counts = self._unsaved.setdefault(name, _no_calls())
        counts["calls"] += calls
        counts["seconds"] += min(float(seconds), _LONGEST_CALL) if seconds > 0 else 0.0  # NaN is not > 0
        counts["last_used"] = at
        if error is not None:
            counts["failures"] += 1
            message = error[:_LONGEST_ERROR].encode("utf-8", "replace").decode("utf-8")
            counts["last_error"] = {"at": at, "message": message}
        if self._saving is None or self._saving.done():
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def get(self, name: str) -> dict[str, Any]:
        """Return the counts of a workflow."""
        await self.wait_until_saved()
        return (await self._read()).get(name) or _no_calls()

    async def wait_until_saved(self) -> None:
        """Wait until all counts are in the store."""
        if self._saving is not None and self._saving.get_loop() is asyncio.get_running_loop():
            await asyncio.shield(self._saving)

    async def _save(self) -> None:
        while self._unsaved:
            unsaved, self._unsaved = self._unsaved, {}
            try:
                while True:
                    stamp = await self._store.stamp(self._key)
                    saved = await self._read()
                    for name, counts in unsaved.items():
                        saved[name] = _sum(saved.get(name) or _no_calls(), counts)
                    data = orjson.dumps(saved, option=orjson.OPT_INDENT_2)
                    if await self._store.put(self._key, data, expect=stamp or MISSING):
                        break
            except StorageError as error:
                _logger.warning("calls of %s were not counted: %s", ", ".join(sorted(unsaved)), error)

    async def _read(self) -> dict[str, dict[str, Any]]:
        data = await self._store.get(self._key)
        try:
            saved = orjson.loads(data) if data else {}
        except ValueError as error:
            _logger.warning("%s cannot be read (%s); counting starts again", self._key, error)
            return {}
        if not isinstance(saved, dict):
            _logger.warning("%s cannot be read (it is not an object); counting starts again", self._key)
            return {}
        return {name: _valid_counts(counts) for name, counts in saved.items()}


def _valid_counts(counts: Any) -> dict[str, Any]:
    """Return counts as they were saved, without values of a wrong type."""
    valid = _no_calls()
    if not isinstance(counts, dict):
        return valid
    for name in ("calls", "failures", "seconds"):
        if isinstance(counts.get(name), (int, float)) and not isinstance(counts[name], bool):
            number = min(max(counts[name], 0), _MOST)
            valid[name] = number if name == "seconds" else int(number)
    if isinstance(counts.get("last_used"), str):
        valid["last_used"] = counts["last_used"]
    if isinstance(counts.get("last_error"), dict):
        valid["last_error"] = counts["last_error"]
    return valid


def _sum(saved: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    total = {name: saved[name] + new[name] for name in ("calls", "failures", "seconds")}
    total["seconds"] = round(total["seconds"], 6)
    return {**total, "last_used": new["last_used"], "last_error": new["last_error"] or saved["last_error"]}
