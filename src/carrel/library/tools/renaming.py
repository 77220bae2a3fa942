"""Pure: a foreign schema's parameters under names that Python code can write, and back."""

from collections.abc import Mapping
from typing import Any

from carrel.library.tools.names import python_names


def renamed(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
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
