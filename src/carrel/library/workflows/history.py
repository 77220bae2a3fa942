"""The versions of workflows, and how often each was called."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from carrel.errors import KeyMissing, StorageError
from carrel.library.workflows.source import without_description
from carrel.storage.base import MISSING, Store

_RECORD_FIELDS = {"name", "digest", "at", "change", "text"}
_LONGEST_ERROR = 2000
_LONGEST_CALL = 365 * 86400.0
"""Seconds; a longer duration that the sandbox reports is not true."""
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
        async for block in self._store.read(self._key):
            for record in self._parse(block.records):
                if record["name"] == name:
                    found.append(_from_record(len(found) + 1, record))
        return found

    async def _append(self, records: Sequence[bytes]) -> bool:
        """Return False if the log has changed since it was read."""
        try:
            return bool(await self._store.append(self._key, records, after=self._read_to))
        except KeyMissing:
            return False

    async def _read_new(self) -> None:
        async for block in self._store.read(self._key, self._read_to + 1):
            self._newest |= {record["name"]: record["digest"] for record in self._parse(block.records)}
            self._read_to = block.last_seq

    def _parse(self, records: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        for data in records:
            try:
                record = orjson.loads(data)
            except ValueError:
                record = None
            if isinstance(record, dict) and record.keys() >= _RECORD_FIELDS:
                yield record
            else:
                _logger.warning("%s: a version cannot be read: %.100r", self._key, data)


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


class CallCount(BaseModel):
    """How often a workflow was called."""

    model_config = ConfigDict(allow_inf_nan=False, defer_build=True)

    calls: int = Field(default=0, ge=0)
    failures: int = Field(default=0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    last_used: str | None = None
    last_error: dict[str, str] | None = None

    def plus(self, new: "CallCount") -> "CallCount":
        """Return the sum of these and newer calls."""
        return CallCount(
            calls=self.calls + new.calls,
            failures=self.failures + new.failures,
            seconds=round(self.seconds + new.seconds, 6),
            last_used=new.last_used,
            last_error=new.last_error or self.last_error,
        )


_BY_NAME = TypeAdapter(dict[str, CallCount])


class CallCounts:
    """How often each workflow was called and its last error, in one small file that all sessions share."""

    def __init__(self, store: Store, key: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._key = key
        self._now = now
        self._unsaved: dict[str, CallCount] = {}
        self._saving: asyncio.Task[None] | None = None

    def count(self, name: str, *, calls: int = 0, seconds: float = 0.0, error: str | None = None) -> None:
        """Count a call, or the end of one; saved in the background."""
        at = self._now().isoformat(timespec="milliseconds")
        new = CallCount(calls=calls, last_used=at)
        if seconds > 0:  # NaN is not
            new.seconds = min(float(seconds), _LONGEST_CALL)
        if error is not None:
            message = error[:_LONGEST_ERROR].encode("utf-8", "replace").decode("utf-8")
            new.failures, new.last_error = 1, {"at": at, "message": message}
        self._unsaved[name] = self._unsaved.get(name, CallCount()).plus(new)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def get(self, name: str) -> dict[str, Any]:
        """Return the counts of a workflow."""
        await self.wait_until_saved()
        return (await self._read()).get(name, CallCount()).model_dump()

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
                    saved |= {name: saved.get(name, CallCount()).plus(new) for name, new in unsaved.items()}
                    if await self._store.put(self._key, _BY_NAME.dump_json(saved, indent=2), expect=stamp or MISSING):
                        break
            except StorageError as error:
                _logger.warning("calls of %s were not counted: %s", ", ".join(sorted(unsaved)), error)

    async def _read(self) -> dict[str, CallCount]:
        data = await self._store.get(self._key)
        try:
            return _BY_NAME.validate_json(data) if data else {}
        except ValidationError:
            _logger.warning("%s is damaged; counting starts again", self._key)
            return {}
