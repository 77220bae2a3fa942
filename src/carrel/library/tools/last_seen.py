"""What servers had the last time, for whoever looks around while they are starting."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from carrel.errors import StorageError
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from carrel.processes import run_in_thread
from carrel.storage.base import Store

_LARGEST = 8 * 2**20
"""Bytes; what a server has beyond that is looked at when it has started."""

logger = logging.getLogger(__name__)


class LastSeen:
    """One object for each server, which may be deleted at any time; nothing secret is in it."""

    def __init__(self, store: Store, secrets: Secrets) -> None:
        self._store = store
        self._secrets = secrets
        self._kept: dict[str, bytes] = {}
        self._shape: TypeAdapter[tuple[str, list[Tool]]] | None = None

    async def recall(self, name: str, fingerprint: str) -> list[Tool]:
        """What it had, where its definition was this one; nothing when that is not known."""
        try:
            data = await self._store.get(_key(name)) or b""
            known, tools = await run_in_thread(lambda: self._form.validate_json(data)) if data else ("", [])
        except (StorageError, ValidationError) as problem:
            logger.warning("what %s had the last time cannot be read (%s)", name, type(problem).__name__)
            return []
        self._kept[name] = data
        return tools if known == fingerprint else []

    async def keep(self, name: str, fingerprint: str, tools: Sequence[Tool]) -> None:
        """Remember it; whoever called goes on where that cannot be done."""
        try:
            clear = [redacted_tool(tool, self._secrets) for tool in tools]
            data = await run_in_thread(lambda: self._form.dump_json((fingerprint, clear)))
            if name not in self._kept:
                self._kept[name] = await self._store.get(_key(name)) or b""
            if data != self._kept[name] and len(data) <= _LARGEST:
                await self._store.put(_key(name), data)
                self._kept[name] = data
        except (StorageError, ValueError) as problem:
            logger.warning("what %s has cannot be kept: %s", name, problem)

    @property
    def _form(self) -> TypeAdapter[tuple[str, list[Tool]]]:
        # Made when it is needed: most sessions have no server.
        self._shape = self._shape or TypeAdapter(tuple[str, list[Tool]])
        return self._shape


def redacted_tool(tool: Tool, secrets: Secrets) -> Tool:
    """The tool without anything secret in what is said of it."""
    return replace(
        tool,
        description=secrets.hide(tool.description),
        parameters=secrets.hide_in(tool.parameters),
        returns=secrets.hide_in(tool.returns),
    )


def _key(name: str) -> str:
    return f"library/tools/servers/{name}.json"
