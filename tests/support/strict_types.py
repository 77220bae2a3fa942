"""The typed dicts of an SDK as models that refuse unknown fields."""

import collections.abc
import types
import warnings
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, Required, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from typing_extensions import get_type_hints, is_typeddict


@cache
def strict(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(kind))


@cache
def _model(kind: Any) -> type[BaseModel]:
    hints = get_type_hints(kind, include_extras=True)
    # The SDKs' annotations are strings, in which `__required_keys__` sees nothing.
    fields: dict[str, Any] = {
        name: (_strict(hint), ... if cast(Any, get_origin(hint)) is Required else None) for name, hint in hints.items()
    }
    with warnings.catch_warnings():
        # A field named `schema` hides a method of the model that is never called.
        warnings.simplefilter("ignore", UserWarning)
        return create_model(kind.__name__, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _strict(kind: Any) -> Any:
    if is_typeddict(kind):
        return _model(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired, Annotated):
        return _strict(arguments[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(_strict(each) for each in arguments)]  # noqa: UP007
    # pydantic does not validate a lazy iterable, but a list.
    if origin in (list, collections.abc.Iterable) or getattr(origin, "__name__", "") == "SequenceNotStr":
        return list[_strict(arguments[0])]  # type: ignore[misc]
    if origin is Literal or kind in (str, int, float, bool, type(None)):
        return kind
    return Any
