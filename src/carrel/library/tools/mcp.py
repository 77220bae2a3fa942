"""Tools of an MCP server: started when first needed, started again when it died, ended with the session."""

import asyncio
import base64
import binascii
import json
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from carrel.errors import ToolCallError, ToolTimeoutError
from carrel.library.names import python_names, with_python_names
from carrel.library.tools.definitions import McpDefinition
from carrel.library.tools.mcp_connection import McpConnection
from carrel.library.tools.schema_types import LONGEST_NAME, SizeBudget, bounded_schema, truncate
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import RETRY_AFTER, SLOW_FAILURE, Tool
from carrel.processes import OnOutput, run_in_thread

if TYPE_CHECKING:
    from mcp import Client


def value_of(result: Mapping[str, Any]) -> Any:
    """The value of a `tools/call` result (its JSON form).

    Structured content is the data itself, and the texts beside it say the same again. Otherwise a text that is a JSON
    object or array is that, another text is itself (also "1.10", which as a number would be another version), an image,
    sound or resource is a dict with its bytes, and several of these are a list."""
    blocks = [block for block in result.get("content") or () if isinstance(block, Mapping)]
    structured = result.get("structuredContent")
    if structured is not None:
        parts = [structured, *(_part(block) for block in blocks if block.get("type") != "text")]
    else:
        parts = [_part(block) for block in blocks]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts


def complaint_of(result: Mapping[str, Any]) -> str:
    """What a result that is an error says, in words, however long."""
    blocks: Sequence[Any] = result.get("content") or ()
    texts = [str(block.get("text", "")) for block in blocks if isinstance(block, Mapping)]
    said = "\n".join(text for text in texts if text).strip()
    if not said and result.get("structuredContent") is not None:
        said = json.dumps(result["structuredContent"], ensure_ascii=False)
    return said or "it failed, and the server did not say why"


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
        raise ToolCallError("the MCP server answered with a resource that has no content")
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
        raise ToolCallError("the MCP server answered with an image or resource that is no base64") from None


MOST_PAGES = 200
MOST_TOOLS = 2000
LONGEST_COMPLAINT = 4000
CLOSED, FORGOTTEN = -32000, "Session terminated"
"""How the SDK says that the connection is gone, and that the server does not know it any more."""

OUTDATED = "its secrets have changed"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """A tool as the server has it."""

    name: str
    parameters: Mapping[str, str]
    """Its parameters' names here, each with the server's."""


class McpProvider:
    """One server and what it has."""

    def __init__(self, definition: McpDefinition, secrets: Secrets, *, patience: float = 5.0) -> None:
        """`patience`: seconds in which a server that left a call unanswered has to answer something else."""
        self.name = definition.name
        self.description = definition.description
        self.fingerprint = sha256(definition.model_dump_json().encode()).hexdigest()[:16]
        self._definition = definition
        self._secrets = secrets
        self._patience = patience
        self._working: set[asyncio.Task[Any]] = set()
        self._leaving: set[asyncio.Task[Any]] = set()
        self._opening: asyncio.Task[tuple[McpConnection, Client]] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._tools: list[Tool] = []
        self._known: dict[str, _Known] = {}
        self._hung: ToolCallError | None = None
        self._hung_at = 0.0
        self._stale = True
        self._closed = False

    # --- what it has ------------------------------------------------------------------------------------------------

    async def definitions(self) -> Sequence[Tool]:
        """The same list as long as the server says nothing else."""
        if self._stale:
            connection, client = await self._connected()
            self._stale = False
            try:
                async with asyncio.timeout(self._definition.startup_timeout):
                    listed = await self._asked(_listed(client))
                    # Thousands take a while, in which others go on.
                    self._learn(*await run_in_thread(lambda: self._made(listed)))
            except BaseException as problem:
                self._stale = True
                if isinstance(problem, TimeoutError):
                    self._ask_whether_alive()
                    wait = self._definition.startup_timeout
                    raise ToolCallError(
                        f"the MCP server {self.name} did not say what it has within {wait:g} s"
                    ) from None
                if isinstance(problem, Exception) and connection.is_outdated:
                    await connection.close(OUTDATED)
                    return await self.definitions()
                if isinstance(problem, Exception):
                    raise await self._explained(problem, "did not say what it has") from None
                raise
        return self._tools

    def _made(self, listed: Sequence[Any]) -> "tuple[list[Tool], dict[str, _Known]]":
        given, parts = self._definition, SizeBudget()
        entries = [tool.model_dump(mode="json", by_alias=True, exclude_unset=True) for tool in listed[:MOST_TOOLS]]
        by_name = {str(entry["name"]): entry for entry in entries if len(str(entry["name"])) <= LONGEST_NAME}
        tools, known = [], {}
        for word, name in python_names(by_name).items():
            entry = by_name[name]
            parameters, foreign = with_python_names(bounded_schema(entry.get("inputSchema") or {}, parts))
            tool = Tool(
                name=f"{self.name}.{word}",
                description=truncate(str(entry.get("description") or entry.get("title") or "")),
                parameters=parameters,
                returns=bounded_schema(entry.get("outputSchema"), parts),
                positional=tuple(parameters["properties"]),
                tags=given.tags,
                approval=given.approval,
                timeout=given.timeout,
                stream=given.stream,
            )
            tools.append(tool)
            known[tool.name] = _Known(name, foreign)
        if len(listed) > MOST_TOOLS:
            logger.warning("the MCP server %s has %d tools; the first %d are used", self.name, len(listed), MOST_TOOLS)
        return tools, known

    def _learn(self, tools: list[Tool], known: "dict[str, _Known]") -> None:
        if tools != self._tools:
            # Else the same list, by which others know that nothing is new.
            self._tools = tools
        self._known = known

    # --- calling ----------------------------------------------------------------------------------------------------

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
        """The server's answer as data; what it tells on the way goes to `stream`."""
        try:
            async with asyncio.timeout(tool.timeout) as limit:
                return await self._call(tool, arguments, stream)
        except TimeoutError:
            if not limit.expired():
                raise
            self._ask_whether_alive()
            raise ToolTimeoutError(f"{tool.name} took longer than {tool.timeout:g} s") from None
        except asyncio.CancelledError:
            self._ask_whether_alive()
            raise

    async def _call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None) -> Any:
        for again in (True, False):
            connection, client = await self._connected()
            known = self._known.get(tool.name) or _Known(tool.name.partition(".")[2], {})
            wire = {known.parameters.get(name, name): value for name, value in arguments.items()}
            try:
                result = await self._asked(client.call_tool(known.name, wire, progress_callback=_progress(stream)))
            except Exception as problem:  # noqa: BLE001 -- the SDK raises of many kinds; all are failed calls
                if again and (_forgotten(problem) or connection.is_outdated):
                    # It has done nothing, for it did not know who asked.
                    await connection.close(OUTDATED if connection.is_outdated else "it forgot this connection")
                    continue
                raise await self._explained(problem, f"failed in {tool.name}", connection) from None
            answer = result.model_dump(mode="json", by_alias=True, exclude_unset=True)
            if answer.get("isError"):
                # Cleared before it is cut: half a secret would not be known for one.
                raise ToolCallError(f"{tool.name}: {self._secrets.hide(complaint_of(answer))[:LONGEST_COMPLAINT]}")
            return value_of(answer)
        raise AssertionError("unreachable")

    async def _asked(self, question: Coroutine[Any, Any, Any]) -> Any:
        """The answer. Cancelled, the server is told so, which may take a while when it does not listen: not ours."""
        task = asyncio.create_task(question)
        self._working.add(task)
        task.add_done_callback(self._answered)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._working.discard(task)
            self._leaving.add(task)
            task.cancel()
            raise

    def _answered(self, task: "asyncio.Task[Any]") -> None:
        self._working.discard(task)
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()  # noted: nobody may be waiting for it any more

    async def _explained(self, problem: Exception, what: str, connection: McpConnection | None = None) -> ToolCallError:
        """The error that says what the SDK's means."""
        connection = connection or self._live()
        if isinstance(problem, ToolCallError):
            return problem
        if connection is not None and (connection.ended or getattr(problem, "code", None) == CLOSED):
            await connection.over()
            return ToolCallError(
                f"the MCP server {self.name} {what}: {connection.how}. It is started again with the next call"
            )
        said = connection.told(problem) if connection is not None else str(problem)
        return ToolCallError(self._secrets.hide(f"the MCP server {self.name} {what}: {said}"))

    # --- its life ---------------------------------------------------------------------------------------------------

    def _live(self) -> McpConnection | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()[0]

    async def _connected(self) -> "tuple[McpConnection, Client]":
        """The live connection; one start for all who wait for it, and its failure too."""
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._closed:
            raise self._over()
        live = self._live()
        if self._opening is None or (self._opening.done() and (live is None or live.ended)):
            if self._hung is not None and time.monotonic() < self._hung_at + RETRY_AFTER:
                raise self._hung.with_traceback(None)
            self._stale = True
            self._opening = asyncio.create_task(self._open(), name=f"start of the MCP server {self.name}")
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and self._closed:
                raise self._over() from None
            raise

    def _over(self) -> ToolCallError:
        return ToolCallError(f"the MCP server {self.name} was closed with its session")

    async def _open(self) -> "tuple[McpConnection, Client]":
        connection = McpConnection(self._definition, self._secrets, self._changed)
        began, self._hung = time.monotonic(), None
        try:
            return connection, await connection.open()
        except ToolCallError as problem:
            self._hung_at = time.monotonic()
            if self._hung_at - began >= SLOW_FAILURE:
                self._hung = problem
            raise

    def _changed(self) -> None:
        self._stale = True

    def _ask_whether_alive(self) -> None:
        """A call went unanswered. Whether the call or the server hangs shows when something else is asked."""
        if self._asking is None and not self._closed and self._live() is not None:
            self._asking = asyncio.create_task(self._end_unless_alive())

    async def _end_unless_alive(self) -> None:
        assert self._opening is not None
        connection, client = self._opening.result()
        try:
            async with asyncio.timeout(self._patience):
                await self._asked(client.list_tools(cache_mode="bypass"))
        except Exception:  # noqa: BLE001 -- whatever went wrong, it did not answer
            # It may be at work for others and answer one after the other; the last of them asks again.
            if not self._working:
                await connection.close("it did not answer any more, and was ended")
        finally:
            self._asking = None

    async def close(self) -> None:
        """The server ends, and all it started; twice is harmless."""
        self._closed = True
        for task in (self._asking, self._opening):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        live = self._live()
        if live is not None:
            await live.close()
        if self._leaving:
            await asyncio.wait(self._leaving)


async def _listed(client: "Client") -> list[Any]:
    """All pages of its list."""
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ToolCallError(f"its list of tools does not end after {MOST_PAGES} pages")


def _progress(stream: OnOutput | None) -> Any:
    if stream is None:
        return None

    async def progress(done: float, total: float | None, message: str | None) -> None:
        part = f"{done:g}/{total:g}" if total is not None else f"{done:g}"
        stream(f"{part} {message}\n" if message else f"{part}\n")

    return progress


def _forgotten(problem: Exception) -> bool:
    return str(problem) == FORGOTTEN
