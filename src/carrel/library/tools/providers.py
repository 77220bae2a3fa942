"""Which definition becomes which provider: the only file here that names them all."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import assert_never

from carrel.library.tools.cli import Program
from carrel.library.tools.definition import AnyDefinition
from carrel.library.tools.definition_local import CliDefinition, PythonDefinition
from carrel.library.tools.definition_remote import HttpDefinition, McpDefinition, OpenApiDefinition
from carrel.library.tools.http_endpoints import HttpEndpoints
from carrel.library.tools.mcp_servers import McpServer
from carrel.library.tools.openapi import OpenApi
from carrel.library.tools.programs import Runner
from carrel.library.tools.python_functions import PythonModule
from carrel.library.tools.reading import OnError
from carrel.library.tools.seam import ToolProvider
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool_files import ToolFiles, key_beside
from carrel.storage.base import Store

Read = Callable[[str], Awaitable[bytes]]
"""The bytes of a file that a definition names; `FileNotFoundError` when there is none."""


def tool_files(
    store: Store,
    *,
    prefix: str = "tools",
    secrets: Secrets,
    sandbox: Runner | None = None,
    on_error: OnError = "raise",
) -> ToolFiles:
    """The definitions in `prefix/**/*.yaml`, each with its provider; nothing is read or started yet.

    `sandbox`: who runs programs inside, for definitions that say `runs: sandbox`."""

    def make(file: str, definition: AnyDefinition) -> ToolProvider:
        return provider_of(definition, secrets=secrets, sandbox=sandbox, read=_beside(store, file))

    return ToolFiles(store, prefix, make, on_error)


def provider_of(
    definition: AnyDefinition, *, secrets: Secrets, read: Read, sandbox: Runner | None = None
) -> ToolProvider:
    """What answers for the definition's tools."""
    match definition:
        case CliDefinition():
            return Program(definition, secrets, sandbox=sandbox)
        case PythonDefinition():
            return PythonModule(definition)
        case McpDefinition():
            return McpServer(definition, secrets)
        case HttpDefinition():
            return HttpEndpoints(definition, secrets)
        case OpenApiDefinition():
            return OpenApi(definition, secrets, read=read)
        case _:
            assert_never(definition)


def _beside(store: Store, file: str) -> Read:
    """Reads what is named relative to a definition: from the store, or from this machine by an absolute path."""

    async def read(path: str) -> bytes:
        if os.path.isabs(path):
            return Path(path).read_bytes()
        key = key_beside(file, path)
        data = await store.get(key)
        if data is None:
            raise FileNotFoundError(f"there is no {key} beside {file}")
        return data

    return read
