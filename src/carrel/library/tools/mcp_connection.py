"""A connection to an MCP server, over the transports of the SDK."""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, TextIO
from urllib.parse import urlsplit

from carrel.errors import ConfigurationError, ToolCallError
from carrel.guest.processes import MARK, kill_marked
from carrel.library.tools.definitions import McpDefinition
from carrel.library.tools.secrets import Secrets, redacted_http_logs
from carrel.processes import BoundedOutput, child_environment, last_lines, run_in_thread
from carrel.version import __version__

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

LARGEST_ANSWER = 32 * 1024 * 1024
"""Bytes of an answer over HTTP."""
MOST_INVALID = 1000
"""Lines in a row that are no messages: some servers print a banner."""
MOST_NOTIFICATIONS = 20_000
"""Notifications in a row that report no progress, without any answer."""
KEPT_STDERR = 32 * 1024
"""Bytes; much more than is shown, so that secrets are redacted before it is shortened."""
LONGEST_STDERR = 4000
"""Characters of the standard error in an error message."""
GOODBYE = 2.0
"""Seconds for a remote server to close a connection."""

_GENERIC_ERRORS = frozenset(("Server returned an error response", "Not Found", "Session terminated"))
"""What the SDK says of any HTTP error."""
_UNAUTHORIZED = ("it answered 401", "it answered 403")

logger = logging.getLogger(__name__)


class McpConnection:
    """Open until it is closed or the server ends; then it stays closed, and `closed_reason` says why."""

    def __init__(self, definition: McpDefinition, secrets: Secrets, on_tools_changed: Callable[[], None]) -> None:
        """`on_tools_changed` is called when the server reports that its tools have changed."""
        self._definition = definition
        self._secrets = secrets
        self._on_tools_changed = on_tools_changed
        self._mark = uuid.uuid4().hex
        """Value of an environment variable of the server and all its processes."""
        self._stderr: StderrPipe | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._http_error = ""
        self._headers: dict[str, str] = {}

    @property
    def is_closed(self) -> bool:
        """Whether no more requests can be sent."""
        return self._closing.is_set() or (self._task is not None and self._task.done())

    @property
    def is_outdated(self) -> bool:
        """Whether the server refused the credentials, and those in the environment have changed since."""
        try:
            return self._http_error.startswith(_UNAUTHORIZED) and self._headers != self._current_headers()
        except ConfigurationError:
            return False

    @property
    def closed_reason(self) -> str:
        """Why it was closed, with the end of the server's standard error, redacted."""
        reason = self._reason or "it ended"
        if self._stderr is not None:
            data, is_cut = self._stderr.read()
            text = self._secrets.redact_piece(data, cut_start=is_cut).decode("utf-8", "replace")
            text = last_lines(text, LONGEST_STDERR, cut=is_cut)
            reason += f"; its standard error: {text}" if text else ""
        return self._secrets.redact(reason)

    def explain(self, error: BaseException) -> str:
        """Return what an error of the SDK means."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError | ValueError) and self._definition.transport == "stdio" and not _faults(error):
            return _start_error(self._definition, error)
        if faults := _faults(error):
            fault = faults[0]
            return f"its answer is not valid MCP: {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        if type(error).__name__ == "ConnectError":
            host = urlsplit(self._definition.url or "").netloc.rpartition("@")[2]
            return f"could not connect to {host}" if host else "could not connect"
        message = str(error) or type(error).__name__
        if message.startswith("Failed to parse") and "validation error" in message:
            # The rest contains the answer in pieces, in which secrets are not recognized.
            return "its answer is not valid MCP, or not JSON"
        is_generic = message in _GENERIC_ERRORS or type(error).__name__ == "HTTPStatusError"
        return self._http_error if is_generic and self._http_error else message

    async def open(self) -> "Client":
        """Return the client once the server is initialized; raises ToolCallError or ConfigurationError."""
        definition = self._definition
        try:
            transport = self._make_transport_function()
            # Importing the SDK takes a second; other tasks run meanwhile.
            await run_in_thread(lambda: import_module("mcp"))
            async with asyncio.timeout(definition.startup_timeout):
                with redacted_http_logs(self._secrets):
                    self._task = asyncio.create_task(self._run(transport), name=f"MCP server {definition.name}")
                return await asyncio.shield(self._client)
        except TimeoutError:
            await self.close(f"it did not start within {definition.startup_timeout:g} s")
        except ToolCallError as error:
            await self.close(str(error))
        except BaseException:
            await self.close()
            raise
        raise ToolCallError(f"the MCP server {definition.name} did not start: {self.closed_reason}")

    async def close(self, reason: str = "it was closed") -> None:
        """End the server, or the connection to a remote one, and wait until nothing of it is left."""
        self._close_soon(reason)
        if self._task is None:
            self._client.cancel()
            return
        if not self._client.done():
            self._client.cancel()
            self._task.cancel()
        # The SDK ends a local server by force at last; a remote one may never answer.
        is_remote = self._definition.transport != "stdio"
        await asyncio.wait([self._task], timeout=GOODBYE if is_remote else None)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def wait_closed(self) -> None:
        """Wait for the end of a connection that is known to be lost, so that its reason is known."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)

    def _close_soon(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._closing.set()

    async def _run(self, transport: Callable[[], Any]) -> None:
        from mcp import Client, types  # noqa: PLC0415 -- a second to import

        async def handle(message: Any) -> None:
            if isinstance(message, types.ToolListChangedNotification):
                self._on_tools_changed()

        try:
            info = types.Implementation(name="carrel", version=__version__)
            streams = repaired_transport(transport(), self._close_soon, self._secrets)
            async with Client(streams, message_handler=handle, client_info=info) as client:
                if not self._client.done():
                    self._client.set_result(client)
                listening = asyncio.create_task(self._listen_for_changes(client))
                try:
                    await self._closing.wait()
                finally:
                    listening.cancel()
                    await asyncio.wait([listening])
        except Exception as error:  # noqa: BLE001 -- any error is the reason why the connection ended
            self._close_soon(self.explain(error))
        finally:
            self._close_soon("it ended")
            if self._definition.transport == "stdio":
                # The SDK leaves the processes that a server has started when it exits by itself.
                await run_in_thread(lambda: kill_marked(self._mark))
            if self._stderr is not None:
                self._stderr.close()
            if not self._client.done():
                self._client.set_exception(ToolCallError(self._reason))
                self._client.exception()  # marked as retrieved, because the caller may have been cancelled

    async def _listen_for_changes(self, client: "Client") -> None:
        """Servers of newer versions report changes only to clients that listen; older ones to all."""
        from mcp import MCPError  # noqa: PLC0415 -- see above

        tools = client.server_capabilities.tools
        if tools is None or not tools.list_changed or client.session.discover_result is None:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._on_tools_changed()
        except (MCPError, RuntimeError, TimeoutError) as error:
            # The known tools can still be called.
            logger.debug("the MCP server %s does not report changes: %s", self._definition.name, error)

    def _make_transport_function(self) -> Callable[[], Any]:
        """Return a function that opens the transport; substitutes secrets now, so that a missing one is reported."""
        definition = self._definition
        if definition.transport == "stdio":
            env = child_environment({**self._secrets.substitute_all(definition.env), MARK: self._mark})
            return lambda: self._stdio_transport(env)
        self._headers = self._current_headers()
        open_ = sse_transport if definition.transport == "sse" else http_transport
        return lambda: open_(definition.url or "", self._headers, self._on_http_error)

    def _stdio_transport(self, env: dict[str, str]) -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client  # noqa: PLC0415 -- see above

        given = self._definition
        cwd = os.path.expanduser(given.cwd) if given.cwd else None
        parameters = StdioServerParameters(command=given.command or "", args=list(given.args), env=env, cwd=cwd)
        self._stderr = StderrPipe()
        return self._stderr.closing_after_start(stdio_client(parameters, errlog=self._stderr.writer))

    def _on_http_error(self, message: str) -> None:
        self._http_error = message

    def _current_headers(self) -> dict[str, str]:
        return self._secrets.substitute_headers(self._definition.headers)


def _faults(error: BaseException) -> list[Any]:
    """Return the details of a pydantic error, without values."""
    errors = getattr(error, "errors", None)
    return list(errors(include_input=False)) if callable(errors) else []


def _start_error(definition: McpDefinition, error: BaseException) -> str:
    cwd = os.path.expanduser(definition.cwd) if definition.cwd else None
    if isinstance(error, FileNotFoundError):
        if cwd is not None and str(error.filename) == cwd:
            return f"there is no folder {cwd} to start it in"
        return f"there is no program {definition.command!r}; install it, or put its arguments into args"
    return f"{definition.command!r} could not be started: {error}"


class StderrPipe:
    """A pipe for the standard error of a server; keeps the end of what is written."""

    def __init__(self) -> None:
        self._reader, write_end = os.pipe()
        self.writer: TextIO = os.fdopen(write_end, "w")
        self._output = BoundedOutput(2 * KEPT_STDERR)
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read_available)
        self._is_open = True

    @contextlib.asynccontextmanager
    async def closing_after_start(self, transport: contextlib.AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        """Open a transport, then close this process's write end, so that the end of the output is noticed."""
        async with transport as streams:
            self.writer.close()
            yield streams

    def _read_available(self) -> None:
        for _ in range(64):
            try:
                data = os.read(self._reader, 65536)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._reader)
                return
            self._output.add(data)

    def read(self) -> tuple[bytes, bool]:
        """Return the end of what was written, and whether there was more before it."""
        if self._is_open:
            self._read_available()
        return self._output.end(KEPT_STDERR)

    def close(self) -> None:
        """Release the pipe; what was read stays."""
        if self._is_open:
            self._read_available()
            self._is_open = False
            self._loop.remove_reader(self._reader)
            self.writer.close()
            os.close(self._reader)


@contextlib.asynccontextmanager
async def repaired_transport(
    transport: contextlib.AbstractAsyncContextManager[Any], on_closed: Callable[[str], None], secrets: Secrets
) -> AsyncIterator[Any]:
    """Open a transport whose messages are repaired; `on_closed` is called when no more will come."""
    async with transport as (reader, writer):
        yield _RepairedStream(reader, on_closed, secrets), writer


class _RepairedStream:
    """A stream of messages that repairs lists of tools, and ends when a server sends too much that is of no use."""

    def __init__(self, stream: Any, on_closed: Callable[[str], None], secrets: Secrets) -> None:
        self._stream = stream
        self._on_closed = on_closed
        self._secrets = secrets
        self._invalid = 0
        self._notifications = 0

    async def receive(self) -> Any:
        return self._repair(await self._stream.receive())

    async def __anext__(self) -> Any:
        while True:
            try:
                item = self._repair(await self._stream.__anext__())
            except StopAsyncIteration:
                self._on_closed("it ended")
                raise
            if item is not None:
                return item

    def _repair(self, item: Any) -> Any:
        """Return the message to pass on; None for one to ignore."""
        if isinstance(item, Exception):
            answer = _as_error_answer(item)
            self._invalid += answer is None
            if self._invalid >= MOST_INVALID:
                line = self._secrets.redact(str(next((e["input"] for e in _inputs(item)), "")))[:200]
                self._stop(f"its output is not MCP: {line!r}")
            return answer
        self._invalid = 0
        message = getattr(item, "message", None)
        method = getattr(message, "method", None)
        if method is None:
            self._notifications = 0
        elif method != "notifications/progress":
            self._notifications += 1
            if self._notifications >= MOST_NOTIFICATIONS:
                self._stop(f"it sent {self._notifications} notifications without an answer")
        if method == "notifications/message":
            return None  # log messages of the server
        result = getattr(message, "result", None)
        if message is not None and isinstance(result, dict) and "tools" in result:
            message.result = repair_tool_list(result)
        return item

    def _stop(self, reason: str) -> None:
        self._on_closed(reason)
        raise StopAsyncIteration

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


def _inputs(error: Exception) -> list[Any]:
    errors = getattr(error, "errors", None)
    return list(errors()) if callable(errors) else []


def _as_error_answer(error: Exception) -> Any:
    """Return an error answer for an invalid line that answers a request, because its caller waits; else None."""
    from mcp import types  # noqa: PLC0415 -- imported here already
    from mcp.shared.message import SessionMessage  # noqa: PLC0415 -- see above

    details = _inputs(error)
    values = [detail["input"] for detail in details if isinstance(detail["input"], dict)]
    answer = next((value for value in values if {"result", "error"} & value.keys() and "id" in value), None)
    if answer is None or isinstance(answer["id"], bool) or not isinstance(answer["id"], int | str):
        return None
    fault = next((detail for detail in details if "result" in detail["loc"]), details[0])
    data = types.ErrorData(code=types.INTERNAL_ERROR, message=f"its answer is not valid MCP: {fault['msg']}")
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=answer["id"], error=data))


def repair_tool_list(result: dict[str, Any]) -> dict[str, Any]:
    """Return a list of tools in which each tool has a name and the schema of an object; other results unchanged."""
    tools = result.get("tools")
    if not isinstance(tools, list):
        return result
    return result | {"tools": [_repair_tool(tool) for tool in tools if isinstance(tool, dict) and tool.get("name")]}


def _repair_tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("inputSchema")
    kept = {name: value for name, value in tool.items() if name != "outputSchema" or isinstance(value, dict)}
    schema = (schema if isinstance(schema, dict) else {}) | {"type": "object"}
    return kept | {"name": str(tool["name"]), "inputSchema": schema}


@contextlib.asynccontextmanager
async def http_transport(url: str, headers: dict[str, str], on_http_error: Callable[[str], None]) -> AsyncIterator[Any]:
    """Open the transport for streamable HTTP; `on_http_error` gets each error status, which the SDK does not report."""
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415 -- see above

    async with (
        _http_client(headers, on_http_error) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=LARGEST_ANSWER) as streams,
    ):
        yield streams


def sse_transport(
    url: str, own_headers: dict[str, str], on_http_error: Callable[[str], None]
) -> contextlib.AbstractAsyncContextManager[Any]:
    """Open the transport for server-sent events."""
    from mcp.client.sse import sse_client  # noqa: PLC0415 -- see above

    def make_client(headers: Any = None, timeout: Any = None, auth: Any = None) -> "httpx2.AsyncClient":
        return _http_client(own_headers, on_http_error)

    return sse_client(url, httpx_client_factory=make_client)


def _http_client(headers: dict[str, str], on_http_error: Callable[[str], None]) -> "httpx2.AsyncClient":
    import httpx2  # noqa: PLC0415 -- slow to import

    class BoundedBody(httpx2.AsyncByteStream):
        """A body that raises an error when it is too long."""

        def __init__(self, body: httpx2.AsyncByteStream) -> None:
            self._body = body

        async def __aiter__(self) -> AsyncIterator[bytes]:
            remaining = LARGEST_ANSWER
            async for piece in self._body:
                remaining -= len(piece)
                if remaining < 0:
                    raise httpx2.StreamError(f"it answered with more than {LARGEST_ANSWER // 2**20} MiB")
                yield piece

        async def aclose(self) -> None:
            await self._body.aclose()

    async def check(response: httpx2.Response) -> None:
        if response.status_code >= 400:
            on_http_error(f"it answered {response.status_code} {response.reason_phrase}".rstrip())
        is_stream = "text/event-stream" in response.headers.get("content-type", "")
        if not is_stream and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = BoundedBody(response.stream)

    return httpx2.AsyncClient(
        # Not compressed: a small body could become a very large one.
        headers=headers | {"Accept-Encoding": "identity"},
        # Each call has its own limit for the answer.
        timeout=httpx2.Timeout(30, read=None),
        event_hooks={"response": [check]},
    )
