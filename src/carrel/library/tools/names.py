"""Pure: what tools and their parameters are called in Python, and which names are near a wrong one."""

import difflib
import heapq
import keyword
import re
import unicodedata
from collections.abc import Iterable

_OTHER = re.compile(r"\W+")
_LONGEST, _MOST = 200, 50
"""Comparing two names costs the square of their length: no longer ones, and only those that have the most in common."""


def python_name(name: str) -> str:
    """The name as code can write it: `max-time` is `max_time`, `class` is `class_`."""
    # As Python itself reads a name: what only looks different is the same.
    word = _OTHER.sub("_", unicodedata.normalize("NFKC", name)) or "_"
    if not word.isidentifier():
        word = "".join(letter if f"a{letter}".isidentifier() else "_" for letter in word)
    if not word.isidentifier():
        word = f"_{word}"
    return f"{word}_" if keyword.iskeyword(word) else word


def python_names(names: Iterable[str]) -> dict[str, str]:
    """Each name under what it is called in Python; where two would be called the same, the later gets a number.

    One that Python can write as it is keeps to that, whatever others come before it."""
    names = list(names)
    itself = {name for name in names if python_name(name) == name}
    called: dict[str, str] = {}
    for name in names:
        first = word = python_name(name)
        number = 2
        while word in called or (word in itself and word != name):
            word, number = f"{first}_{number}", number + 1
        called[word] = name
    return called


def near(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that says what may have been meant, or what there is; empty when there is nothing."""
    name = name[:_LONGEST]
    known = sorted({other[:_LONGEST] for other in names})
    folded = {other.lower(): other for other in known}
    pairs = _pairs(name.lower())
    alike = heapq.nlargest(_MOST, folded, key=lambda other: _likeness(pairs, _pairs(other)))
    found = difflib.get_close_matches(name.lower(), alike, n=3, cutoff=0.6)
    found += [other for other in folded if name and name.lower() in other and other not in found][: 3 - len(found)]
    if found:
        return f"; did you mean {_or([folded[other] for other in found])}?"
    if not known:
        return ""
    shown = ", ".join(known[:8])
    return f"; there is {shown}" if len(known) <= 8 else f"; there are {shown} and {len(known) - 8} more"


def _pairs(word: str) -> set[str]:
    """Its letters, two by two."""
    return {word[at : at + 2] for at in range(max(len(word) - 1, 1))}


def _likeness(one: set[str], other: set[str]) -> float:
    return len(one & other) / (len(one) + len(other))


def _or(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
