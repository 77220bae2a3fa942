"""Pure: schemas of an OpenAPI document as plain JSON Schema that stands alone."""

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


def an_object(value: Any) -> Mapping[str, Any]:
    """The value where the document has an object; else an empty one."""
    return value if isinstance(value, Mapping) else {}


def a_list(value: Any) -> list[Any]:
    """The same for a list."""
    return value if isinstance(value, list) else []


def words(value: Any) -> list[str]:
    """The same for a list of words."""
    return [item for item in a_list(value) if isinstance(item, str)]


class OpenApiDocument:
    """An OpenAPI document, and what its references mean."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self._places: dict[str, str] = {}
        """Where what a schema refers to by this name stands."""
        self._schemas: dict[str, tuple[dict[str, Any], list[str]]] = {}

    def resolved(self, value: Any) -> dict[str, Any]:
        """A part of the document, or what it refers to; `ConfigurationError` when that is not there."""
        for _ in range(_DEEPEST):
            if not isinstance(value, Mapping):
                raise ConfigurationError(f"{str(value)[:100]!r} stands where the document needs an object")
            reference = value.get("$ref")
            if not isinstance(reference, str):
                return dict(value)
            # What stands beside a reference says more about it: a description, for one.
            beside = {name: item for name, item in value.items() if name != "$ref"}
            value = {**self._at(reference), **beside}
        raise ConfigurationError("a $ref that leads back to itself")

    def _at(self, reference: str) -> Mapping[str, Any]:
        if not reference.startswith("#"):
            raise ConfigurationError(f"$ref {reference} leads out of the document; put what it means into it")
        found: Any = self.content
        for step in reference[1:].split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ConfigurationError(f"$ref {reference} leads nowhere") from None
        if not isinstance(found, Mapping):
            raise ConfigurationError(f"$ref {reference} leads to what is no object")
        return found

    # --- schemas ----------------------------------------------------------------------------------------------------

    def schema(self, given: Any, leave_out: str) -> dict[str, Any]:
        """The schema with references to `$defs` in place of the document's; `leave_out`: readOnly or writeOnly."""
        return self._schema(given, leave_out, 0)

    def with_definitions(self, schema: dict[str, Any], leave_out: str) -> dict[str, Any]:
        """The schema and, below `$defs`, all that it refers to, so that it stands alone."""
        definitions: dict[str, Any] = {}
        wanted = self._referred(schema)
        while wanted:
            name = wanted.pop()
            if name not in definitions:
                definitions[name], others = self._named(self._places[name], leave_out)
                wanted += others
        return schema | {"$defs": {name: definitions[name] for name in sorted(definitions)}} if definitions else schema

    def _named(self, reference: str, leave_out: str) -> tuple[dict[str, Any], list[str]]:
        """A schema of the document and what it refers to; once for all operations, of which there may be thousands."""
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
        made: dict[str, Any] = {}
        for name, value in given.items():
            if name in _NOT_SCHEMA or name in LEFT_OUT or name.startswith("x-"):
                continue
            if name in _INSIDE and isinstance(value, Mapping):
                made[name] = self._schema(value, leave_out, depth + 1)
            elif name in _LISTS and isinstance(value, Sequence):
                made[name] = [self._schema(item, leave_out, depth + 1) for item in value]
            elif name in _MAPS and isinstance(value, Mapping):
                kept = {key: item for key, item in value.items() if not self._is(item, leave_out)}
                made[name] = {key: self._schema(item, leave_out, depth + 1) for key, item in kept.items()}
            else:
                made[name] = value
        if "patternProperties" in given:
            made["additionalProperties"] = True
        if isinstance(made.get("description"), str):
            made["description"] = truncate(made["description"])
        if "required" in made:
            gone = {key for key, item in an_object(given.get("properties")).items() if self._is(item, leave_out)}
            made["required"] = [name for name in words(made["required"]) if name not in gone]
        return _modern(made, nullable=given.get("nullable") is True)

    def _reference(self, given: Mapping[str, Any], reference: str) -> dict[str, Any]:
        """Never what it refers to in its place: schemas refer to each other, also in circles."""
        self._at(reference)
        name = unquote(reference.removeprefix(_SCHEMAS).removeprefix("#/"))
        self._places[name] = reference
        beside = {name: item for name, item in given.items() if name in ("description", "default")}
        return {"$ref": _DEFINITIONS + name.replace("~", "~0").replace("/", "~1"), **beside}

    def _referred(self, schema: Any) -> list[str]:
        """The names of all `$defs` that a schema refers to."""
        if isinstance(schema, list):
            return [name for item in schema for name in self._referred(item)]
        if not isinstance(schema, Mapping):
            return []
        found = [name for item in schema.values() for name in self._referred(item)]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith(_DEFINITIONS):
            found.append(reference.removeprefix(_DEFINITIONS).replace("~1", "/").replace("~0", "~"))
        return [name for name in found if name in self._places]

    def _is(self, schema: Any, mark: str) -> bool:
        return isinstance(schema, Mapping) and schema.get(mark) is True


def _modern(schema: dict[str, Any], nullable: bool) -> dict[str, Any]:
    """What OpenAPI 3.0 says in its own way, as JSON Schema says it; 3.1 says so already."""
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        exclusive = schema.get(limit)
        if isinstance(exclusive, bool):
            del schema[limit]
            if exclusive and bound in schema:
                schema[limit] = schema.pop(bound)
    if (schema.get("type") == "string" and schema.get("format") in ("binary", "byte")) or "contentEncoding" in schema:
        # Bytes as well as text: they are written as the service wants them.
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
