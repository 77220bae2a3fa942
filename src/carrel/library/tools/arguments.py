"""The arguments of a call: bound to parameters and validated against the tool's schema before anything runs."""

import datetime
import decimal
import enum
import itertools
import sys
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from carrel.errors import ToolCallError
from carrel.library.names import python_name
from carrel.library.tools.tool import Tool
from carrel.text import did_you_mean

_MOST_SHOWN, _MOST_ERRORS = 3, 50
_LEAST_STEPS, _STEPS_PER_VALUE = 20_000, 200
"""References that a validation may follow: so many, and so many more for each value of the arguments."""
_MANY_VALUES = 5000
"""Values that are validated without noticeable delay."""
_NAMED_ELSEWHERE = {
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
    "dependentSchemas",
    "propertyNames",
}
"""Keywords by which a schema may allow more names than its own properties."""
_PYTHON_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
}


def bind_arguments(tool: Tool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, as Python binds them; `ToolCallError` for too many, or for one given twice."""
    order = tool.in_order
    if len(args) > len(order):
        takes = f"only {', '.join(order)}" if order else "none"
        raise ToolCallError(
            f"{tool.name}: {len(args)} positional arguments, and it takes {takes}; pass them as name=value"
        )
    named = dict(zip(order, args, strict=False))
    repeated = [name for name in named if name in kwargs]
    if repeated:
        raise ToolCallError(f"{tool.name}: {repeated[0]} is given twice")
    return {**named, **kwargs}


class ArgumentValidator:
    """Validates arguments for one tool; kept, because reading a schema takes longer than using it."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        properties = tool.parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        required = tool.parameters.get("required")
        self._required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        self._is_closed = _is_closed(tool.parameters)
        self._validator: Any = None

    def validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the tool takes them; `ToolCallError` names each that is missing, unknown or wrong."""
        try:
            named = self._named(arguments)
            values = {name: to_json_value(value) for name, value in named.items()}
            errors = self._unknown(values) + self._missing(values) or self._invalid(values)
        except RecursionError:
            raise ToolCallError(f"{self.tool.name}: its arguments are nested too deeply") from None
        if errors:
            more = f"; and {len(errors) - _MOST_SHOWN} more" if len(errors) > _MOST_SHOWN else ""
            raise ToolCallError(f"{self.tool.name}: {'; '.join(errors[:_MOST_SHOWN])}{more}")
        return named if self.tool.takes_values else values

    def _named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for name, value in arguments.items():
            python = python_name(name)
            parameter = python if name not in self._properties and python in self._properties else name
            if parameter in named:
                raise ToolCallError(f"{self.tool.name}: {parameter} is given twice")
            # None means "not passed", unless the schema has it as a value.
            if value is not None or parameter in self._required or _takes_null(self._properties.get(parameter)):
                named[parameter] = value
        return named

    def _unknown(self, values: Mapping[str, Any]) -> list[str]:
        unknown = [name for name in values if name not in self._properties] if self._is_closed else []
        return [f"it has no parameter {name}{did_you_mean(name, self._properties)}" for name in unknown]

    def _missing(self, values: Mapping[str, Any]) -> list[str]:
        return [
            f"{name} is missing{_in_brackets(self._properties.get(name))}"
            for name in self._required
            if name not in values
        ]

    def _invalid(self, values: Mapping[str, Any]) -> list[str]:
        import jsonschema  # noqa: PLC0415 - a tenth of a second, and only a call needs it
        import referencing.exceptions  # noqa: PLC0415

        if self._validator is None:
            self._validator = _make_validator(self.tool.parameters)
        token = _steps_left.set([_LEAST_STEPS + _STEPS_PER_VALUE * count_values(values)])
        try:
            errors = list(itertools.islice(self._validator.iter_errors(values), _MOST_ERRORS))
        except (
            referencing.exceptions.Unresolvable,
            jsonschema.SchemaError,
            SchemaError,
            TypeError,
            AttributeError,
            _TooManySteps,
        ):
            # The schema cannot be used, so the provider has to validate the arguments.
            return []
        finally:
            _steps_left.reset(token)
        errors.sort(key=lambda error: list(map(str, error.absolute_path)))
        return list(dict.fromkeys(_message(jsonschema.exceptions.best_match([error])) for error in errors))

    def is_slow(self, arguments: Mapping[str, Any]) -> bool:
        """Whether validation may take so long that it should run in a thread."""
        return "jsonschema" not in sys.modules or count_values(arguments, _MANY_VALUES) >= _MANY_VALUES


class _TooManySteps(Exception):
    """A schema refers to itself in too many ways."""


_steps_left: ContextVar[list[int]] = ContextVar("carrel_steps_left")
"""References that the current validation may still follow: a small schema may have millions of paths through it."""


def _make_validator(schema: Mapping[str, Any]) -> Any:
    """Return a validator that follows no reference out of the schema, and only so many within it."""
    import jsonschema  # noqa: PLC0415 - see above
    import referencing  # noqa: PLC0415

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)

    def counted(rule: Any) -> Any:
        def follow(validator: Any, reference: Any, instance: Any, part: Any) -> Any:
            steps = _steps_left.get()
            steps[0] -= 1
            if steps[0] < 0:
                raise _TooManySteps
            return rule(validator, reference, instance, part)

        return follow

    def pattern(validator: Any, expression: Any, instance: Any, part: Any) -> Any:
        if isinstance(instance, str) and not matches(expression, instance):
            yield jsonschema.ValidationError(f"{instance[:100]!r} does not match {expression!r}")

    def unless_pattern_properties(rule: Any) -> Any:
        def check(validator: Any, wanted: Any, instance: Any, part: Any) -> Any:
            return () if "patternProperties" in part else rule(validator, wanted, instance, part)

        return check

    rules = {name: counted(rule) for name, rule in kind.VALIDATORS.items() if name in ("$ref", "$dynamicRef")}
    # Names of properties are not matched with expressions: those that a schema allows in this way are accepted.
    rules |= {"pattern": pattern, "patternProperties": lambda *_: ()}
    for name in ("additionalProperties", "unevaluatedProperties"):
        if name in kind.VALIDATORS:
            rules[name] = unless_pattern_properties(kind.VALIDATORS[name])
    # An empty registry of our own: nothing is fetched because a schema refers to it.
    extend: Any = jsonschema.validators.extend
    return extend(kind, rules)(dict(schema), registry=referencing.Registry())


def matches(expression: str, text: str) -> bool:
    """Whether an expression is found in a text, in time linear in its length; `SchemaError` for an expression with
    lookaround or back-references, which that excludes."""
    try:
        _string_validator(expression).validate_python(text)
    except ValidationError:
        return False
    return True


def expression_error(expression: str) -> str:
    """Return why an expression cannot be used, empty if it can."""
    try:
        _string_validator(expression)
    except SchemaError as error:
        return str(error).strip().splitlines()[-1].strip()
    return ""


@lru_cache(maxsize=1000)
def _string_validator(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression, regex_engine="rust-regex"))


def count_values(value: Any, most: int = 10_000_000) -> int:
    """Return about how many values data contains, long texts counted as several; counting ends at `most`."""
    size, left = 0, [value]
    while left and size < most:
        one = left.pop()
        size += 1
        match one:
            case str() | bytes():
                size += len(one) // 1000
            case Mapping():
                left += one.values()
            case list() | tuple():
                left += one
    return size


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a name that a schema does not list is a mistake: if it says so, or lists all its names."""
    if "additionalProperties" in schema:
        return schema["additionalProperties"] is False
    return bool(schema.get("properties")) and not _NAMED_ELSEWHERE & schema.keys()


def to_json_value(value: Any) -> Any:
    """Return a value as JSON has it; values that JSON does not have stay as they are."""
    match value:
        case enum.Enum():
            return to_json_value(value.value)
        case None | bool() | int() | float() | str() | bytes():
            return value
        case Mapping():
            return {key if isinstance(key, str) else str(key): to_json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json_value(item) for item in value]
        case set() | frozenset():
            return sorted((to_json_value(item) for item in value), key=repr)
        case uuid.UUID():
            return str(value)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return float(value)
        case _ if hasattr(value, "__fspath__"):
            return to_json_value(value.__fspath__())
        case _:
            return value


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    kinds = schema.get("type")
    if kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or None in (schema.get("enum") or ()):
        return True
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return any(map(_takes_null, choices)) if choices else not schema or "$ref" in schema


def _in_brackets(schema: Any) -> str:
    if not isinstance(schema, Mapping) or not isinstance(schema.get("description"), str):
        return ""
    lines = schema["description"].strip().splitlines()
    return f" ({textwrap.shorten(lines[0], 100, placeholder='…')})" if lines else ""


def _message(error: Any) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    value, expected = error.instance, error.validator_value
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}…"
    match error.validator:
        case "type":
            kinds = expected if isinstance(expected, list) else [expected]
            types = " or ".join(_PYTHON_TYPES.get(kind, "None" if kind == "null" else str(kind)) for kind in kinds)
            return f"{where or 'the arguments'} must be {types}, not {type(value).__name__} {shown}"
        case "enum" | "const":
            choices = expected if error.validator == "enum" else [expected]
            return f"{where} must be one of {', '.join(map(repr, choices))}, not {shown}"
        case "additionalProperties" if isinstance(value, Mapping):
            known = (error.schema.get("properties") or {}) if isinstance(error.schema, Mapping) else {}
            unknown = next((str(name) for name in value if name not in known), "")
            return f"{where or 'it'} has no {unknown}{did_you_mean(unknown, known)}"
        case "required" if isinstance(value, Mapping):
            missing = next((str(name) for name in expected if name not in value), "")
            return f"{where}.{missing} is missing".lstrip(".")
        case _:
            message = error.message if len(error.message) <= 200 else f"{error.message[:197]}…"
            return f"{where}: {message}".lstrip(": ")
