"""Text in, a typed definition out; what is wrong is told by file, line and field."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from carrel.errors import ConfigurationError
from carrel.library.tools.definition_local import (
    CliDefinition,
    Option,
    Positional,
    ProgramSchema,
    PythonDefinition,
    Recipe,
    RecipeParameter,
)
from carrel.library.tools.definition_remote import Endpoint, HttpDefinition, McpDefinition, OpenApiDefinition
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
