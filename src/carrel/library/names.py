"""Python names for foreign names, and signature checks for calls from code."""

import inspect
import keyword
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_OTHER = re.compile(r"\W+")


def python_name(name: str) -> str:
    """Return a name as code can write it: `max-time` as `max_time`, `class` as `class_`."""
    # Python normalizes names when it reads code.
    word = _OTHER.sub("_", unicodedata.normalize("NFKC", name)) or "_"
    if not word.isidentifier():
        word = "".join(letter if f"a{letter}".isidentifier() else "_" for letter in word)
    if not word.isidentifier():
        word = f"_{word}"
    return f"{word}_" if keyword.iskeyword(word) else word


def python_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names by their Python names; of two with the same Python name, the later gets a number.

    A name that is a Python name already keeps it."""
    names = list(names)
    unchanged = {name for name in names if python_name(name) == name}
    by_word: dict[str, str] = {}
    for name in names:
        first = word = python_name(name)
        number = 2
        while word in by_word or (word in unchanged and word != name):
            word, number = f"{first}_{number}", number + 1
        by_word[word] = name
    return by_word


def with_python_names(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an object's schema with Python names for its properties, and the original name of each.

    Names within the properties stay, because they are keys of data."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    original = python_names(str(name) for name in properties)
    renamed = {name: word for word, name in original.items()}
    required = schema.get("required")
    result: dict[str, Any] = {
        **schema,
        "type": "object",
        "properties": {word: properties[name] for word, name in original.items()},
    }
    if isinstance(required, list):
        result["required"] = [renamed.get(name, name) for name in required]
    return result, original


def check_call_signature(name: str, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a TypeError that shows the signature if a method cannot be called with these arguments."""
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        raise TypeError(f"{name}{inspect.Signature(bare)}: {error}") from None
