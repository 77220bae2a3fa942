"""Python names for foreign names, and signature checks for calls from code."""

import inspect
import keyword
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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


def with_python_names(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The schema of an object with its properties named as in Python, and each of those names' foreign one.

    Only the object's own properties are renamed: what lies deeper is data, which code writes as it is."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    foreign = python_names(str(name) for name in properties)
    python = {name: word for word, name in foreign.items()}
    required = schema.get("required")
    result: dict[str, Any] = {
        **schema,
        "type": "object",
        "properties": {word: properties[name] for word, name in foreign.items()},
    }
    if isinstance(required, list):
        result["required"] = [python.get(name, name) for name in required]
    return result, foreign


def check_call_signature(name: str, called: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TypeError that shows how it is called, in the words that the code used."""
    signature = inspect.signature(called)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        raise TypeError(f"{name}{inspect.Signature(bare)}: {problem}") from None
