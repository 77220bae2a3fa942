"""Tools of an HTTP service whose endpoints a definition lists."""

from collections.abc import Mapping, Sequence
from typing import Any

from carrel.library.tools.definition_remote import Endpoint, HttpDefinition
from carrel.library.tools.http_calls import HttpCaller
from carrel.library.tools.http_request import NOTHING, Operation, Part, Place
from carrel.library.tools.names import python_names
from carrel.library.tools.seam import Stream, Tool
from carrel.library.tools.secrets import Secrets

FORM = "application/x-www-form-urlencoded"
_IN_QUERY = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
_PATH_VALUE: Mapping[str, Any] = {"type": ["string", "integer"]}
"""Of a parameter that stands in the path and is described nowhere."""


class HttpEndpoints:
    """A service and what can be asked of it."""

    def __init__(self, definition: HttpDefinition, secrets: Secrets) -> None:
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._caller = HttpCaller(secrets, definition.headers, definition.query)
        self._operations: dict[str, tuple[Operation, Mapping[str, str]]] = {}
        self._tools = [self._learned(word, name) for word, name in python_names(definition.endpoints).items()]

    def _learned(self, word: str, name: str) -> Tool:
        given, endpoint = self._definition, self._definition.endpoints[name]
        operation, parameters = operation_of(endpoint)
        tool = Tool(
            name=f"{self.name}.{word}",
            description=endpoint.description,
            parameters=parameters,
            positional=tuple(parameters["properties"]),
            tags=(*given.tags, *endpoint.tags),
            approval=endpoint.approval or given.approval,
            timeout=endpoint.timeout or given.timeout,
            stream=given.stream,
        )
        self._operations[tool.name] = operation, endpoint.headers
        return tool

    async def definitions(self) -> Sequence[Tool]:
        """Always the same; nothing has to run for that."""
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: Stream | None = None) -> Any:
        """The service's answer: JSON as data, text as text, anything else as bytes."""
        operation, headers = self._operations[tool.name]
        return await self._caller.call(tool, self._definition.base_url, operation, arguments, stream, headers)

    async def close(self) -> None:
        await self._caller.close()


def operation_of(endpoint: Endpoint) -> tuple[Operation, dict[str, Any]]:
    """The request an endpoint stands for, and the schema of its arguments: those of the path first."""
    in_path = endpoint.path_names
    described = {given.name or name: name for name, given in endpoint.params.items()}
    undescribed = [name for name in in_path if name not in described]
    names = [described.get(name, name) for name in in_path]
    names += [name for name in endpoint.params if name not in names]
    properties: dict[str, Any] = {}
    required: list[str] = []
    parts: list[Part] = []
    for word, name in python_names(names).items():
        given = endpoint.params.get(name)
        schema = dict(_PATH_VALUE) if given is None else given.value_schema
        wire = (given.name if given is not None else None) or name
        place: Place = "path" if wire in in_path else (given.place if given is not None else None) or _usual(endpoint)
        default = schema.get("default", NOTHING)
        properties[word] = schema
        if default is NOTHING and (name in undescribed or place == "path" or (given is not None and given.required)):
            required.append(word)
        parts.append(Part(word, wire, place, default, style="simple" if place == "path" else "form"))
    operation = Operation(
        method=endpoint.method,
        path=endpoint.path if endpoint.path.startswith("/") else f"/{endpoint.path}",
        parts=tuple(parts),
        content_type=FORM if endpoint.sends == "form" else "application/json",
    )
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return operation, schema


def _usual(endpoint: Endpoint) -> Place:
    return "query" if endpoint.method in _IN_QUERY else "body"
