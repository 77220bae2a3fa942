"""The workflows that are in a store now: what changed is read again, all else is remembered, also between processes."""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import orjson

from carrel.errors import StorageError, WorkflowValidationError
from carrel.library.names import python_name
from carrel.library.search import SearchEntry
from carrel.library.skill_folders import FILE, read_skill
from carrel.library.workflow_reading import Outlines
from carrel.library.workflow_source import QUICK, checked_name, without_description
from carrel.storage.base import KeyedLock, Stamp, Store

_FORMAT = 1
_WORTH_KEEPING = 50
"""So many outlines are written down for the next process."""
_FEW = 20
"""So many sources are read in the loop's own thread; more, in another."""
_LITTLE = QUICK
"""So many bytes of them."""
_LONGEST_DESCRIPTION = 4000
_LONGEST_DOC = 20_000
_log = logging.getLogger("carrel.library")


@dataclass(frozen=True, eq=False)
class Shelved:
    """One file: a workflow, or a skill to be read."""

    key: str
    stamp: Stamp
    digest: str
    """Of the whole file: another one means another version."""
    kind: Literal["workflow", "instructions", "script"]
    """A script lies in a skill's folder and is for people and shells: it has no `run`."""
    facts: dict[str, Any]
    """What a listing shows."""
    doc: str
    problem: str = ""
    """Why it cannot be called, "" when it can."""

    @cached_property
    def entry(self) -> SearchEntry:
        """What a search looks at."""
        told = " ".join(f"{p['name']} {p['description']}" for p in self.facts["parameters"])
        return SearchEntry(self.key, self.name, self.facts["description"], told, self.doc)

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    def shown(self) -> dict[str, Any]:
        facts = {**self.facts, "parameters": [dict(parameter) for parameter in self.facts["parameters"]]}
        return {**facts, "error": self.problem} if self.problem else facts


def digest_of(data: bytes) -> str:
    """What tells one version of a file from another."""
    return hashlib.sha256(data).hexdigest()[:32]


def read_shelved(key: str, prefix: str, stamp: Stamp, data: bytes, outlines: Outlines) -> Shelved:
    """One file as what it is; never fails: what cannot be called says why."""
    digest = digest_of(data)
    words = key[len(prefix) + 1 :].split("/")
    if words[-1] == FILE:
        return _read_instructions(key, words[0], stamp, digest, data)
    name = words[0].removesuffix(".py")
    if len(words) > 1:
        name = f"{python_name(words[0])}.{words[-1].removesuffix('.py')}"
    facts: dict[str, Any] = {"name": name, "description": "", "parameters": [], "kind": "workflow"}
    try:
        for word in name.split("."):
            checked_name(word)
        source, description = without_description(data.decode("utf-8"))
        found = outlines.read(name, source, description)
    except (UnicodeDecodeError, WorkflowValidationError) as problem:
        why = f"{key} is no UTF-8 text: {problem}" if isinstance(problem, UnicodeDecodeError) else str(problem)
        return Shelved(key, stamp, digest, "workflow" if len(words) == 1 else "script", facts, "", why)
    facts |= {
        "description": found.description[:_LONGEST_DESCRIPTION],
        "parameters": [p.as_data() for p in found.parameters],
    }
    facts |= {"returns": found.returns, "is_async": found.is_async}
    return Shelved(key, stamp, digest, "workflow", facts, found.doc[:_LONGEST_DOC])


def _read_instructions(key: str, folder: str, stamp: Stamp, digest: str, data: bytes) -> Shelved:
    facts: dict[str, Any] = {"name": folder, "description": "", "parameters": [], "kind": "instructions"}
    try:
        skill = read_skill(folder, data.decode("utf-8"))
    except ValueError as problem:
        return Shelved(key, stamp, digest, "instructions", facts, "", f"{key} cannot be read: {problem}")
    facts |= {"name": skill.name, "description": skill.description}
    return Shelved(key, stamp, digest, "instructions", facts, skill.instructions[:2000])


class Shelf:
    """What is there below some prefixes; of two with one name, the one below the earlier prefix counts."""

    def __init__(self, store: Store, prefixes: Sequence[str], cache: str) -> None:
        self._store = store
        self._prefixes = tuple(prefixes)
        self._cache = cache
        self._by_key: dict[str, Shelved] = {}
        self._by_name: dict[str, list[Shelved]] | None = None
        """All of a name, the one that counts last; None when it has to be made anew."""
        self._loaded = False
        self._unkept = 0
        self._passed_over: set[str] = set()
        self._turns = KeyedLock()

    @property
    def shelved(self) -> list[Shelved]:
        """In the order of their names, as of the last refresh."""
        return [of_a_name[-1] for of_a_name in self._named().values()]

    async def refresh(self) -> list[tuple[Shelved, bytes]]:
        """Take up what changed; what was read for that, with its bytes."""
        async with self._turns.hold(self._cache):
            await self._load()
            fresh: list[tuple[Shelved, bytes]] = []
            for prefix in self._prefixes:
                found = await self._store.scan(prefix)
                keys = [key for key in found if self._wanted(prefix, key) and not self._remembers(key, found[key])]
                gone = {key for key in self._by_key if key.startswith(f"{prefix}/") and key not in found}
                fresh += await self._read(prefix, keys, gone)
                for key in gone:
                    self._by_key.pop(key, None)
                    self._by_name = None
            self._unkept += len(fresh)
            if self._unkept >= _WORTH_KEEPING:
                await self.keep()
            return fresh

    async def look(self, name: str) -> tuple[Shelved, bytes | None] | None:
        """The one of this name as it is now, at the cost of a stamp; with its bytes when it had to be read."""
        keys = [f"{prefix}/{name}.py" for prefix in self._prefixes]
        for prefix, key, stamp in zip(self._prefixes, keys, await self._store.stamps(keys), strict=True):
            if stamp is None:
                continue
            known = self._by_key.get(key)
            if known is not None and known.stamp == stamp:
                return known, None
            read = await self._read(prefix, [key], set())
            if read:
                self._unkept += 1
                return read[0]
        return None

    async def again(self, shelved: Shelved) -> tuple[Shelved, bytes] | None:
        """The file as it is now, read also where its stamp says nothing new; None when it is gone."""
        prefix = next(prefix for prefix in self._prefixes if shelved.key.startswith(f"{prefix}/"))
        read = await self._read(prefix, [shelved.key], set(), anew=True)
        return read[0] if read else None

    def find(self, name: str) -> Shelved | None:
        """The one of this name as of the last refresh; `-` and `_` are the same."""
        found = self.all_of(name)
        return found[-1] if found else None

    def all_of(self, name: str) -> list[Shelved]:
        """The same with those that it hides, which come before it."""
        return self._named().get(_callable(name), [])

    def _wanted(self, prefix: str, key: str) -> bool:
        words = key[len(prefix) + 1 :].split("/")
        if words[-1].startswith("_"):
            return False
        if len(words) == 1:
            return key.endswith(".py")
        return len(words) <= 3 and (words[1:] == [FILE] or (key.endswith(".py") and words[1:-1] in ([], ["scripts"])))

    async def _read(
        self, prefix: str, keys: Sequence[str], gone: set[str], *, anew: bool = False
    ) -> list[tuple[Shelved, bytes]]:
        """Read those that are not as they are remembered; `gone` takes up those that are there no more."""
        stamps = dict(zip(keys, await self._store.stamps(keys), strict=True))
        gone |= {key for key, stamp in stamps.items() if stamp is None and key in self._by_key}
        waiting = [
            key for key, stamp in stamps.items() if stamp is not None and (anew or not self._remembers(key, stamp))
        ]
        fresh: list[tuple[Shelved, bytes]] = []
        for _ in range(5):
            datas = await self._store.get_many(waiting)
            found = [(key, stamps[key], data) for key, data in zip(waiting, datas, strict=True) if data is not None]
            after = dict(zip(waiting, await self._store.stamps(waiting), strict=True))
            # One that was replaced while it was read is read again, so that its stamp is that of its bytes.
            steady = [(key, stamp, data) for key, stamp, data in found if stamp and after[key] == stamp]
            read = await self._outlined(prefix, steady)
            fresh += read
            self._by_key.update({shelved.key: shelved for shelved, _ in read})
            self._by_name = None if read else self._by_name
            waiting = [key for key, stamp in after.items() if stamp is not None and stamp != stamps[key]]
            if not waiting:
                break
            stamps.update(after)
        return fresh

    async def _outlined(self, prefix: str, found: list[tuple[str, Stamp, bytes]]) -> list[tuple[Shelved, bytes]]:
        def outlined() -> list[tuple[Shelved, bytes]]:
            with Outlines() as outlines:
                return [(read_shelved(key, prefix, stamp, data, outlines), data) for key, stamp, data in found]

        little = len(found) <= _FEW and sum(len(data) for _, _, data in found) <= _LITTLE
        return outlined() if little else await asyncio.to_thread(outlined)

    def _remembers(self, key: str, stamp: Stamp) -> bool:
        known = self._by_key.get(key)
        return known is not None and known.stamp == stamp

    def _pass_over(self, shelved: Shelved) -> None:
        """Say once that nobody will find it where it lies."""
        if shelved.kind == "workflow" and not shelved.problem and shelved.key not in self._passed_over:
            self._passed_over.add(shelved.key)
            folder, _, file = shelved.key.rpartition("/")
            prefix = folder.partition("/")[0]
            _log.warning(
                "%s is no workflow: it lies in a folder without a %s; move it to %s/%s", shelved.key, FILE, prefix, file
            )

    def _named(self) -> dict[str, list[Shelved]]:
        if self._by_name is None:
            self._by_name = self._sorted()
        return self._by_name

    def _sorted(self) -> dict[str, list[Shelved]]:
        skills = {shelved.key.rpartition("/")[0] for shelved in self._by_key.values() if shelved.key.endswith(FILE)}
        named: dict[str, list[Shelved]] = {}
        # The later one counts: from an earlier prefix, and a file rather than what lies in a folder.
        for prefix in reversed(self._prefixes):
            start = f"{prefix}/"
            files: list[Shelved] = []
            for key, shelved in self._by_key.items():
                if shelved.kind == "script" or not key.startswith(start):
                    continue
                slash = key.find("/", len(start))
                if slash < 0:
                    files.append(shelved)
                elif key[:slash] in skills:
                    named.setdefault(_callable(shelved.name), []).append(shelved)
                else:
                    self._pass_over(shelved)
            for shelved in files:
                named.setdefault(_callable(shelved.name), []).append(shelved)
        return dict(sorted(named.items()))

    # --- between processes ------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """What another process wrote down, for the keys whose stamps still say the same."""
        if self._loaded:
            return
        self._loaded = True
        data = await self._store.get(self._cache)
        if data is None:
            return
        try:
            kept = orjson.loads(data)
            if kept["format"] == _FORMAT:
                self._by_key = {one.key: one for one in map(_from_data, kept["shelved"])} | self._by_key
                self._by_name = None
        except (ValueError, KeyError, TypeError) as problem:
            _log.warning("%s could not be read (%s) and is made anew", self._cache, problem)

    async def keep(self) -> None:
        """Write down what was read anew; of few workflows it is not worth a file."""
        if not self._unkept or len(self._by_key) < _WORTH_KEEPING:
            return
        self._unkept = 0
        kept = {"format": _FORMAT, "shelved": [_as_data(shelved) for shelved in self._by_key.values()]}
        try:
            await self._store.put(self._cache, orjson.dumps(kept))
        except (StorageError, TypeError) as problem:
            _log.warning("%s could not be written, so the next start is slower: %s", self._cache, problem)


def _callable(name: str) -> str:
    return name.replace("-", "_")


def _as_data(shelved: Shelved) -> list[Any]:
    one = shelved
    return [one.key, list(one.stamp), one.digest, one.kind, one.facts, one.doc, one.problem]


def _from_data(data: Iterable[Any]) -> Shelved:
    key, stamp, digest, kind, facts, doc, problem = data
    return Shelved(key, Stamp(*stamp), digest, kind, facts, doc, problem)
