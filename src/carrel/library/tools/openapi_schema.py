"""Schemas of an OpenAPI document as self-contained JSON Schema; pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from carrel.errors import ConfigurationError
from carrel.library.tools.schema_types import LEFT_OUT, truncate

_SCHEMAS, _DEFINITIONS = "#/components/schemas/", "#/$defs/"
_NOT_SCHEMA = frozenset(("discriminator", "xml", "externalDocs", "example", "examples", "nullable", "deprecated"))
_INSIDE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "dependentSchemas", "$defs")
_DEEPEST = 50


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def list_or_empty(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def strings(value: Any) -> list[str]:
    """Return the strings of a list."""
    return [item for item in list_or_empty(value) if isinstance(item, str)]


class OpenApiDocument:
    """An OpenAPI document with its references."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self._references: dict[str, str] = {}
        """For each name in `$defs` the reference in the document."""
        self._schemas: dict[str, tuple[dict[str, Any], list[str]]] = {}

    def resolved(self, value: Any) -> dict[str, Any]:
        """Return a part of the document with its reference followed; `ConfigurationError` when that leads nowhere."""
        for _ in range(_DEEPEST):
            if not isinstance(value, Mapping):
                raise ConfigurationError(f"expected an object in the document, found {str(value)[:100]!r}")
            reference = value.get("$ref")
            if not isinstance(reference, str):
                return dict(value)
            # Fields beside a reference, such as a description, override those of its target.
            beside = {name: item for name, item in value.items() if name != "$ref"}
            value = {**self._at(reference), **beside}
        raise ConfigurationError("a $ref refers to itself")

    def _at(self, reference: str) -> Mapping[str, Any]:
        if not reference.startswith("#"):
            raise ConfigurationError(f"$ref {reference} leads out of the document; copy its target into the document")
        found: Any = self.content
        for step in reference[1:].split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ConfigurationError(f"$ref {reference} leads nowhere") from None
        if not isinstance(found, Mapping):
            raise ConfigurationError(f"$ref {reference} does not lead to an object")
        return found

    # --- schemas ----------------------------------------------------------------------------------------------------

    def schema(self, given: Any, leave_out: str) -> dict[str, Any]:
        """Return a schema with references to `$defs`; `leave_out`: readOnly or writeOnly."""
        return self._schema(given, leave_out, 0)

    def with_definitions(self, schema: dict[str, Any], leave_out: str) -> dict[str, Any]:
        """Return a schema with all schemas that it refers to in `$defs`."""
        definitions: dict[str, Any] = {}
        remaining = self._referred(schema)
        while remaining:
            name = remaining.pop()
            if name not in definitions:
                definitions[name], others = self._named(self._references[name], leave_out)
                remaining += others
        return schema | {"$defs": {name: definitions[name] for name in sorted(definitions)}} if definitions else schema

    def _named(self, reference: str, leave_out: str) -> tuple[dict[str, Any], list[str]]:
        """Return a schema of the document and the names it refers to, cached for all operations."""
        key = f"{leave_out} {reference}"
        if key not in self._schemas:
            schema = self._schema(self._at(reference), leave_out, 0)
            self._schemas[key] = schema, self._referred(schema)
        return self._schemas[key]

    def _schema(self, given: Any, leave_out: str, depth: int) -> dict[str, Any]:
        if isinstance(given, bool):
            return {} if given else {"not": {}}
        if not isinstance(given, Mapping) or depth > _DEEPEST:
            return {}
        reference = given.get("$ref")
        if isinstance(reference, str):
            return self._reference(given, reference)
        result: dict[str, Any] = {}
        for name, value in given.items():
            if name in _NOT_SCHEMA or name in LEFT_OUT or name.startswith("x-"):
                continue
            if name in _INSIDE and isinstance(value, Mapping):
                result[name] = self._schema(value, leave_out, depth + 1)
            elif name in _LISTS and isinstance(value, Sequence):
                result[name] = [self._schema(item, leave_out, depth + 1) for item in value]
            elif name in _MAPS and isinstance(value, Mapping):
                kept = {key: item for key, item in value.items() if not _is_marked(item, leave_out)}
                result[name] = {key: self._schema(item, leave_out, depth + 1) for key, item in kept.items()}
            else:
                result[name] = value
        if "patternProperties" in given:
            result["additionalProperties"] = True
        if isinstance(result.get("description"), str):
            result["description"] = truncate(result["description"])
        if "required" in result:
            removed = {
                key for key, item in mapping_or_empty(given.get("properties")).items() if _is_marked(item, leave_out)
            }
            result["required"] = [name for name in strings(result["required"]) if name not in removed]
        return _modernize(result, nullable=given.get("nullable") is True)

    def _reference(self, given: Mapping[str, Any], reference: str) -> dict[str, Any]:
        """Return a reference to `$defs`; the target is not inlined, because references may be circular."""
        self._at(reference)
        name = unquote(reference.removeprefix(_SCHEMAS).removeprefix("#/"))
        self._references[name] = reference
        beside = {name: item for name, item in given.items() if name in ("description", "default")}
        return {"$ref": _DEFINITIONS + name.replace("~", "~0").replace("/", "~1"), **beside}

    def _referred(self, schema: Any) -> list[str]:
        """Return the names of all `$defs` that a schema refers to."""
        if isinstance(schema, list):
            return [name for item in schema for name in self._referred(item)]
        if not isinstance(schema, Mapping):
            return []
        found = [name for item in schema.values() for name in self._referred(item)]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith(_DEFINITIONS):
            found.append(reference.removeprefix(_DEFINITIONS).replace("~1", "/").replace("~0", "~"))
        return [name for name in found if name in self._references]


def _is_marked(schema: Any, mark: str) -> bool:
    return isinstance(schema, Mapping) and schema.get(mark) is True


def _modernize(schema: dict[str, Any], nullable: bool) -> dict[str, Any]:
    """Return what OpenAPI 3.0 expresses in its own way as JSON Schema, as 3.1 does."""
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        exclusive = schema.get(limit)
        if isinstance(exclusive, bool):
            del schema[limit]
            if exclusive and bound in schema:
                schema[limit] = schema.pop(bound)
    if (schema.get("type") == "string" and schema.get("format") in ("binary", "byte")) or "contentEncoding" in schema:
        # Bytes as well as text are accepted, and encoded for the service.
        schema.pop("type", None)
    if nullable:
        kind = schema.get("type")
        if isinstance(kind, str):
            schema["type"] = [kind, "null"]
            if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
                schema["enum"] = [*schema["enum"], None]
        elif "$ref" in schema or set(schema) & set(_LISTS):
            schema = {"anyOf": [schema, {"type": "null"}]}
    return schema
