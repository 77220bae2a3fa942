"""Workflows: Python files with a `run` that people and agents write down once and call by name."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from carrel.errors import (
    KeyMissing,
    KeyRefused,
    StorageWriteError,
    WorkflowExecutionError,
    WorkflowNotFoundError,
    WorkflowValidationError,
)
from carrel.library.names import check_call_signature
from carrel.library.search import LibrarySearch
from carrel.library.skill_folders import FILE, read_skill
from carrel.library.workflow_history import History, Version
from carrel.library.workflow_reading import Outlines
from carrel.library.workflow_shelf import Shelf, Shelved, digest_of
from carrel.library.workflow_source import (
    LARGEST,
    LONGEST_NAME,
    checked_name,
    compiled,
    with_description,
    without_description,
)
from carrel.library.workflow_usage import Usage
from carrel.storage.base import Store
from carrel.text import did_you_mean

LONGEST_DESCRIPTION = 4000
_LONGEST_QUERY = 2000
_log = logging.getLogger("carrel.library")


def _now() -> datetime:
    return datetime.now(UTC)


class WorkflowLibrary:
    """The workflows of a store: `workflows/NAME.py`, also `skills/NAME.py` and folders with a SKILL.md.

    Nothing of them is ever run here: name, parameters and description are read from the syntax tree, and the code
    runs where the session's code does. Files may be edited by hand at any time; the next call sees it.
    """

    def __init__(
        self,
        store: Store,
        *,
        prefix: str = "workflows",
        also: Sequence[str] = ("skills",),
        index: LibrarySearch | None = None,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._notes = f"library/{prefix}"
        self._shelf = Shelf(store, (prefix, *also), f"{self._notes}/outline.json")
        self._history = History(store, f"{self._notes}/history.jsonl", now)
        self._usage = Usage(store, f"{self._notes}/usage.json", now)
        self._index = index if index is not None else LibrarySearch(store, f"search/{prefix}")

    # --- what is there ----------------------------------------------------------------------------------------------

    async def search(self, query: str, limit: int = 5) -> list[dict[str, Any]]:
        """Those that fit best, the best first."""
        current = {shelved.key: shelved for shelved in await self._current()}
        self._index.set_entries([shelved.entry for shelved in current.values()])
        hits = await self._index.search(str(query)[:_LONGEST_QUERY], int(limit))
        # Another search may have told the index of later ones meanwhile.
        return [current[hit.key].shown() for hit in hits if hit.key in current]

    async def get(self, name: str) -> dict[str, Any] | None:
        """The same with `source` and `usage`, or None; of a skill to be read, its instructions and files."""
        found = await self._whole(name, await self._found(name))
        if found is None:
            return None
        shelved, data = found
        if shelved.kind == "instructions":
            files = await self._store.list(_whole_key(shelved))
            # One that went meanwhile had more.
            return self._shown_skill(shelved, data, files) if shelved.key in files else await self.get(name)
        source, _ = without_description(data.decode("utf-8", "replace"))
        return {**shelved.shown(), "source": source, "usage": await self._usage.of(shelved.name)}

    async def history(self, name: str) -> list[dict[str, Any]]:
        """Its versions, oldest first: `version`, `at`, `change`, `description`, `source`.

        Where the folder of a skill was removed, `files` says where it was put."""
        found = await self._whole(name, await self._found(name))
        if found is not None and found[0].kind == "workflow":
            await self._note([found])
        versions = await self._history.of(found[0].name if found is not None else name[:LONGEST_NAME])
        if not versions and found is None:
            raise await self._unknown(name)
        return versions

    async def read(self, name: str, path: str = FILE) -> str | bytes:
        """A file that lies in the folder of a skill: text, or bytes where it is none."""
        found = await self._found(name)
        if found is None or found[0].kind != "instructions":
            raise WorkflowNotFoundError(f"there is no skill with a folder that is called {name!r}")
        folder = found[0].key.rpartition("/")[0]
        path = str(path)
        try:
            data = await self._store.get(f"{folder}/{path}")
        except KeyRefused as refused:
            # Its message speaks of keys, which are nothing to whoever asks.
            why = "it is a link out of the base" if "link" in str(refused) else "it is no plain relative path"
            raise WorkflowNotFoundError(f"the skill {name} has no file {path[:200]!r}: {why}") from None
        if data is None:
            raise WorkflowNotFoundError(
                f"the skill {name} has no file {path[:200]!r}; get({name!r}) lists those it has"
            )
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data

    # --- changing what is there -------------------------------------------------------------------------------------

    async def add(self, name: str, source: str, description: str = "") -> dict[str, Any]:
        """Keep a workflow, in the place of one of the same name.

        `WorkflowValidationError` (a ValueError) for a name that is no identifier or a source with no `run`,
        `WorkflowSyntaxError` (also a SyntaxError) for what is no Python; nothing was kept then."""
        checked_name(name)
        if not isinstance(source, str) or not isinstance(description, str):
            raise WorkflowValidationError(f"the source and the description of {name} are texts")
        if len(source) > LARGEST + LONGEST_DESCRIPTION or len(description) > LONGEST_DESCRIPTION:
            raise WorkflowValidationError(
                f"{name} was not kept: a source has at most {LARGEST} characters, a description {LONGEST_DESCRIPTION};"
                " keep data in an artifact, code in a package"
            )
        bare, own = without_description(source)
        description = description.strip() or own
        if own == description:
            source = bare
        told = await asyncio.to_thread(_described, name, source)
        # A comment of the source's own that reads like one is followed by ours, so that it stays a part of the source.
        text = (
            with_description(source, description) if description and (description != told or source != bare) else source
        )
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            raise WorkflowValidationError(
                f"the source of {name} has half a surrogate pair, which no file can hold"
            ) from None
        async with _Held(self._store, self._notes):
            found = await self._whole(name, await self._found(name, note=False))
            if found is not None and found[0].kind == "workflow" and "." not in found[0].name:
                key = found[0].key
                # What a person wrote by hand and nobody looked at is kept before it goes.
                await self._history.note([_version(*found)])
            else:
                key = f"{self._prefix}/{name}.py"
            await self._store.put(key, data)
            added = await self._shelf.look(name)
            if added is None:
                raise StorageWriteError(f"{key} was removed while it was written; nothing was kept")
            await self._history.note([_version(added[0], data)])
        return added[0].shown()

    async def remove(self, name: str) -> bool:
        """True when there was one. Its versions stay in its history.

        The folder of a skill is put aside, and the history says where."""
        return await self._remove(name)

    async def _remove(self, name: str, *, folders: bool = True) -> bool:
        """`folders`: also the folder of a skill, which people wrote; without, that is a `WorkflowValidationError`."""
        async with _Held(self._store, self._notes):
            if await self._found(name, note=False) is None:
                return False
            fresh = await self._shelf.refresh()
            await self._history.note([_version(*pair) for pair in fresh if pair[0].kind == "workflow"])
            # Also those of this name that it hides, and they first: to be removed is to be gone.
            found = self._shelf.all_of(name)
            if found and found[-1].kind == "instructions" and not folders:
                raise WorkflowValidationError(
                    f"{found[-1].name} is a skill with a folder of files, which code inside does not delete; whoever"
                    f" has the session can: remove_workflow({found[-1].name!r})"
                )
            found = [shelved for shelved in found if folders or shelved.kind == "workflow"]
            # Noted before: one who is cut off after it leaves what the next look notes as there again.
            for shelved in found:
                data = await self._store.get(shelved.key)
                if data is None:
                    continue
                aside = await self._put_aside(shelved) if shelved.kind == "instructions" else ""
                await self._history.note([_version(shelved, data), Version(shelved.name, "", "", aside)])
            removed = [await self._store.delete(_whole_key(shelved)) for shelved in found]
        return any(removed)

    async def _put_aside(self, shelved: Shelved) -> str:
        """Copy the folder of a skill to where nobody looks for skills; that place."""
        folder = shelved.key.rpartition("/")[0]
        taken = await self._store.folders(f"{self._notes}/removed")
        numbered = (f"{folder.rpartition('/')[2]}-{number}" for number in itertools.count(1))
        aside = f"{self._notes}/removed/{next(name for name in numbered if name not in taken)}"
        for key in await self._store.list(folder):
            try:
                await self._store.put_pieces(f"{aside}{key[len(folder) :]}", self._store.pieces(key))
            except (KeyRefused, KeyMissing) as problem:
                _log.warning("%s was not kept when %s was removed: %s", key, folder, problem)
        return aside

    # --- calling ----------------------------------------------------------------------------------------------------

    async def begin(self, name: str, known: str | None = None) -> dict[str, Any]:
        """What is needed to call it inside: its `name`, `digest`, and the `source` unless that digest is `known`.

        Counts the call. `WorkflowNotFoundError` names near ones; one that cannot be called is an error that says why.
        """
        found = await self._found(name)
        if found is not None and found[0].digest != known:
            found = await self._whole(name, found)
        if found is None:
            raise await self._unknown(name)
        shelved, data = found
        if shelved.kind == "instructions":
            raise WorkflowExecutionError(
                f"{shelved.name} is a skill to be read, not to be called: skills.get({shelved.name!r}) has its"
                " instructions, skills.read(name, path) its files"
            )
        if shelved.problem:
            raise WorkflowValidationError(shelved.problem)
        self._usage.count(shelved.name, calls=1)
        if data is None or known == shelved.digest:
            return {"name": shelved.name, "digest": shelved.digest}
        source, _ = without_description(data.decode("utf-8", "replace"))
        return {"name": shelved.name, "digest": shelved.digest, "source": source}

    def ended(self, name: str, seconds: float = 0.0, error: str | None = None) -> None:
        """A call has ended; `error` is what it raised."""
        self._usage.count(str(name), seconds=seconds, error=None if error is None else str(error))

    async def record_use(self, name: str, seconds: float = 0.0, error: str | None = None) -> None:
        """Count a call that was made elsewhere, and wait until it is kept."""
        self._usage.count(str(name), calls=1, seconds=seconds, error=error)
        await self._usage.written()

    async def handle(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer what code inside asks of `workflows` and `skills`."""
        verb = name.partition(".")[2]
        answers: dict[str, Callable[..., Awaitable[Any]]] = {
            "list": self.list,
            "search": self.search,
            "get": self.get,
            "create": self.add,
            "delete": self._delete,
            "history": self.history,
            "read": self.read,
            "begin": self.begin,
            "ended": self._ended,
        }
        if verb not in answers:
            raise WorkflowNotFoundError(
                f"{name} is called where code runs, not on the host{did_you_mean(verb, answers)}"
            )
        check_call_signature(name, answers[verb], args, kwargs)
        return await answers[verb](*args, **kwargs)

    async def _delete(self, name: str) -> bool:
        """As code inside asks for it."""
        return await self._remove(name, folders=False)

    async def _ended(self, name: str, seconds: float = 0.0, error: str | None = None) -> None:
        """As code inside tells it, who may tell anything."""
        found = self._shelf.find(str(name)[:_LONGEST_QUERY])
        if found is not None:
            self.ended(found.name, seconds if isinstance(seconds, (int, float)) else 0.0, error)

    async def close(self) -> None:
        """Write down what the next process needs not find out again; usable again afterwards."""
        await self._usage.written()
        await self._shelf.keep()
        await self._index.close()

    # --- looking ----------------------------------------------------------------------------------------------------

    async def _current(self, note: bool = True) -> Sequence[Shelved]:
        fresh = await self._shelf.refresh()
        if note:
            await self._note([(shelved, data) for shelved, data in fresh if shelved.kind == "workflow"])
        return self._shelf.shelved

    async def _found(self, name: str, note: bool = True) -> tuple[Shelved, bytes | None] | None:
        """The one of this name, with its bytes where they are at hand."""
        if not isinstance(name, str):
            raise WorkflowValidationError(f"a workflow's name is a text, not {type(name).__name__}")
        if len(name) > _LONGEST_QUERY:
            return None
        if name.isidentifier() and len(name.encode()) <= LONGEST_NAME:
            found = await self._shelf.look(name)
            if found is not None:
                if note and found[1] is not None:
                    await self._note([(found[0], found[1])])
                return found
        await self._current(note)
        shelved = self._shelf.find(name)
        return (shelved, None) if shelved is not None else None

    async def _whole(self, name: str, found: tuple[Shelved, bytes | None] | None) -> tuple[Shelved, bytes] | None:
        """The same with the bytes that it was read from; what changed meanwhile is looked for again."""
        while found is not None:
            shelved, data = found
            data = data if data is not None else await self._store.get(shelved.key)
            if data is not None and digest_of(data) == shelved.digest:
                return shelved, data
            found = await self._shelf.again(shelved) or await self._found(name, note=False)
        return None

    async def _unknown(self, name: str) -> WorkflowNotFoundError:
        names = [shelved.name for shelved in await self._current()]
        name = name[:LONGEST_NAME]
        return WorkflowNotFoundError(f"there is no workflow {name}{did_you_mean(name, names)}")

    async def _note(self, found: Sequence[tuple[Shelved, bytes]]) -> None:
        """Keep the versions that people made by hand; a store that cannot be written is still a library to read."""
        if not found:
            return
        try:
            async with _Held(self._store, self._notes):
                await self._history.note([_version(shelved, data) for shelved, data in await self._as_now(found)])
        except StorageWriteError as problem:
            _log.warning("versions of %d workflows were not kept: %s", len(found), problem)

    async def _as_now(self, found: Sequence[tuple[Shelved, bytes]]) -> list[tuple[Shelved, bytes]]:
        """The same as it is in this moment: what was read before the lock was had may be older than what is noted."""
        stamps = await self._store.stamps([shelved.key for shelved, _ in found])
        steady = [pair for pair, stamp in zip(found, stamps, strict=True) if stamp == pair[0].stamp]
        other = [pair[0] for pair, stamp in zip(found, stamps, strict=True) if stamp not in (None, pair[0].stamp)]
        datas = await self._store.get_many([shelved.key for shelved in other])
        return steady + [(shelved, data) for shelved, data in zip(other, datas, strict=True) if data is not None]

    def _shown_skill(self, shelved: Shelved, data: bytes, files: Sequence[str]) -> dict[str, Any]:
        folder = _whole_key(shelved)
        try:
            skill = read_skill(folder.rpartition("/")[2], data.decode("utf-8", "replace"))
        except ValueError as problem:
            raise WorkflowValidationError(f"the skill {shelved.name} cannot be read: {problem}") from None
        return {
            **shelved.shown(),
            "source": skill.instructions,
            "files": [key[len(folder) + 1 :] for key in files if key != shelved.key],
            "front_matter": skill.front,
        }

    # Last, because after it the name is no longer that of the type.
    async def list(self) -> list[dict[str, Any]]:
        """Name, description and parameters of each, by name; one that cannot be called has an `error` that says why."""
        return [shelved.shown() for shelved in await self._current()]


class _Held:
    """The library's lock, among all processes, for a while."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key

    async def __aenter__(self) -> None:
        self._lock = await self._store.lock(self._key)

    async def __aexit__(self, *problem: object) -> None:
        if self._lock is not None:
            await asyncio.shield(self._lock.release())


def _described(name: str, source: str) -> str:
    """What a source that can be kept says of itself; `WorkflowValidationError` for another."""
    compiled(name, source)
    with Outlines() as outlines:
        return outlines.read(name, source).description


def _whole_key(shelved: Shelved) -> str:
    """All that belongs to it."""
    return shelved.key.rpartition("/")[0] if shelved.kind == "instructions" else shelved.key


def _version(shelved: Shelved, data: bytes) -> Version:
    return Version(shelved.name, digest_of(data), data.decode("utf-8", "replace"))
