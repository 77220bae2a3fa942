"""What a call asks of the host, as data: all of it, or an error that names the argument which cannot cross."""

from __future__ import annotations

from typing import Any

from . import values
from .host_errors import error_class


def encoded(name: str, arguments: dict[str, Any]) -> tuple[Any, int]:
    """The arguments of a call (`args` and `kwargs`) as data, and about how many bytes the call has."""
    try:
        data, size = values.encode_whole(arguments)
    except values.TooLarge as problem:
        raise refusal(name, f"{_culprit(arguments)} cannot be given to the host: {problem}") from None
    return data, size + len(name)


def refusal(name: str, why: str) -> Exception:
    """The error for a call that is not sent: a tool's own, else a ValueError."""
    if name.partition(".")[0] == "tools":
        return error_class("ToolCallError", ["RuntimeError"])(f"{name[:100]}: {why}")
    return ValueError(f"{name[:100]}: {why}")


def _culprit(arguments: dict[str, Any]) -> str:
    """Which argument it is; each is looked at by itself."""
    given = [(f"argument {place}", value) for place, value in enumerate(arguments["args"], 1)]
    given += [(f"the argument {name}", value) for name, value in arguments["kwargs"].items()]
    for told, value in given:
        try:
            # As deep as it is inside of the call.
            values.encode_whole([[value]])
        except values.TooLarge:
            return told
    return "all its arguments together"
