"""YAML that people write: read without its surprises, and with the line of each field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_DEEPEST = 100
_MAX_REPEATED = 10_000
"""Values that all aliases of a text together may stand for."""


class YamlFault(Exception):
    """What is wrong with a text, and in which line if that is known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line

    def in_file(self, file: object) -> str:
        """Return the message with file and line."""
        return f"{file}{f', line {self.line}' if self.line else ''}: {self}"


class YamlSyntaxFault(YamlFault):
    """The text is not YAML."""


def read_yaml(data: bytes, *, unique_keys: bool = True) -> tuple[Any, yaml.Node | None]:
    """Return the value of a text and the node that `line_of` needs, both None for an empty text; raises YamlFault.

    Only `true` and `false` are booleans, and no text is a date, because a program may be called `yes`. `unique_keys`: a
    repeated key is an error, because its first value would be lost without notice."""
    import yaml  # noqa: PLC0415 -- slow to import, and few programs read any

    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlFault("this is not UTF-8 text", data.count(b"\n", 0, error.start) + 1) from None
    try:
        _refuse_deep(text)
        loader = _loader_class()(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None, None
            _Checker(unique_keys).check(root, frozenset())
            return loader.construct_document(root), root
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _syntax_fault(error, text) from None
    except yaml.YAMLError as error:
        raise YamlSyntaxFault(f"this is not valid YAML: {error}") from None
    except (ValueError, OverflowError) as error:
        raise YamlFault(f"a value cannot be read: {error}") from None


def line_of(root: yaml.Node, path: Sequence[str | int]) -> int:
    """Return the line of a field, or of the nearest one above it; from 1."""
    import yaml  # noqa: PLC0415 -- loaded already

    node, line = root, root.start_mark.line
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(step)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line
        else:
            break
    return int(line) + 1


@lru_cache(maxsize=1)
def _loader_class() -> Any:
    import yaml  # noqa: PLC0415 -- loaded already

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """YAML's safe loader with fewer types of plain words."""

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in known if not tag.endswith((":bool", ":timestamp"))]
        for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
    return Loader


def _syntax_fault(error: yaml.MarkedYAMLError, text: str) -> YamlSyntaxFault:
    mark, reason = error.problem_mark, error.problem or error.context
    lines = text.rstrip().splitlines()
    if error.context_mark is not None and (mark is None or mark.line >= len(lines)):
        # The line after the last is of no help.
        mark, reason = error.context_mark, "the bracket or quote that begins here does not end"
    elif mark is not None and lines[mark.line][mark.column : mark.column + 1] == "\t":
        reason = "there is a tab; indent with spaces"
    return YamlSyntaxFault(f"this is not valid YAML: {reason}", min(mark.line + 1, len(lines)) if mark else None)


def _refuse_deep(text: str) -> None:
    """Raise YamlFault for a text that is nested so deeply that libyaml would crash the process."""
    import yaml  # noqa: PLC0415 -- loaded already

    depth = 0
    for event in yaml.parse(text, _loader_class()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise YamlFault("it is nested too deeply", event.start_mark.line + 1)


class _Checker:
    """Refuses repeated keys, halves of characters, and aliases that contain themselves or stand for many values."""

    def __init__(self, unique_keys: bool) -> None:
        self._unique_keys = unique_keys
        self._seen: set[int] = set()
        self._repeated = 0

    def check(self, node: yaml.Node, above: frozenset[int]) -> None:
        """Check a node and all below it; `above` are the ids of those that contain it."""
        import yaml  # noqa: PLC0415 -- loaded already

        line = node.start_mark.line + 1
        if id(node) in above:
            raise YamlFault("an alias contains itself; write the values out", line)
        if id(node) in self._seen:
            self._repeated += 1
            if self._repeated > _MAX_REPEATED:
                raise YamlFault(f"its aliases stand for more than {_MAX_REPEATED:,} values", line)
        self._seen.add(id(node))
        above |= {id(node)}
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise YamlFault("a text contains half of a surrogate pair", line)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.check(item, above)
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, here = str(key.value), key.start_mark.line + 1
                if self._unique_keys and name in lines:
                    raise YamlFault(f"the key {name} is in line {lines[name]} already", here)
                lines[name] = here
                self.check(key, above)
                self.check(value, above)
