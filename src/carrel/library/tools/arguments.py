"""What code called with, checked against the tool's schema before anything runs."""

import datetime
import decimal
import enum
import itertools
import re
import sys
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from carrel.errors import ToolCallError
from carrel.library.names import python_name
from carrel.library.tools.patterns import Expressions, TooSlow
from carrel.library.tools.tool import Tool
from carrel.text import did_you_mean

_MOST_TOLD, _MOST_ERRORS = 3, 50
_LEAST_STEPS, _STEPS = 20_000, 200
"""References that a check may follow: so many, and so many more for each part of the arguments."""
_LONG = 5000
"""Parts of arguments that are checked in an instant."""
_ELSEWHERE = {"patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "propertyNames"}
"""Where a schema may know more names than its own properties."""
_PYTHON = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


def bind_arguments(tool: Tool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, as Python would bind them; `ToolCallError` for too many, or one said twice."""
    order = tool.in_order
    if len(args) > len(order):
        takes = f"only {', '.join(order)}" if order else "none"
        raise ToolCallError(
            f"{tool.name}: {len(args)} arguments without a name, and it takes {takes}; write them as name=value"
        )
    named = dict(zip(order, args, strict=False))
    twice = [name for name in named if name in kwargs]
    if twice:
        raise ToolCallError(f"{tool.name}: {twice[0]} is given twice")
    return {**named, **kwargs}


class ArgumentValidator:
    """Checks arguments for one tool; made once, because reading a schema costs more than using it."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        properties = tool.parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        required = tool.parameters.get("required")
        self._required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        self._closed = _is_closed(tool.parameters)
        self._validator: Any = None
        self._has_patterns: bool | None = None

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the tool takes them; `ToolCallError` names each one that is missing, unknown or wrong."""
        try:
            named = self._named(arguments)
            given = {name: to_json_value(value) for name, value in named.items()}
            problems = self._unknown(given) + self._missing(given) or self._wrong(given)
        except RecursionError:
            raise ToolCallError(f"{self.tool.name}: its arguments are nested too deeply") from None
        if problems:
            more = f"; and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
            raise ToolCallError(f"{self.tool.name}: {'; '.join(problems[:_MOST_TOLD])}{more}")
        return named if self.tool.takes_values else given

    def _named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            spelled = python_name(name)
            called = spelled if name not in self._properties and spelled in self._properties else name
            if called in given:
                raise ToolCallError(f"{self.tool.name}: {called} is given twice")
            # None is how Python says "not given", unless the schema knows it as a value.
            if value is not None or called in self._required or _takes_null(self._properties.get(called)):
                given[called] = value
        return given

    def _unknown(self, given: Mapping[str, Any]) -> list[str]:
        unknown = [name for name in given if name not in self._properties] if self._closed else []
        return [f"it has no parameter {name}{did_you_mean(name, self._properties)}" for name in unknown]

    def _missing(self, given: Mapping[str, Any]) -> list[str]:
        return [
            f"{name} is missing{_described(self._properties.get(name))}" for name in self._required if name not in given
        ]

    def _wrong(self, given: Mapping[str, Any]) -> list[str]:
        import jsonschema  # noqa: PLC0415 - a tenth of a second, and only a call needs it
        import referencing.exceptions  # noqa: PLC0415

        if self._validator is None:
            self._validator = _validator(self.tool.parameters)
        try:
            with Expressions() as expressions:
                check = _CHECK.set(_Check(expressions, _LEAST_STEPS + _STEPS * size_of(given)))
                try:
                    errors = list(itertools.islice(self._validator.iter_errors(given), _MOST_ERRORS))
                finally:
                    _CHECK.reset(check)
        except TooSlow as problem:
            return [f"it takes too long to find out whether an argument matches {str(problem)[:80]!r}; send less"]
        except (
            referencing.exceptions.Unresolvable,
            jsonschema.SchemaError,
            re.error,
            TypeError,
            AttributeError,
            _Boundless,
        ) as bad:
            # Whoever has the tool wrote a schema that nobody can use; it will have to check by itself.
            del bad
            return []
        errors.sort(key=lambda error: list(map(str, error.absolute_path)))
        return list(dict.fromkeys(_told(jsonschema.exceptions.best_match([error])) for error in errors))

    def takes_long(self, arguments: Mapping[str, Any]) -> bool:
        """Whether checking them may take so long that it should be done aside."""
        if self._has_patterns is None:
            self._has_patterns = "'pattern'" in repr(self.tool.parameters)
        return "jsonschema" not in sys.modules or self._has_patterns or size_of(arguments, _LONG) >= _LONG


@dataclass
class _Check:
    """One check under way."""

    expressions: Expressions
    left: int
    """References that may still be followed: they can lead to millions of ways through a small schema."""


class _Boundless(Exception):
    """Too many references."""


_CHECK: ContextVar[_Check] = ContextVar("carrel_check")


def _validator(schema: Mapping[str, Any]) -> Any:
    """One that follows no reference out of the schema, and neither references nor expressions without end."""
    import jsonschema  # noqa: PLC0415 - see above
    import referencing  # noqa: PLC0415

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)

    def counted(rule: Any) -> Any:
        def follow(validator: Any, reference: Any, instance: Any, part: Any) -> Any:
            check = _CHECK.get()
            check.left -= 1
            if check.left < 0:
                raise _Boundless
            return rule(validator, reference, instance, part)

        return follow

    def pattern(validator: Any, wanted: Any, instance: Any, part: Any) -> Any:
        if isinstance(instance, str) and not _CHECK.get().expressions.found(wanted, instance):
            yield jsonschema.ValidationError(f"{instance[:100]!r} does not match {wanted!r}")

    def unless_by_pattern(rule: Any) -> Any:
        def check(validator: Any, wanted: Any, instance: Any, part: Any) -> Any:
            return () if "patternProperties" in part else rule(validator, wanted, instance, part)

        return check

    rules = {name: counted(rule) for name, rule in kind.VALIDATORS.items() if name in ("$ref", "$dynamicRef")}
    rules |= {"pattern": pattern}
    # Names of properties are not tried on expressions: those that a schema allows in this way are let through.
    rules |= {"patternProperties": lambda *_: ()}
    for name in ("additionalProperties", "unevaluatedProperties"):
        if name in kind.VALIDATORS:
            rules[name] = unless_by_pattern(kind.VALIDATORS[name])
    # A registry of our own, empty: nothing is ever fetched because a schema refers to it.
    extend: Any = jsonschema.validators.extend
    return extend(kind, rules)(dict(schema), registry=referencing.Registry())


def size_of(value: Any, most: int = 10_000_000) -> int:
    """About how many parts data has, long texts counted as many; counting ends at `most`."""
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
    """Whether a name that it does not list is a mistake: also where it does not say so, but lists all it knows."""
    if "additionalProperties" in schema:
        return schema["additionalProperties"] is False
    return bool(schema.get("properties")) and not _ELSEWHERE & schema.keys()


def to_json_value(value: Any) -> Any:
    """The value as JSON knows it; what JSON does not know stays as it is."""
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


def _described(schema: Any) -> str:
    if not isinstance(schema, Mapping) or not isinstance(schema.get("description"), str):
        return ""
    lines = schema["description"].strip().splitlines()
    return f" ({textwrap.shorten(lines[0], 100, placeholder='…')})" if lines else ""


def _told(error: Any) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    value, wanted = error.instance, error.validator_value
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}…"
    match error.validator:
        case "type":
            kinds = wanted if isinstance(wanted, list) else [wanted]
            spoken = " or ".join(_PYTHON.get(kind, "None" if kind == "null" else str(kind)) for kind in kinds)
            return f"{where or 'the arguments'} must be {spoken}, not {type(value).__name__} {shown}"
        case "enum" | "const":
            choices = wanted if error.validator == "enum" else [wanted]
            return f"{where} must be one of {', '.join(map(repr, choices))}, not {shown}"
        case "additionalProperties" if isinstance(value, Mapping):
            known = (error.schema.get("properties") or {}) if isinstance(error.schema, Mapping) else {}
            unknown = next((str(name) for name in value if name not in known), "")
            return f"{where or 'it'} has no {unknown}{did_you_mean(unknown, known)}"
        case "required" if isinstance(value, Mapping):
            missing = next((str(name) for name in wanted if name not in value), "")
            return f"{where}.{missing} is missing".lstrip(".")
        case _:
            message = error.message if len(error.message) <= 200 else f"{error.message[:197]}…"
            return f"{where}: {message}".lstrip(": ")
