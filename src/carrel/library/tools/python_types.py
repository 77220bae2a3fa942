"""Pure: a JSON Schema in, the Python type that says the same out."""

from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
MOST_CHOICES = 20
"""So many values are a `Literal`; where there are more, the type is that of the values."""
_DEEPEST = 6
_MOST_REFERENCES = 30
ANY = "Any"


class Work:
    """How many parts of schemas may still be looked at: references make a small schema a boundless type."""

    def __init__(self, left: int = 30_000) -> None:
        self.left = left
        self.hidden = False
        """Whether something lay too deep to be told."""

    def spend(self, parts: int = 1) -> bool:
        """False when there is nothing left to spend."""
        self.left -= parts
        return self.left >= 0


def python_type(schema: Any, whole: Mapping[str, Any] | None = None, room: int = 240, work: Work | None = None) -> str:
    """The type as a person would write it, in at most about `room` characters: what lies deep is told as `dict`.

    `whole`: the schema in which a `$ref` is looked up; `work`: what several types may cost together."""
    return type_and_depth(schema, whole, room, work)[0]


def type_and_depth(
    schema: Any, whole: Mapping[str, Any] | None = None, room: int = 240, work: Work | None = None
) -> tuple[str, int]:
    """The same, and how many objects deep it tells the names of what lies in them."""
    work = work or Work()
    told = ANY, 0
    # From the top down: most of what is too long is so within a level or two.
    for depth in range(_DEEPEST + 1):
        # Hardly a part takes fewer than two characters.
        part = Work(min(2 * room, work.left))
        before = part.left
        written = _type(schema, whole or {}, depth, (), part)
        work.left -= before - max(part.left, 0)
        if depth and (len(written) > room or part.left < 0):
            break
        if len(written) > 4 * room:
            return ANY, 0
        told = written, depth if part.hidden else _DEEPEST
        if not part.hidden:
            break
    return told


def _type(schema: Any, whole: Mapping[str, Any], depth: int, seen: tuple[str, ...], work: Work) -> str:
    if not isinstance(schema, Mapping) or not work.spend():
        return ANY
    schema, seen = resolved(schema, whole, seen, work)
    if "const" in schema:
        return _literal([schema["const"]])
    choices = schema.get("enum")
    if isinstance(choices, list) and 0 < len(choices) <= MOST_CHOICES:
        return _literal(choices)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            return union(_type(choice, whole, depth, seen, work) for choice in schema[word])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return union(_type({**schema, "type": kind}, whole, depth, seen, work) for kind in kinds[:MOST_CHOICES])
    if kinds == "string" and schema.get("format") in ("binary", "byte"):
        return "bytes"
    if kinds == "array" or (kinds is None and "items" in schema):
        inner = _type(schema.get("items"), whole, depth, seen, work)
        return "list" if inner == ANY else f"list[{inner}]"
    if kinds == "object" or (kinds is None and "properties" in schema):
        return _object(schema, whole, depth, seen, work)
    return _PLAIN.get(kinds, ANY) if isinstance(kinds, str) else ANY


def resolved(
    schema: Mapping[str, Any], whole: Mapping[str, Any], seen: tuple[str, ...] = (), work: Work | None = None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The schema with its `$ref` followed and its `allOf` put together; an endless one is an open object."""
    work = work or Work()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen or len(seen) >= _MOST_REFERENCES:
            return {"type": "object"}, seen
        found = _found(reference, whole)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return resolved({**found, **rest}, whole, (*seen, reference), work)
    parts = schema.get("allOf")
    if not isinstance(parts, list):
        return schema, seen
    merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
    for part in parts:
        if not isinstance(part, Mapping) or not work.spend():
            continue
        one, seen = resolved(part, whole, seen, work)
        for key, value in one.items():
            if key == "properties" and isinstance(merged.get(key), Mapping) and isinstance(value, Mapping):
                merged[key] = {**merged[key], **value}
            elif key == "required" and isinstance(merged.get(key), list) and isinstance(value, list):
                merged[key] = [*merged[key], *value]
            else:
                merged.setdefault(key, value)
    return merged, seen


def _found(reference: str, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    node: Any = whole
    for word in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        name = word.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _object(schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int, seen: tuple[str, ...], work: Work) -> str:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and properties:
        if not depth:
            work.hidden = True
            return "dict"
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        # {'id': str, 'note?': str}: what need not be there has the question mark that TypeScript gives it.
        shown = [
            f"{_key(str(name), name in (required or ()))}: {_type(inner, whole, depth - 1, seen, work)}"
            for name, inner in properties.items()
        ]
        return f"{{{', '.join(shown)}}}"
    values = schema.get("additionalProperties")
    if isinstance(values, Mapping) and values:
        inner = _type(values, whole, depth, seen, work)
        return "dict" if inner == ANY else f"dict[str, {inner}]"
    return "dict"


def _key(name: str, required: bool) -> str:
    return repr(name if required else f"{name}?")


def _literal(values: list[Any]) -> str:
    return f"Literal[{', '.join(map(repr, values))}]"


def union(kinds: Iterable[str]) -> str:
    """One of several types, each named once."""
    found = list(dict.fromkeys(kinds))
    if ANY in found:
        return ANY
    literals = [kind for kind in found if kind.startswith("Literal[") and " | " not in kind]
    if len(literals) > 1:
        values = ", ".join(kind.removeprefix("Literal[").removesuffix("]") for kind in literals)
        found = [f"Literal[{values}]", *(kind for kind in found if kind not in literals)]
    # None last, as people write it.
    found.sort(key=lambda kind: kind == "None")
    return " | ".join(found)
