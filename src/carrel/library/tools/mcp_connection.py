"""One live connection to an MCP server, kept by a task of its own: the SDK's scopes end in the task that began them."""

import asyncio
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from carrel.errors import ConfigurationError, ToolCallError
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.bounded import last_lines
from carrel.library.tools.definition_remote import McpDefinition
from carrel.library.tools.mcp_mending import mending
from carrel.library.tools.mcp_process import ServerProcess
from carrel.library.tools.mcp_transports import over_http, over_process, over_sse
from carrel.library.tools.request_logs import hidden_in_logs
from carrel.library.tools.secrets import Secrets

if TYPE_CHECKING:
    from mcp import Client

LONGEST_COMPLAINTS = 4000
GOODBYE = 2.0
"""Seconds for a server that is elsewhere to take note that we go."""

_UNSAID = frozenset(("Server returned an error response", "Not Found", "Session terminated"))
"""What the SDK says of an answer that is an error, whatever it was."""
_NOT_LET_IN = ("it answered 401", "it answered 403")

logger = logging.getLogger(__name__)


class Connection:
    """Open until somebody closes it or the server is gone; then it stays closed, and says why."""

    def __init__(self, definition: McpDefinition, secrets: Secrets, changed: Callable[[], None]) -> None:
        """`changed` is told when the server says that it has other tools now."""
        self._definition = definition
        self._secrets = secrets
        self._changed = changed
        self._process: ServerProcess | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._why = ""
        self._refusal = ""
        self._headers: dict[str, str] = {}

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self._leave.is_set() or (self._keeping is not None and self._keeping.done())

    @property
    def is_outdated(self) -> bool:
        """Whether it was refused, and what it names itself with has changed since it was opened."""
        try:
            return self._refusal.startswith(_NOT_LET_IN) and self._headers != self._named()
        except ConfigurationError:
            return False

    @property
    def how(self) -> str:
        """How it ended, and what the server complained last; nothing secret."""
        said = ""
        if self._process is not None:
            complaints, cut = self._process.complaints
            clear = self._secrets.hide_cut(complaints, start=cut).decode("utf-8", "replace")
            said = last_lines(clear, LONGEST_COMPLAINTS, cut=cut)
        code = self._process.own_exit_code if self._process else None
        why = self._why or "it ended"
        if code is not None and why == "it ended":
            why += f" by signal {-code}" if code < 0 else f" with exit code {code}"
        return self._secrets.hide(f"{why}; it said: {said}" if said else why)

    def told(self, problem: BaseException) -> str:
        """What an error of the SDK means, in words."""
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        faults = getattr(problem, "errors", None)
        if callable(faults):
            # Of pydantic: what the server answered has not the shape that MCP wants.
            first = faults()[0]
            return f"its answer is no MCP result: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        if type(problem).__name__ == "ConnectError":
            address = urlsplit(self._definition.url or "").netloc.rpartition("@")[2]
            return f"it could not be reached at {address}" if address else "it could not be reached"
        said = str(problem) or type(problem).__name__
        if said.startswith("Failed to parse") and "validation error" in said:
            # What follows is a page of pydantic's, with the answer cut in pieces that nothing can be hidden in.
            return "its answer is no MCP result, or no JSON"
        unsaid = said in _UNSAID or type(problem).__name__ == "HTTPStatusError"
        return self._refusal if unsaid and self._refusal else said

    async def open(self) -> "Client":
        """The client, once the server has introduced itself; ToolCallError or ConfigurationError when it does not."""
        given = self._definition
        try:
            if given.transport == "stdio":
                assert given.command is not None
                env = self._secrets.fill_all(given.env)
                self._process = await ServerProcess.start(given.command, given.args, env, given.cwd)
            # While the server starts; loading the SDK takes a second, in which others go on.
            await in_a_thread(lambda: import_module("mcp"))
            async with asyncio.timeout(given.startup_timeout):
                with hidden_in_logs(self._secrets):
                    self._keeping = asyncio.create_task(self._keep(), name=f"MCP server {given.name}")
                return await asyncio.shield(self._client)
        except TimeoutError:
            await self.close(f"it did not introduce itself within {given.startup_timeout:g} s")
        except ToolCallError as problem:
            await self.close(str(problem))
        except BaseException:
            await self.close()
            raise
        raise ToolCallError(f"the MCP server {given.name} did not start: {self.how}")

    async def close(self, why: str = "it was closed") -> None:
        """End it, and wait until nothing of it is left."""
        self._gone(why)
        if self._keeping is None:
            if self._process is not None:
                await self._process.end()
            self._client.cancel()
            return
        if not self._client.done():
            self._client.cancel()
            self._keeping.cancel()
        # A child is ended by force at last; a server that is elsewhere may never answer a goodbye.
        await asyncio.wait([self._keeping], timeout=GOODBYE if self._process is None else None)
        if not self._keeping.done():
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    async def over(self) -> None:
        """Wait for the end of a connection that is known to be gone, so that it can be told."""
        # One that is elsewhere does not end by itself; why it is gone shows when it is left.
        self._leave.set()
        if self._keeping is not None:
            await asyncio.wait([self._keeping], timeout=5)

    def _gone(self, why: str) -> None:
        self._why = self._why or why
        self._leave.set()

    def _refused(self, what: str) -> None:
        self._refusal = what

    async def _keep(self) -> None:
        from mcp import Client, types  # noqa: PLC0415 -- a second to load, and not every session has a server

        async def heard(message: Any) -> None:
            if isinstance(message, types.ToolListChangedNotification):
                self._changed()

        try:
            me = types.Implementation(name="carrel", version=version("carrel"))
            async with Client(
                mending(self._transport(), self._leave.set), message_handler=heard, client_info=me
            ) as client:
                if not self._client.done():
                    self._client.set_result(client)
                watching = asyncio.create_task(self._watch(client))
                try:
                    await self._leave.wait()
                finally:
                    watching.cancel()
                    await asyncio.wait([watching])
        except Exception as problem:  # noqa: BLE001 -- of whatever kind, it is how this connection ended
            self._gone(self.told(problem))
        finally:
            self._gone("it ended")
            if self._process is not None:
                await self._process.end()
            if not self._client.done():
                self._client.set_exception(ToolCallError(self._why))
                self._client.exception()  # noted here: nobody may be waiting for it any more

    async def _watch(self, client: "Client") -> None:
        """Newer servers tell of other tools only to those who listen; older ones tell everybody."""
        from mcp import MCPError  # noqa: PLC0415 -- see above

        tools = client.server_capabilities.tools
        if tools is None or not tools.list_changed or client.session.discover_result is None:
            return
        try:
            async with client.listen(tools_list_changed=True) as told:
                async for _ in told:
                    self._changed()
        except (MCPError, RuntimeError, TimeoutError) as problem:
            # The tools it has can be called all the same.
            logger.debug("the MCP server %s does not tell of changes: %s", self._definition.name, problem)

    def _transport(self) -> Any:
        given = self._definition
        if self._process is not None:
            return over_process(self._process, self._gone, self._secrets.hide_cut)
        assert given.url is not None
        over = over_sse if given.transport == "sse" else over_http
        self._headers = self._named()
        return over(given.url, self._headers, self._refused)

    def _named(self) -> dict[str, str]:
        return self._secrets.fill_headers(self._definition.headers)
