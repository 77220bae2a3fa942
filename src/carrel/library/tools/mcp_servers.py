"""Tools of an MCP server: started when first needed, started again when it died, ended with the session."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from carrel.errors import ToolCallError, ToolTimeoutError
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.definition_remote import McpDefinition
from carrel.library.tools.foreign_schema import LONGEST_NAME, Parts, cut, taken
from carrel.library.tools.mcp_connection import Connection
from carrel.library.tools.mcp_results import complaint_of, value_of
from carrel.library.tools.names import python_names
from carrel.library.tools.renaming import renamed
from carrel.library.tools.seam import Stream, Tool
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.source import AGAIN, SLOW

if TYPE_CHECKING:
    from mcp import Client

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


class McpServer:
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
        self._opening: asyncio.Task[tuple[Connection, Client]] | None = None
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
                    self._learn(*await in_a_thread(lambda: self._made(listed)))
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
        given, parts = self._definition, Parts()
        entries = [tool.model_dump(mode="json", by_alias=True, exclude_unset=True) for tool in listed[:MOST_TOOLS]]
        by_name = {str(entry["name"]): entry for entry in entries if len(str(entry["name"])) <= LONGEST_NAME}
        tools, known = [], {}
        for word, name in python_names(by_name).items():
            entry = by_name[name]
            parameters, foreign = renamed(taken(entry.get("inputSchema") or {}, parts))
            tool = Tool(
                name=f"{self.name}.{word}",
                description=cut(str(entry.get("description") or entry.get("title") or "")),
                parameters=parameters,
                returns=taken(entry.get("outputSchema"), parts),
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

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: Stream | None = None) -> Any:
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

    async def _call(self, tool: Tool, arguments: Mapping[str, Any], stream: Stream | None) -> Any:
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

    async def _explained(self, problem: Exception, what: str, connection: Connection | None = None) -> ToolCallError:
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

    def _live(self) -> Connection | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()[0]

    async def _connected(self) -> "tuple[Connection, Client]":
        """The live connection; one start for all who wait for it, and its failure too."""
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._closed:
            raise self._over()
        live = self._live()
        if self._opening is None or (self._opening.done() and (live is None or live.ended)):
            if self._hung is not None and time.monotonic() < self._hung_at + AGAIN:
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

    async def _open(self) -> "tuple[Connection, Client]":
        connection = Connection(self._definition, self._secrets, self._changed)
        began, self._hung = time.monotonic(), None
        try:
            return connection, await connection.open()
        except ToolCallError as problem:
            self._hung_at = time.monotonic()
            if self._hung_at - began >= SLOW:
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


def _progress(stream: Stream | None) -> Any:
    if stream is None:
        return None

    async def progress(done: float, total: float | None, message: str | None) -> None:
        part = f"{done:g}/{total:g}" if total is not None else f"{done:g}"
        stream(f"{part} {message}\n" if message else f"{part}\n")

    return progress


def _forgotten(problem: Exception) -> bool:
    return str(problem) == FORGOTTEN
