"""The workflow files of a store, parsed once per version."""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from carrel.errors import WorkflowValidationError
from carrel.library.names import python_name
from carrel.library.search import SearchEntry
from carrel.library.workflows.source import (
    LONGEST_DESCRIPTION,
    SKILL_FILE,
    read_signature,
    read_skill,
    validate_name,
    without_description,
)
from carrel.storage.base import KeyedLock, Stamp, Store

_FEW_FILES, _FEW_BYTES = 20, 32 * 1024
"""Files that are parsed at once; more are parsed in another thread."""
_LONGEST_DOC = 20_000
_LONGEST_INSTRUCTIONS = 2000
_ATTEMPTS = 5
_logger = logging.getLogger("carrel.library")


@dataclass(frozen=True, eq=False)
class WorkflowFile:
    """A file of a workflow or a skill, without its source."""

    key: str
    stamp: Stamp
    digest: str
    """Of the whole file."""
    kind: Literal["workflow", "instructions", "script"]
    """Instructions are a SKILL.md; a script is in the folder of a skill and has no `run`, so it cannot be called."""
    details: dict[str, Any]
    """What a listing shows."""
    doc: str
    error: str = ""
    """Why it cannot be called; empty if it can."""

    @cached_property
    def entry(self) -> SearchEntry:
        """What a search compares."""
        parameters = " ".join(f"{one['name']} {one['description']}" for one in self.details["parameters"])
        return SearchEntry(self.key, self.name, self.details["description"], parameters, self.doc)

    @property
    def name(self) -> str:
        return str(self.details["name"])

    @property
    def folder(self) -> str:
        """The key of its folder."""
        return self.key.rpartition("/")[0]

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in a listing, a new dict each time."""
        details = {**self.details, "parameters": [dict(parameter) for parameter in self.details["parameters"]]}
        return {**details, "error": self.error} if self.error else details


def digest_of(data: bytes) -> str:
    """Return what identifies a version of a file."""
    return hashlib.sha256(data).hexdigest()[:32]


@lru_cache(maxsize=5000)
def parse_file(key: str, prefix: str, stamp: Stamp, data: bytes) -> WorkflowFile:
    """Parse a file; one that cannot be called has an `error`.

    Cached, because every session of a process reads the same files, and parsing 2,000 of them takes 0.4 s."""
    digest = digest_of(data)
    parts = key[len(prefix) + 1 :].split("/")
    if parts[-1] == SKILL_FILE:
        return _parse_skill(key, parts[0], stamp, digest, data)
    name = parts[0].removesuffix(".py")
    if len(parts) > 1:
        name = f"{python_name(parts[0])}.{parts[-1].removesuffix('.py')}"
    details: dict[str, Any] = {"name": name, "description": "", "parameters": [], "kind": "workflow"}
    try:
        for word in name.split("."):
            validate_name(word)
        source, description = without_description(data.decode("utf-8"))
        signature = read_signature(name, source, description)
    except (UnicodeDecodeError, WorkflowValidationError) as error:
        why = f"{key} is not UTF-8 text: {error}" if isinstance(error, UnicodeDecodeError) else str(error)
        return WorkflowFile(key, stamp, digest, "workflow" if len(parts) == 1 else "script", details, "", why)
    details |= {
        "description": signature.description[:LONGEST_DESCRIPTION],
        "parameters": [parameter.as_dict() for parameter in signature.parameters],
        "returns": signature.returns,
        "is_async": signature.is_async,
    }
    return WorkflowFile(key, stamp, digest, "workflow", details, signature.doc[:_LONGEST_DOC])


def _parse_skill(key: str, folder: str, stamp: Stamp, digest: str, data: bytes) -> WorkflowFile:
    details: dict[str, Any] = {"name": folder, "description": "", "parameters": [], "kind": "instructions"}
    try:
        skill = read_skill(folder, data.decode("utf-8"))
    except ValueError as error:
        return WorkflowFile(key, stamp, digest, "instructions", details, "", f"{key} cannot be read: {error}")
    details |= {"name": skill.name, "description": skill.description}
    return WorkflowFile(key, stamp, digest, "instructions", details, skill.instructions[:_LONGEST_INSTRUCTIONS])


class WorkflowIndex:
    """The files below some prefixes of a store. Of two with the same name, that below the earlier prefix counts."""

    def __init__(self, store: Store, prefixes: Sequence[str]) -> None:
        self._store = store
        self._prefixes = tuple(prefixes)
        self._by_key: dict[str, WorkflowFile] = {}
        self._by_name: dict[str, list[WorkflowFile]] | None = None
        """All files of a name, the one that counts last; None when it must be computed again."""
        self._warned: set[str] = set()
        self._lock = KeyedLock()

    @property
    def files(self) -> list[WorkflowFile]:
        """The files that count, by name, as of the last refresh."""
        return [same_name[-1] for same_name in self._named().values()]

    async def refresh(self) -> None:
        """Parse the files that have changed."""
        async with self._lock.hold("refresh"):
            for prefix in self._prefixes:
                found = await self._store.scan(prefix)
                changed = [key for key in found if _is_listed(prefix, key) and not self._is_known(key, found[key])]
                removed = {key for key in self._by_key if key.startswith(f"{prefix}/") and key not in found}
                await self._read(prefix, changed)
                self._remove(removed)

    async def get(self, name: str) -> tuple[WorkflowFile, bytes | None] | None:
        """Return the workflow with this file name as it is now, for the price of a stamp; with its content if it had
        to be read."""
        keys = [f"{prefix}/{name}.py" for prefix in self._prefixes]
        for prefix, key, stamp in zip(self._prefixes, keys, await self._store.stamps(keys), strict=True):
            if stamp is None:
                continue
            known = self._by_key.get(key)
            if known is not None and known.stamp == stamp:
                return known, None
            read = await self._read(prefix, [key])
            if read:
                return read[0]
        return None

    async def reread(self, file: WorkflowFile) -> tuple[WorkflowFile, bytes] | None:
        """Return a file as it is now, read even if its stamp is unchanged; None if it is gone."""
        prefix = next(prefix for prefix in self._prefixes if file.key.startswith(f"{prefix}/"))
        read = await self._read(prefix, [file.key], is_forced=True)
        return read[0] if read else None

    def find(self, name: str) -> WorkflowFile | None:
        """Return the file of a name as of the last refresh; `-` and `_` are the same."""
        found = self.all_of(name)
        return found[-1] if found else None

    def all_of(self, name: str) -> list[WorkflowFile]:
        """Return all files of a name, the one that counts last."""
        return self._named().get(_normalize(name), [])

    async def _read(
        self, prefix: str, keys: Sequence[str], *, is_forced: bool = False
    ) -> list[tuple[WorkflowFile, bytes]]:
        """Read and parse those files that are not known as they are now, or with `is_forced` all."""
        stamps = dict(zip(keys, await self._store.stamps(keys), strict=True))
        self._remove({key for key, stamp in stamps.items() if stamp is None})
        waiting = [
            key for key, stamp in stamps.items() if stamp is not None and (is_forced or not self._is_known(key, stamp))
        ]
        parsed: list[tuple[WorkflowFile, bytes]] = []
        for _ in range(_ATTEMPTS):
            contents = dict(zip(waiting, await self._store.get_many(waiting), strict=True))
            after = dict(zip(waiting, await self._store.stamps(waiting), strict=True))
            # A file that was replaced meanwhile is read again, so that its stamp is that of its content.
            found = [
                (key, stamp, data)
                for key, data in contents.items()
                if data is not None and (stamp := after[key]) is not None and stamp == stamps[key]
            ]
            new = await _parse_files(prefix, found)
            parsed += new
            self._by_key.update({file.key: file for file, _ in new})
            self._by_name = None if new else self._by_name
            waiting = [key for key, stamp in after.items() if stamp is not None and stamp != stamps[key]]
            if not waiting:
                break
            stamps.update(after)
        return parsed

    def _is_known(self, key: str, stamp: Stamp) -> bool:
        known = self._by_key.get(key)
        return known is not None and known.stamp == stamp

    def _remove(self, keys: Collection[str]) -> None:
        for key in keys:
            if self._by_key.pop(key, None) is not None:
                self._by_name = None

    def _named(self) -> dict[str, list[WorkflowFile]]:
        if self._by_name is None:
            self._by_name = self._sort()
        return self._by_name

    def _sort(self) -> dict[str, list[WorkflowFile]]:
        skills = {file.folder for file in self._by_key.values() if file.key.endswith(SKILL_FILE)}
        named: dict[str, list[WorkflowFile]] = {}
        # The later one counts: that of an earlier prefix, and a file rather than one in the folder of a skill.
        for prefix in reversed(self._prefixes):
            start = f"{prefix}/"
            files: list[WorkflowFile] = []
            for key, file in self._by_key.items():
                if file.kind == "script" or not key.startswith(start):
                    continue
                slash = key.find("/", len(start))
                if slash < 0:
                    files.append(file)
                elif key[:slash] in skills:
                    named.setdefault(_normalize(file.name), []).append(file)
                else:
                    self._warn_not_listed(file)
            for file in files:
                named.setdefault(_normalize(file.name), []).append(file)
        return dict(sorted(named.items()))

    def _warn_not_listed(self, file: WorkflowFile) -> None:
        """Warn once about a workflow in a folder that is not one of a skill."""
        if file.kind == "workflow" and not file.error and file.key not in self._warned:
            self._warned.add(file.key)
            target = f"{file.key.partition('/')[0]}/{file.key.rpartition('/')[2]}"
            _logger.warning("%s is not a workflow: its folder has no %s; move it to %s", file.key, SKILL_FILE, target)


def _is_listed(prefix: str, key: str) -> bool:
    """Whether a key may be a workflow, a SKILL.md, or a script of a skill."""
    parts = key[len(prefix) + 1 :].split("/")
    if parts[-1].startswith("_"):
        return False
    if len(parts) == 1:
        return key.endswith(".py")
    return len(parts) <= 3 and (parts[1:] == [SKILL_FILE] or (key.endswith(".py") and parts[1:-1] in ([], ["scripts"])))


async def _parse_files(prefix: str, found: Sequence[tuple[str, Stamp, bytes]]) -> list[tuple[WorkflowFile, bytes]]:
    def parse() -> list[tuple[WorkflowFile, bytes]]:
        return [(parse_file(key, prefix, stamp, data), data) for key, stamp, data in found]

    is_little = len(found) <= _FEW_FILES and sum(len(data) for _, _, data in found) <= _FEW_BYTES
    return parse() if is_little else await asyncio.to_thread(parse)


def _normalize(name: str) -> str:
    return name.replace("-", "_")
