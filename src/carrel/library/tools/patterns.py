"""Regular expressions on texts of strangers: simple ones at once, others in a process that is ended when time is up."""

import contextlib
import json
import re
import select
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Self

SECONDS = 2.0
"""For all expressions of one call together."""
_QUICK_STEPS = 2_000_000
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_PLAIN = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY, _constants.AT)
_PROGRAM = Path(__file__).parent / "pattern_process.py"


class TooSlow(Exception):
    """An expression took longer than there was time."""


class Expressions:
    """Those of one call; blocks while a hard one is tried."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()

    def found(self, pattern: str, text: str) -> bool:
        """Whether the expression is found in the text; `TooSlow`, or `re.error` when it is none."""
        degree = degree_of(pattern)
        if degree is not None and max(len(text), 1) ** degree <= _QUICK_STEPS:
            return re.search(pattern, text) is not None
        return self._tried(pattern, text)

    def _tried(self, pattern: str, text: str) -> bool:
        if self._process is None:
            # Without -I and -S it would be slower, and could be made to load what lies about.
            words = [sys.executable, "-I", "-S", str(_PROGRAM)]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, bufsize=0)
            self._until = time.monotonic() + self._seconds
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._until is not None
        # It reads all of it before it begins, so that writing does not wait for what may hang.
        unsent = memoryview(json.dumps([pattern, text]).encode() + b"\n")
        while unsent:
            unsent = unsent[self._process.stdin.write(unsent) or 0 :]
        ready, _, _ = select.select([self._process.stdout], [], [], max(self._until - time.monotonic(), 0))
        answer = self._process.stdout.read(2) if ready else b""
        if not answer:
            raise TooSlow(pattern)
        return answer == b"1\n"


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
