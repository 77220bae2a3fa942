"""The tool files of a store while a session lives: what came, changed, broke or went since the last look."""

import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from carrel.errors import ConfigurationError, KeyRefused, StorageError
from carrel.library.tools.definition import AnyDefinition
from carrel.library.tools.definition_remote import OpenApiDefinition
from carrel.library.tools.names import python_name
from carrel.library.tools.reading import OnError, definition_files, read_definitions
from carrel.library.tools.seam import Stream, Tool, ToolProvider
from carrel.storage.base import Stamp, Store, check_key

logger = logging.getLogger(__name__)

Make = Callable[[str, AnyDefinition], ToolProvider]
"""What answers for the definition in a file."""


Content = AnyDefinition | ConfigurationError
"""What a file defines, or what is wrong with it."""


class Change(NamedTuple):
    """A file that is not as it was: the provider it had, and the one it has now."""

    old: ToolProvider | None
    new: ToolProvider | None


@dataclass(frozen=True)
class _Read:
    """A file as it was read."""

    content: Content
    provider: ToolProvider
    stamps: Mapping[str, Stamp | None]
    """Of the file, and of what it names beside it."""


class Broken:
    """Stands for a file that cannot be read, so that whoever looks for its tools is told why."""

    def __init__(self, name: str, problem: ConfigurationError) -> None:
        self.name = name
        self._problem = problem

    async def definitions(self) -> Sequence[Tool]:
        # Without the frames of earlier raises, which would add up on the one object.
        raise self._problem.with_traceback(None)

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: Stream | None = None) -> Any:
        raise self._problem.with_traceback(None)

    async def close(self) -> None:
        """Nothing was started."""


class ToolFiles:
    """`prefix/**/*.yaml` of a store, each with its provider as long as the file says the same."""

    def __init__(self, store: Store, prefix: str, make: Make, on_error: OnError = "raise") -> None:
        """`on_error` is for files that are wrong from the beginning; one that breaks later costs its own tools only."""
        self._store = store
        self._prefix = prefix
        self._make = make
        self._on_error = on_error
        self._stamps: dict[str, Stamp | None] | None = None
        self._read: dict[str, _Read] = {}
        self._file_of: dict[ToolProvider, str] = {}

    async def is_as_read(self, provider: ToolProvider) -> bool:
        """Whether the file behind it is the one that was read, at the cost of a stamp."""
        file = self._file_of.get(provider)
        if file is None:
            return True
        stamps = self._read[file].stamps
        try:
            return stamps == await self._stamped([*stamps])
        except StorageError:
            return False

    async def look(self) -> list[Change]:
        """Read what changed; the first time, everything, and `ConfigurationError` for a bad file.

        Where the store does not answer later on, everything stays as it was."""
        try:
            return await self._looked()
        except StorageError as problem:
            if self._stamps is None:
                raise
            logger.warning("whether tool files changed cannot be seen: %s", problem)
            return []

    async def _looked(self) -> list[Change]:
        files = await definition_files(self._store, self._prefix)
        # Taken before the files are read: what is written meanwhile has another stamp the next time.
        stamps = await self._stamped([*files, *(_beside(self._read) - {*files})])
        if stamps == self._stamps:
            return []
        on_error = self._on_error if self._stamps is None else "skip"
        found = await read_definitions(self._store, self._prefix, on_error, files)
        named = {file: _named_by(file, definition) for file, definition in found.by_file.items()}
        stamps |= await self._stamped([key for key in named.values() if key is not None and key not in stamps])
        # One that has never been right is left out where that is wanted; what it says is in the log.
        wrong = {file: one for file, one in found.problems.items() if file in self._read or self._on_error == "raise"}
        read = {
            file: self._now(file, content, {key: stamps[key] for key in (file, named.get(file)) if key is not None})
            for file, content in (found.by_file | wrong).items()
        }
        changes = [Change(_provider(self._read.get(file)), _provider(read.get(file))) for file in self._read | read]
        self._read = read
        self._stamps = {key: stamps[key] for key in {*files} | _beside(read)}
        self._file_of = {one.provider: file for file, one in read.items()}
        return [change for change in changes if change.old is not change.new]

    async def _stamped(self, keys: Sequence[str]) -> dict[str, Stamp | None]:
        return dict(zip(keys, await self._store.stamps(keys), strict=True)) if keys else {}

    def _now(self, file: str, content: Content, stamps: Mapping[str, Stamp | None]) -> _Read:
        """What a file is now: with the provider that it has, where nothing else than its look changed."""
        was = self._read.get(file)
        if was is not None and _same(was.content, content) and _rest(was.stamps, file) == _rest(stamps, file):
            return _Read(was.content, was.provider, stamps)
        if not isinstance(content, ConfigurationError):
            return _Read(content, self._make(file, content), stamps)
        stem = posixpath.basename(file).rpartition(".")[0]
        return _Read(content, Broken(was.provider.name if was is not None else python_name(stem), content), stamps)


def _provider(read: _Read | None) -> ToolProvider | None:
    return read.provider if read is not None else None


def _named_by(file: str, definition: AnyDefinition) -> str | None:
    """The key of what a definition names beside it, where it does."""
    if not isinstance(definition, OpenApiDefinition):
        return None
    try:
        return check_key(key_beside(file, definition.spec))
    except KeyRefused:
        # An address, a file of this machine, or one that nobody may read.
        return None


def key_beside(file: str, path: str) -> str:
    """The key of what a file names by a relative path."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), path))


def _beside(read: Mapping[str, _Read]) -> set[str]:
    return {key for one in read.values() for key in one.stamps}


def _rest(stamps: Mapping[str, Stamp | None], file: str) -> dict[str, Stamp | None]:
    return {key: stamp for key, stamp in stamps.items() if key != file}


def _same(one: Content, other: Content) -> bool:
    if isinstance(one, ConfigurationError) or isinstance(other, ConfigurationError):
        return type(one) is type(other) and str(one) == str(other)
    return one == other
