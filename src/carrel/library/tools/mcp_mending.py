"""What servers write that the SDK would refuse, mended before it sees it: one sloppy tool costs no other."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self


def mended(result: dict[str, Any]) -> dict[str, Any]:
    """A list of tools in which each has a name and the schema of an object; other results as they are."""
    tools = result.get("tools")
    if not isinstance(tools, list):
        return result
    return result | {"tools": [_tool(tool) for tool in tools if isinstance(tool, dict) and tool.get("name")]}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("inputSchema")
    kept = {name: value for name, value in tool.items() if name != "outputSchema" or isinstance(value, dict)}
    return kept | {"name": str(tool["name"]), "inputSchema": (schema if isinstance(schema, dict) else {}) | _OBJECT}


_OBJECT = {"type": "object"}


@contextlib.asynccontextmanager
async def mending(
    transport: contextlib.AbstractAsyncContextManager[Any], over: Callable[[], None]
) -> AsyncIterator[Any]:
    """The transport's streams, with what comes mended; `over` is called when no more will come."""
    async with transport as (heard, said):
        yield _Mending(heard, over), said


class _Mending:
    """A stream of messages as the SDK reads it."""

    def __init__(self, stream: Any, over: Callable[[], None]) -> None:
        self._stream = stream
        self._over = over

    async def receive(self) -> Any:
        return _message(await self._stream.receive())

    async def __anext__(self) -> Any:
        try:
            return _message(await self._stream.__anext__())
        except StopAsyncIteration:
            self._over()
            raise

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _message(item: Any) -> Any:
    result = getattr(getattr(item, "message", None), "result", None)
    if isinstance(result, dict) and "tools" in result:
        item.message.result = mended(result)
    return item
