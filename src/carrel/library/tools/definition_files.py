"""Reads `tools/*.yaml` into definitions and makes their providers; errors name file, line and field."""

import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, assert_never

import orjson
from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from carrel.errors import ConfigurationError, KeyRefused, MissingExtra, StorageError
from carrel.library.names import python_name
from carrel.library.tools.cli import CliProvider
from carrel.library.tools.definitions import (
    CliDefinition,
    Endpoint,
    HttpDefinition,
    McpDefinition,
    OpenApiDefinition,
    Option,
    Positional,
    ProgramSchema,
    PythonDefinition,
    Recipe,
    RecipeParameter,
    ToolDefinition,
)
from carrel.library.tools.http import HttpProvider
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.openapi import OpenApiProvider
from carrel.library.tools.python import ModuleProvider
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool, ToolProvider
from carrel.processes import OnOutput, Runner
from carrel.storage.base import Stamp, Store, check_key
from carrel.text import did_you_mean

KINDS = ("cli", "mcp", "http", "openapi", "python")
LONGEST = 1024 * 1024
"""A definition of more bytes is a mistake."""

Place = Sequence[str | int]

_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")


def _kind(given: Any) -> str:
    return str((given.get("type") or "cli") if isinstance(given, dict) else given.type)


AnyDefinition = Annotated[
    Annotated[CliDefinition, Tag("cli")]
    | Annotated[McpDefinition, Tag("mcp")]
    | Annotated[HttpDefinition, Tag("http")]
    | Annotated[OpenApiDefinition, Tag("openapi")]
    | Annotated[PythonDefinition, Tag("python")],
    Discriminator(_kind),
]


@lru_cache(maxsize=1)
def adapter() -> TypeAdapter[Any]:
    """Checks one definition of any kind."""
    return TypeAdapter(AnyDefinition)


def parse(data: bytes, file: str) -> AnyDefinition:
    """The definition in a file; `ConfigurationError` names the file, the line, the field and what was expected."""
    if len(data) > LONGEST:
        raise ConfigurationError(f"{file}: a definition of {len(data):,} bytes; at most {LONGEST:,} are read")
    fields = _fields(data, file)
    kind = fields.get("type", "cli")
    if kind not in KINDS:
        raise ConfigurationError(
            f"{file}, line {_line(data, ['type'])}, type: {kind!r} is no kind of tool{did_you_mean(str(kind), KINDS)}"
        )
    try:
        definition: AnyDefinition = adapter().validate_python(fields)
    except ValidationError as problem:
        told = [_told(data, file, error) for error in problem.errors(include_url=False, include_context=False)]
        raise ConfigurationError("\n".join(told[:5])) from None
    return definition


def _fields(data: bytes, file: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - only where a definition is read anew

    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise ConfigurationError(f"{file}, line {line}: no text in UTF-8") from None
    try:
        documents = list(yaml.load_all(data, _loader()))
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{file}{where}: no YAML: {problem.problem or problem.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise ConfigurationError(f"{file}: no YAML: {problem}") from None
    documents = [document for document in documents if document is not None]
    if len(documents) != 1:
        raise ConfigurationError(
            f"{file}: one definition per file was expected, and there are {len(documents) or 'none'}"
        )
    fields = documents[0]
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{file}: fields such as `name:` were expected, and there is a {_spoken(fields)}")
    return fields


@lru_cache(maxsize=1)
def _loader() -> Any:
    """YAML's own safe loader, except that a key that stands twice is an error, and that only `true` and `false` are
    boolean and no text is a date: a program may well be called `yes`."""
    import yaml  # noqa: PLC0415

    quickest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(quickest):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
                    seen.add(key.value)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in known if not tag.endswith((":bool", ":timestamp"))]
        for letter, known in quickest.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
    return Loader


def _told(data: bytes, file: str, error: Any) -> str:
    # The first part of a place is the kind, which nobody wrote there.
    place = [part for part in error["loc"][1:] if part not in _NOT_WRITTEN]
    message, given = str(error["msg"]), error.get("input")
    match error["type"]:
        case "missing":
            expected = "is missing"
        case "extra_forbidden":
            expected = f"nobody knows this field{_meant(error['loc'])}"
        case "model_type" | "model_attributes_type" | "dict_type":
            expected = f"should be fields (`name: value`), not {_short(given)}"
        case "value_error":
            expected = message.removeprefix("Value error, ")
            field, found, rest = expected.partition(": ")
            if found and " " not in field and not place:
                place, expected = list(field.split(".")), rest
        case _:
            spoken = message.removeprefix("Input ").replace("a valid tuple", "a list").replace("a valid string", "text")
            expected = f"{spoken}, not {_short(given)}"
    field = ".".join(map(str, place)) or "the definition"
    return f"{file}, line {_line(data, place)}, {field}: {expected}"


_FIELDS = {
    "cli": [one.model_fields for one in (CliDefinition, ProgramSchema, Option, Positional, Recipe, RecipeParameter)],
    "mcp": [McpDefinition.model_fields],
    "http": [HttpDefinition.model_fields, Endpoint.model_fields],
    "openapi": [OpenApiDefinition.model_fields],
    "python": [PythonDefinition.model_fields],
}
"""Of each kind: what stands in the definition itself, then what stands in its parts."""


def _meant(place: Place) -> str:
    """Which field may have been meant, where one is near."""
    whole, *parts = _FIELDS[str(place[0])]
    names = {part.alias or name for one in ([whole] if len(place) == 2 else parts) for name, part in one.items()}
    said = did_you_mean(str(place[-1]), names)
    return said if "did you mean" in said else ""


_NOT_WRITTEN = frozenset(("str", "tuple[constrained-str, ...]", "tuple[str, ...]", "function-before", "[key]"))


def _line(data: bytes, place: Place) -> int:
    """Where the field stands, or the nearest one above it; from 1."""
    import yaml  # noqa: PLC0415

    node: Any = yaml.compose(data, yaml.SafeLoader)
    line = node.start_mark.line + 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                return int(line)
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return int(line)
    return int(line)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _spoken(value: Any) -> str:
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__


logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]

_MOST_KEPT = 5000
_parsed: dict[str, AnyDefinition] = {}
"""By the hash of the file; all sessions of this process share it, because definitions never change."""


@dataclass(frozen=True)
class Definitions:
    """What was found, and what was wrong with the rest, by file."""

    by_file: dict[str, AnyDefinition] = field(default_factory=dict)
    problems: dict[str, ConfigurationError] = field(default_factory=dict)


async def definition_files(store: Store, prefix: str = "tools") -> list[str]:
    """All of `prefix/**/*.yaml` and `.yml`."""
    return [key for key in await store.list(prefix) if key.endswith((".yaml", ".yml"))]


async def read_definitions(
    store: Store, prefix: str = "tools", on_error: OnError = "raise", files: Sequence[str] | None = None
) -> Definitions:
    """What the files define. A bad one, or a name that stands in two, is a `ConfigurationError`;

    with `on_error="skip"` it is logged and the others are there. `files`: as `definition_files` found them just now."""
    files = await definition_files(store, prefix) if files is None else files
    contents = {file: data for file, data in zip(files, await store.get_many(files), strict=True) if data is not None}
    hashes = {file: hashlib.blake2b(data, digest_size=16).hexdigest() for file, data in contents.items()}
    place = f"library/{prefix}/parsed.json"
    if not _parsed.keys() >= set(hashes.values()):
        await _recall(store, place)
    found, new = Definitions(), False
    named: dict[str, str] = {}
    for file, data in contents.items():
        try:
            definition = _parsed.get(hashes[file])
            if definition is None:
                if _is_openapi(data):
                    continue
                definition, new = parse(data, file), True
                _keep(hashes[file], definition)
            if definition.name in named:
                raise ConfigurationError(
                    f"{file}, name: {definition.name} is defined in {named[definition.name]} already"
                )
        except ConfigurationError as problem:
            if on_error == "raise":
                raise
            logger.warning("a tool was left out: %s", problem)
            found.problems[file] = problem
            continue
        named[definition.name] = file
        found.by_file[file] = definition
    if new:
        await _remember(store, place, hashes.values())
    return found


def _is_openapi(data: bytes) -> bool:
    """Whether a file is what a definition with `type: openapi` refers to, and no definition itself."""
    return any(line.startswith((b"openapi:", b"swagger:", b'"openapi"')) for line in data[:20_000].splitlines())


def _keep(key: str, definition: AnyDefinition) -> None:
    while len(_parsed) >= _MOST_KEPT:
        _parsed.pop(next(iter(_parsed)))
    _parsed[key] = definition


async def _recall(store: Store, place: str) -> None:
    """What another process has read already; reading it is thirty times quicker than reading YAML."""
    try:
        data = await store.get(place)
        known: Any = orjson.loads(data) if data else {}
        for key, fields in known.items() if isinstance(known, dict) else ():
            if key not in _parsed:
                _keep(str(key), adapter().validate_python(fields))
    except (StorageError, ValidationError, orjson.JSONDecodeError) as problem:
        logger.debug("the tools read before are read again: %s", problem)


async def _remember(store: Store, place: str, hashes: Iterable[str]) -> None:
    kept = {key: _dumped(_parsed[key]) for key in hashes if key in _parsed}
    try:
        await store.put(place, orjson.dumps(kept))
    except StorageError as problem:
        logger.debug("the tools that were read cannot be kept for the next time: %s", problem)


def _dumped(definition: ToolDefinition) -> dict[str, Any]:
    return definition.model_dump(mode="json", by_alias=True, exclude_unset=True)


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

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
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
        stamps = await self._stamped([*files, *(_stamped_keys(self._read) - {*files})])
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
        self._stamps = {key: stamps[key] for key in {*files} | _stamped_keys(read)}
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


def _stamped_keys(read: Mapping[str, _Read]) -> set[str]:
    return {key for one in read.values() for key in one.stamps}


def _rest(stamps: Mapping[str, Stamp | None], file: str) -> dict[str, Stamp | None]:
    return {key: stamp for key, stamp in stamps.items() if key != file}


def _same(one: Content, other: Content) -> bool:
    if isinstance(one, ConfigurationError) or isinstance(other, ConfigurationError):
        return type(one) is type(other) and str(one) == str(other)
    return one == other


Read = Callable[[str], Awaitable[bytes]]
"""The bytes of a file that a definition names; `FileNotFoundError` when there is none."""


def tool_files(
    store: Store,
    *,
    prefix: str = "tools",
    secrets: Secrets,
    sandbox: Runner | None = None,
    on_error: OnError = "raise",
) -> ToolFiles:
    """The definitions in `prefix/**/*.yaml`, each with its provider; nothing is read or started yet.

    `sandbox`: who runs programs inside, for definitions that say `runs: sandbox`."""

    def make(file: str, definition: AnyDefinition) -> ToolProvider:
        return provider_of(definition, secrets=secrets, sandbox=sandbox, read=_beside(store, file))

    return ToolFiles(store, prefix, make, on_error)


def provider_of(
    definition: AnyDefinition, *, secrets: Secrets, read: Read, sandbox: Runner | None = None
) -> ToolProvider:
    """What answers for the definition's tools."""
    match definition:
        case CliDefinition():
            return CliProvider(definition, secrets, sandbox=sandbox)
        case PythonDefinition():
            return ModuleProvider(definition)
        case McpDefinition():
            if find_spec("mcp") is None:
                raise MissingExtra("tools of type mcp need", "mcp")
            return McpProvider(definition, secrets)
        case HttpDefinition():
            return HttpProvider(definition, secrets)
        case OpenApiDefinition():
            return OpenApiProvider(definition, secrets, read=read)
        case _:
            assert_never(definition)


def _beside(store: Store, file: str) -> Read:
    """Reads what is named relative to a definition: from the store, or from this machine by an absolute path."""

    async def read(path: str) -> bytes:
        if os.path.isabs(path):
            return Path(path).read_bytes()
        key = key_beside(file, path)
        data = await store.get(key)
        if data is None:
            raise FileNotFoundError(f"there is no {key} beside {file}")
        return data

    return read
