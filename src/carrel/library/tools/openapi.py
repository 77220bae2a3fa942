"""Tools of a service that describes itself by OpenAPI: one for each operation."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from carrel.errors import ConfigurationError
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.definition_remote import OpenApiDefinition
from carrel.library.tools.http_calls import HttpCaller
from carrel.library.tools.names import python_name, python_names
from carrel.library.tools.openapi_operations import Described, Read, read
from carrel.library.tools.seam import Stream, Tool
from carrel.library.tools.secrets import Secrets
from carrel.text import did_you_mean

SECONDS_TO_FETCH = 30.0
_URL = ("http://", "https://")
_PUBLIC_HEADERS = frozenset(
    ("accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent")
)
"""Nobody writes a key into these."""
_KEY_LIKE = re.compile(r"key|token|secret|auth|passw|signature", re.IGNORECASE)

logger = logging.getLogger(__name__)


class OpenApi:
    """A service and its operations, known once its description has been read."""

    def __init__(
        self, definition: OpenApiDefinition, secrets: Secrets, *, read: Callable[[str], Awaitable[bytes]]
    ) -> None:
        """`read` gives the bytes of a file beside the definition; FileNotFoundError when there is none."""
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._caller = HttpCaller(secrets, definition.headers, definition.query)
        self._read = read
        self._reading = asyncio.Lock()
        self._tools: list[Tool] | None = None
        self._operations: dict[str, Described] = {}

    async def definitions(self) -> Sequence[Tool]:
        """Read once; `ConfigurationError` when there is no description, or it is none."""
        async with self._reading:
            if self._tools is None:
                self._tools = self._learned(await self._described())
            return self._tools

    async def _described(self) -> Read:
        given = self._definition
        spec_url = given.spec if given.spec.startswith(_URL) else None
        try:
            data = await (self._caller.fetch(spec_url, SECONDS_TO_FETCH) if spec_url else self._read(given.spec))
        except FileNotFoundError as problem:
            raise ConfigurationError(f"{self.name}, spec: {problem}") from None
        fixed = {f"header {name.lower()}" for name in given.headers} | {f"query {name.lower()}" for name in given.query}
        try:
            # Large ones take a while, in which others go on.
            return await in_a_thread(
                lambda: read(
                    parsed(data),
                    fixed=frozenset(fixed),
                    base_url=given.base_url,
                    spec_url=spec_url,
                    private=_has_secrets(given),
                )
            )
        except ConfigurationError as problem:
            raise ConfigurationError(f"{self.name}, spec {given.spec}: {problem}") from None

    def _learned(self, found: Read) -> list[Tool]:
        given = self._definition
        for problem in found.problems:
            logger.warning("an operation of %s was left out: %s", self.name, problem)
        wanted = _wanted(self.name, found.operations, given.only)
        tools = []
        for word, operation in zip(python_names(operation.name for operation in wanted), wanted, strict=True):
            tool = Tool(
                name=f"{self.name}.{word}",
                description=operation.description,
                parameters=operation.parameters,
                returns=operation.returns,
                positional=tuple(operation.parameters["properties"]),
                tags=tuple(dict.fromkeys((*given.tags, *operation.tags))),
                approval=given.approval,
                timeout=given.timeout,
                stream=given.stream,
            )
            self._operations[tool.name] = operation
            tools.append(tool)
        return tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: Stream | None = None) -> Any:
        """The service's answer: JSON as data, text as text, anything else as bytes."""
        await self.definitions()
        described = self._operations[tool.name]
        return await self._caller.call(tool, described.base_url, described.operation, arguments, stream)

    async def close(self) -> None:
        await self._caller.close()


def _has_secrets(given: OpenApiDefinition) -> bool:
    """Whether it sends what not every server may see: a key may be written in any header, whatever its name."""
    filled = any("${" in text for text in (*given.headers.values(), *given.query.values()))
    return (
        filled
        or any(name.lower() not in _PUBLIC_HEADERS for name in given.headers)
        or any(_KEY_LIKE.search(name) for name in given.query)
    )


def _wanted(name: str, operations: Sequence[Described], only: Sequence[str]) -> list[Described]:
    """Those that `only` names, or whose tag it names; `ConfigurationError` for a word that names nothing."""
    known = {word for operation in operations for word in (operation.name, *operation.tags)}
    for word in only:
        if word not in known and word not in set(map(python_name, known)):
            raise ConfigurationError(f"{name}, only: there is no operation or tag {word}{did_you_mean(word, known)}")
    return [
        operation
        for operation in operations
        if not only or {operation.name, python_name(operation.name), *operation.tags} & set(only)
    ]


def parsed(data: bytes) -> Any:
    """A document in JSON or YAML; `ConfigurationError` when it is neither."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        if data.lstrip()[:1] == b"{":
            raise ConfigurationError(f"it is no JSON: {problem}") from None
    import yaml  # noqa: PLC0415 -- only where there is YAML to read

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(data, loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as problem:
        raise ConfigurationError(f"it is neither JSON nor YAML: {problem}") from None
