"""Models of the five kinds of tool definitions."""

import re
import shlex
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from carrel.library.names import python_name
from carrel.text import did_you_mean

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Headers = dict[Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")], str]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]

TAKEN = frozenset(("list", "search", "describe", "call_sync", "call_async"))
"""What code finds on `tools` itself."""

_STREAMABLE = frozenset(("streamable-http", "streamable_http", "streamableHttp"))
_IN_PATH = re.compile(r"{([^{}]+)}")


class StrictModel(BaseModel):
    """A part of a definition; a field nobody knows is a mistake, and said to be one."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, defer_build=True)


class ToolDefinition(StrictModel):
    """What every definition of tools has."""

    name: str
    """The first word of its tools' names: an identifier, so that code can write it."""
    type: str
    description: str = ""
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = 60.0
    """Seconds a call may take; null is no limit."""
    approval: Literal["never", "ask"] = "never"
    """`ask`: somebody says yes to each call before it is made."""
    stream: bool = False
    """What a call says while it works goes to the output of the code that called."""

    @field_validator("name")
    @classmethod
    def _callable(cls, name: str) -> str:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError("a name that Python code can write: letters, digits and _, no digit or _ first")
        if name in TAKEN:
            raise ValueError(f"another name: tools.{name} is something else already")
        return name


class McpDefinition(ToolDefinition):
    """An MCP server; each of its tools is one of ours."""

    type: Literal["mcp"]
    transport: Annotated[
        Literal["stdio", "http", "sse"], BeforeValidator(lambda word: "http" if word in _STREAMABLE else word)
    ] = "stdio"
    """stdio: a program that is started here; http: streamable HTTP; sse: its forerunner."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Beside PATH, HOME and the like; nothing else of this process's environment is handed on."""
    cwd: str | None = None
    url: Url | None = None
    headers: Headers = Field(default_factory=dict)
    startup_timeout: Seconds = 10.0
    """Seconds until the server has introduced itself, and again until it has said what it has."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.transport == "stdio":
            wanted, unused = "command", [name for name in ("url", "headers") if getattr(self, name)]
        else:
            wanted, unused = "url", [name for name in ("command", "args", "env", "cwd") if getattr(self, name)]
        if not getattr(self, wanted):
            raise ValueError(f"{wanted} is needed with transport: {self.transport}")
        if unused:
            raise ValueError(f"{unused[0]} says nothing with transport: {self.transport}")
        return self


class EndpointParameter(BaseModel):
    """One parameter of an endpoint: where it goes, and the JSON Schema of its value."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True, defer_build=True)

    place: Literal["path", "query", "header", "cookie", "body", "payload"] | None = Field(default=None, alias="in")
    """`body`: a field of it; `payload`: all of it. Without: the query of GET, HEAD and DELETE, else the body."""
    name: str | None = None
    """Its name on the wire, when that is another than in Python."""
    required: bool = False

    @property
    def value_schema(self) -> dict[str, Any]:
        """All that is not ours is JSON Schema: type, description, default, enum, items …"""
        return dict(self.model_extra or {})


class Endpoint(StrictModel):
    """One request that can be made."""

    method: Annotated[
        Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
        BeforeValidator(lambda word: word.upper() if isinstance(word, str) else word),
    ] = "GET"
    path: str
    """Below `base_url`; `{owner}` is a parameter."""
    description: str = ""
    params: dict[str, EndpointParameter] = Field(default_factory=dict)
    sends: Literal["json", "form"] = "json"
    """How the fields of a body are written."""
    headers: Headers = Field(default_factory=dict)
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = None
    approval: Literal["never", "ask"] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        on_the_wire = {given.name or name for name, given in self.params.items() if given.place == "path"}
        lost = on_the_wire - set(self.path_names)
        if lost:
            raise ValueError(f"{min(lost)} is to go into the path, which has no {{{min(lost)}}}")
        places = [given.place for given in self.params.values()]
        if places.count("payload") > 1 or ("payload" in places and "body" in places):
            raise ValueError("a payload is the whole body: there is one, and no fields of a body beside it")
        return self

    @property
    def path_names(self) -> list[str]:
        """The parameters that stand in the path, in order."""
        return list(dict.fromkeys(_IN_PATH.findall(self.path)))


class HttpDefinition(ToolDefinition):
    """A service by its endpoints; each is a tool."""

    type: Literal["http"]
    base_url: Url
    headers: Headers = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    """Sent with each request."""
    endpoints: dict[str, Endpoint] = Field(min_length=1)


class OpenApiDefinition(ToolDefinition):
    """A service that describes itself; each operation is a tool."""

    type: Literal["openapi"]
    spec: str
    """The description, OpenAPI 3.0 to 3.2, JSON or YAML: a file beside this one, or a URL."""
    base_url: Url | None = None
    """In place of the first of the description's `servers`."""
    headers: Headers = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    only: tuple[str, ...] = ()
    """The operations wanted, by name or tag; all when empty."""


_SPOKEN = {"bool": "boolean", "int": "integer", "str": "string", "float": "number", "list": "array"}
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
}
# What code finds on every name of the host.
_TAKEN = ("call_sync", "call_async")


def _called(names: dict[str, Any]) -> dict[str, Any]:
    for name in names:
        if not name or not python_name(name).strip("_") or python_name(name) in _TAKEN:
            raise ValueError(f"{name!r} is no name that Python code can call; use letters, digits, - and _")
    return names


Kind = Annotated[
    Literal["string", "integer", "number", "boolean", "array"],
    BeforeValidator(lambda word: _SPOKEN.get(word, word) if isinstance(word, str) else word),
]
Short = Annotated[str, Field(pattern=r"^-?[A-Za-z0-9?@#]$"), AfterValidator(lambda letter: letter.lstrip("-"))]
Flag = Annotated[str, Field(pattern=r"^[-+/][^\s=]*$")]


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"{pattern!r} is no regular expression: {problem}") from None
    return pattern


Expression = Annotated[str, AfterValidator(_compiled)]


class Items(StrictModel):
    """What each value of an array is."""

    type: Kind = "string"
    description: str | None = None
    enum: tuple[Any, ...] | None = None
    pattern: Expression | None = None


class Parameter(StrictModel):
    """One thing that can be said to a program, and what may be said."""

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
    def _whole(self) -> Self:
        if self.default is not None and not self.fits(self.default):
            raise ValueError(f"the default {self.default!r} is no {self.type}")
        if self.items is not None and self.type != "array":
            raise ValueError("items is for type: array")
        return self

    def fits(self, value: Any) -> bool:
        """Whether a value written in the definition is of the kind it should be."""
        if self.enum is not None and value not in self.enum:
            return False
        return isinstance(value, _PYTHON[self.type]) and not (isinstance(value, bool) and self.type != "boolean")

    @property
    def value_schema(self) -> dict[str, Any]:
        """The JSON Schema of its value."""
        schema = self.model_dump(by_alias=True, exclude_none=True, mode="json", include=_SCHEMA_FIELDS)
        if self.type == "array":
            schema.setdefault("items", {"type": "string"})
        return schema


_SCHEMA_FIELDS = {name for name in Parameter.model_fields if name != "required"}


class Option(Parameter):
    """An option: `--max-time 5`, `-s`."""

    short: Short | None = None
    """One letter; it is used where there is one."""
    flag: Flag | None = None
    """As the program wants it written, when that is neither `--name` nor a letter: `-name`."""


class Positional(Parameter):
    """A word without a name before it."""

    name: str


class ProgramSchema(StrictModel):
    """What a program understands."""

    options: Annotated[dict[str, Option], AfterValidator(_called)] = Field(default_factory=dict)
    positional: tuple[Positional, ...] = ()


class RecipeParameter(StrictModel):
    """What a recipe lets its caller say; what is not given is as in the schema."""

    description: str | None = None
    default: Any = None
    required: bool | None = None
    enum: tuple[Any, ...] | None = None


class Recipe(StrictModel):
    """A call with some things said beforehand and only the listed ones left open."""

    description: str = ""
    preset: dict[str, Any] = Field(default_factory=dict)
    params: dict[str, Annotated[RecipeParameter, BeforeValidator(lambda given: {} if given is None else given)]] = (
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
    """The program with its fixed first arguments, in a line or as a list; no shell reads it."""
    options: ProgramSchema = Field(default_factory=ProgramSchema, alias="schema")
    recipes: Annotated[dict[str, Recipe], AfterValidator(_called)] = Field(default_factory=dict)
    double_dash: bool = False
    """Write `--` before the positional words, so that one that begins with `-` is no option."""
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    """Beside PATH, HOME and the like; `${NAME}` is the host's own, and nothing else of it is handed on."""
    stdin: str | None = None
    """The parameter that goes to its standard input."""
    output: Literal["text", "json", "bytes"] = "text"
    exit_codes: tuple[int, ...] = (0,)
    """Those that are no failure: grep ends with 1 when it found nothing."""
    runs: Literal["host", "sandbox"] = "host"

    @cached_property
    def words(self) -> list[str]:
        """The program and its first arguments."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Everything that can be said to it, under its name in Python."""
        found: dict[str, Parameter] = {python_name(part.name): part for part in self.options.positional}
        found |= {python_name(name): option for name, option in self.options.options.items()}
        if self.stdin is not None and python_name(self.stdin) not in found:
            found[python_name(self.stdin)] = Parameter(required=True, description="Given to its standard input")
        return found

    @model_validator(mode="after")
    def _whole(self) -> Self:
        try:
            words = self.words
        except ValueError as problem:
            raise ValueError(f"command cannot be split into words: {problem}") from None
        if not words or not words[0]:
            raise ValueError("command names no program")
        inside = [name for name, value in self.env.items() if "${" in value and self.runs == "sandbox"]
        if inside:
            raise ValueError(
                f"env.{inside[0]}: a secret would go into the sandbox; take it out, or let it run on the host"
            )
        names = [*(part.name for part in self.options.positional), *self.options.options]
        twice = [name for name in names if [python_name(other) for other in names].count(python_name(name)) > 1]
        if twice:
            raise ValueError(f"schema: two parameters are called {python_name(twice[0])} in Python")
        for name, recipe in self.recipes.items():
            self._check_recipe(name, recipe)
        return self

    def _check_recipe(self, name: str, recipe: Recipe) -> None:
        known = self.parameters
        for place, words in (("preset", recipe.preset), ("params", recipe.params)):
            for word in words:
                if python_name(word) not in known:
                    raise ValueError(f"recipes.{name}.{place}: the schema has no {word}{did_you_mean(word, known)}")
        for word, value in recipe.preset.items():
            if not known[python_name(word)].fits(value):
                raise ValueError(f"recipes.{name}.preset.{word}: {value!r} is no {known[python_name(word)].type}")
        for word, given in recipe.params.items():
            if given.default is not None and not known[python_name(word)].fits(given.default):
                wanted = known[python_name(word)].type
                raise ValueError(f"recipes.{name}.params.{word}.default: {given.default!r} is no {wanted}")
        said = {python_name(word) for word in (*recipe.preset, *recipe.params)}
        unsaid = [word for word, part in known.items() if part.required and part.default is None and word not in said]
        if unsaid:
            raise ValueError(f"recipes.{name}: {unsaid[0]} is required and is neither in preset nor in params")


class PythonDefinition(ToolDefinition):
    """A module; each of its public functions is a tool."""

    type: Literal["python"]
    module: Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]
    functions: tuple[str, ...] = ()
    """Only these, when some are named."""
