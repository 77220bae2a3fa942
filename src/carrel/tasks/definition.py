"""A YAML file whose faults are told by line and field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from carrel.errors import DatasetInvalid

_MOST_REPEATED = 10_000
"""Values that all aliases of a file may stand for together."""


@dataclass(frozen=True)
class Definition:
    """What a file says, and where it says it."""

    file: Path
    data: dict[str, Any]
    root: yaml.Node | None

    def refused(self, problem: ValidationError, part: str | None = None) -> DatasetInvalid:
        """The first fault, with the line it is on; `part` is the field that was validated."""
        where = (*((part,) if part else ()), *problem.errors()[0]["loc"])
        line = f", line {_line(self.root, where)}" if self.root is not None else ""
        return DatasetInvalid(f"{self.file}{line}: {faults(problem, part)}")


def read_yaml(file: Path) -> Definition:
    """A map; a key that is there twice is refused, since the first would be lost in silence."""
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_bombs(file, root)
        data = yaml.safe_load(text)
    except UnicodeDecodeError as problem:
        raise DatasetInvalid(f"{file}: no text in UTF-8: {problem}") from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        raise DatasetInvalid(f"{file}, line {mark.line + 1 if mark else 1}: no YAML: {problem.problem}") from None
    except yaml.YAMLError as problem:
        raise DatasetInvalid(f"{file}: no YAML: {problem}") from None
    except RecursionError:
        raise DatasetInvalid(f"{file}: it is nested too deeply") from None
    except (ValueError, OverflowError) as problem:
        if isinstance(problem, DatasetInvalid):
            raise
        raise DatasetInvalid(f"{file}: a value cannot be read: {problem}") from None
    if data is None:
        return Definition(file, {}, None)
    if not isinstance(data, dict):
        raise DatasetInvalid(f"{file}, line 1: it should be a map, like `name: demo`")
    _refuse_twins(file, root)
    return Definition(file, data, root)


def faults(problem: ValidationError, part: str | None = None) -> str:
    """The first fault as `field: what is wrong`, and how many more there are."""
    every = problem.errors()
    first = every[0]
    field = ".".join(str(step) for step in (*((part,) if part else ()), *first["loc"]))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such field"
    elif first["type"] == "missing":
        message = "it is missing"
    given = first["input"]
    if isinstance(given, int) and abs(given) > 10**100:
        given = None  # Python refuses to write out very long numbers
    if isinstance(given, str | int | float | bool) and first["type"] not in (
        "missing",
        "extra_forbidden",
        "value_error",
    ):
        message += f", not {given!r}"[:120]
    more = f" (and {len(every) - 1} more)" if len(every) > 1 else ""
    return (f"{field}: " if field else "") + message + more


def _line(root: yaml.Node | None, where: tuple[int | str, ...]) -> int:
    """Of the field, or of what comes nearest to it."""
    node, line = root, root.start_mark.line + 1 if root is not None else 1
    for step in where:
        found = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(step):
                    found, line = value, key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node.value[step]
            line = found.start_mark.line + 1
        if found is None:
            break
        node = found
    return line


def _refuse_bombs(file: Path, root: yaml.Node | None) -> None:
    """Refuse aliases that contain themselves, and those that stand for very many values."""
    counted: set[int] = set()
    repeated = 0

    def count(node: yaml.Node, above: frozenset[int]) -> None:
        nonlocal repeated
        line = node.start_mark.line + 1
        if id(node) in above:
            raise DatasetInvalid(f"{file}, line {line}: an alias contains itself; write the values out")
        if id(node) in counted:
            repeated += 1
            if repeated > _MOST_REPEATED:
                raise DatasetInvalid(f"{file}, line {line}: its aliases stand for more than {_MOST_REPEATED:,} values")
        counted.add(id(node))
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise DatasetInvalid(f"{file}, line {line}: there is half of a surrogate pair in a text")
        if isinstance(node, yaml.CollectionNode):
            for part in node.value:
                for each in part if isinstance(part, tuple) else (part,):
                    count(each, above | {id(node)})

    if root is not None:
        count(root, frozenset())


def _refuse_twins(file: Path, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _refuse_twins(file, part)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                raise DatasetInvalid(f"{file}, line {line}: {name}: it is on line {seen[name]} already")
            seen[name] = line
            _refuse_twins(file, value)
