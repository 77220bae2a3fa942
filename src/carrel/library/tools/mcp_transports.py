"""The two streams of messages that the MCP SDK wants: over a child's lines, over streamable HTTP, over SSE."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from carrel.errors import ToolCallError
from carrel.library.tools.mcp_process import ServerProcess

if TYPE_CHECKING:
    import httpx2

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
