"""Python functions as tools: the schema comes from type hints and docstring."""

import asyncio
import contextlib
import importlib
import inspect
import itertools
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from carrel.errors import CarrelError, ConfigurationError, ToolCallError, ToolTimeoutError
from carrel.library.docstrings import read_docstring
from carrel.library.tools.arguments import to_json_value
from carrel.library.tools.definitions import TAKEN, PythonDefinition
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, run_in_thread
from carrel.text import did_you_mean

MOST_ITEMS = 100_000
"""What yields more may never end."""
_NOT_BY_NAME = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class PythonFunction:
    """One Python function, ready to be called as a tool."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """`ConfigurationError` when its parameters cannot be told as data."""
        self._function = function
        self._signature = _signature(function, name)
        self._model = _model_of(function, self._signature, name)
        self.tool = _tool_of(function, self._signature, self._model, name)

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        args, kwargs = self._bound(tool, arguments)
        try:
            async with asyncio.timeout(tool.timeout) as clock:
                try:
                    return as_data(await self._called(args, kwargs))
                except (CarrelError, asyncio.CancelledError):
                    raise
                # Code written as a program says sys.exit, which would end the host's loop and with it every session.
                except (Exception, SystemExit) as problem:
                    if isinstance(problem, TimeoutError) and clock.expired():
                        raise
                    raise ToolCallError(f"{tool.name} failed: {_told(problem)}") from problem
        except TimeoutError as problem:
            if isinstance(problem, CarrelError):
                raise
            raise ToolTimeoutError(f"{tool.name} took longer than {tool.timeout:g} s") from None

    async def _called(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function) or _is_async(self._function):
            return await self._function(*args, **kwargs)
        answer = await run_in_thread(lambda: _listed(self._function(*args, **kwargs)))
        if inspect.isasyncgen(answer):
            async with contextlib.aclosing(answer):
                return await _gathered(answer)
        return await answer if inspect.isawaitable(answer) else answer

    def _bound(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        try:
            read = self._read(arguments)
        except ValidationError as problem:
            told = [f"{_place(error['loc'])}: {error['msg']}" for error in problem.errors(include_url=False)]
            raise ToolCallError(f"{tool.name}: {'; '.join(told[:3])}") from None
        args: list[Any] = []
        kwargs = dict(read.model_extra or {})
        for name, field in type(read).model_fields.items():
            called = str(field.alias)
            if self._signature.parameters[called].kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(getattr(read, name))
            elif name in read.model_fields_set:
                kwargs[called] = getattr(read, name)
        return args, kwargs

    def _read(self, arguments: Mapping[str, Any]) -> BaseModel:
        """As the hints say; what they do not take as it is, they may take as JSON knows it: a date as a text."""
        try:
            return self._model.model_validate(dict(arguments))
        except ValidationError as problem:
            wrong = {error["loc"][0] for error in problem.errors(include_url=False) if error["loc"]}
            given = {name: to_json_value(value) if name in wrong else value for name, value in arguments.items()}
            return self._model.model_validate(given)


class FunctionProvider:
    """The tool provider of functions that a program registered itself, or of one module."""

    def __init__(self, name: str, functions: Sequence[PythonFunction] = ()) -> None:
        self.name = name
        self._by_name = {function.tool.name: function for function in functions}
        self._tools = [function.tool for function in functions]

    async def definitions(self) -> Sequence[Tool]:
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
        return await self._by_name[tool.name].call(tool, arguments)

    async def close(self) -> None:
        """Nothing runs between calls."""


class ModuleProvider(FunctionProvider):
    """The tool provider of a module's public functions; the module is imported when it is first needed."""

    def __init__(self, definition: PythonDefinition) -> None:
        super().__init__(definition.name)
        self.description = definition.description
        self._definition = definition
        self._loaded = False

    async def definitions(self) -> Sequence[Tool]:
        if not self._loaded:
            definition = self._definition
            found = await run_in_thread(lambda: functions_in(_imported(definition), definition))
            self._by_name = {function.tool.name: function for function in found}
            self._tools = [function.tool for function in found]
            self._loaded = True
        return self._tools


def register(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    tags: Sequence[str] = (),
    approval: Literal["never", "ask"] = "never",
    timeout: float | None = 60.0,
) -> FunctionProvider:
    """A provider of this one function, under its own name or another (`group.name` too)."""
    called = name or str(getattr(function, "__name__", type(function).__name__))
    if not all(word.isidentifier() and not word.startswith("_") for word in called.split(".")):
        raise ConfigurationError(f"{called!r} is no name for a tool; give one that Python code can write: name=…")
    word = called.partition(".")[0]
    if word in TAKEN:
        raise ConfigurationError(
            f"a tool cannot be called {word!r}: tools.{word} is something else already; give name=…"
        )
    made = PythonFunction(function, called)
    made.tool = replace(
        made.tool,
        description=made.tool.description if description is None else description,
        tags=tuple(tags),
        approval=approval,
        timeout=timeout,
    )
    return FunctionProvider(word, [made])


def functions_in(module: ModuleType, definition: PythonDefinition) -> list[PythonFunction]:
    """Its public functions: those in `__all__`, or else those written in it whose name begins with no underscore."""
    listed = getattr(module, "__all__", None)
    names = [str(name) for name in listed] if listed is not None else [n for n in vars(module) if not n.startswith("_")]
    functions = {
        name: value
        for name, value in ((name, getattr(module, name, None)) for name in names)
        if inspect.isroutine(value) and (listed is not None or getattr(value, "__module__", None) == module.__name__)
    }
    for name in definition.functions:
        if not callable(getattr(module, name, None)):
            raise ConfigurationError(
                f"{definition.name}, functions: {module.__name__} has no function {name}{did_you_mean(name, functions)}"
            )
    if definition.functions:
        functions = {name: getattr(module, name) for name in definition.functions}
    made = [PythonFunction(function, f"{definition.name}.{name}") for name, function in functions.items()]
    for function in made:
        function.tool = replace(
            function.tool,
            tags=definition.tags,
            approval=definition.approval,
            timeout=definition.timeout,
            stream=definition.stream,
        )
    return made


def as_data(value: Any) -> Any:
    """Pydantic models as the dicts they are, also inside lists and dicts; all else as it is."""
    match value:
        case BaseModel():
            return value.model_dump()
        case list():
            return [as_data(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(as_data(item) for item in value)
        case dict():
            return {key: as_data(item) for key, item in value.items()}
        case _:
            return value


def _imported(definition: PythonDefinition) -> ModuleType:
    try:
        return importlib.import_module(definition.module)
    except (Exception, SystemExit) as problem:
        raise ConfigurationError(
            f"{definition.name}: the module {definition.module} cannot be imported: {_told(problem)}"
        ) from problem


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as problem:
        raise ConfigurationError(f"{name}: its parameters cannot be seen ({problem}); wrap it in a function") from None


def _model_of(function: Callable[..., Any], signature: inspect.Signature, name: str) -> type[BaseModel]:
    """A model with a field per parameter, under another name, because a parameter may be called `copy` or `_x`."""
    hints = _hints(function)
    described = read_docstring(inspect.getdoc(function)).parameters
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(signature.parameters.values()):
        if parameter.kind in _NOT_BY_NAME:
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        about = Field(default, alias=parameter.name, description=described.get(parameter.name))
        fields[f"p{number}"] = (hints.get(parameter.name, Any), about)
    open_ended = any(part.kind is inspect.Parameter.VAR_KEYWORD for part in signature.parameters.values())
    config = ConfigDict(extra="allow" if open_ended else "forbid", arbitrary_types_allowed=False)
    try:
        return create_model(name.rpartition(".")[2], __config__=config, **fields)
    except (PydanticUserError, TypeError, NameError) as problem:
        lines = str(problem).splitlines()
        raise ConfigurationError(
            f"{name}: its type hints cannot be told as data: {lines[0] if lines else ''}"
        ) from None


def _tool_of(function: Callable[..., Any], signature: inspect.Signature, model: type[BaseModel], name: str) -> Tool:
    try:
        schema = model.model_json_schema(schema_generator=_Untitled)
    except PydanticUserError as problem:
        lines = str(problem).splitlines()
        raise ConfigurationError(
            f"{name}: its type hints cannot be told as data: {lines[0] if lines else ''}"
        ) from None
    schema.pop("description", None)
    schema.setdefault("properties", {})
    said = read_docstring(inspect.getdoc(function))
    return Tool(
        name=name,
        description=said.text or said.summary,
        parameters=schema,
        returns=_returns(function),
        takes_values=True,
        positional=tuple(
            part.name
            for part in signature.parameters.values()
            if part.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ),
    )


class _Untitled(GenerateJsonSchema):
    """Without the titles that say nothing but the name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        made = super().generate(schema, mode)
        made.pop("title", None)
        return made


def _returns(function: Callable[..., Any]) -> dict[str, Any] | None:
    hint = _hints(function).get("return", Any)
    if hint is Any:
        return None
    try:
        return TypeAdapter(hint).json_schema(mode="serialization", schema_generator=_Untitled)
    except (PydanticUserError, TypeError):
        return None  # what it returns is no JSON, and may still be data


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    known = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        return typing.get_type_hints(inspect.unwrap(known), include_extras=True)
    except (NameError, TypeError, AttributeError):
        return dict(getattr(known, "__annotations__", {}))


def _listed(answer: Any) -> Any:
    """What a function yields is its answer as a whole: nothing can be asked for later on."""
    if not inspect.isgenerator(answer):
        return answer
    items = list(itertools.islice(answer, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise _Endless
    return items


async def _gathered(answer: AsyncIterator[Any]) -> list[Any]:
    """The same of an `async def` that yields."""
    items: list[Any] = []
    async for item in answer:
        items.append(item)
        if len(items) > MOST_ITEMS:
            raise _Endless
    return items


class _Endless(Exception):
    def __str__(self) -> str:
        return f"it yields more than {MOST_ITEMS:,} items; let it return those that are wanted"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _place(parts: Sequence[str | int]) -> str:
    return ".".join(map(str, parts)) or "the arguments"


def _told(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
