"""Reads `tools/*.yaml` into definitions and makes their providers; errors name file, line and field."""

import logging
import os
import posixpath
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, assert_never

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from carrel.errors import ConfigurationError, MissingExtra
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
)
from carrel.library.tools.http import HttpProvider
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.openapi import OpenApiProvider
from carrel.library.tools.python import ModuleProvider
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import ToolProvider
from carrel.processes import Runner
from carrel.storage.base import Store
from carrel.text import did_you_mean
from carrel.yaml_files import YamlFault, line_of, read_yaml

if TYPE_CHECKING:
    import yaml

ReadFile = Callable[[str], Awaitable[bytes]]
"""Returns the bytes of a file that a definition names; `FileNotFoundError` when there is none."""

KINDS = ("cli", "mcp", "http", "openapi", "python")
LONGEST_FILE = 1024 * 1024
"""Bytes of a definition file."""

FieldPath = Sequence[str | int]


def _kind(value: Any) -> str:
    return str((value.get("type") or "cli") if isinstance(value, dict) else value.type)


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
    """Return the validator of a definition of any kind."""
    return TypeAdapter(AnyDefinition)


@lru_cache(maxsize=2000)
def parse_definition(data: bytes, file: str) -> AnyDefinition:
    """Return the definition in a file; `ConfigurationError` names file, line, field and what was expected.

    Cached, because every session of a process reads the same files, and parsing 200 of them takes 80 ms."""
    if len(data) > LONGEST_FILE:
        raise ConfigurationError(f"{file}: the definition has {len(data):,} bytes; at most {LONGEST_FILE:,} are read")
    try:
        fields, root = read_yaml(data)
    except YamlFault as fault:
        raise ConfigurationError(fault.in_file(file)) from None
    if root is None or not isinstance(fields, dict):
        found = "nothing" if fields is None else f"a {_type_name(fields)}"
        raise ConfigurationError(f"{file}: expected fields such as `name:`, found {found}")
    kind = fields.get("type", "cli")
    if kind not in KINDS:
        raise ConfigurationError(
            f"{file}, line {line_of(root, ['type'])}, type: unknown type {kind!r}{did_you_mean(str(kind), KINDS)}"
        )
    try:
        definition: AnyDefinition = adapter().validate_python(fields)
    except ValidationError as invalid:
        messages = [_message(root, file, error) for error in invalid.errors(include_url=False, include_context=False)]
        raise ConfigurationError(";\n".join(messages[:5])) from None
    return definition


def _message(root: "yaml.Node", file: str, error: Any) -> str:
    # The first part of the path is the kind of definition, and some are parts of the models; neither is in the file.
    path = [part for part in error["loc"][1:] if part not in _NOT_IN_FILE]
    message, value = str(error["msg"]), error.get("input")
    match error["type"]:
        case "missing":
            expected = "is missing"
        case "extra_forbidden":
            expected = f"unknown field{_suggestion(error['loc'])}"
        case "model_type" | "model_attributes_type" | "dict_type":
            expected = f"should be fields (`name: value`), not {_short(value)}"
        case "value_error":
            expected = message.removeprefix("Value error, ")
            field, found, rest = expected.partition(": ")
            if found and " " not in field and not path:
                path, expected = list(field.split(".")), rest
        case _:
            plain = re.sub(", unable to .*", "", message.removeprefix("Input "))
            for old, new in _PLAIN_TYPES.items():
                plain = plain.replace(old, new)
            expected = f"{plain}, not {_short(value)}"
    field = ".".join(map(str, path)) or "the definition"
    return f"{file}, line {line_of(root, path)}, {field}: {expected}"


_PLAIN_TYPES = {
    "a valid tuple": "a list",
    "a valid string": "text",
    "a valid integer": "an integer",
    "a valid ": "a ",
}
"""Words of pydantic's messages, and those of YAML's users."""
_FIELDS = {
    "cli": [one.model_fields for one in (CliDefinition, ProgramSchema, Option, Positional, Recipe, RecipeParameter)],
    "mcp": [McpDefinition.model_fields],
    "http": [HttpDefinition.model_fields, Endpoint.model_fields],
    "openapi": [OpenApiDefinition.model_fields],
    "python": [PythonDefinition.model_fields],
}
"""The fields of each kind of definition, then those of its parts."""


def _suggestion(path: FieldPath) -> str:
    """Return which field may have been meant, if one has a similar name."""
    definition, *parts = _FIELDS[str(path[0])]
    models = [definition] if len(path) == 2 else parts
    names = {field.alias or name for model in models for name, field in model.items()}
    suggestion = did_you_mean(str(path[-1]), names)
    return suggestion if "did you mean" in suggestion else ""


_NOT_IN_FILE = frozenset(("str", "tuple[constrained-str, ...]", "tuple[str, ...]", "function-before", "[key]"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _type_name(value: Any) -> str:
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__


OnError = Literal["raise", "skip"]
"""What to do about a wrong definition file: raise `ConfigurationError`, or log it and leave it out."""

logger = logging.getLogger(__name__)


async def read_definitions(
    store: Store, prefix: str = "tools", on_error: OnError = "raise"
) -> dict[str, AnyDefinition]:
    """Return the definitions in `prefix/**/*.yaml` and `.yml`, by file.

    A wrong file, or a name that two files define, is a `ConfigurationError`; with `on_error="skip"` it is logged and
    the others are returned."""
    files = [key for key in await store.list(prefix) if key.endswith((".yaml", ".yml"))]
    found: dict[str, AnyDefinition] = {}
    file_of_name: dict[str, str] = {}
    for file, data in zip(files, await store.get_many(files), strict=True):
        if data is None or _is_openapi_document(data):
            continue
        try:
            definition = parse_definition(data, file)
            if definition.name in file_of_name:
                raise ConfigurationError(
                    f"{file}, name: {definition.name} is already defined in {file_of_name[definition.name]}"
                )
        except ConfigurationError as error:
            if on_error == "raise":
                raise
            logger.warning("left out a tool: %s", error)
            continue
        file_of_name[definition.name] = file
        found[file] = definition
    return found


def _is_openapi_document(data: bytes) -> bool:
    """Whether a file is what a definition with `type: openapi` names, and no definition itself."""
    return any(line.startswith((b"openapi:", b"swagger:", b'"openapi"')) for line in data[:20_000].splitlines())


class FileChanges(NamedTuple):
    """What a reading of definition files found."""

    providers: dict[str, tuple[AnyDefinition, ToolProvider]]
    """All providers by file, with their definitions."""
    added: list[ToolProvider]
    removed: list[ToolProvider]


class ToolFiles:
    """`prefix/**/*.yaml` of a store, with a provider for each file."""

    def __init__(
        self,
        store: Store,
        *,
        prefix: str = "tools",
        secrets: Secrets,
        sandbox: Runner | None = None,
        on_error: OnError = "raise",
    ) -> None:
        """`sandbox` runs the programs of definitions with `runs: sandbox`. Nothing is read yet."""
        self._store = store
        self._prefix = prefix
        self._secrets = secrets
        self._sandbox = sandbox
        self._on_error: OnError = on_error
        self._providers: dict[str, tuple[AnyDefinition, ToolProvider]] = {}

    async def read_changes(self) -> FileChanges:
        """Read the files; `ConfigurationError` for a wrong one. A provider with the same definition stays.

        That of an OpenAPI service whose document is beside the file is always made anew: it reads the document once."""
        before, now = self._providers, dict[str, tuple[AnyDefinition, ToolProvider]]()
        for file, definition in (await read_definitions(self._store, self._prefix, self._on_error)).items():
            known = before.get(file)
            if known is not None and known[0] == definition and not isinstance(definition, OpenApiDefinition):
                now[file] = known
            else:
                now[file] = definition, self.make_provider(file, definition)
        old, new = ([provider for _, provider in some.values()] for some in (before, now))
        kept = {id(provider) for provider in old} & {id(provider) for provider in new}
        return FileChanges(
            now,
            added=[provider for provider in new if id(provider) not in kept],
            removed=[provider for provider in old if id(provider) not in kept],
        )

    def apply(self, changes: FileChanges) -> None:
        """Use what was read."""
        self._providers = changes.providers

    def make_provider(self, file: str, definition: AnyDefinition) -> ToolProvider:
        """Return the provider of a definition; nothing is started yet."""
        match definition:
            case CliDefinition():
                return CliProvider(definition, self._secrets, sandbox=self._sandbox)
            case PythonDefinition():
                return ModuleProvider(definition)
            case McpDefinition():
                if find_spec("mcp") is None:
                    raise MissingExtra("tools of type mcp need", "mcp")
                return McpProvider(definition, self._secrets)
            case HttpDefinition():
                return HttpProvider(definition, self._secrets)
            case OpenApiDefinition():
                return OpenApiProvider(definition, self._secrets, read=self._reader_beside(file))
            case _:
                assert_never(definition)

    def _reader_beside(self, file: str) -> ReadFile:
        """Return a function that reads a file named in a definition: in the store, or on this machine by an absolute
        path."""

        async def read(path: str) -> bytes:
            if os.path.isabs(path):
                return Path(path).read_bytes()
            key = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
            data = await self._store.get(key)
            if data is None:
                raise FileNotFoundError(f"there is no {key} beside {file}")
            return data

        return read
