"""Pure: tools in, a page of typed Python stubs out, the most useful first and never longer than asked for."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from carrel.library.names import python_name
from carrel.library.tools.schema_types import (
    ANY,
    LONGEST_DEFAULT,
    ROOM,
    ToolDocs,
    Work,
    parameters_in_order,
    python_type,
    resolved,
    told,
)
from carrel.library.tools.tool import Tool

Docs = Literal["all", "line", "none", "name"]
"""How much is said: everything, the first sentence, the parameters only, the name only."""

_FIRST = 8
"""So many of the tools that fit a task best are shown whole before any other gets a line."""
_LONGEST_LINE = 160
_WRAPPED = 60
_SENTENCE = re.compile(r"(?<=[^.\s][.!?])\s+(?=[A-Z`*])")


def parameters_of(tool: Tool) -> list[dict[str, Any]]:
    """Its parameters as dicts with name, type, description, required and default."""
    found = []
    work = Work()
    for name, schema, required in parameters_in_order(tool):
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
    return _signature(tool, [(one.name, one.typed, "") for one in _parameters(tool, room)], room)


def stub(tool: Tool, name: str, docs: Docs = "all") -> str:
    """One function as a stub: what is said of a parameter is a comment after it, what lies in one is told below."""
    return _stub(_Known(tool), name, docs, {})


def group_stub(name: str, tools: Sequence[tuple[Tool, Docs]]) -> str:
    """All tools under one first word; one that is the word itself is a plain function, many are a class.

    A parameter that means the same in several of them is an attribute of the class, and only named where it is
    taken."""
    return _group_stub(name, [(_Known(tool), docs) for tool, docs in tools])


def describe(tools: Sequence[Tool], limit: int = 8000, ranked: Sequence[str] = (), docs: Docs = "all") -> str:
    """At most `limit` characters. `ranked`: the names that fit the task best, the best first.

    Those are shown whole and first; of the others as many as there is room for, with a line each, with their
    parameters only, or only by name; and the last line says how many there are beside them."""
    order = {name: place for place, name in enumerate(ranked)}
    known = map(_Known, _in_turn(tools))
    wanted = sorted(known, key=lambda one: order.get(one.tool.name, math.inf))
    page = _Page(limit - len(_HEAD) - len(_rest(len(tools), len(tools))))
    page.show([one for one in wanted if one.tool.name in order][:_FIRST], docs, page.room // 2)
    # That a thing is there is worth knowing, but not more than what the better ones are.
    page.show(wanted, "name", page.room // 3)
    for level in _LEVELS[1 : _LEVELS.index(docs) + 1]:
        page.show(wanted, level, page.room)
    shown = [one for one in wanted if one.tool.name in page.levels]
    while shown:
        text = _written(shown, page.levels, len(tools))
        if len(text) <= limit:
            return text
        page.levels.pop(shown.pop().tool.name)
    return _rest(len(tools), len(tools))[: max(limit, 0)]


class _Page:
    """Who is shown how, and how much room there still is, in characters and about."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.levels: dict[str, Docs] = {}
        self._taken: dict[str, int] = {}

    def show(self, tools: Sequence["_Known"], level: Docs, room: int) -> None:
        """As many as there is room for, in order; those that are shown better already stay so."""
        room = min(room, self.room)
        for one in tools:
            name = one.tool.name
            was = self.levels.get(name)
            if was is not None and _LEVELS.index(was) >= _LEVELS.index(level):
                continue
            if room < len(name):
                return
            size = _size(one, level)
            costs = size - self._taken.get(name, 0)
            if costs <= room:
                self.levels[name], self._taken[name] = level, size
                self.room, room = self.room - costs, room - costs


_HEAD = (
    "# Called as tools.NAME(...) or tools.GROUP.NAME(...); await tools.NAME.call_async(...) for many at once.\n"
    "# A comment is about the parameter before it; a bare parameter is what its class says of that name.\n"
)
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


def _size(known: "_Known", docs: Docs) -> int:
    """About what it takes on the page, its part of a group's first line included."""
    if docs == "name":
        return len(known.tool.name) + 2
    return len(_stub(known, _below(known.tool, known.tool.name), docs, {})) + 3


def _below(tool: Tool, itself: str) -> str:
    """Its name within its group."""
    _, _, below = tool.name.partition(".")
    return python_name(below) if below else itself


def _written(tools: Sequence["_Known"], levels: Mapping[str, Docs], of: int) -> str:
    groups: dict[str, list[tuple[_Known, Docs]]] = {}
    for one in tools:
        groups.setdefault(one.tool.name.partition(".")[0], []).append((one, levels[one.tool.name]))
    stubs = [_group_stub(name, members) for name, members in groups.items()]
    return _HEAD + "\n".join(stubs) + "\n" + _rest(of - len(tools), of)


# --- parts of a stub --------------------------------------------------------------------------------------------------


def _group_stub(name: str, tools: Sequence[tuple["_Known", Docs]]) -> str:
    [(first, docs), *more] = tools
    if not more and first.tool.name == name:
        return f"# {name}" if docs == "name" else _stub(first, name, docs, {})
    shared, lines = _shared(tools)
    for known, docs in tools:
        if docs != "name":
            lines.append(_stub(known, _below(known.tool, "__call__"), docs, shared))
    others = [_below(known.tool, "__call__") for known, docs in tools if docs == "name"]
    if not lines:
        return f"# {name}: {', '.join(others)}"
    if others:
        lines.append(f"# and {', '.join(others)}")
    return "\n ".join([f"class {name}:", *lines])


def _stub(known: "_Known", name: str, docs: Docs, shared: Mapping[str, "_Meaning"]) -> str:
    """`shared`: what its class says of some parameters already."""
    written, below = [], []
    for one in known.parameters(docs):
        attribute, meaning = shared.get(one.name), known.meaning(one)
        if attribute is not None and attribute == meaning:
            written.append((one.name, one.bare, ""))
        else:
            prose = meaning.prose if docs == "all" else ""
            written.append((one.name, one.inferred if attribute is None else one.explicit, prose))
            below += [f"{one.name}:", *meaning.below] if meaning.below else []
    match docs:
        case "all":
            lines = [*known.told.about, *below]
        case "line":
            lines = [line for line in [first_sentence(known.tool.description)] if line]
        case _:
            lines = []
    head = f"def {name}{_signature(known.tool, written, _room(docs))}:"
    if not lines:
        return f"{head} ..."
    return f"{head} {_quoted(lines[0]) if len(lines) == 1 else _quoted_lines(lines)}"


class _Known:
    """A tool, and what is found out about it once for all the ways to show it."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self._parameters: dict[int, list[_Parameter]] = {}

    @cached_property
    def told(self) -> ToolDocs:
        return told(self.tool)

    def parameters(self, docs: Docs) -> list["_Parameter"]:
        room = _room(docs)
        if room not in self._parameters:
            self._parameters[room] = list(_parameters(self.tool, room))
        return self._parameters[room]

    def meaning(self, parameter: "_Parameter") -> "_Meaning":
        return _Meaning(
            parameter.kind, self.told.parameters.get(parameter.name, ""), self._trees.get(parameter.name, ())
        )

    @cached_property
    def _trees(self) -> dict[str, tuple[str, ...]]:
        """What is told of what lies in each parameter, in lines."""
        names = dict.fromkeys(place[0] for place in self.told.below)
        return {
            name: tuple(_tree({place: said for place, said in self.told.below.items() if place[0] == name}))
            for name in names
        }


@dataclass(frozen=True)
class _Meaning:
    """What a parameter is: its type, what is said of it, and of what lies in it."""

    kind: str
    prose: str
    below: tuple[str, ...]


@dataclass(frozen=True)
class _Parameter:
    """One parameter as a signature may write it."""

    name: str
    kind: str
    default: str | None
    """As Python writes it; None where there is none."""
    typical: bool
    """Whether the default alone says which type it is."""

    @property
    def bare(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"

    @property
    def typed(self) -> str:
        return self.bare if self.kind == ANY else self.explicit

    @property
    def inferred(self) -> str:
        return self.bare if self.typical else self.typed

    @property
    def explicit(self) -> str:
        written = f"{self.name}: {self.kind}"
        return written if self.default is None else f"{written} = {self.default}"


def _parameters(tool: Tool, room: int) -> Iterator[_Parameter]:
    work = Work()
    for name, schema, required in parameters_in_order(tool):
        kind = python_type(schema, tool.parameters, room, work)
        if required:
            yield _Parameter(name, kind, None, False)
            continue
        # Python says by the default alone that nothing need be given.
        kind = kind.removesuffix(" | None")
        default = schema.get("default")
        if len(repr(default)) > LONGEST_DEFAULT:
            default = None
        yield _Parameter(name, kind, repr(default), type(default).__name__ == kind)


def _signature(tool: Tool, written: Sequence[tuple[str, str, str]], room: int) -> str:
    """Names, what stands for each in the signature, and what is said of it."""
    named = [one for one in written if one[0] not in tool.positional]
    parts = [one for one in written if one[0] in tool.positional] + ([("", "*", ""), *named] if named else [])
    text = ""
    for place, (_, parameter, prose) in enumerate(parts, 1):
        text += parameter + ("," if place < len(parts) else "")
        text += f" # {prose}\n " if prose else " " if place < len(parts) else ""
    returns = python_type(tool.returns, tool.returns, room) if tool.returns is not None else ANY
    return f"({text})" + (f" -> {returns}" if returns != ANY else "")


def _shared(tools: Sequence[tuple[_Known, Docs]]) -> tuple[dict[str, _Meaning], list[str]]:
    """What it is shorter to say once of a parameter's name than at each tool, and the lines that say it."""
    saved: dict[str, Counter[_Meaning]] = {}
    whole: set[tuple[str, _Meaning]] = set()
    for known, docs in tools:
        for one in known.parameters(docs) if docs != "name" else ():
            meaning = known.meaning(one)
            saves = len(one.inferred) - len(one.bare)
            if docs == "all":
                saves += len(f" # {meaning.prose} ") if meaning.prose else 0
                saves += sum(len(line) + 2 for line in meaning.below)
                whole.add((one.name, meaning))
            saved.setdefault(one.name, Counter())[meaning] += saves
    shared, lines = {}, []
    for name, meanings in saved.items():
        [(meaning, saves)] = meanings.most_common(1)
        told_here = [f"{name}: {meaning.kind}"]
        if (name, meaning) in whole:
            told_here[0] += f" # {meaning.prose}" if meaning.prose else ""
            told_here += [f"#{line}" for line in meaning.below]
        if saves > sum(len(line) + 2 for line in told_here):
            shared[name] = meaning
            lines += told_here
    return shared, lines


def _tree(below: Mapping[tuple[str, ...], str]) -> list[str]:
    """What lies in a parameter, each by its own name there; the parameter itself is left to who shows it."""
    lines: list[str] = []
    last: tuple[str, ...] = ()
    for place, said in below.items():
        inside = place[1:]
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, inside[:-1], strict=False)))
        lines += [f"{' ' * (depth + 1)}{inside[depth]}:" for depth in range(same, len(inside) - 1)]
        lines.append(f"{' ' * len(inside)}{inside[-1]}{said}")
        last = inside
    return lines


def _room(docs: Docs) -> int:
    """Characters that a type may take."""
    return ROOM if docs == "all" else 80


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
    body = "\n ".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}{" " if body.endswith(chr(34)) else ""}"""'
