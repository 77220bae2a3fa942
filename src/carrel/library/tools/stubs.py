"""Pure: describe tools as typed Python stubs on a page of limited length, the most useful first."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from carrel.library.names import python_name
from carrel.library.tools.schema_types import (
    ANY,
    LONGEST_DEFAULT,
    LONGEST_TYPE,
    ToolDocs,
    WorkBudget,
    parameters_in_order,
    python_type,
    resolve,
    tool_docs,
)
from carrel.library.tools.tool import Tool

Docs = Literal["all", "line", "none", "name"]
"""How much of a tool is shown: all its docs, the first sentence, only its parameters, or only its name."""

_LEVELS: tuple[Docs, ...] = ("name", "none", "line", "all")
_SHORT_TYPE = 80
"""Characters of a type, except with all docs."""
_MOST_RANKED = 8
"""Tools that match a task best and are shown with all docs before any other is shown."""
_LONGEST_LINE = 160
_WRAPPED = 60
"""A longer line was probably wrapped; a shorter one ends where its author wanted."""
_SENTENCE = re.compile(r"(?<=[^.\s][.!?])\s+(?=[A-Z`*])")
_HEAD = (
    "# Call them as tools.NAME(...) or tools.GROUP.NAME(...); await tools.NAME.call_async(...) lets many run at once.\n"
    "# A comment describes the parameter before it.\n"
)


def parameters_of(tool: Tool) -> list[dict[str, Any]]:
    """Return its parameters as dicts with name, type, description, required and default."""
    found = []
    work = WorkBudget()
    for name, schema, required in parameters_in_order(tool):
        inner, _ = resolve(schema, tool.parameters, (), work)
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


def signature_of(tool: Tool, longest_type: int = LONGEST_TYPE) -> str:
    """Return the signature: `(url: str, max_time: int = 30) -> str`."""
    parameters = _parameters(tool, longest_type)
    return _signature(tool, [(one.name, one.with_type, "") for one in parameters], longest_type)


def describe(tools: Sequence[Tool], limit: int = 8000, ranked: Sequence[str] = (), docs: Docs = "all") -> str:
    """Return a page of at most `limit` characters. `ranked`: the names that match a task, the best first.

    Those are shown first and with all docs; the others with a line, only their parameters, or only their names, as many
    as fit. The last line counts the rest."""
    order = {name: rank for rank, name in enumerate(ranked)}
    wanted = sorted(map(ToolStub, _round_robin(tools)), key=lambda one: order.get(one.tool.name, math.inf))
    page = _Page(limit - len(_HEAD) - len(_rest(len(tools), len(tools))))
    page.show([one for one in wanted if one.tool.name in order][:_MOST_RANKED], docs, page.available // 2)
    # The names of all are useful, but less so than the docs of the best.
    page.show(wanted, "name", page.available // 3)
    for level in _LEVELS[1 : _LEVELS.index(docs) + 1]:
        page.show(wanted, level, page.available)
    shown = [one for one in wanted if one.tool.name in page.levels]
    while shown:
        text = _page_text(shown, page.levels, len(tools))
        if len(text) <= limit:
            return text
        page.levels.pop(shown.pop().tool.name)
    return _rest(len(tools), len(tools))[: max(limit, 0)]


class _Page:
    """How much of each tool is shown, and how many characters are left, approximately."""

    def __init__(self, available: int) -> None:
        self.available = available
        self.levels: dict[str, Docs] = {}
        self._sizes: dict[str, int] = {}

    def show(self, tools: Sequence["ToolStub"], level: Docs, available: int) -> None:
        """Show as many tools as fit, in order; those that are shown with more docs stay as they are."""
        available = min(available, self.available)
        for one in tools:
            name = one.tool.name
            current = self.levels.get(name)
            if current is not None and _LEVELS.index(current) >= _LEVELS.index(level):
                continue
            if available < len(name):
                return
            size = one.size(level)
            cost = size - self._sizes.get(name, 0)
            if cost <= available:
                self.levels[name], self._sizes[name] = level, size
                self.available, available = self.available - cost, available - cost


def _rest(count: int, of: int) -> str:
    if not count:
        return ""
    shown = f"{count} more tools" if count < of else f"{count} tools"
    return f"# {shown}: tools.search('what for'), tools.list()\n"


def _round_robin(tools: Sequence[Tool]) -> list[Tool]:
    """Return one tool of each group, then the next of each, so that a large group does not displace small ones."""
    counts: Counter[str] = Counter()
    rounds: list[tuple[int, Tool]] = []
    for tool in tools:
        group = tool.name.partition(".")[0]
        rounds.append((counts[group], tool))
        counts[group] += 1
    return [tool for _, tool in sorted(rounds, key=lambda one: one[0])]


def _page_text(tools: Sequence["ToolStub"], levels: Mapping[str, Docs], of: int) -> str:
    groups: dict[str, list[tuple[ToolStub, Docs]]] = {}
    for one in tools:
        groups.setdefault(one.tool.name.partition(".")[0], []).append((one, levels[one.tool.name]))
    stubs = [group_stub(name, members) for name, members in groups.items()]
    return _HEAD + "\n".join(stubs) + "\n" + _rest(of - len(tools), of)


def group_stub(name: str, tools: Sequence[tuple["ToolStub", Docs]]) -> str:
    """Return all tools of a group: a function if there is only one with the group's name, else a class."""
    [(first, docs), *more] = tools
    if not more and first.tool.name == name:
        return f"# {name}" if docs == "name" else first.text(name, docs)
    lines = [one.text(one.name_in_group("__call__"), docs) for one, docs in tools if docs != "name"]
    names = [one.name_in_group("__call__") for one, docs in tools if docs == "name"]
    if not lines:
        return f"# {name}: {', '.join(names)}"
    if names:
        lines.append(f"# and {', '.join(names)}")
    return "\n ".join([f"class {name}:", *lines])


@dataclass(frozen=True)
class _StubParameter:
    """A parameter in the forms that a signature needs."""

    name: str
    type: str
    default: str | None
    """As Python code; None without one."""
    is_inferred: bool
    """Whether the default shows the type."""

    @property
    def with_type(self) -> str:
        if self.type == ANY:
            return self.name if self.default is None else f"{self.name}={self.default}"
        return f"{self.name}: {self.type}" + ("" if self.default is None else f" = {self.default}")

    @property
    def shortest(self) -> str:
        return f"{self.name}={self.default}" if self.is_inferred else self.with_type


class ToolStub:
    """A tool, with what all its forms have in common."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self._parameters: dict[int, list[_StubParameter]] = {}

    @cached_property
    def docs(self) -> ToolDocs:
        return tool_docs(self.tool)

    @cached_property
    def _docs_of_parts(self) -> dict[str, list[str]]:
        """The docs of the parts of each parameter, as indented lines."""
        names = dict.fromkeys(path[0] for path in self.docs.parts)
        return {
            name: _tree({path: text for path, text in self.docs.parts.items() if path[0] == name}) for name in names
        }

    def name_in_group(self, own: str) -> str:
        """Return its name below that of its group; `own` for a tool that has the name of its group."""
        _, _, name = self.tool.name.partition(".")
        return python_name(name) if name else own

    def size(self, docs: Docs) -> int:
        """Return about how many characters it takes on a page."""
        if docs == "name":
            return len(self.tool.name) + 2
        return len(self.text(self.name_in_group(self.tool.name), docs)) + 3

    def text(self, name: str, docs: Docs) -> str:
        """Return one function. Descriptions of parameters are comments, those of their parts are in the docstring."""
        longest_type = LONGEST_TYPE if docs == "all" else _SHORT_TYPE
        if longest_type not in self._parameters:
            self._parameters[longest_type] = _parameters(self.tool, longest_type)
        parameters = self._parameters[longest_type]
        lines: list[str] = []
        if docs == "all":
            lines += self.docs.description
            for one in parameters:
                parts = self._docs_of_parts.get(one.name)
                lines += [f"{one.name}:", *parts] if parts else []
        elif docs == "line":
            lines += filter(None, [first_sentence(self.tool.description)])
        comments = self.docs.parameters if docs == "all" else {}
        written = [(one.name, one.shortest, comments.get(one.name, "")) for one in parameters]
        head = f"def {name}{_signature(self.tool, written, longest_type)}:"
        if not lines:
            return f"{head} ..."
        return f"{head} {_quote(lines[0]) if len(lines) == 1 else _quote_lines(lines)}"


def _parameters(tool: Tool, longest_type: int) -> list[_StubParameter]:
    work = WorkBudget()
    found: list[_StubParameter] = []
    for name, schema, required in parameters_in_order(tool):
        kind = python_type(schema, tool.parameters, longest_type, work)
        if required:
            found.append(_StubParameter(name, kind, None, False))
            continue
        # The default shows that None is possible.
        kind = kind.removesuffix(" | None")
        default = schema.get("default")
        if len(repr(default)) > LONGEST_DEFAULT:
            default = None
        found.append(_StubParameter(name, kind, repr(default), type(default).__name__ == kind))
    return found


def _signature(tool: Tool, written: Sequence[tuple[str, str, str]], longest_type: int) -> str:
    """Return a signature of parameters with their name, code and comment."""
    by_name = [one for one in written if one[0] not in tool.positional]
    parts = [one for one in written if one[0] in tool.positional] + ([("", "*", ""), *by_name] if by_name else [])
    text = ""
    for number, (_, code, comment) in enumerate(parts, 1):
        text += code + ("," if number < len(parts) else "")
        text += f" # {comment}\n " if comment else " " if number < len(parts) else ""
    returns = python_type(tool.returns, tool.returns, longest_type) if tool.returns is not None else ANY
    return f"({text})" + (f" -> {returns}" if returns != ANY else "")


def _tree(parts: Mapping[tuple[str, ...], str]) -> list[str]:
    """Return the docs of the parts of a parameter, each indented by its depth."""
    lines: list[str] = []
    last: tuple[str, ...] = ()
    for path, text in parts.items():
        inside = path[1:]
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, inside[:-1], strict=False)))
        lines += [f"{' ' * (depth + 1)}{inside[depth]}:" for depth in range(same, len(inside) - 1)]
        lines.append(f"{' ' * len(inside)}{inside[-1]}{text}")
        last = inside
    return lines


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    joined = ""
    for line in text.strip().splitlines():
        joined = f"{joined} {line.strip()}".strip()
        if len(line.strip()) < _WRAPPED or joined.endswith((".", ":")):
            break
    first = _SENTENCE.split(joined, maxsplit=1)[0].rstrip(".:")
    return first if len(first) <= _LONGEST_LINE else f"{first[: _LONGEST_LINE - 1].rsplit(' ', 1)[0]}…"


def _quote(line: str) -> str:
    if '"' not in line and "\\" not in line:
        return f'"{line}"'
    return repr(line)


def _quote_lines(lines: Sequence[str]) -> str:
    body = "\n ".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}{" " if body.endswith(chr(34)) else ""}"""'
