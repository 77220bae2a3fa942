"""Models of the five kinds of tool definitions."""

import re
import shlex
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from carrel.library.names import python_name
from carrel.library.tools.arguments import expression_error
from carrel.library.tools.tool import Tool
from carrel.text import did_you_mean

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Headers = dict[Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")], str]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]

RESERVED_NAMES = frozenset(("list", "search", "describe", "call_sync", "call_async"))
"""Attributes of `tools` itself."""

_STREAMABLE = frozenset(("streamable-http", "streamable_http", "streamableHttp"))
_IN_PATH = re.compile(r"{([^{}]+)}")


class StrictModel(BaseModel):
    """A part of a definition; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, defer_build=True)


class ToolDefinition(StrictModel):
    """The fields of every definition."""

    name: str
    """The first word of the names of its tools, an identifier."""
    type: str
    description: str = ""
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = 60.0
    """Seconds a call may take; null for no limit."""
    approval: Literal["never", "ask"] = "never"
    """`ask`: each call needs approval."""
    stream: bool = False
    """Whether the output of a call goes to the output of the calling code as it comes."""

    @field_validator("name")
    @classmethod
    def _callable(cls, name: str) -> str:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError("must be a Python name: letters, digits and _, beginning with a letter")
        if name in RESERVED_NAMES:
            raise ValueError(f"choose another name, because tools.{name} is a function of tools itself")
        return name

    def make_tool(
        self,
        word: str,
        parameters: Mapping[str, Any],
        *,
        positional: tuple[str, ...] | None = None,
        tags: tuple[str, ...] = (),
        approval: Literal["never", "ask"] | None = None,
        timeout: float | None = None,
        stream: bool | None = None,
        **more: Any,
    ) -> Tool:
        """Return a tool below the definition's name, or of that name if `word` is empty.

        What is None is as the definition says; `positional` is then all parameters."""
        return Tool(
            name=f"{self.name}.{word}" if word else self.name,
            parameters=parameters,
            positional=tuple(parameters["properties"]) if positional is None else positional,
            tags=tuple(dict.fromkeys((*self.tags, *tags))),
            approval=approval or self.approval,
            timeout=self.timeout if timeout is None else timeout,
            stream=self.stream if stream is None else stream,
            **more,
        )


class McpDefinition(ToolDefinition):
    """An MCP server; each of its tools is a tool."""

    type: Literal["mcp"]
    transport: Annotated[
        Literal["stdio", "http", "sse"], BeforeValidator(lambda value: "http" if value in _STREAMABLE else value)
    ] = "stdio"
    """stdio: a program on this machine; http: streamable HTTP; sse: its predecessor."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Added to PATH, HOME and a few others; nothing else of this process's environment is passed."""
    cwd: str | None = None
    url: Url | None = None
    headers: Headers = Field(default_factory=dict)
    startup_timeout: Seconds = 10.0
    """Seconds for the server to start, and again to list its tools."""

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.transport == "stdio":
            required, unused = "command", [name for name in ("url", "headers") if getattr(self, name)]
        else:
            required, unused = "url", [name for name in ("command", "args", "env", "cwd") if getattr(self, name)]
        if not getattr(self, required):
            raise ValueError(f"{required} is required with transport: {self.transport}")
        if unused:
            raise ValueError(f"{unused[0]} has no effect with transport: {self.transport}")
        return self


class EndpointParameter(BaseModel):
    """One parameter of an endpoint: where it is sent, and the JSON Schema of its value."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True, defer_build=True)

    location: Literal["path", "query", "header", "cookie", "body", "payload"] | None = Field(default=None, alias="in")
    """`body`: a field of the body; `payload`: all of it. Default: the query of GET, HEAD and DELETE, else the body."""
    name: str | None = None
    """Its name in the request, if it differs from the one in Python."""
    required: bool = False

    @property
    def value_schema(self) -> dict[str, Any]:
        """Return all other fields, which are JSON Schema: type, description, default, enum, items, …"""
        return dict(self.model_extra or {})


class Endpoint(StrictModel):
    """One kind of request."""

    method: Annotated[
        Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
        BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
    ] = "GET"
    path: str
    """Below `base_url`; `{owner}` is a parameter."""
    description: str = ""
    params: dict[str, EndpointParameter] = Field(default_factory=dict)
    sends: Literal["json", "form"] = "json"
    """How the fields of a body are encoded."""
    headers: Headers = Field(default_factory=dict)
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = None
    approval: Literal["never", "ask"] | None = None

    @model_validator(mode="after")
    def _check_locations(self) -> Self:
        in_path = {parameter.name or name for name, parameter in self.params.items() if parameter.location == "path"}
        missing = in_path - set(self.path_names)
        if missing:
            raise ValueError(f"{min(missing)} is a parameter of the path, and the path has no {{{min(missing)}}}")
        locations = [parameter.location for parameter in self.params.values()]
        if locations.count("payload") > 1 or ("payload" in locations and "body" in locations):
            raise ValueError("a payload is the whole body, so there can be only one, and no fields of a body")
        return self

    @property
    def path_names(self) -> list[str]:
        """Return the names of the parameters in the path, in order."""
        return list(dict.fromkeys(_IN_PATH.findall(self.path)))


class HttpDefinition(ToolDefinition):
    """An HTTP service; each of its endpoints is a tool."""

    type: Literal["http"]
    base_url: Url
    headers: Headers = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    """Sent with each request."""
    endpoints: dict[str, Endpoint] = Field(min_length=1)


class OpenApiDefinition(ToolDefinition):
    """A service with an OpenAPI document; each operation is a tool."""

    type: Literal["openapi"]
    spec: str
    """The document, OpenAPI 3.0 to 3.2, JSON or YAML: a file beside this one, or a URL."""
    base_url: Url | None = None
    """Instead of the first of the document's `servers`."""
    headers: Headers = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    only: tuple[str, ...] = ()
    """Names or tags of the operations to use; empty for all."""


_TYPE_ALIASES = {"bool": "boolean", "int": "integer", "str": "string", "float": "number", "list": "array"}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
}
# Attributes of every tool.
_RESERVED_BELOW = ("call_sync", "call_async")


def _check_names(names: dict[str, Any]) -> dict[str, Any]:
    for name in names:
        if not name or not python_name(name).strip("_") or python_name(name) in _RESERVED_BELOW:
            raise ValueError(f"{name!r} cannot be called from Python; use letters, digits, - and _")
    return names


Kind = Annotated[
    Literal["string", "integer", "number", "boolean", "array"],
    BeforeValidator(lambda value: _TYPE_ALIASES.get(value, value) if isinstance(value, str) else value),
]
Short = Annotated[str, Field(pattern=r"^-?[A-Za-z0-9?@#]$"), AfterValidator(lambda letter: letter.lstrip("-"))]
Flag = Annotated[str, Field(pattern=r"^[-+/][^\s=]*$")]


def _check_expression(pattern: str) -> str:
    error = expression_error(pattern)
    if error:
        raise ValueError(
            f"{pattern!r} is not a regular expression of the supported kind, which has no lookaround and no "
            f"back-references: {error}"
        )
    return pattern


Expression = Annotated[str, AfterValidator(_check_expression)]


class Items(StrictModel):
    """The values of an array."""

    type: Kind = "string"
    description: str | None = None
    enum: tuple[Any, ...] | None = None
    pattern: Expression | None = None


class Parameter(StrictModel):
    """A parameter of a program, and its allowed values."""

    type: Kind = "string"
    description: str | None = None
    required: bool = False
    default: Any = None
    enum: tuple[Any, ...] | None = None
    items: Items | None = None
    minimum: float | None = None
    maximum: float | None = None
    pattern: Expression | None = None
    min_length: int | None = Field(default=None, alias="minLength")
    max_length: int | None = Field(default=None, alias="maxLength")
    min_items: int | None = Field(default=None, alias="minItems")
    max_items: int | None = Field(default=None, alias="maxItems")

    @model_validator(mode="after")
    def _check_default(self) -> Self:
        if self.default is not None and not self.allows(self.default):
            raise ValueError(f"the default {self.default!r} is not a valid {self.type}")
        if self.items is not None and self.type != "array":
            raise ValueError("items needs type: array")
        return self

    def allows(self, value: Any) -> bool:
        """Whether a value in the definition has the right type."""
        if self.enum is not None and value not in self.enum:
            return False
        return isinstance(value, _PYTHON_TYPES[self.type]) and not (isinstance(value, bool) and self.type != "boolean")

    @property
    def value_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of its value."""
        schema = self.model_dump(by_alias=True, exclude_none=True, mode="json", include=_SCHEMA_FIELDS)
        if self.type == "array":
            schema.setdefault("items", {"type": "string"})
        return schema


_SCHEMA_FIELDS = {name for name in Parameter.model_fields if name != "required"}


class Option(Parameter):
    """An option: `--max-time 5`, `-s`."""

    short: Short | None = None
    """One letter; used instead of the name if there is one."""
    flag: Flag | None = None
    """How the program expects it, if that is neither `--name` nor a letter: `-name`."""


class Positional(Parameter):
    """An argument without a name before it."""

    name: str


class ProgramSchema(StrictModel):
    """The parameters of a program."""

    options: Annotated[dict[str, Option], AfterValidator(_check_names)] = Field(default_factory=dict)
    positional: tuple[Positional, ...] = ()


class RecipeParameter(StrictModel):
    """A parameter of a recipe; other fields are as in the schema."""

    description: str | None = None
    default: Any = None
    required: bool | None = None
    enum: tuple[Any, ...] | None = None


class Recipe(StrictModel):
    """A call with preset arguments; only the listed parameters can be passed."""

    description: str = ""
    preset: dict[str, Any] = Field(default_factory=dict)
    params: dict[str, Annotated[RecipeParameter, BeforeValidator(lambda value: {} if value is None else value)]] = (
        Field(default_factory=dict)
    )
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = None
    approval: Literal["never", "ask"] | None = None
    stream: bool | None = None


class CliDefinition(ToolDefinition):
    """A program; each recipe is a tool below it."""

    type: Literal["cli"] = "cli"
    command: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """The program with its first arguments, as one line or a list; never passed to a shell."""
    options: ProgramSchema = Field(default_factory=ProgramSchema, alias="schema")
    recipes: Annotated[dict[str, Recipe], AfterValidator(_check_names)] = Field(default_factory=dict)
    double_dash: bool = False
    """Put `--` before the positional arguments, so that one that begins with `-` is not an option."""
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    """Added to PATH, HOME and a few others; `${NAME}` is a variable of the host, and no other is passed."""
    stdin: str | None = None
    """The parameter that is written to its standard input."""
    output: Literal["text", "json", "bytes"] = "text"
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes of success: grep ends with 1 when it finds nothing."""
    runs: Literal["host", "sandbox"] = "host"

    @cached_property
    def words(self) -> list[str]:
        """Return the program and its first arguments."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Return all its parameters by their names in Python."""
        found: dict[str, Parameter] = {python_name(part.name): part for part in self.options.positional}
        found |= {python_name(name): option for name, option in self.options.options.items()}
        if self.stdin is not None and python_name(self.stdin) not in found:
            found[python_name(self.stdin)] = Parameter(required=True, description="Written to its standard input")
        return found

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        try:
            words = self.words
        except ValueError as error:
            raise ValueError(f"command cannot be split into words: {error}") from None
        if not words or not words[0]:
            raise ValueError("command is empty")
        secret = [name for name, value in self.env.items() if "${" in value and self.runs == "sandbox"]
        if secret:
            raise ValueError(f"env.{secret[0]}: the secret would enter the sandbox; remove it, or use runs: host")
        names = [*(part.name for part in self.options.positional), *self.options.options]
        repeated = [name for name in names if [python_name(other) for other in names].count(python_name(name)) > 1]
        if repeated:
            raise ValueError(f"schema: two parameters have the name {python_name(repeated[0])} in Python")
        for name, recipe in self.recipes.items():
            self._check_recipe(name, recipe)
        return self

    def _check_recipe(self, name: str, recipe: Recipe) -> None:
        known = self.parameters
        for field, names in (("preset", recipe.preset), ("params", recipe.params)):
            for parameter in names:
                if python_name(parameter) not in known:
                    raise ValueError(
                        f"recipes.{name}.{field}: the schema has no {parameter}{did_you_mean(parameter, known)}"
                    )
        defaults: dict[str, Any] = {f"preset.{parameter}": value for parameter, value in recipe.preset.items()}
        defaults |= {f"params.{one}.default": given.default for one, given in recipe.params.items()}
        for path, value in defaults.items():
            part = known[python_name(path.split(".")[1])]
            is_unset = value is None and path.startswith("params.")
            if not is_unset and not part.allows(value):
                raise ValueError(f"recipes.{name}.{path}: {value!r} is not a valid {part.type}")
        named = {python_name(one) for one in (*recipe.preset, *recipe.params)}
        missing = [one for one, part in known.items() if part.required and part.default is None and one not in named]
        if missing:
            raise ValueError(f"recipes.{name}: {missing[0]} is required and is neither in preset nor in params")


class PythonDefinition(ToolDefinition):
    """A module; each of its public functions is a tool."""

    type: Literal["python"]
    module: Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]
    functions: tuple[str, ...] = ()
    """The functions to use; empty for all public ones."""
