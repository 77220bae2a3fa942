"""Every version of every workflow that was ever seen, in one log."""

import logging
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import orjson

from carrel.errors import KeyMissing
from carrel.library.workflow_source import without_description
from carrel.storage.base import Store

_log = logging.getLogger("carrel.library")

Change = Literal["added", "edited", "removed"]

_HEAD = re.compile(rb'\{"name":("[^"]*"),"digest":"(\w*)"')
"""How each record begins, so that few have to be parsed whole."""


class Version(NamedTuple):
    """What a workflow is from now on."""

    name: str
    digest: str
    """Of its text; "" when it was removed."""
    text: str
    files: str = ""
    """Where the folder of a skill was put that was removed."""


class History:
    """The log, and which version of each workflow is the newest in it."""

    def __init__(self, store: Store, key: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._key = key
        self._now = now
        self._newest: dict[str, str] = {}
        self._read_to = 0

    async def note(self, versions: Sequence[Version]) -> None:
        """Write down those that are not the newest of their workflow already.

        For whoever holds the library's lock. One who lost it notes nothing twice, and nothing out of its turn."""
        at = self._now().isoformat(timespec="milliseconds")
        while True:
            await self._catch_up()
            records, newest = [], dict[str, str]()
            for version in versions:
                before = newest.get(version.name, self._newest.get(version.name, ""))
                if before != version.digest:
                    change: Change = "edited" if before else "added"
                    records.append(_record(version, "removed" if not version.digest else change, at))
                    newest[version.name] = version.digest
            if not records or await self._appended(records):
                self._newest |= newest
                return
            self._newest, self._read_to = {}, 0

    async def _appended(self, records: Sequence[bytes]) -> bool:
        """False when somebody noted something since it was looked at, or it is another log by now."""
        try:
            return bool(await self._store.append(self._key, records, after=self._read_to))
        except KeyMissing:
            return False

    async def of(self, name: str) -> list[dict[str, Any]]:
        """The versions of one workflow, oldest first."""
        versions: list[dict[str, Any]] = []
        beginning = _beginning(name)
        async for block in self._store.read(self._key):
            for record in block.records:
                if not record.startswith(beginning):
                    continue
                try:
                    versions.append(_shown(len(versions) + 1, orjson.loads(record)))
                except (ValueError, KeyError) as problem:
                    _log.warning("a version of %s in %s cannot be read: %s", name, self._key, problem)
        return versions

    async def _catch_up(self) -> None:
        async for block in self._store.read(self._key, self._read_to + 1):
            for record in block.records:
                found = _HEAD.match(record)
                if found is not None:
                    self._newest[orjson.loads(found[1])] = found[2].decode()
            self._read_to = block.last_seq


def _beginning(name: str) -> bytes:
    return b'{"name":' + orjson.dumps(name) + b","


def _record(version: Version, change: Change, at: str) -> bytes:
    said = {"name": version.name, "digest": version.digest, "at": at, "change": change, "text": version.text}
    return orjson.dumps({**said, "files": version.files} if version.files else said)


def _shown(number: int, said: dict[str, Any]) -> dict[str, Any]:
    source, description = without_description(said["text"])
    shown = {
        "version": number,
        "at": said["at"],
        "change": said["change"],
        "description": description,
        "source": source,
    }
    return {**shown, "files": str(said["files"])} if said.get("files") else shown
