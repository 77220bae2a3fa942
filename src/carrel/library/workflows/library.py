"""Workflows: Python files with a function `run`, which people and agents write once and call by name."""

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
from carrel.library.workflows.history import CallCounts, Version, WorkflowHistory
from carrel.library.workflows.index import WorkflowFile, WorkflowIndex, digest_of
from carrel.library.workflows.source import (
    LARGEST_SOURCE,
    LONGEST_DESCRIPTION,
    LONGEST_NAME,
    SKILL_FILE,
    read_signature,
    read_skill,
    validate_name,
    with_description,
    without_description,
)
from carrel.storage.base import Store, locked
from carrel.text import did_you_mean

_LONGEST_QUERY = 2000
_logger = logging.getLogger("carrel.library")


def _now() -> datetime:
    return datetime.now(UTC)


class WorkflowLibrary:
    """The workflows of a store: `workflows/NAME.py`, also `skills/NAME.py` and folders with a SKILL.md.

    Nothing of them runs here: name, parameters and description are read from the syntax tree, and code runs where the
    session's code does. Files may be edited at any time; the next call sees the change.
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
        self._folder = f"library/{prefix}"
        self._files = WorkflowIndex(store, (prefix, *also))
        self._history = WorkflowHistory(store, f"{self._folder}/history.jsonl", now)
        self._counts = CallCounts(store, f"{self._folder}/usage.json", now)
        self._search = index if index is not None else LibrarySearch(store, f"search/{prefix}")

    # --- reading ----------------------------------------------------------------------------------------------------

    async def search(self, query: str, limit: int = 5) -> list[dict[str, Any]]:
        """Return the workflows that match best, the best first."""
        await self._files.refresh()
        files = {file.key: file for file in self._files.files}
        self._search.set_entries([file.entry for file in files.values()])
        matches = await self._search.search(str(query)[:_LONGEST_QUERY], int(limit))
        # A concurrent search may have set the entries of newer files.
        return [files[match.key].as_dict() for match in matches if match.key in files]

    async def get(self, name: str) -> dict[str, Any] | None:
        """Return a workflow with `source` and `usage`, or a skill with its instructions and files; None if there is
        none."""
        found = await self._read(name, await self._find(name))
        if found is None:
            return None
        file, data = found
        if file.kind == "instructions":
            keys = await self._store.list(file.folder)
            # A skill that was removed meanwhile may hide another one.
            return self._skill_as_dict(file, data, keys) if file.key in keys else await self.get(name)
        await self._record(file, data)
        source, _ = without_description(data.decode("utf-8", "replace"))
        return {**file.as_dict(), "source": source, "usage": await self._counts.get(file.name)}

    async def history(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a workflow, the oldest first: `version`, `at`, `change`, `description`, `source`.

        For a removed skill, `files` is where its folder was moved to."""
        found = await self._read(name, await self._find(name))
        if found is not None and found[0].kind == "workflow":
            await self._record(*found)
        versions = await self._history.versions(found[0].name if found is not None else name[:LONGEST_NAME])
        if not versions and found is None:
            raise await self._not_found(name)
        return versions

    async def read(self, name: str, path: str = SKILL_FILE) -> str | bytes:
        """Return a file from the folder of a skill, as text if it is UTF-8."""
        found = await self._find(name)
        if found is None or found[0].kind != "instructions":
            raise WorkflowNotFoundError(f"there is no skill {name!r} with a folder")
        path = str(path)
        try:
            data = await self._store.get(f"{found[0].folder}/{path}")
        except KeyRefused as error:
            why = "it is a link to a file outside the base" if "link" in str(error) else "it is not a relative path"
            raise WorkflowNotFoundError(f"the skill {name} has no file {path[:200]!r}: {why}") from None
        if data is None:
            raise WorkflowNotFoundError(f"the skill {name} has no file {path[:200]!r}; get({name!r}) lists its files")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data

    # --- changing ---------------------------------------------------------------------------------------------------

    async def add(self, name: str, source: str, description: str = "") -> dict[str, Any]:
        """Save a workflow, and replace one with the same name.

        `WorkflowValidationError` (a ValueError) for a name that is not an identifier or a source without `run`,
        `WorkflowSyntaxError` (also a SyntaxError) if it is not valid Python; nothing is saved then."""
        validate_name(name)
        if not isinstance(source, str) or not isinstance(description, str):
            raise WorkflowValidationError(f"source and description of {name} must be str")
        if len(source) > LARGEST_SOURCE + LONGEST_DESCRIPTION or len(description) > LONGEST_DESCRIPTION:
            raise WorkflowValidationError(
                f"{name} was not saved: a source has at most {LARGEST_SOURCE} characters and a description"
                f" {LONGEST_DESCRIPTION}; keep data in an artifact and shared code in a package"
            )
        data = _to_file(name, *await asyncio.to_thread(_split_description, name, source, description))
        async with locked(self._store, self._folder):
            found = await self._read(name, await self._find(name))
            if found is not None and found[0].kind == "workflow" and "." not in found[0].name:
                key = found[0].key
                # The version that is replaced may have been written by hand.
                await self._history.add([_version(*found)])
            else:
                key = f"{self._prefix}/{name}.py"
            await self._store.put(key, data)
            added = await self._files.get(name)
            if added is None:
                raise StorageWriteError(f"{key} was removed while it was written; nothing was saved")
            await self._history.add([_version(added[0], data)])
        return added[0].as_dict()

    async def remove(self, name: str) -> bool:
        """Remove a workflow or skill; True if there was one. Its versions stay in its history.

        The folder of a skill is moved, and the history says where."""
        return await self._remove(name)

    async def _remove(self, name: str, *, with_folders: bool = True) -> bool:
        """`with_folders`: also the folder of a skill; without it, that is a `WorkflowValidationError`."""
        async with locked(self._store, self._folder):
            if await self._find(name) is None:
                return False
            await self._files.refresh()
            # Also files that this one hides, and they first: nothing of this name must be left.
            found = self._files.all_of(name)
            if found and found[-1].kind == "instructions" and not with_folders:
                raise WorkflowValidationError(
                    f"{found[-1].name} is a skill with a folder of files, which code cannot remove;"
                    f" the program that has the session can: remove_workflow({found[-1].name!r})"
                )
            found = [file for file in found if with_folders or file.kind == "workflow"]
            # Recorded before the removal, so that an interrupted one loses nothing.
            for file in found:
                data = await self._store.get(file.key)
                if data is None:
                    continue
                moved_to = await self._copy_folder(file) if file.kind == "instructions" else ""
                await self._history.add([_version(file, data), Version(file.name, "", "", moved_to)])
            removed = [
                await self._store.delete(file.folder if file.kind == "instructions" else file.key) for file in found
            ]
        return any(removed)

    async def _copy_folder(self, file: WorkflowFile) -> str:
        """Copy the folder of a skill to where removed ones are kept; return its key there."""
        folder = file.folder
        existing = await self._store.folders(f"{self._folder}/removed")
        numbered = (f"{folder.rpartition('/')[2]}-{number}" for number in itertools.count(1))
        target = f"{self._folder}/removed/{next(name for name in numbered if name not in existing)}"
        for key in await self._store.list(folder):
            try:
                await self._store.put_pieces(f"{target}{key[len(folder) :]}", self._store.pieces(key))
            except (KeyRefused, KeyMissing) as error:
                _logger.warning("%s was not kept when %s was removed: %s", key, folder, error)
        return target

    # --- calling ----------------------------------------------------------------------------------------------------

    async def begin(self, name: str, known: str | None = None) -> dict[str, Any]:
        """Return what a call needs: `name`, `digest`, and the `source` unless `known` is that digest. Counts the call.

        `WorkflowNotFoundError` with similar names; another error if it cannot be called."""
        found = await self._find(name)
        if found is not None and found[0].digest != known:
            found = await self._read(name, found)
        if found is None:
            raise await self._not_found(name)
        file, data = found
        if file.kind == "instructions":
            raise WorkflowExecutionError(
                f"{file.name} is a skill with instructions and cannot be called; read them with"
                f" skills.get({file.name!r}) and its files with skills.read(name, path)"
            )
        if file.error:
            raise WorkflowValidationError(file.error)
        self._counts.count(file.name, calls=1)
        if data is None or known == file.digest:
            return {"name": file.name, "digest": file.digest}
        await self._record(file, data)
        source, _ = without_description(data.decode("utf-8", "replace"))
        return {"name": file.name, "digest": file.digest, "source": source}

    def ended(self, name: str, seconds: float = 0.0, error: str | None = None) -> None:
        """Count the end of a call; `error` is what it raised."""
        self._counts.count(str(name), seconds=seconds, error=None if error is None else str(error))

    async def handle(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer a call of code: `workflows.search(…)`."""
        verb = name.partition(".")[2]
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
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
        if verb not in methods:
            raise WorkflowNotFoundError(f"{name} runs in the session, not on the host{did_you_mean(verb, methods)}")
        check_call_signature(name, methods[verb], args, kwargs)
        return await methods[verb](*args, **kwargs)

    async def _delete(self, name: str) -> bool:
        return await self._remove(name, with_folders=False)

    async def _ended(self, name: str, seconds: float = 0.0, error: str | None = None) -> None:
        """Count the end of a call as code reports it: any arguments are possible."""
        file = self._files.find(str(name)[:_LONGEST_QUERY])
        if file is not None:
            self.ended(file.name, seconds if isinstance(seconds, (int, float)) else 0.0, error)

    async def close(self) -> None:
        """Save the counts of calls; the library can still be used afterwards."""
        await self._counts.wait_until_saved()
        await self._search.close()

    # --- finding ----------------------------------------------------------------------------------------------------

    async def _find(self, name: str) -> tuple[WorkflowFile, bytes | None] | None:
        """Return the file of a name, with its content if it had to be read."""
        if not isinstance(name, str):
            raise WorkflowValidationError(f"the name of a workflow must be a str, not {type(name).__name__}")
        if len(name) > _LONGEST_QUERY:
            return None
        if name.isidentifier() and len(name.encode()) <= LONGEST_NAME:
            found = await self._files.get(name)
            if found is not None:
                return found
        await self._files.refresh()
        file = self._files.find(name)
        return (file, None) if file is not None else None

    async def _read(
        self, name: str, found: tuple[WorkflowFile, bytes | None] | None
    ) -> tuple[WorkflowFile, bytes] | None:
        """Return a file with the content that it was parsed from, found again if it has changed meanwhile."""
        while found is not None:
            file, data = found
            data = data if data is not None else await self._store.get(file.key)
            if data is not None and digest_of(data) == file.digest:
                return file, data
            found = await self._files.reread(file) or await self._find(name)
        return None

    async def _not_found(self, name: str) -> WorkflowNotFoundError:
        await self._files.refresh()
        name = name[:LONGEST_NAME]
        names = [file.name for file in self._files.files]
        return WorkflowNotFoundError(f"there is no workflow {name}{did_you_mean(name, names)}")

    async def _record(self, file: WorkflowFile, data: bytes) -> None:
        """Add a version to the history, if it was written by hand; a store that cannot be written can still be read."""
        if await self._history.has(_version(file, data)):
            return
        try:
            async with locked(self._store, self._folder):
                # Only what is there now: a concurrent session may have replaced it since it was read.
                current = await self._store.get(file.key)
                if current is not None:
                    await self._history.add([_version(file, current)])
        except StorageWriteError as error:
            _logger.warning("the version of %s was not added to its history: %s", file.name, error)

    def _skill_as_dict(self, file: WorkflowFile, data: bytes, keys: Sequence[str]) -> dict[str, Any]:
        try:
            skill = read_skill(file.folder.rpartition("/")[2], data.decode("utf-8", "replace"))
        except ValueError as error:
            raise WorkflowValidationError(f"the skill {file.name} cannot be read: {error}") from None
        return {
            **file.as_dict(),
            "source": skill.instructions,
            "files": [key[len(file.folder) + 1 :] for key in keys if key != file.key],
            "front_matter": skill.front_matter,
        }

    # The last method, because its name hides the builtin type in annotations after it.
    async def list(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of all, by name; those that cannot be called have an `error`."""
        await self._files.refresh()
        return [file.as_dict() for file in self._files.files]


def _split_description(name: str, source: str, description: str) -> tuple[str, str]:
    """Return the source and the description to write below it, empty if the source says the same by itself.

    Raises an error if the source is not a workflow."""
    bare, own = without_description(source)
    description = description.strip() or own
    if own == description:
        source = bare
    in_docstring = read_signature(name, source).description
    # A comment of the source that looks like a description is kept as part of the source by one below it.
    is_needed = description and (description != in_docstring or source != bare)
    return source, description if is_needed else ""


def _to_file(name: str, source: str, description: str) -> bytes:
    try:
        return (with_description(source, description) if description else source).encode("utf-8")
    except UnicodeEncodeError:
        raise WorkflowValidationError(
            f"the source of {name} contains half of a surrogate pair, which no file can hold"
        ) from None


def _version(file: WorkflowFile, data: bytes) -> Version:
    return Version(file.name, digest_of(data), data.decode("utf-8", "replace"))
