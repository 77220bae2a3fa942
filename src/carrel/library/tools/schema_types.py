"""Pure: JSON Schemas as Python types and as docs of parameters; foreign schemas in a bounded size."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from carrel.library.names import python_name
from carrel.library.tools.tool import Tool

_PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
MOST_CHOICES = 20
"""Values of an enum that are shown as a `Literal`; of more, only their type is shown."""
_DEEPEST = 6
_MOST_REFERENCES = 30
ANY = "Any"


class WorkBudget:
    """How many parts of schemas may still be read or copied: with references, a small schema can be of endless size."""

    def __init__(self, left: int = 30_000) -> None:
        self.left = left
        self.hidden = False
        """Whether a part was too deep to be shown."""

    def spend(self, parts: int = 1) -> bool:
        """Return False when nothing is left."""
        self.left -= parts
        return self.left >= 0


def python_type(
    schema: Any, whole: Mapping[str, Any] | None = None, longest: int = 240, work: WorkBudget | None = None
) -> str:
    """Return a schema as a Python type of about `longest` characters at most; deep objects are shown as `dict`.

    `whole`: the schema in which references are resolved; `work`: a budget that several types share."""
    return type_and_depth(schema, whole, longest, work)[0]


def type_and_depth(
    schema: Any, whole: Mapping[str, Any] | None = None, longest: int = 240, work: WorkBudget | None = None
) -> tuple[str, int]:
    """Return the type, and up to which depth of objects it shows their keys."""
    work = work or WorkBudget()
    best = ANY, 0
    # From the top down, because most types that are too long are so within a level or two.
    for depth in range(_DEEPEST + 1):
        # Most parts take at least two characters.
        part = WorkBudget(min(2 * longest, work.left))
        before = part.left
        text = _type(schema, whole or {}, depth, (), part)
        work.left -= before - max(part.left, 0)
        if depth and (len(text) > longest or part.left < 0):
            break
        if len(text) > 4 * longest:
            return ANY, 0
        best = text, depth if part.hidden else _DEEPEST
        if not part.hidden:
            break
    return best


def _type(schema: Any, whole: Mapping[str, Any], depth: int, seen: tuple[str, ...], work: WorkBudget) -> str:
    if not isinstance(schema, Mapping) or not work.spend():
        return ANY
    schema, seen = resolve(schema, whole, seen, work)
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


def resolve(
    schema: Mapping[str, Any], whole: Mapping[str, Any], seen: tuple[str, ...] = (), work: WorkBudget | None = None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a schema with its `$ref` resolved and its `allOf` merged; an endless one becomes an object."""
    work = work or WorkBudget()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen or len(seen) >= _MOST_REFERENCES:
            return {"type": "object"}, seen
        found = _follow(reference, whole)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return resolve({**found, **rest}, whole, (*seen, reference), work)
    parts = schema.get("allOf")
    if not isinstance(parts, list):
        return schema, seen
    merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
    for part in parts:
        if not isinstance(part, Mapping) or not work.spend():
            continue
        one, seen = resolve(part, whole, seen, work)
        for key, value in one.items():
            if key == "properties" and isinstance(merged.get(key), Mapping) and isinstance(value, Mapping):
                merged[key] = {**merged[key], **value}
            elif key == "required" and isinstance(merged.get(key), list) and isinstance(value, list):
                merged[key] = [*merged[key], *value]
            else:
                merged.setdefault(key, value)
    return merged, seen


def _follow(reference: str, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    node: Any = whole
    for word in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        name = word.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _object(
    schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int, seen: tuple[str, ...], work: WorkBudget
) -> str:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and properties:
        if not depth:
            work.hidden = True
            return "dict"
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        # {'id': str, 'note?': str}: a question mark for keys that are not required, as in TypeScript.
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
    """Return the union of several types, each once."""
    found = list(dict.fromkeys(kinds))
    if ANY in found:
        return ANY
    literals = [kind for kind in found if kind.startswith("Literal[") and " | " not in kind]
    if len(literals) > 1:
        values = ", ".join(kind.removeprefix("Literal[").removesuffix("]") for kind in literals)
        found = [f"Literal[{values}]", *(kind for kind in found if kind not in literals)]
    # None last, as is usual.
    found.sort(key=lambda kind: kind == "None")
    return " | ".join(found)


DEEPEST = 40
LONGEST_TEXT, LONGEST_NAME = 16_000, 200
LEFT_OUT = frozenset(("pattern", "patternProperties", "uniqueItems", "$comment", "examples"))
"""Checked by the server only: a regular expression and the comparison of all items can take very long."""
_NAMED = frozenset(("properties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("default", "enum", "const"))


def bounded_schema(value: Any, budget: WorkBudget, depth: int = 0) -> Any:
    """Return a copy of a schema without what is too deep or beyond the budget, and with shortened texts."""
    fits = budget.spend() and depth <= DEEPEST
    if isinstance(value, list):
        return [bounded_schema(item, budget, depth + 1) for item in value] if fits else []
    if not isinstance(value, Mapping):
        return value
    if not fits:
        return {}
    copy: dict[str, Any] = {}
    for name, item in value.items():
        if name in LEFT_OUT:
            continue
        if name in _NAMED and isinstance(item, Mapping):
            # The keys are names here, also `description` or `pattern`.
            named = {inner: one for inner, one in item.items() if len(inner) <= LONGEST_NAME}
            copy[name] = {inner: bounded_schema(one, budget, depth + 2) for inner, one in named.items()}
        elif name in _DATA:
            if len(str(item)) <= LONGEST_TEXT or name == "enum":
                copy[name] = item
        else:
            copy[name] = truncate(item) if isinstance(item, str) else bounded_schema(item, budget, depth + 1)
    if "patternProperties" in value:
        # Some other names are allowed; which ones was in the patterns.
        copy["additionalProperties"] = True
    return copy


def truncate(text: str) -> str:
    """Return a text that is not too long."""
    return f"{text[:LONGEST_TEXT]}…" if len(text) > LONGEST_TEXT else text


_MOST_DESCRIPTIONS, _LONGEST_PATH = 3000, 300
"""Parts of a tool's parameters whose descriptions are read, and the longest path to one: `filter.owner.name`."""
LONGEST_TYPE, _LONGEST_PART_TYPE = 240, 120
"""Characters of the type of a parameter, and of that of a part of one."""
_MOST_PARTS = 200
"""Parts of a tool's parameters that are listed because the type does not show them."""
_LONGEST_CHOICES = 600
LONGEST_DEFAULT = 40
"""Characters of a default in a signature; a longer one is shown as None."""
ANY_NAME = "*"
"""Stands for any key of an object."""


@dataclass(frozen=True)
class ToolDocs:
    """The docs of a tool."""

    description: tuple[str, ...]
    """The lines that are not empty."""
    parameters: Mapping[str, str]
    """The description of each parameter, on one line."""
    parts: Mapping[tuple[str, ...], str]
    """The description of each part of a parameter, by its path, as it is shown after its name: with its type if that of
    the parameter does not show it."""


class _Part(NamedTuple):
    """A part of a parameter, or the parameter itself."""

    path: tuple[str, ...]
    prose: str
    kind: str = ""
    """Its type, if the type of the parameter does not show this part."""
    optional: bool = False


def tool_docs(tool: Tool) -> ToolDocs:
    """Return the docs of a tool without repetitions."""
    parameters = list(parameters_in_order(tool))
    lines = inspect.cleandoc(tool.description).splitlines()
    whole = " ".join(" ".join(lines).split())
    of_all = resolve(tool.parameters, tool.parameters)[0].get("description")
    if isinstance(of_all, str) and " ".join(of_all.split()) not in whole:
        lines += inspect.cleandoc(of_all).splitlines()
    texts: dict[tuple[str, ...], list[str]] = {}
    kinds: dict[tuple[str, ...], dict[str, None]] = {}
    optional: set[tuple[str, ...]] = set()
    left_out = 0
    work, types = WorkBudget(_MOST_DESCRIPTIONS), WorkBudget()
    for name, schema, _ in parameters:
        _, depth = type_and_depth(schema, tool.parameters, LONGEST_TYPE, types)
        for path, prose, kind, may_be_missing in _parts_of(
            _Walk(tool.parameters, work, types), schema, (name,), (), depth
        ):
            if kind and (path in kinds or len(kinds) < _MOST_PARTS):
                kinds.setdefault(path, {})[kind] = None
                texts.setdefault(path, [])
                if may_be_missing:
                    optional.add(path)
            elif kind:
                left_out += 1
            if prose and prose not in whole and prose not in " ".join(texts.get(path, ())):
                texts.setdefault(path, []).append(prose)
    more = [f"(Its parameters have {left_out} more parts, which are not shown.)"] if left_out else []
    return ToolDocs(
        (*(line.rstrip() for line in lines if line.strip()), *more),
        {path[0]: _joined(prose) for path, prose in texts.items() if len(path) == 1},
        {
            path: _after_name(_joined(prose), union(kinds.get(path, ())), path in optional)
            for path, prose in texts.items()
            if len(path) > 1
        },
    )


def _joined(texts: Sequence[str]) -> str:
    """Join texts, with a semicolon after one that does not end with punctuation."""
    stopped = [text if text.endswith((".", "!", "?", ":", ";")) else f"{text};" for text in texts[:-1]]
    return " ".join([*stopped, *texts[-1:]])


def _after_name(prose: str, kind: str, optional: bool) -> str:
    if not kind:
        return f": {prose}"
    return f"{'?' if optional else ''}: {kind}{f' # {prose}' if prose else ''}"


def parameters_in_order(tool: Tool) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield name, schema and whether it is required: positional parameters first, then required ones."""
    schema, _ = resolve(tool.parameters, tool.parameters)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return
    listed = schema.get("required")
    required = set(map(str, listed)) if isinstance(listed, list) else set()
    order = {name: number for number, name in enumerate(tool.in_order)}
    names = sorted(properties, key=lambda name: (order.get(name, len(order)), name not in required))
    for name in names:
        inner = properties[name]
        yield python_name(str(name)), inner if isinstance(inner, Mapping) else {}, name in required


@dataclass(frozen=True)
class _Walk:
    """What reading the parts of one tool's parameters needs."""

    whole: Mapping[str, Any]
    work: WorkBudget
    types: WorkBudget


def _parts_of(walk: _Walk, schema: Any, path: tuple[str, ...], seen: tuple[str, ...], depth: int) -> Iterator[_Part]:
    """Yield the parts of a schema; `depth`: up to which depth of objects the type that is shown has their keys."""
    if not isinstance(schema, Mapping) or sum(map(len, path)) > _LONGEST_PATH or not walk.work.spend():
        return
    schema, seen = resolve(schema, walk.whole, seen, walk.work)
    if isinstance(schema.get("description"), str):
        yield _Part(path, " ".join(schema["description"].split()))
    choices = schema.get("enum")
    if isinstance(choices, list) and len(choices) > MOST_CHOICES:
        yield _Part(path, _one_of(choices))
    for word in ("anyOf", "oneOf"):
        for choice in schema[word] if isinstance(schema.get(word), list) else ():
            yield from _parts_of(walk, choice, path, seen, depth)
    yield from _parts_of(walk, schema.get("items"), path, seen, depth)
    for word in ("propertyNames", "additionalProperties"):
        yield from _parts_of(walk, schema.get(word), (*path, ANY_NAME), seen, depth)
    properties = schema.get("properties")
    listed = schema.get("required")
    required = listed if isinstance(listed, list) else ()
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        # On one line, because a name from a server can contain anything and is shown in a comment.
        within, deeper = (*path, " ".join(str(name).split())), depth - 1
        if depth <= 0:
            kind, deeper = type_and_depth(inner, walk.whole, _LONGEST_PART_TYPE, walk.types)
            yield _Part(within, "", kind, name not in required)
        yield from _parts_of(walk, inner, within, seen, deeper)


def _one_of(choices: Sequence[Any]) -> str:
    shown = [json.dumps(choice, ensure_ascii=False, default=str) for choice in choices]
    text, count = ", ".join(shown), len(shown)
    while len(text) > _LONGEST_CHOICES:
        count = count // 2
        text = ", ".join(shown[:count])
    return f"One of {text}" if count == len(shown) else f"One of {len(shown)}: {text}, …"
