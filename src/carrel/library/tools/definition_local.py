"""Definitions of tools that run here: programs with their options and recipes, and modules of Python functions."""

import re
import shlex
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from carrel.library.tools.definition_remote import Closed, Definition, Seconds
from carrel.library.tools.names import python_name
from carrel.text import did_you_mean

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


class Items(Closed):
    """What each value of an array is."""

    type: Kind = "string"
    description: str | None = None
    enum: tuple[Any, ...] | None = None
    pattern: Expression | None = None


class Parameter(Closed):
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


class ProgramSchema(Closed):
    """What a program understands."""

    options: Annotated[dict[str, Option], AfterValidator(_called)] = Field(default_factory=dict)
    positional: tuple[Positional, ...] = ()


class RecipeParameter(Closed):
    """What a recipe lets its caller say; what is not given is as in the schema."""

    description: str | None = None
    default: Any = None
    required: bool | None = None
    enum: tuple[Any, ...] | None = None


class Recipe(Closed):
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


class CliDefinition(Definition):
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


class PythonDefinition(Definition):
    """A module; each of its public functions is a tool."""

    type: Literal["python"]
    module: Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]
    functions: tuple[str, ...] = ()
    """Only these, when some are named."""
