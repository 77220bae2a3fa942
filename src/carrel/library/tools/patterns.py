"""Regular expressions on texts of strangers: simple ones at once, others in a process that is ended when time is up."""

import re
import time
from functools import lru_cache
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Self

from carrel.library.asked_process import AskedProcess

SECONDS = 2.0
"""For all expressions of one call together."""
_QUICK_STEPS = 2_000_000
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_PLAIN = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY, _constants.AT)
_PROGRAM = str(Path(__file__).parent / "pattern_process.py")


class TooSlow(Exception):
    """An expression took longer than there was time."""


class Expressions:
    """Those of one call; blocks while a hard one is tried."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._process = AskedProcess(_PROGRAM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()

    def found(self, pattern: str, text: str) -> bool:
        """Whether the expression is found in the text; `TooSlow`, or `re.error` when it is none."""
        degree = degree_of(pattern)
        if degree is not None and max(len(text), 1) ** degree <= _QUICK_STEPS:
            return re.search(pattern, text) is not None
        return self._tried(pattern, text)

    def _tried(self, pattern: str, text: str) -> bool:
        if self._until is None:
            self._until = time.monotonic() + self._seconds
        try:
            return bool(self._process.ask([pattern, text], self._until))
        except (TimeoutError, EOFError):
            raise TooSlow(pattern) from None


@lru_cache(maxsize=1000)
def degree_of(pattern: str) -> int | None:
    """Pure: trying it on n letters takes at most about n to this power steps; None when that may be exponential."""
    parsed = _parser.parse(pattern)
    repeats = _repeats(parsed, inside=False)
    if repeats is None:
        return None
    begins = len(parsed) > 0 and parsed[0] == (_constants.AT, _constants.AT_BEGINNING)
    return max(repeats if begins else repeats + 1, 1)


def _repeats(parsed: Any, *, inside: bool) -> int | None:
    """How many parts of it take as much as they like; None when one lies in another, or it is harder still."""
    count = 0
    for kind, given in parsed:
        parts: list[Any] = []
        within = inside
        if kind in _REPEATS:
            least, most, part = given
            if least != most:
                if inside:
                    return None
                count += 1
            parts, within = [part], inside or most > 1
        elif kind is _constants.BRANCH:
            if inside:
                return None
            parts = list(given[1])
        elif kind is _constants.SUBPATTERN:
            parts = [given[3]]
        elif kind not in _PLAIN:
            return None
        for part in parts:
            more = _repeats(part, inside=within)
            if more is None:
                return None
            count += more
    return count
