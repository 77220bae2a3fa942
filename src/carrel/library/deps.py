"""The packages of a session: requirements.txt is the truth, and the session's Python is brought to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from carrel.errors import DependencyError, RequirementRefused, RuntimeDepsDisabledError
from carrel.library.names import check_call_signature
from carrel.library.requirements_text import (
    Written,
    checked,
    is_bare,
    merged,
    name_of,
    read,
    with_requirement,
    without_requirement,
)
from carrel.storage.base import MISSING, Lock, Store


class Installer(Protocol):
    """What puts packages where the session's code can import them; every executor does."""

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        """Returns the versions of what was added or changed, by name; DependencyError, and nothing has changed."""

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        """Returns those that were there; DependencyError where one is not the session's to remove."""

    async def installed(self) -> dict[str, str]:
        """The version of each package, by its normalized name."""


class Deps:
    """The list of a base or a store, and the Python that has what it names.

    `message` in what `add`, `remove` and `sync` return is empty, or what the installer said of what failed."""

    def __init__(
        self,
        store: Store,
        installer: Installer,
        *,
        allow_runtime: bool = True,
        cut_off: Callable[[], bool] = lambda: False,
        key: str = "requirements.txt",
        settings: Sequence[str] = (),
        settings_file: Path | None = None,
    ) -> None:
        """`cut_off` says whether code inside has no network: then it may not ask the package index for anything.

        `settings` and `settings_file`: requirements that the installer has from the session's settings and installs by
        itself at its start; they are listed after those of the file."""
        self._store = store
        self._installer = installer
        self._allow_runtime = allow_runtime
        self._cut_off = cut_off
        self._key = key
        self._settings = settings
        self._settings_file = settings_file
        self._removed: set[str] = set()
        """Packages of the settings that were uninstalled in this session."""

    async def list(self) -> list[str]:
        """The requirements as they are written, comments left out: those of the file, then those of the settings."""
        entries = read(await self._text())
        return [entry.text for entry in (*entries, *await self._of_settings(entries))]

    async def _of_settings(self, entries: Sequence[Written]) -> Sequence[Written]:
        """What the settings name and the file does not, a package once."""
        data = b""
        if self._settings_file is not None:
            with suppress(FileNotFoundError):
                data = await asyncio.to_thread(self._settings_file.read_bytes)
        found = {entry.name or entry.text: entry for entry in entries}
        listed = len(found)
        for entry in read("\n".join([*self._settings, data.decode("utf-8", "replace")])):
            # A line such as `-r more.txt` is an option of the installer and names no package.
            if entry.name not in self._removed and not entry.text.startswith("-"):
                found.setdefault(entry.name or entry.text, entry)
        return [*found.values()][listed:]

    async def add(self, package: str) -> dict[str, Any]:
        """Install a package and put it on the list; it can be imported at once.

        Returns `installed`, `already_present` and `failed`, lists of requirements. One that fails is not listed and
        nothing has changed. Raises RequirementRefused and RuntimeDepsDisabledError."""
        self._refuse_if_fixed("added")
        requirement, name = checked(package), name_of(package)
        async with self._turn() as turn:
            text = await self._text()
            others = [entry for entry in read(text) if entry.name]
            same = [entry.text for entry in others if entry.name == name]
            # The file says which version; a bare name is content with that.
            wanted = same if same and is_bare(requirement) else [merged(same[-1], requirement) if same else requirement]
            there = await self._installer.installed()
            # What is there has needs of its own, which a constraint does not speak of.
            beside = [entry for entry in others if entry.name != name and entry.name in there]
            absent = [entry for entry in others if entry.name != name and entry.name not in there]
            try:
                changed = await self._installer.install(
                    [*wanted, *(entry.text for entry in beside)], [_constraint(entry.text) for entry in absent]
                )
            except DependencyError as problem:
                return _report(failed=[requirement], message=str(problem))
            await turn.edit(lambda text: with_requirement(text, requirement))
            self._removed.discard(name)
        return _report(installed=[requirement]) if changed else _report(already_present=[requirement])

    async def remove(self, package: str) -> dict[str, Any]:
        """Uninstall a package and take it off the list; what it brought with it stays.

        Returns `removed`, `not_found` and `failed`, lists of names, and whether it was `removed_from_config`."""
        self._refuse_if_fixed("removed")
        name = name_of(package)
        report: dict[str, Any] = {"removed": [], "not_found": [], "failed": [], "message": ""}
        async with self._turn() as turn:
            # First off the list: what is listed is there, also for one who is cut off here.
            listed = await turn.edit(lambda text: without_requirement(text, name))
            try:
                gone = await self._installer.uninstall([name])
                report["removed" if gone else "not_found"] = [name]
                self._removed.update(gone)
            except DependencyError as problem:
                report["failed"], report["message"] = [name], str(problem)
            # And once more: it takes a while, and a person may have written meanwhile.
            again = await turn.edit(lambda text: without_requirement(text, name))
        return {**report, "removed_from_config": listed or again}

    async def sync(self) -> dict[str, Any]:
        """Install what the list names and is not there; returns the same as `add`.

        Those that cannot be had, and lines that are no requirement, are in `failed`; the others are installed."""
        entries = read(await self._text())
        bad = [entry for entry in entries if not entry.name]
        good: Sequence[str] = [entry.text for entry in entries if entry.name]
        report = _report(failed=[entry.text for entry in bad])
        said = [entry.problem for entry in bad]
        settings = await self._of_settings(entries)
        there = await self._installer.installed() if settings else {}
        # What the settings name was installed at the start, also what is named by an address.
        report["already_present"] += [entry.text for entry in settings if not entry.name or entry.name in there]
        good = [*good, *(entry.text for entry in settings if entry.name and entry.name not in there)]
        if not good:
            return {**report, "message": "\n".join(said)}
        try:
            changed = await self._installer.install(good)
        except DependencyError:
            good, changed, failed = await self._one_by_one(good)
            report["failed"] += failed
            said += failed.values()
        for text in good:
            report["installed" if name_of(text) in changed else "already_present"].append(text)
        return {**report, "message": "\n".join(said)}

    async def _one_by_one(self, wanted: Sequence[str]) -> tuple[Sequence[str], dict[str, str], dict[str, str]]:
        """Each beside those before it that could be had, so that what is there in the end goes together."""
        had: list[str] = []
        changed: dict[str, str] = {}
        failed: dict[str, str] = {}
        for requirement in wanted:
            try:
                changed |= await self._installer.install([*had, requirement])
                had.append(requirement)
            except DependencyError as problem:
                failed[requirement] = str(problem)
        return had, changed, failed

    async def installed(self) -> dict[str, str]:
        """What can be imported, listed or not: the version of each package by its name."""
        return await self._installer.installed()

    async def handle(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Answer what code inside calls: `deps.add("pandas")`."""
        verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "list": self.list,
            "add": self.add,
            "remove": self.remove,
            "sync": self.sync,
        }
        verb = name.partition(".")[2]
        if verb not in verbs:
            raise AttributeError(f"deps has no {verb or 'call of its own'}; it has {', '.join(verbs)}")
        check_call_signature(name, verbs[verb], args, kwargs)
        if verb in ("add", "sync") and self._allow_runtime and self._cut_off():
            raise DependencyError(
                f"deps.{verb} is closed to code in this session: it has no network, and the name of a package would go "
                "out to the index. Whoever made the session can install it (add_dep, sync_deps), or give a wheelhouse "
                "to install from"
            )
        return await verbs[verb](*args, **kwargs)

    # --- the file ---------------------------------------------------------------------------------------------------

    def _refuse_if_fixed(self, what: str) -> None:
        if not self._allow_runtime:
            raise RuntimeDepsDisabledError(
                f"packages cannot be {what} in this session (allow_runtime_deps is off); "
                f"a person can edit {self._key}, and sync installs what it names"
            )

    async def _text(self) -> str:
        data = await self._store.get(self._key)
        try:
            return (data or b"").decode("utf-8")
        except UnicodeDecodeError as problem:
            raise RequirementRefused(
                f"{self._key} is no text in UTF-8 (byte {problem.start}); mend it by hand"
            ) from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[_Turn]:
        turn = _Turn(self._store, self._key, self._text)
        await turn.begin()
        try:
            yield turn
        finally:
            await turn.end()


class _Turn:
    """The list for one alone, among all that share the store: nobody's line is lost to somebody else's edit."""

    def __init__(self, store: Store, key: str, text: Callable[[], Awaitable[str]]) -> None:
        self._store, self._key, self._text = store, key, text
        self._lock: Lock | None = None

    async def begin(self) -> None:
        self._lock = await self._store.lock(self._key)

    async def end(self) -> None:
        if self._lock is not None:
            await self._lock.release()

    async def edit(self, change: Callable[[str], str]) -> bool:
        """Whether it changed. Edited is what is there now: an install takes long, and a person may write meanwhile."""
        while True:
            stamp = await self._store.stamp(self._key)
            before = await self._text()
            after = change(before)
            if after == before:
                return False
            if await self._store.put(self._key, after.encode("utf-8"), expect=stamp or MISSING):
                return True


def _constraint(requirement: str) -> str:
    """A constraint bounds versions; extras mean nothing there."""
    name, bracket, rest = requirement.partition("[")
    return name + rest.partition("]")[2] if bracket else requirement


def _report(**lists: Any) -> dict[str, Any]:
    return {"installed": [], "already_present": [], "failed": [], "message": "", **lists}
