"""Arguments that were left out, and time limits."""

from collections.abc import Mapping
from typing import Any

import httpx2

Timeout = httpx2.Timeout
DEFAULT_TIMEOUT = Timeout(timeout=300, connect=5.0)
DEFAULT_MAX_RETRIES = 0


class NotGiven:
    """The default of arguments for which None has a meaning."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NOT_GIVEN"


class Omit:
    """The default of arguments that are then not sent."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "omit"


NOT_GIVEN = not_given = NotGiven()
omit = Omit()

Seconds = float | Timeout | None | NotGiven


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given, with time limits in seconds."""
    return {
        name: seconds(value) if isinstance(value, Timeout) else value
        for name, value in arguments.items()
        if not isinstance(value, NotGiven | Omit)
    }


def seconds(timeout: float | Timeout | None) -> float | None:
    """Return a time limit as a number; of an object with several limits, the one for an answer."""
    return timeout.read if isinstance(timeout, Timeout) else timeout
