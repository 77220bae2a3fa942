"""One live connection to an MCP server."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from carrel.errors import ConfigurationError, ToolCallError
from carrel.library.tools.definitions import McpDefinition
from carrel.library.tools.secrets import Secrets, redacted_http_logs
from carrel.processes import MARK, child_environment, kill_marked_processes, last_lines, run_in_thread
from carrel.version import __version__

if TYPE_CHECKING:
    import httpx2
    from mcp import Client


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


LONGEST_LINE = 32 * 1024 * 1024
KEPT_COMPLAINTS = 32 * 1024
"""Bytes; much more than is shown, because what is secret in it has to be found before it is cut."""
GRACE = 1.0
"""Seconds that a server has to end by itself, and again after it was told to."""

_POLL = 0.01


class ServerProcess:
    """One server, the head of a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        """`mark`: what it and all it starts have in their environment."""
        self._process = process
        self._mark = mark
        self._complaints = bytearray()
        self._complained = 0
        self._told_to_end = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, command: str, args: Sequence[str], env: Mapping[str, str], cwd: str | None) -> "ServerProcess":
        """Started, or a ToolCallError that says why it cannot be."""
        mark = uuid.uuid4().hex
        cwd = os.path.expanduser(cwd) if cwd else None
        try:
            process = await asyncio.create_subprocess_exec(
                command,
                *args,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=cwd,
                env=child_environment({**env, MARK: mark}),
                start_new_session=True,
            )
        except FileNotFoundError as problem:
            if problem.filename == cwd and cwd is not None:
                raise ToolCallError(f"there is no folder {cwd} to start it in") from None
            raise ToolCallError(
                f"there is no program {command!r}; install it, or put its arguments into args"
            ) from None
        except (OSError, ValueError) as problem:
            raise ToolCallError(f"{command!r} could not be started: {problem}") from None
        return cls(process, mark)

    @property
    def own_exit_code(self) -> int | None:
        """How it ended, when it did so by itself; negative: the signal that ended it."""
        return None if self._told_to_end else self._process.returncode

    @property
    def complaints(self) -> tuple[bytes, bool]:
        """The end of what it wrote to its standard error, and of what it wrote instead of messages; nothing is hidden
        yet. And whether there was more before."""
        return bytes(self._complaints), self._complained > len(self._complaints)

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(65536):
            self._keep(piece)

    def note(self, said: bytes) -> None:
        """Keep something that explains what is wrong with it, as long as nothing newer does."""
        self._keep(said if said.endswith(b"\n") else said + b"\n")

    def _keep(self, said: bytes) -> None:
        self._complained += len(said)
        self._complaints += said[-KEPT_COMPLAINTS:]
        del self._complaints[:-KEPT_COMPLAINTS]

    async def lines(self) -> AsyncIterator[bytes]:
        """What it writes, line by line, until it writes no more; ToolCallError for a line without end."""
        assert self._process.stdout is not None
        begun: list[bytes] = []
        size = 0
        while piece := await self._process.stdout.read(65536):
            head, *others = piece.split(b"\n")
            begun.append(head)
            size += len(head)
            if size > LONGEST_LINE:
                raise ToolCallError(f"it wrote a line of more than {LONGEST_LINE // 2**20} MiB")
            if not others:
                continue
            *whole, rest = others
            for line in (b"".join(begun), *whole):
                if line.strip():
                    yield line
            begun, size = [rest], len(rest)

    async def write(self, line: bytes) -> None:
        """One line to it; OSError when it does not listen any more."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def end(self) -> None:
        """No more words to it, then a request to end, then force: to the whole group, so that nothing stays.

        Nobody may be reading its lines any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # Else one that still writes would wait for somebody to read, and not end.
        draining = asyncio.create_task(self._drain())
        await self._ended(GRACE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._told_to_end = self._told_to_end or self._process.returncode is None
            if not self._signalled(number):
                break
            await self._ended(GRACE, group=True)
        # Some leave the group, on purpose or as daemons do.
        await run_in_thread(lambda: kill_marked_processes(self._mark))
        with contextlib.suppress(TimeoutError):
            # What it said last explains its end; somebody who left the group may keep the pipe open.
            async with asyncio.timeout(0.2):
                await asyncio.shield(self._listening)
        for task in (draining, self._listening):
            task.cancel()
        await asyncio.gather(draining, self._listening, return_exceptions=True)
        # Nothing public closes the pipes when somebody who left the group holds their other end.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(65536):
            pass

    async def _ended(self, seconds: float, group: bool = False) -> None:
        # Not Process.wait: that also waits for the pipes, which a child of the server may hold.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._process.returncode is None or (group and self._signalled(0)):  # noqa: ASYNC110 -- nobody tells
                    await asyncio.sleep(_POLL)

    def _signalled(self, number: int) -> bool:
        """False when nobody of the group is left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


MOST_NONSENSE = 1000
"""Lines in a row that are no message: some servers print a banner, none prints this much."""
MOST_UNASKED = 20_000
"""Messages in a row that answer nothing and tell of no progress."""
LARGEST_ANSWER = 32 * 1024 * 1024

_SHOWN = 200
_ID = re.compile(rb'"id"\s*:\s*(\d{1,15}|"[A-Za-z0-9_-]{1,100}")')

Tell = Callable[[str], None]
Hide = Callable[[bytes], bytes]


@contextlib.asynccontextmanager
async def over_process(process: ServerProcess, gone: Tell, hide: Hide) -> AsyncIterator[Any]:
    """`gone` is told once, in words, when no more will come from it; `hide` clears those of what is secret.

    The SDK has one of its own; this one bounds what a server can make us hold, and keeps what it complains."""
    import anyio  # noqa: PLC0415 -- comes with the SDK

    heard_in, heard = anyio.create_memory_object_stream[Any](0)
    said, said_out = anyio.create_memory_object_stream[Any](0)

    async def hear() -> None:
        why = "it ended"
        try:
            await _hear(process, heard_in, hide)
        except ToolCallError as problem:
            why = str(problem)
        gone(why)
        # Whoever waits for an answer learns that none will come.
        heard_in.close()

    async def say() -> None:
        try:
            async for message in said_out:
                await process.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
        except OSError:
            # It does not listen any more, though it may still run.
            gone("it ended")
            heard_in.close()

    tasks = [asyncio.create_task(hear()), asyncio.create_task(say())]
    try:
        yield heard, said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (heard_in, heard, said, said_out):
            stream.close()


async def _hear(process: ServerProcess, heard: Any, hide: Hide) -> None:
    import anyio  # noqa: PLC0415 -- comes with the SDK
    from mcp import types  # noqa: PLC0415 -- a second to load, and not every session has a server
    from mcp.shared.message import SessionMessage  # noqa: PLC0415 -- see above

    nonsense = unasked = 0
    async for line in process.lines():
        try:
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError as problem:
            asked = id_of(line)
            if asked is not None:
                # An answer all the same: whoever asked shall not wait for another.
                fault = types.ErrorData(
                    code=types.INTERNAL_ERROR, message=f"its answer is no MCP result: {_fault(problem)}"
                )
                await heard.send(SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=asked, error=fault)))
                continue
            process.note(line)
            nonsense += 1
            if nonsense >= MOST_NONSENSE:
                raise ToolCallError(f"what it writes is no MCP: {_shown(hide(line))}") from None
            continue
        nonsense = 0
        method = getattr(message, "method", None)
        if method != "notifications/progress":
            unasked = 0 if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) else unasked + 1
        if unasked >= MOST_UNASKED:
            raise ToolCallError(f"it sent {unasked} messages that answer nothing")
        if method == "notifications/message":
            continue  # its log, which nobody here reads
        try:
            await heard.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


def id_of(line: bytes) -> int | str | None:
    """Which question a line answers that is no message as MCP has them; None when it answers none."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        # Nested too deeply to be read, perhaps; what it answers stands at its beginning or its end.
        edges = line[:_SHOWN] + b" " + line[-_SHOWN:]
        found = _ID.search(edges) if b'"result"' in edges or b'"error"' in edges else None
        said = {"id": json.loads(found[1]), "result": None} if found else None
    if not isinstance(said, dict) or not {"result", "error"} & said.keys():
        return None
    asked = said.get("id")
    return asked if isinstance(asked, int | str) and not isinstance(asked, bool) else None


def _fault(problem: ValueError) -> str:
    told = getattr(problem, "errors", None)
    if not callable(told):
        return str(problem)
    # Of pydantic: several for each kind of message that it could have been.
    faults = told(include_input=False)
    return str(next((fault for fault in faults if "result" in fault["loc"]), faults[0])["msg"])


def _shown(line: bytes) -> str:
    return repr(line[:_SHOWN].decode("utf-8", "replace"))


@contextlib.asynccontextmanager
async def over_http(url: str, headers: dict[str, str], refused: Tell) -> AsyncIterator[Any]:
    """`refused` is told each answer that is an error: the SDK says only that there was one."""
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415 -- see above

    async with (
        _client(headers, refused) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=LARGEST_ANSWER) as streams,
    ):
        yield streams


def over_sse(url: str, own: dict[str, str], refused: Tell) -> contextlib.AbstractAsyncContextManager[Any]:
    """The older way; `refused` as above."""
    from mcp.client.sse import sse_client  # noqa: PLC0415 -- see above

    def client(headers: Any = None, timeout: Any = None, auth: Any = None) -> "httpx2.AsyncClient":
        return _client(own, refused)

    return sse_client(url, httpx_client_factory=client)


def _client(headers: dict[str, str], refused: Tell) -> "httpx2.AsyncClient":
    import httpx2  # noqa: PLC0415 -- slow to load

    class Bounded(httpx2.AsyncByteStream):
        """A body that ends in an error when it does not end by itself."""

        def __init__(self, body: httpx2.AsyncByteStream) -> None:
            self._body = body

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = LARGEST_ANSWER
            async for piece in self._body:
                left -= len(piece)
                if left < 0:
                    raise httpx2.StreamError(f"it answered with more than {LARGEST_ANSWER // 2**20} MiB")
                yield piece

        async def aclose(self) -> None:
            await self._body.aclose()

    async def look(response: httpx2.Response) -> None:
        if response.status_code >= 400:
            refused(f"it answered {response.status_code} {response.reason_phrase}".rstrip())
        streams = "text/event-stream" in response.headers.get("content-type", "")
        if not streams and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = Bounded(response.stream)

    return httpx2.AsyncClient(
        # Not compressed: a small body could become a very large one.
        headers=headers | {"Accept-Encoding": "identity"},
        # How long an answer may take is each call's own matter.
        timeout=httpx2.Timeout(30, read=None),
        event_hooks={"response": [look]},
    )


LONGEST_COMPLAINTS = 4000
GOODBYE = 2.0
"""Seconds for a server that is elsewhere to take note that we go."""

_UNSAID = frozenset(("Server returned an error response", "Not Found", "Session terminated"))
"""What the SDK says of an answer that is an error, whatever it was."""
_NOT_LET_IN = ("it answered 401", "it answered 403")

logger = logging.getLogger(__name__)


class McpConnection:
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
            await run_in_thread(lambda: import_module("mcp"))
            async with asyncio.timeout(given.startup_timeout):
                with redacted_http_logs(self._secrets):
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
            me = types.Implementation(name="carrel", version=__version__)
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
