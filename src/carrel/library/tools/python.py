"""Python functions as tools, with schemas from type hints and docstrings."""

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
from carrel.library.tools.definitions import RESERVED_NAMES, PythonDefinition
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, run_in_thread
from carrel.text import did_you_mean

MOST_ITEMS = 100_000
"""Items that a generator may yield; one that yields more may never end."""
_NOT_BY_NAME = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class PythonFunction:
    """A Python function as a tool."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Raise `ConfigurationError` when its parameters cannot be passed as data."""
        self._function = function
        self._signature = _signature(function, name)
        self._model = _make_model(function, self._signature, name)
        self.tool = _make_tool(function, self._signature, self._model, name)

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        args, kwargs = self._bind(tool, arguments)
        try:
            async with asyncio.timeout(tool.timeout) as limit:
                try:
                    return to_data(await self._call(args, kwargs))
                except (CarrelError, asyncio.CancelledError):
                    raise
                # sys.exit in the function would end the host's event loop, and with it every session.
                except (Exception, SystemExit) as error:
                    if isinstance(error, TimeoutError) and limit.expired():
                        raise
                    raise ToolCallError(f"{tool.name} failed: {_describe_error(error)}") from error
        except TimeoutError as error:
            if isinstance(error, CarrelError):
                raise
            raise ToolTimeoutError(f"{tool.name} took longer than {tool.timeout:g} s") from None

    async def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function) or _has_async_call(self._function):
            return await self._function(*args, **kwargs)
        result = await run_in_thread(lambda: _collect(self._function(*args, **kwargs)))
        if inspect.isasyncgen(result):
            async with contextlib.aclosing(result):
                return await _collect_async(result)
        return await result if inspect.isawaitable(result) else result

    def _bind(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        try:
            model = self._validate(arguments)
        except ValidationError as invalid:
            messages = [f"{_path(error['loc'])}: {error['msg']}" for error in invalid.errors(include_url=False)]
            raise ToolCallError(f"{tool.name}: {'; '.join(messages[:3])}") from None
        args: list[Any] = []
        kwargs = dict(model.model_extra or {})
        for name, field in type(model).model_fields.items():
            parameter = str(field.alias)
            if self._signature.parameters[parameter].kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(getattr(model, name))
            elif name in model.model_fields_set:
                kwargs[parameter] = getattr(model, name)
        return args, kwargs

    def _validate(self, arguments: Mapping[str, Any]) -> BaseModel:
        """Validate against the type hints; a value that they do not accept is tried as JSON, such as a date as text."""
        try:
            return self._model.model_validate(dict(arguments))
        except ValidationError as invalid:
            wrong = {error["loc"][0] for error in invalid.errors(include_url=False) if error["loc"]}
            values = {name: to_json_value(value) if name in wrong else value for name, value in arguments.items()}
            return self._model.model_validate(values)


class FunctionProvider:
    """The tool provider of registered functions, or of the functions of a module."""

    def __init__(self, name: str, functions: Sequence[PythonFunction] = ()) -> None:
        self.name = name
        self._by_name = {function.tool.name: function for function in functions}
        self._tools = [function.tool for function in functions]

    async def definitions(self) -> Sequence[Tool]:
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        return await self._by_name[tool.name].call(tool, arguments)

    async def close(self) -> None:
        """Do nothing: nothing runs between calls."""


class ModuleProvider(FunctionProvider):
    """The tool provider of a module's public functions; the module is imported on first use."""

    def __init__(self, definition: PythonDefinition) -> None:
        super().__init__(definition.name)
        self.description = definition.description
        self._definition = definition
        self._loaded = False

    async def definitions(self) -> Sequence[Tool]:
        if not self._loaded:
            definition = self._definition
            found = await run_in_thread(lambda: functions_in(_import(definition), definition))
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
    """Return a provider of one function, under its own name or another (`group.name` too)."""
    tool_name = name or str(getattr(function, "__name__", type(function).__name__))
    if not all(word.isidentifier() and not word.startswith("_") for word in tool_name.split(".")):
        raise ConfigurationError(f"{tool_name!r} cannot be the name of a tool; pass a Python name as name=…")
    group = tool_name.partition(".")[0]
    if group in RESERVED_NAMES:
        raise ConfigurationError(
            f"a tool cannot have the name {group!r}, because tools.{group} is a function of tools itself; pass name=…"
        )
    made = PythonFunction(function, tool_name)
    made.tool = replace(
        made.tool,
        description=made.tool.description if description is None else description,
        tags=tuple(tags),
        approval=approval,
        timeout=timeout,
    )
    return FunctionProvider(group, [made])


def functions_in(module: ModuleType, definition: PythonDefinition) -> list[PythonFunction]:
    """Return its public functions: those in `__all__`, else those defined in it without a leading underscore."""
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


def to_data(value: Any) -> Any:
    """Convert pydantic models to dicts, also within lists and dicts; other values stay as they are."""
    match value:
        case BaseModel():
            return value.model_dump()
        case list():
            return [to_data(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(to_data(item) for item in value)
        case dict():
            return {key: to_data(item) for key, item in value.items()}
        case _:
            return value


def _import(definition: PythonDefinition) -> ModuleType:
    try:
        return importlib.import_module(definition.module)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{definition.name}: the module {definition.module} cannot be imported: {_describe_error(error)}"
        ) from error


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{name}: it has no signature ({error}); wrap it in a function") from None


def _make_model(function: Callable[..., Any], signature: inspect.Signature, name: str) -> type[BaseModel]:
    """Return a model with a field per parameter, with other names, because a parameter may be called `copy` or `_x`."""
    hints = _hints(function)
    descriptions = read_docstring(inspect.getdoc(function)).parameters
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(signature.parameters.values()):
        if parameter.kind in _NOT_BY_NAME:
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=descriptions.get(parameter.name))
        fields[f"p{number}"] = (hints.get(parameter.name, Any), field)
    open_ended = any(part.kind is inspect.Parameter.VAR_KEYWORD for part in signature.parameters.values())
    config = ConfigDict(extra="allow" if open_ended else "forbid", arbitrary_types_allowed=False)
    try:
        return create_model(name.rpartition(".")[2], __config__=config, **fields)
    except (PydanticUserError, TypeError, NameError) as error:
        raise _unusable_hints(name, error) from None


def _make_tool(function: Callable[..., Any], signature: inspect.Signature, model: type[BaseModel], name: str) -> Tool:
    try:
        schema = model.model_json_schema(schema_generator=_SchemaWithoutTitles)
    except PydanticUserError as error:
        raise _unusable_hints(name, error) from None
    schema.pop("description", None)
    schema.setdefault("properties", {})
    docstring = read_docstring(inspect.getdoc(function))
    return Tool(
        name=name,
        description=docstring.text or docstring.summary,
        parameters=schema,
        returns=_returns(function),
        takes_values=True,
        positional=tuple(
            part.name
            for part in signature.parameters.values()
            if part.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ),
    )


def _unusable_hints(name: str, error: Exception) -> ConfigurationError:
    first_line = next(iter(str(error).splitlines()), "")
    return ConfigurationError(f"{name}: its type hints do not describe data: {first_line}")


class _SchemaWithoutTitles(GenerateJsonSchema):
    """Leaves out titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        generated = super().generate(schema, mode)
        generated.pop("title", None)
        return generated


def _returns(function: Callable[..., Any]) -> dict[str, Any] | None:
    hint = _hints(function).get("return", Any)
    if hint is Any:
        return None
    try:
        return TypeAdapter(hint).json_schema(mode="serialization", schema_generator=_SchemaWithoutTitles)
    except (PydanticUserError, TypeError):
        return None  # the result may still be data


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    annotated = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        return typing.get_type_hints(inspect.unwrap(annotated), include_extras=True)
    except (NameError, TypeError, AttributeError):
        return dict(getattr(annotated, "__annotations__", {}))


def _collect(result: Any) -> Any:
    """Return what a generator yields as a list: nothing of it can be requested later."""
    if not inspect.isgenerator(result):
        return result
    items = list(itertools.islice(result, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise _TooManyItems
    return items


async def _collect_async(result: AsyncIterator[Any]) -> list[Any]:
    """Return what an asynchronous generator yields as a list."""
    items: list[Any] = []
    async for item in result:
        items.append(item)
        if len(items) > MOST_ITEMS:
            raise _TooManyItems
    return items


class _TooManyItems(Exception):
    def __str__(self) -> str:
        return f"it yields more than {MOST_ITEMS:,} items; return fewer"


def _has_async_call(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _path(parts: Sequence[str | int]) -> str:
    return ".".join(map(str, parts)) or "the arguments"


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
