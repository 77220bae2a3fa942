"""Results and descriptions as py_code_mode has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ExecutionResult", "JsonSchema", "ToolDefinition"]


@dataclass
class ExecutionResult:
    """The result of one run."""

    value: Any
    stdout: str
    error: str | None
    execution_time_ms: float | None = None
    backend_info: dict[str, Any] = field(default_factory=dict)
    """What else carrel knows of the run: `error_type`, `state`, `state_reason`, `stderr`, `display`."""

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass
class JsonSchema:
    """A part of JSON Schema."""

    type: str = "object"
    description: str | None = None
    properties: dict[str, JsonSchema] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    items: JsonSchema | None = None
    enum: list[Any] = field(default_factory=list)
    default: Any = None
    additional_properties: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the schema without what it leaves open."""
        found: dict[str, Any] = {
            "type": self.type,
            "description": self.description,
            "properties": {name: each.to_dict() for name, each in self.properties.items()} or None,
            "required": self.required or None,
            "items": self.items.to_dict() if self.items else None,
            "enum": self.enum or None,
            "default": self.default,
            "additionalProperties": None if self.additional_properties else False,
        }
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JsonSchema:
        return cls(
            type=data.get("type", "object"),
            description=data.get("description"),
            properties={name: cls.from_dict(each) for name, each in data.get("properties", {}).items()},
            required=list(data.get("required", ())),
            items=cls.from_dict(data["items"]) if data.get("items") else None,
            enum=list(data.get("enum", ())),
            default=data.get("default"),
            additional_properties=data.get("additionalProperties", True),
        )


@dataclass
class ToolDefinition:
    """The description of a tool."""

    name: str
    description: str
    input_schema: JsonSchema
    output_schema: JsonSchema | None = None
    tags: frozenset[str] = frozenset()
    python_deps: tuple[str, ...] = ()
    timeout_seconds: float = 60.0

    def matches_scope(self, scope: Iterable[str] | None) -> bool:
        """Return whether the tool has one of these tags; None and an empty scope match every tool."""
        wanted = frozenset(scope or ())
        return not wanted or bool(self.tags & wanted)
