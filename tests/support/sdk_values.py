"""Values for any type that an SDK declares, so that new kinds of blocks are tested without a change here."""

import types
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel

DEEPEST = 6


def kinds(union: Any) -> Iterator[Any]:
    """The members of a union, nested unions included."""
    if get_origin(union) is Annotated:
        union = get_args(union)[0]
    if get_origin(union) in (Union, types.UnionType):
        for member in get_args(union):
            yield from kinds(member)
    else:
        yield union


def instance(model: type[BaseModel], *, full: bool, choice: int = 0, depth: int = 0) -> dict[str, Any]:
    """The JSON of one: only what must be there, or all it can have; `choice` picks among the members of unions."""
    return {
        field.alias or name: _value(field.annotation, full, choice, depth + 1)
        for name, field in model.model_fields.items()
        if field.is_required() or (full and depth < DEEPEST) or get_origin(field.annotation) is Literal
    }


def _value(kind: Any, full: bool, choice: int, depth: int) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    members = [member for member in kinds(kind) if member is not type(None)]
    if len(members) > 1 or origin in (Annotated, Union, types.UnionType):
        return _value(members[choice % len(members)], full, choice, depth)
    if origin is Literal:
        return arguments[0]
    if origin is list:
        return [_value(arguments[0], full, choice, depth)] if depth < DEEPEST else []
    if origin is dict:
        return {"some_key": _value(arguments[1], full, choice, depth)}
    if kind in (object, Any):
        return {"some_key": None}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return instance(kind, full=full, choice=choice, depth=depth)
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return next(iter(cast(type[StrEnum], kind))).value
    return {str: "text", int: 3, float: 1.5, bool: True, bytes: "-_8="}[kind]
