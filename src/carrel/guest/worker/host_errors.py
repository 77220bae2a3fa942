"""Errors of the host, raised inside as exceptions of the same class."""

from __future__ import annotations

import builtins
from typing import Any

from . import values


class HostCallError(Exception):
    """An error of the host; the base of all its errors that are not builtin exceptions."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a message is for reading.
        return str(self.args[0]) if self.args else ""


_made: dict[str, type[Exception]] = {}
_UNFIT = (StopIteration, StopAsyncIteration)
"""Raised through a coroutine or a generator, these mean something else."""


def error_class(name: str, also: list[str]) -> type[Exception]:
    """The builtin exception of this name, or a class made for it that inherits from each of `also`."""
    known = _known(name)
    if known is not None:
        return known
    bases = [kind for kind in map(_known, also) if kind is not None]
    # Each only once, and none that another one of them is already.
    bases = [kind for kind in bases if not any(other is not kind and issubclass(other, kind) for other in bases)]
    if not any(issubclass(kind, HostCallError) for kind in bases):
        bases.insert(0, HostCallError)
    try:
        made = type(name, tuple(dict.fromkeys(bases)), {"__module__": "carrel"})
    except TypeError:
        made = type(name, (HostCallError,), {"__module__": "carrel"})
    _made[name] = made
    return made


def _known(name: str) -> type[Exception] | None:
    if name in _made:
        return _made[name]
    standard = getattr(builtins, name, None)
    if isinstance(standard, type) and issubclass(standard, Exception) and not issubclass(standard, _UNFIT):
        return standard
    return None


def error_from_record(error: dict[str, Any]) -> Exception:
    """The exception that an answer describes: class, message, and further attributes."""
    message = str(error.get("message", ""))
    name, also = error.get("type"), error.get("also")
    name = name if isinstance(name, str) and name.isidentifier() else "HostCallError"
    kind = error_class(name, [str(other) for other in also] if isinstance(also, list) else [])
    try:
        problem = kind(message)
    except TypeError:
        # Some of Python's own want more than a message.
        problem = HostCallError(f"{name}: {message}")
    if isinstance(problem, SyntaxError):
        # A traceback shows this and not the argument; a class that is two of Python's own has the other one's start.
        problem.msg = message
    attributes = values.decode(error.get("attributes"))
    for attribute, value in attributes.items() if isinstance(attributes, dict) else ():
        if str(attribute).isidentifier() and not str(attribute).startswith("_"):
            setattr(problem, str(attribute), value)
    return problem
