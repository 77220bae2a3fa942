"""Pure: tools in, a page of typed Python stubs out, the most useful first and never longer than asked for."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from carrel.library.tools.names import python_name
from carrel.library.tools.python_types import ANY, Work, python_type, resolved
from carrel.library.tools.seam import Tool

Docs = Literal["all", "line", "none", "name"]
"""How much is said: everything, the first sentence, the parameters only, the name only."""

_FIRST = 8
"""So many of the tools that fit a task best are shown whole before any other gets a line."""
_LONGEST_LINE = 160
_WRAPPED = 60
_MOST_PROSE, _LONGEST_PLACE = 3000, 300
"""Parts of a tool's parameters whose descriptions are looked for, and how deep: the length of `filter.owner.name`."""
_SENTENCE = re.compile(r"(?<=[^.\s][.!?])\s+(?=[A-Z`*])")


def parameters_of(tool: Tool) -> list[dict[str, Any]]:
    """Its parameters as dicts with name, type, description, required and default."""
    found = []
    work = Work()
    for name, schema, required in _parameters(tool):
        inner, _ = resolved(schema, tool.parameters, (), work)
        description = schema.get("description", inner.get("description"))
        found.append(
            {
                "name": name,
                "type": python_type(schema, tool.parameters, work=work),
                "description": description if isinstance(description, str) else "",
                "required": required,
                "default": schema.get("default", inner.get("default")),
            }
        )
    return found


def signature_of(tool: Tool, room: int = 240) -> str:
    """`(url: str, max_time: int = 30) -> str`"""
    work = Work()
    written = [
        (name, _parameter(name, schema, required, tool.parameters, room, work))
        for name, schema, required in _parameters(tool)
    ]
    shown = [parameter for name, parameter in written if name in tool.positional]
    named = [parameter for name, parameter in written if name not in tool.positional]
    if named:
        shown += ["*", *named]
    returns = python_type(tool.returns, tool.returns, room, work) if tool.returns is not None else ANY
    return f"({', '.join(shown)})" + (f" -> {returns}" if returns != ANY else "")


def stub(tool: Tool, name: str, docs: Docs = "all", known: frozenset[tuple[str, str]] = frozenset()) -> str:
    """One function as a stub. `known`: what has been said of some parameters already."""
    head = f"def {name}{signature_of(tool, 240 if docs == 'all' else 80)}:"
    if docs == "none":
        return f"{head} ..."
    if docs == "line":
        line = first_sentence(tool.description)
        return f"{head} {_quoted(line)}" if line else f"{head} ..."
    lines = [line.rstrip() for line in inspect.cleandoc(tool.description).splitlines() if line.strip()]
    lines += [f"{place}: {prose}" for place, prose in _prose(tool) if (place, prose) not in known]
    if not lines:
        return f"{head} ..."
    return f"{head}\n {_quoted(lines[0]) if len(lines) == 1 else _quoted_lines(lines)}"


def group_stub(name: str, tools: Sequence[tuple[Tool, Docs]]) -> str:
    """All tools under one first word; one that is the word itself is a plain function, many are a class."""
    if len(tools) == 1 and tools[0][0].name == name:
        return f"# {name}" if tools[0][1] == "name" else stub(tools[0][0], name, tools[0][1])
    counted = Counter(said for tool, docs in tools if docs == "all" for said in set(_prose(tool)))
    known = frozenset(said for said, count in counted.items() if count > 1)
    lines: list[str] = []
    if known:
        lines.append(_quoted_lines(sorted(f"{place}: {prose}" for place, prose in known)))
    for tool, docs in tools:
        if docs != "name":
            lines.append(stub(tool, _below(tool, "__call__"), docs, known))
    others = [_below(tool, "__call__") for tool, docs in tools if docs == "name"]
    if not lines:
        return f"# {name}: {', '.join(others)}"
    if others:
        lines.append(f"# and {', '.join(others)}")
    return "\n ".join([f"class {name}:", *(line.replace("\n", "\n ") for line in lines)])


def describe(tools: Sequence[Tool], limit: int = 8000, ranked: Sequence[str] = (), docs: Docs = "all") -> str:
    """At most `limit` characters. `ranked`: the names that fit the task best, the best first.

    Those are shown whole and first; of the others as many as there is room for, with a line each, with their
    parameters only, or only by name; and the last line says how many there are beside them."""
    order = {name: place for place, name in enumerate(ranked)}
    wanted = sorted(_in_turn(tools), key=lambda tool: order.get(tool.name, math.inf))
    page = _Page(limit - len(_HEAD) - len(_rest(len(tools), len(tools))))
    page.show([tool for tool in wanted if tool.name in order][:_FIRST], docs, page.room // 2)
    # That a thing is there is worth knowing, but not more than what the better ones are.
    page.show(wanted, "name", page.room // 3)
    for level in _LEVELS[1 : _LEVELS.index(docs) + 1]:
        page.show(wanted, level, page.room)
    shown = [tool for tool in wanted if tool.name in page.levels]
    while shown:
        text = _written(shown, page.levels, len(tools))
        if len(text) <= limit:
            return text
        page.levels.pop(shown.pop().name)
    return _rest(len(tools), len(tools))[: max(limit, 0)]


class _Page:
    """Who is shown how, and how much room there still is, in characters and about."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.levels: dict[str, Docs] = {}
        self._taken: dict[str, int] = {}

    def show(self, tools: Sequence[Tool], level: Docs, room: int) -> None:
        """As many as there is room for, in order; those that are shown better already stay so."""
        room = min(room, self.room)
        for tool in tools:
            was = self.levels.get(tool.name)
            if was is not None and _LEVELS.index(was) >= _LEVELS.index(level):
                continue
            if room < len(tool.name):
                return
            size = _size(tool, level)
            costs = size - self._taken.get(tool.name, 0)
            if costs <= room:
                self.levels[tool.name], self._taken[tool.name] = level, size
                self.room, room = self.room - costs, room - costs


_HEAD = "# Called as tools.NAME(...) or tools.GROUP.NAME(...); await tools.NAME.call_async(...) for many at once.\n"
_LEVELS: tuple[Docs, ...] = ("name", "none", "line", "all")


def _rest(count: int, of: int) -> str:
    if not count:
        return ""
    shown = f"{count} more tools" if count < of else f"{count} tools"
    return f"# {shown}: tools.search('what for'), tools.list()\n"


def _in_turn(tools: Sequence[Tool]) -> list[Tool]:
    """One of each group, then the next of each: a big group shall not take the place of all small ones."""
    turns: Counter[str] = Counter()
    placed: list[tuple[int, Tool]] = []
    for tool in tools:
        group = tool.name.partition(".")[0]
        placed.append((turns[group], tool))
        turns[group] += 1
    return [tool for _, tool in sorted(placed, key=lambda one: one[0])]


def _size(tool: Tool, docs: Docs) -> int:
    """About what it takes on the page, its part of a group's first line included."""
    if docs == "name":
        return len(tool.name) + 2
    return len(stub(tool, _below(tool, tool.name), docs).replace("\n", "\n ")) + 3


def _below(tool: Tool, itself: str) -> str:
    """Its name within its group."""
    _, _, below = tool.name.partition(".")
    return python_name(below) if below else itself


def _written(tools: Sequence[Tool], levels: Mapping[str, Docs], of: int) -> str:
    groups: dict[str, list[tuple[Tool, Docs]]] = {}
    for tool in tools:
        groups.setdefault(tool.name.partition(".")[0], []).append((tool, levels[tool.name]))
    stubs = [group_stub(name, members) for name, members in groups.items()]
    return _HEAD + "\n".join(stubs) + "\n" + _rest(of - len(tools), of)


# --- parts of a stub --------------------------------------------------------------------------------------------------


def _parameters(tool: Tool) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required: first those that need no name, then the required, then the others."""
    schema, _ = resolved(tool.parameters, tool.parameters)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return
    listed = schema.get("required")
    required = set(map(str, listed)) if isinstance(listed, list) else set()
    order = {name: place for place, name in enumerate(tool.in_order)}
    names = sorted(properties, key=lambda name: (order.get(name, math.inf), name not in required))
    for name in names:
        inner = properties[name]
        yield python_name(str(name)), inner if isinstance(inner, Mapping) else {}, name in required


def _parameter(
    name: str, schema: Mapping[str, Any], required: bool, whole: Mapping[str, Any], room: int, work: Work
) -> str:
    kind = python_type(schema, whole, room, work)
    if required:
        return name if kind == ANY else f"{name}: {kind}"
    # Python says by the default alone that nothing need be given.
    kind = kind.removesuffix(" | None")
    default = schema.get("default")
    shown = repr(default) if default is not None and len(repr(default)) <= 40 else "None"
    return f"{name}={shown}" if kind == ANY else f"{name}: {kind} = {shown}"


def _prose(tool: Tool) -> list[tuple[str, str]]:
    """What is said of its parameters and of what lies in them, on one line each, unless the tool says it itself."""
    told = " ".join(tool.description.split())
    work = Work(_MOST_PROSE)
    described = (
        said for name, schema, _ in _parameters(tool) for said in _described(schema, tool.parameters, name, (), work)
    )
    found = [(place, " ".join(prose.split())) for place, prose in described]
    return list(dict.fromkeys((place, prose) for place, prose in found if prose and prose not in told))


def _described(
    schema: Any, whole: Mapping[str, Any], place: str, seen: tuple[str, ...], work: Work
) -> Iterator[tuple[str, str]]:
    if not isinstance(schema, Mapping) or len(place) > _LONGEST_PLACE or not work.spend():
        return
    schema, seen = resolved(schema, whole, seen, work)
    if isinstance(schema.get("description"), str):
        yield place, schema["description"]
    for word in ("anyOf", "oneOf"):
        for choice in schema[word] if isinstance(schema.get(word), list) else ():
            yield from _described(choice, whole, place, seen, work)
    yield from _described(schema.get("items"), whole, place, seen, work)
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        yield from _described(inner, whole, f"{place}.{name}", seen, work)


def first_sentence(text: str) -> str:
    """What a text says first, on one line."""
    said = ""
    for line in text.strip().splitlines():
        said = f"{said} {line.strip()}".strip()
        # A short line was ended by whoever wrote it; a long one goes on in the next.
        if len(line.strip()) < _WRAPPED or said.endswith((".", ":")):
            break
    first = _SENTENCE.split(said, maxsplit=1)[0].rstrip(".:")
    return first if len(first) <= _LONGEST_LINE else f"{first[: _LONGEST_LINE - 1].rsplit(' ', 1)[0]}…"


def _quoted(line: str) -> str:
    if '"' not in line and "\\" not in line:
        return f'"{line}"'
    return repr(line)


def _quoted_lines(lines: Sequence[str]) -> str:
    body = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}{" " if body.endswith(chr(34)) else ""}"""'
