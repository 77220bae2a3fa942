"""Pure: what tools and their parameters are called in Python."""

import keyword
import re
import unicodedata
from collections.abc import Iterable

_OTHER = re.compile(r"\W+")


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
