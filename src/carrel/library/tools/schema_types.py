"""Pure: JSON Schemas as Python types and parameter docs; foreign schemas in a bounded size."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from carrel.library.names import python_name
from carrel.library.tools.tool import Tool

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


DEEPEST = 40
LONGEST_TEXT, LONGEST_NAME = 16_000, 200
LEFT_OUT = frozenset(("pattern", "patternProperties", "uniqueItems", "$comment", "examples"))
"""Whoever has the tool checks them: an expression can take for ever, comparing all with all nearly so."""
_NAMED = frozenset(("properties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("default", "enum", "const"))


class SizeBudget:
    """How many parts may still be taken; one count for all schemas of a server."""

    def __init__(self, left: int = 200_000) -> None:
        self.left = left


def bounded_schema(schema: Any, parts: SizeBudget) -> Any:
    """A copy; what is nested too deeply or beyond the count is anything, and long texts are cut."""
    return _schema(schema, parts, 0)


def _schema(value: Any, parts: SizeBudget, depth: int) -> Any:
    parts.left -= 1
    if isinstance(value, list):
        return [_schema(item, parts, depth + 1) for item in value] if _has_room(parts, depth) else []
    if not isinstance(value, Mapping):
        return value
    if not _has_room(parts, depth):
        return {}
    made: dict[str, Any] = {}
    for name, item in value.items():
        if name in LEFT_OUT:
            continue
        if name in _NAMED and isinstance(item, Mapping):
            # What is called description or pattern here is a name, and no word of the schema.
            named = {inner: one for inner, one in item.items() if len(inner) <= LONGEST_NAME}
            made[name] = {inner: _schema(one, parts, depth + 2) for inner, one in named.items()}
        elif name in _DATA:
            if len(str(item)) <= LONGEST_TEXT or name == "enum":
                made[name] = item
        else:
            made[name] = truncate(item) if isinstance(item, str) else _schema(item, parts, depth + 1)
    if "patternProperties" in value:
        # Some names are allowed that are not listed; which, is not known any more.
        made["additionalProperties"] = True
    return made


def _has_room(parts: SizeBudget, depth: int) -> bool:
    return parts.left >= 0 and depth <= DEEPEST


def truncate(text: str) -> str:
    """The text in a bearable length."""
    return f"{text[:LONGEST_TEXT]}…" if len(text) > LONGEST_TEXT else text


_MOST_PROSE, _LONGEST_PLACE = 3000, 300
"""Parts of a tool's parameters whose descriptions are looked for, and how deep: the length of `filter.owner.name`."""
ROOM, _ROOM_BELOW = 240, 120
"""Characters that the type of a parameter may take where all is told, and that of something that lies in one."""
_MOST_HIDDEN = 200
"""Parts of a tool's parameters that are told because no type shows them."""
_LONGEST_CHOICES = 600
LONGEST_DEFAULT = 40
"""Characters of a default that a signature shows; a longer one is None there."""
ANY_NAME = "*"
"""Stands for the names in an object whose names are open."""
_WRAPPED = 60
"""A line at least so long was ended by its width; a shorter one by whoever wrote it."""

_ARGUMENTS = re.compile(r"(args|arguments|parameters|params):", re.IGNORECASE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\(([^)]*)\))?\s*:\s+(.*)")
_OWN_LINE = re.compile(r"[-*•#|>`]|\d+[.)]|[\w ]{1,40}:(\s|$)")
"""What begins a line of its own: an item of a list, a title, a table."""
_RESULT = re.compile(r"(returns?|raises|yields|notes?):", re.IGNORECASE)

_OPTIONAL = re.compile(r"^\(optional\)[:,.]?\s+|^optional[:;.]\s+|\s+\(optional\)(?=\.?$)", re.IGNORECASE)
_REQUIRED = re.compile(r"^\(required\)[:,.]?\s+|^required[:;.]\s+|\s+\(required\)(?=\.?$)", re.IGNORECASE)
_DEFAULT_IN_BRACKETS = re.compile(r"\s*\(defaults?(?: to| is|:|=)?\s*([^()]+)\)", re.IGNORECASE)
_DEFAULT_SENTENCE = re.compile(r"(?:^|(?<=[.;])\s+)defaults?(?: to| is|:|=)\s*(\S+?)(?:\.(?=\s|$)|$)", re.IGNORECASE)


@dataclass(frozen=True)
class ToolDocs:
    """The prose of one tool."""

    about: tuple[str, ...]
    """Its description, a paragraph or an item of a list to a line."""
    parameters: Mapping[str, str]
    """What is said of each parameter, on one line."""
    below: Mapping[tuple[str, ...], str]
    """What is said of what lies in a parameter, by the way there, as it stands after the name: with its type where that
    of the parameter does not show it."""


class _Part(NamedTuple):
    """Something that lies in a parameter, or the parameter itself."""

    place: tuple[str, ...]
    prose: str
    kind: str = ""
    """Its type, where none above it shows that it is there."""
    optional: bool = False


def told(tool: Tool) -> ToolDocs:
    """All of it, each thing once: what the tool says of a parameter itself is not said again."""
    parameters = list(parameters_in_order(tool))
    lines, arguments = _apart(inspect.cleandoc(tool.description).splitlines(), {name for name, _, _ in parameters})
    whole = " ".join(" ".join(lines).split())
    of_all = resolved(tool.parameters, tool.parameters)[0].get("description")
    if isinstance(of_all, str) and " ".join(of_all.split()) not in whole:
        lines = [*lines, "", *inspect.cleandoc(of_all).splitlines()]
    said: dict[tuple[str, ...], list[str]] = {}
    kinds: dict[tuple[str, ...], dict[str, None]] = {}
    optional: set[tuple[str, ...]] = set()
    untold = 0
    work, types = Work(_MOST_PROSE), Work()
    for name, schema, required in parameters:
        _, depth = type_and_depth(schema, tool.parameters, ROOM, types)
        parts = list(_described(_Walk(tool.parameters, work, types), schema, (name,), (), depth))
        if name in arguments:
            parts.append(_Part((name,), _without_type(*arguments[name], schema, tool.parameters, required)))
        default = schema.get("default", resolved(schema, tool.parameters, (), work)[0].get("default"))
        for place, prose, kind, may_be_missing in parts:
            left = without_signature(prose, required, default) if place == (name,) else prose
            if kind and (place in kinds or len(kinds) < _MOST_HIDDEN):
                kinds.setdefault(place, {})[kind] = None
                said.setdefault(place, [])
                if may_be_missing:
                    optional.add(place)
            elif kind:
                untold += 1
            if left and left not in whole and left not in " ".join(said.get(place, ())):
                said.setdefault(place, []).append(left)
    more = [f"(Its parameters have {untold} more parts, which are not told here.)"] if untold else []
    return ToolDocs(
        (*_unwrapped(lines), *more),
        {place[0]: _joined(prose) for place, prose in said.items() if len(place) == 1},
        {
            place: _after_name(_joined(prose), union(kinds.get(place, ())), place in optional)
            for place, prose in said.items()
            if len(place) > 1
        },
    )


def _joined(texts: Sequence[str]) -> str:
    """Several texts about the same, with a stop between two where the first has none."""
    stopped = [text if text.endswith((".", "!", "?", ":", ";")) else f"{text};" for text in texts[:-1]]
    return " ".join([*stopped, *texts[-1:]])


def _after_name(prose: str, kind: str, optional: bool) -> str:
    if not kind:
        return f": {prose}"
    return f"{'?' if optional else ''}: {kind}{f' # {prose}' if prose else ''}"


def without_signature(prose: str, required: bool, default: Any) -> str:
    """What is said of a parameter, less "(optional)" and "(default: 10)" where its signature shows just that."""
    if required:
        return _REQUIRED.sub("", prose).strip()
    prose = _OPTIONAL.sub("", prose)
    if default is None or len(repr(default)) > LONGEST_DEFAULT:
        return prose.strip()
    shown = {str(default), repr(default), json.dumps(default, default=str)}
    shown |= {f"{quote}{one}{quote}" for one in shown for quote in "'\"`"}

    def less(found: re.Match[str]) -> str:
        return "" if found[1].strip() in shown else found[0]

    return _DEFAULT_SENTENCE.sub(less, _DEFAULT_IN_BRACKETS.sub(less, prose)).strip()


def parameters_in_order(tool: Tool) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required: first those that need no name, then the required, then the others."""
    schema, _ = resolved(tool.parameters, tool.parameters)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return
    listed = schema.get("required")
    required = set(map(str, listed)) if isinstance(listed, list) else set()
    order = {name: place for place, name in enumerate(tool.in_order)}
    names = sorted(properties, key=lambda name: (order.get(name, len(order)), name not in required))
    for name in names:
        inner = properties[name]
        yield python_name(str(name)), inner if isinstance(inner, Mapping) else {}, name in required


@dataclass(frozen=True)
class _Walk:
    """What all steps down one tool's parameters have in common."""

    whole: Mapping[str, Any]
    work: Work
    types: Work


def _described(walk: _Walk, schema: Any, place: tuple[str, ...], seen: tuple[str, ...], depth: int) -> Iterator[_Part]:
    """`depth`: how many objects deep a type that is shown names what lies here."""
    if not isinstance(schema, Mapping) or sum(map(len, place)) > _LONGEST_PLACE or not walk.work.spend():
        return
    schema, seen = resolved(schema, walk.whole, seen, walk.work)
    if isinstance(schema.get("description"), str):
        yield _Part(place, " ".join(schema["description"].split()))
    choices = schema.get("enum")
    if isinstance(choices, list) and len(choices) > MOST_CHOICES:
        yield _Part(place, _one_of(choices))
    for word in ("anyOf", "oneOf"):
        for choice in schema[word] if isinstance(schema.get(word), list) else ():
            yield from _described(walk, choice, place, seen, depth)
    yield from _described(walk, schema.get("items"), place, seen, depth)
    for word in ("propertyNames", "additionalProperties"):
        yield from _described(walk, schema.get(word), (*place, ANY_NAME), seen, depth)
    properties = schema.get("properties")
    listed = schema.get("required")
    required = listed if isinstance(listed, list) else ()
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        # On one line: a name is whatever a server has sent, and may stand in a comment.
        within, deeper = (*place, " ".join(str(name).split())), depth - 1
        if depth <= 0:
            kind, deeper = type_and_depth(inner, walk.whole, _ROOM_BELOW, walk.types)
            yield _Part(within, "", kind, name not in required)
        yield from _described(walk, inner, within, seen, deeper)


def _one_of(choices: Sequence[Any]) -> str:
    shown = [json.dumps(choice, ensure_ascii=False, default=str) for choice in choices]
    said, truncate = ", ".join(shown), len(shown)
    while len(said) > _LONGEST_CHOICES:
        truncate = truncate // 2
        said = ", ".join(shown[:truncate])
    return f"One of {said}" if truncate == len(shown) else f"One of {len(shown)}: {said}, …"


def _apart(lines: Sequence[str], names: set[str]) -> tuple[Sequence[str], dict[str, tuple[str, str]]]:
    """A description without its list of arguments, and of each its type and prose as they stand there.

    A list that names anything but the tool's parameters stays where it is."""
    for at, line in enumerate(lines):
        if not _ARGUMENTS.fullmatch(line.strip()):
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > _indent(line)):
            end += 1
        found = _arguments([one for one in lines[at + 1 : end] if one.strip()], names)
        if found:
            return [*lines[:at], "", *lines[end:]], found
    return lines, {}


def _arguments(lines: Sequence[str], names: set[str]) -> dict[str, tuple[str, str]]:
    outer = min(map(_indent, lines), default=0)
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        item = _ARGUMENT.match(line.strip()) if _indent(line) == outer else None
        if item is not None and item[1] in names and item[1] not in found:
            found[item[1]] = item[2] or "", item[3]
        elif _indent(line) > outer and found:
            name, (kind, prose) = found.popitem()
            found[name] = kind, f"{prose} {' '.join(line.split())}"
        else:
            return {}
    return found


def _without_type(kind: str, prose: str, schema: Mapping[str, Any], whole: Mapping[str, Any], required: bool) -> str:
    """`(str, optional) Which` is `Which` where the signature says that it is a str and need not be given."""
    shown = {*python_type(schema, whole).split(" | ")} - {"None"}
    words = [word for word in map(str.strip, kind.split(",")) if required or word != "optional"]
    return prose if {word.lower() for word in words if word} in (set(), shown) else f"({', '.join(words)}) {prose}"


def _unwrapped(lines: Sequence[str]) -> list[str]:
    """Lines as they were before somebody broke them at a width; empty ones are left out."""
    found: list[str] = []
    last = ""
    for line in lines:
        goes_on = (
            len(last) >= _WRAPPED and _indent(line) >= _indent(last) and not _OWN_LINE.match(line.strip())
        ) or _RESULT.fullmatch(last.strip())
        if goes_on and line.strip():
            found[-1] += f" {' '.join(line.split())}"
        elif line.strip():
            found.append(line.rstrip())
        last = line.rstrip()
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
