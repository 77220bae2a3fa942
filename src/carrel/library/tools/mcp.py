"""Tools of an MCP server, which is started on first use, again after it has ended, and ended with the session."""

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carrel.errors import ToolCallError, ToolTimeoutError
from carrel.library.names import python_names, with_python_names
from carrel.library.tools.definitions import McpDefinition
from carrel.library.tools.mcp_connection import McpConnection
from carrel.library.tools.schema_types import LONGEST_NAME, WorkBudget, bounded_schema, truncate
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, run_in_thread

if TYPE_CHECKING:
    from mcp import Client


def parse_result(result: Mapping[str, Any]) -> Any:
    """Return the value of a `tools/call` result in its JSON form.

    Structured content is the value, and texts beside it repeat it. Otherwise a text with a JSON object or array is
    parsed, another text stays a str (also "1.10", which could be a version), an image, sound or resource becomes a dict
    with its bytes, and several of these become a list."""
    blocks = [block for block in result.get("content") or () if isinstance(block, Mapping)]
    structured = result.get("structuredContent")
    if structured is not None:
        parts = [structured, *(_part(block) for block in blocks if block.get("type") != "text")]
    else:
        parts = [_part(block) for block in blocks]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts


def error_message(result: Mapping[str, Any]) -> str:
    """Return the message of a result that is an error, at full length."""
    blocks: Sequence[Any] = result.get("content") or ()
    texts = [str(block.get("text", "")) for block in blocks if isinstance(block, Mapping)]
    message = "\n".join(text for text in texts if text).strip()
    if not message and result.get("structuredContent") is not None:
        message = json.dumps(result["structuredContent"], ensure_ascii=False)
    return message or "it failed without a message"


def _part(block: Mapping[str, Any]) -> Any:
    match block.get("type"):
        case "text":
            return _text(str(block.get("text", "")))
        case "image" | "audio" as kind:
            return {"type": kind, "mime_type": block.get("mimeType"), "data": _bytes(block.get("data"))}
        case "resource":
            return _resource(block.get("resource"))
        case "resource_link":
            return {"type": "resource_link"} | _present(
                block, "uri", "name", "title", "description", "mimeType", "size"
            )
        case _:
            return dict(block)


def _resource(resource: Any) -> dict[str, Any]:
    if not isinstance(resource, Mapping):
        raise ToolCallError("the MCP server answered with a resource without content")
    part = {"type": "resource"} | _present(resource, "uri", "mimeType")
    if "blob" in resource:
        return part | {"data": _bytes(resource["blob"])}
    return part | {"text": str(resource.get("text", ""))}


def _present(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {("mime_type" if name == "mimeType" else name): given[name] for name in names if given.get(name) is not None}


def _text(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _bytes(data: Any) -> bytes:
    try:
        return base64.b64decode(str(data), validate=True)
    except (binascii.Error, ValueError):
        raise ToolCallError("the MCP server answered with an image or resource that is not valid base64") from None


MOST_PAGES = 200
MOST_TOOLS = 2000
_MOST_SCHEMA_PARTS = 200_000
"""Parts of the schemas of all tools of a server together."""
LONGEST_ERROR = 4000
"""Characters of a server's error in the message of ours."""
CLOSED, UNKNOWN_SESSION = -32000, "Session terminated"
"""How the SDK reports that the connection is closed, and that the server does not know the session."""

OUTDATED = "its secrets have changed"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteToolName:
    """The name of a tool at the server."""

    name: str
    parameters: Mapping[str, str]
    """The names of its parameters here, with those at the server."""


class McpProvider:
    """The tool provider of an MCP server."""

    def __init__(self, definition: McpDefinition, secrets: Secrets, *, ping_timeout: float = 5.0) -> None:
        """`ping_timeout`: seconds in which a server must answer another request after a call timed out."""
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._secrets = secrets
        self._ping_timeout = ping_timeout
        self._requests: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._opening: asyncio.Task[tuple[McpConnection, Client]] | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._tools: list[Tool] = []
        self._remote_names: dict[str, RemoteToolName] = {}
        self._must_list = True
        self._is_closed = False

    # --- tools ------------------------------------------------------------------------------------------------------

    async def definitions(self) -> Sequence[Tool]:
        """Return the tools: the same list until the server reports a change."""
        if self._must_list:
            connection, client = await self._connect()
            self._must_list = False
            try:
                async with asyncio.timeout(self._definition.startup_timeout):
                    listed = await self._request(_list_tools(client))
                    # Thousands of tools take a while; other tasks run meanwhile.
                    tools, names = await run_in_thread(lambda: self._make_tools(listed))
                    # An unchanged list stays the same object, so that callers see that nothing has changed.
                    self._tools = self._tools if tools == self._tools else tools
                    self._remote_names = names
            except BaseException as error:
                self._must_list = True
                if isinstance(error, TimeoutError):
                    self._start_ping()
                    seconds = self._definition.startup_timeout
                    raise ToolCallError(
                        f"the MCP server {self.name} did not list its tools within {seconds:g} s"
                    ) from None
                if isinstance(error, Exception) and connection.is_outdated:
                    await connection.close(OUTDATED)
                    return await self.definitions()
                if isinstance(error, Exception):
                    raise await self._call_error(error, "did not list its tools") from None
                raise
        return self._tools

    def _make_tools(self, listed: Sequence[Any]) -> tuple[list[Tool], dict[str, RemoteToolName]]:
        definition, budget = self._definition, WorkBudget(_MOST_SCHEMA_PARTS)
        entries = [tool.model_dump(mode="json", by_alias=True, exclude_unset=True) for tool in listed[:MOST_TOOLS]]
        by_name = {str(entry["name"]): entry for entry in entries if len(str(entry["name"])) <= LONGEST_NAME}
        tools, names = [], {}
        for word, name in python_names(by_name).items():
            entry = by_name[name]
            parameters, remote = with_python_names(bounded_schema(entry.get("inputSchema") or {}, budget))
            tool = definition.make_tool(
                word,
                parameters,
                description=truncate(str(entry.get("description") or entry.get("title") or "")),
                returns=bounded_schema(entry.get("outputSchema"), budget),
            )
            tools.append(tool)
            names[tool.name] = RemoteToolName(name, remote)
        if len(listed) > MOST_TOOLS:
            logger.warning("the MCP server %s has %d tools; the first %d are used", self.name, len(listed), MOST_TOOLS)
        return tools, names

    # --- calling ----------------------------------------------------------------------------------------------------

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        """Return the server's answer as data; progress reports go to `on_output`."""
        try:
            async with asyncio.timeout(tool.timeout) as limit:
                return await self._call(tool, arguments, on_output)
        except TimeoutError:
            if not limit.expired():
                raise
            self._start_ping()
            raise ToolTimeoutError(f"{tool.name} took longer than {tool.timeout:g} s") from None
        except asyncio.CancelledError:
            self._start_ping()
            raise

    async def _call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None) -> Any:
        for may_repeat in (True, False):
            connection, client = await self._connect()
            remote = self._remote_names.get(tool.name) or RemoteToolName(tool.name.partition(".")[2], {})
            wire = {remote.parameters.get(name, name): value for name, value in arguments.items()}
            try:
                result = await self._request(
                    client.call_tool(remote.name, wire, progress_callback=_progress_callback(on_output))
                )
            except Exception as error:  # noqa: BLE001 -- the SDK raises many kinds of errors
                if may_repeat and (str(error) == UNKNOWN_SESSION or connection.is_outdated):
                    # The server has done nothing, because it did not accept the session.
                    await connection.close(OUTDATED if connection.is_outdated else "it has lost this session")
                    continue
                raise await self._call_error(error, f"failed in {tool.name}", connection) from None
            answer = result.model_dump(mode="json", by_alias=True, exclude_unset=True)
            if answer.get("isError"):
                # Redacted before it is shortened: a part of a secret would not be recognized.
                raise ToolCallError(f"{tool.name}: {self._secrets.redact(error_message(answer))[:LONGEST_ERROR]}")
            return parse_result(answer)
        raise AssertionError("unreachable")

    async def _request(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer to a request. If the caller is cancelled, the SDK notifies the server in the background."""
        task = asyncio.create_task(request)
        self._requests.add(task)
        task.add_done_callback(self._on_done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._requests.discard(task)
            self._cancelled.add(task)
            task.cancel()
            raise

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._requests.discard(task)
        self._cancelled.discard(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved, because the caller may have been cancelled

    async def _call_error(self, error: Exception, what: str, connection: McpConnection | None = None) -> ToolCallError:
        """Return the error that explains an error of the SDK."""
        connection = connection or self._live()
        if isinstance(error, ToolCallError):
            return error
        if connection is not None and (connection.is_closed or getattr(error, "code", None) == CLOSED):
            await connection.wait_closed()
            return ToolCallError(
                f"the MCP server {self.name} {what}: {connection.closed_reason}. The next call starts it again"
            )
        message = connection.explain(error) if connection is not None else str(error)
        return ToolCallError(self._secrets.redact(f"the MCP server {self.name} {what}: {message}"))

    # --- connection -------------------------------------------------------------------------------------------------

    def _live(self) -> McpConnection | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()[0]

    async def _connect(self) -> "tuple[McpConnection, Client]":
        """Return the open connection; concurrent callers share one start, and its failure."""
        if self._pinging is not None:
            await asyncio.wait([self._pinging])
        if self._is_closed:
            raise self._closed_error()
        live = self._live()
        if self._opening is None or (self._opening.done() and (live is None or live.is_closed)):
            self._must_list = True
            self._opening = asyncio.create_task(self._open(), name=f"start of the MCP server {self.name}")
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and self._is_closed:
                raise self._closed_error() from None
            raise

    def _closed_error(self) -> ToolCallError:
        return ToolCallError(f"the MCP server {self.name} was closed with its session")

    async def _open(self) -> "tuple[McpConnection, Client]":
        connection = McpConnection(self._definition, self._secrets, self._on_tools_changed)
        return connection, await connection.open()

    def _on_tools_changed(self) -> None:
        self._must_list = True

    def _start_ping(self) -> None:
        """After a call that was not answered, find out with another request whether the server hangs."""
        if self._pinging is None and not self._is_closed and self._live() is not None:
            self._pinging = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        assert self._opening is not None
        connection, client = self._opening.result()
        try:
            async with asyncio.timeout(self._ping_timeout):
                await self._request(client.list_tools(cache_mode="bypass"))
        except Exception:  # noqa: BLE001 -- with any error it did not answer
            # It may answer one request after the other; the last request that times out starts another ping.
            if not self._requests:
                await connection.close("it did not answer, and was ended")
        finally:
            self._pinging = None

    async def close(self) -> None:
        """End the server and all its processes; closing twice has no effect."""
        self._is_closed = True
        for task in (self._pinging, self._opening):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        live = self._live()
        if live is not None:
            await live.close()
        if self._cancelled:
            await asyncio.wait(self._cancelled)


async def _list_tools(client: "Client") -> list[Any]:
    """Return the tools on all pages."""
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ToolCallError(f"its list of tools has more than {MOST_PAGES} pages")


def _progress_callback(on_output: OnOutput | None) -> Any:
    if on_output is None:
        return None

    async def progress(done: float, total: float | None, message: str | None) -> None:
        part = f"{done:g}/{total:g}" if total is not None else f"{done:g}"
        on_output(f"{part} {message}\n" if message else f"{part}\n")

    return progress
