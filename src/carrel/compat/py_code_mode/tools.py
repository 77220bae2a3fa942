"""Tools as objects, and as the dicts that a session returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from carrel.compat import INTERNAL, refuse_missing

_WORDS = {"bool": "boolean", "int": "integer", "float": "number", "list": "array", "dict": "object"}
"""The types of parameters as tool definitions name them; a text is `str`, as where they name none."""


@dataclass
class ToolParameter:
    name: str
    type: str = "str"
    required: bool = False
    default: Any = None
    description: str = ""


@dataclass
class ToolCallable:
    """A recipe, or the tool itself."""

    name: str
    description: str = ""
    parameters: list[ToolParameter] = field(default_factory=list)

    def signature(self) -> str:
        texts = [
            f"{each.name}: {each.type}{'' if each.required else f' = {each.default!r}'}" for each in self.parameters
        ]
        return f"{self.name}({', '.join(texts)})"


@dataclass
class Tool:
    name: str
    description: str = ""
    callables: list[ToolCallable] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)

    def signatures(self) -> list[str]:
        return [each.signature() for each in self.callables]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def callables_of(tool: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the recipes of a tool of carrel; a tool without recipes is its own only one."""
    return [
        {
            "name": each["name"],
            "description": each["description"],
            "parameters": [_parameter(parameter) for parameter in each["parameters"]],
        }
        for each in tool.get("recipes") or [tool]
    ]


def tool_dict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of carrel as `list_tools` has it."""
    shown = {name: tool[name] for name in ("name", "description")}
    return {**shown, "tags": list(tool["tags"]), "callables": callables_of(tool)}


def _parameter(parameter: Mapping[str, Any]) -> dict[str, Any]:
    word = _WORDS.get(parameter["type"].partition("[")[0], parameter["type"])
    kept = {name: parameter[name] for name in ("required", "default", "description")}
    return {"name": parameter["name"], "type": word, **kept}


_MISSING = "ScopedToolRegistry ToolRegistry CallableProxy ToolProxy ToolsNamespace load_tools_from_path"
__getattr__ = refuse_missing(__name__, dict.fromkeys(_MISSING.split(), INTERNAL))
