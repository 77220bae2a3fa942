"""MCP servers behind HTTP that are away, refuse, forget, hang or speak nonsense."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from carrel.errors import ConfigurationError, ToolCallError, ToolTimeoutError
from carrel.library.tools.definitions import McpDefinition
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from tests.support.ports import free_port
from tests.support.web_server import Answer, WebRequest, WebServer

Serve = Callable[[Callable[[WebRequest], Answer]], WebServer]
ECHO = Tool(name="far.echo", timeout=60)


@pytest.fixture
async def far() -> Any:
    """A provider of whatever is at a URL."""
    made: list[McpProvider] = []

    def make(url: str, environment: dict[str, str] | None = None, **fields: Any) -> McpProvider:
        fields = {"transport": "http", "startup_timeout": 60} | fields
        secrets = Secrets({"KEY": "mellon-mellon"} if environment is None else environment)
        made.append(McpProvider(McpDefinition(name="far", type="mcp", url=url, **fields), secrets, ping_timeout=1))
        return made[-1]

    yield make
    for server in made:
        await server.close()


class Session:
    """An older MCP server, one request and one JSON answer at a time; it knows a connection by its number."""

    def __init__(self) -> None:
        self.number = 1
        self.calls: Callable[[WebRequest], Answer] = lambda request: self.result(request, "hello")

    @staticmethod
    def result(request: WebRequest, text: str) -> Answer:
        result = {"content": [{"type": "text", "text": text}]}
        return Answer({"jsonrpc": "2.0", "id": request.json["id"], "result": result})

    def __call__(self, request: WebRequest) -> Answer:
        if request.method != "POST":
            return Answer(status=405)
        message = request.json
        if "id" not in message:
            return Answer(status=202)
        if message["method"] == "initialize":
            result: dict[str, Any] = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "session", "version": "1"},
            }
            headers = {"Mcp-Session-Id": str(self.number)}
            return Answer({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers)
        if message["method"] == "server/discover":
            return Answer(status=400)
        if request.headers.get("mcp-session-id") != str(self.number):
            return Answer(status=404)
        if message["method"] == "tools/list":
            tools = [{"name": "echo", "inputSchema": {"type": "object"}}]
            return Answer({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools}})
        return self.calls(request)


async def test_a_forgotten_session_is_initialized_again(web: Serve, far: Any) -> None:
    session = Session()
    served = web(session)
    server = far(served.url, headers={"Authorization": "Bearer ${KEY}"})
    assert await server.call(ECHO, {}) == "hello"
    session.number = 2
    assert await server.call(ECHO, {}) == "hello"
    assert {request.headers["authorization"] for request in served.requests} == {"Bearer mellon-mellon"}


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_an_unreachable_server_is_named_and_used_when_it_answers(far: Any, transport: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    server = far(f"http://{address}/mcp", transport=transport)
    with pytest.raises(ToolCallError, match=f"the MCP server far did not start: could not connect to {address}"):
        await server.definitions()


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_a_server_that_refuses_access(web: Serve, far: Any, transport: str) -> None:
    server = far(web(lambda _: Answer("who are you?", 401)).url, transport=transport)
    with pytest.raises(ToolCallError, match="the MCP server far did not start: it answered 401 Unauthorized"):
        await server.definitions()


async def test_an_earlier_refusal_is_not_the_reason_of_a_later_end(web: Serve, far: Any) -> None:
    served = web(Session())
    server = far(served.url)
    assert await server.call(ECHO, {}) == "hello"
    served.close()
    with pytest.raises(ToolCallError, match="could not connect to"):
        await server.call(ECHO, {})
    wrong = far(web(lambda _: Answer(status=404)).url)
    with pytest.raises(ToolCallError, match="far did not start: it answered 404 Not Found"):
        await wrong.definitions()


@pytest.mark.parametrize("body", ["<html>hello</html>", {"no": "message"}])
async def test_a_service_that_is_not_an_mcp_server(web: Serve, far: Any, body: Any) -> None:
    with pytest.raises(ToolCallError, match="the MCP server far did not start: "):
        await far(web(lambda _: Answer(body)).url).definitions()


async def test_a_failed_call_over_http(web: Serve, far: Any) -> None:
    session = Session()
    server = far(web(session).url)
    assert await server.call(ECHO, {}) == "hello"
    session.calls = lambda _: Answer("out of order", 503)
    with pytest.raises(ToolCallError, match=r"far failed in far\.echo: it answered 503 Service Unavailable"):
        await server.call(ECHO, {})
    session.calls = lambda _: Answer("{", headers={"content-type": "application/json"})
    with pytest.raises(ToolCallError, match=r"far failed in far\.echo: its answer is not valid MCP, or not JSON$"):
        await server.call(ECHO, {})
    session.calls = lambda _: Answer(endless(b"x" * 65536), headers={"content-type": "application/json"})
    with pytest.raises(ToolCallError, match=r"far failed in far\.echo: .*more than 32 MiB"):
        await server.call(ECHO, {})
    session.calls = lambda request: session.result(request, "again")
    assert await server.call(ECHO, {}) == "again"


async def test_a_server_that_hangs_ends_the_call_with_its_timeout(web: Serve, far: Any) -> None:
    session, over = Session(), threading.Event()
    server = far(web(session).url)
    assert await server.call(ECHO, {}) == "hello"

    def hang(request: WebRequest) -> Answer:
        over.wait()
        return session.result(request, "late")

    session.calls = hang
    try:
        with pytest.raises(ToolTimeoutError, match=r"far\.echo took longer than 0\.3 s"):
            await server.call(Tool(name="far.echo", timeout=0.3), {})
        session.calls = lambda request: session.result(request, "again")
        assert await server.call(ECHO, {}) == "again"
    finally:
        over.set()


async def test_closing_does_not_wait_for_a_server(web: Serve, far: Any) -> None:
    session, over = Session(), threading.Event()

    def answer(request: WebRequest) -> Answer:
        if request.method == "DELETE":
            over.wait()
        return session(request)

    served = web(answer)
    server = far(served.url)
    assert await server.call(ECHO, {}) == "hello"
    try:
        await asyncio.wait_for(server.close(), 60)
    finally:
        over.set()
    assert "DELETE" in [request.method for request in served.requests]


async def test_a_server_that_never_answers(web: Serve, far: Any) -> None:
    over = threading.Event()

    def answer(_: WebRequest) -> Answer:
        over.wait()
        return Answer()

    try:
        with pytest.raises(ToolCallError, match=r"far did not start: it did not start within 0\.5 s"):
            await far(web(answer).url, startup_timeout=0.5).definitions()
    finally:
        over.set()


async def test_a_server_that_ended_between_two_calls(start_official: Any, far: Any) -> None:
    port = free_port()
    process = await start_official("http", port)
    server = far(f"http://127.0.0.1:{port}/mcp")
    hello = Tool(name="far.say-hello")
    assert await server.call(hello, {"name": "Ada"}) == "hello Ada"
    process.kill()
    await process.wait()
    with pytest.raises(ToolCallError, match="could not connect to"):
        await server.call(hello, {"name": "Ada"})
    await start_official("http", port)
    assert await server.call(hello, {"name": "Bob"}) == "hello Bob"


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_a_server_that_was_restarted_between_two_calls(
    start_official: Any, far: Any, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    process = await start_official(transport, port)
    server = far(f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}", transport=transport)
    hello = Tool(name="far.say-hello", timeout=60)
    assert await server.call(hello, {"name": "Ada"}) == "hello Ada"
    process.kill()
    await process.wait()
    await start_official(transport, port)
    assert await server.call(hello, {"name": "Bob"}) == "hello Bob"
    assert [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def endless(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


async def test_a_changed_secret_is_used_when_the_old_one_is_refused(web: Serve, far: Any) -> None:
    session, environment = Session(), {"KEY": "mellon-mellon"}
    wanted = "mellon-mellon"

    def let_in(request: WebRequest) -> Answer:
        return session(request) if request.headers.get("authorization") == f"Bearer {wanted}" else Answer(status=401)

    server = far(web(let_in).url, environment, headers={"Authorization": "Bearer ${KEY}"})
    assert await server.call(ECHO, {}) == "hello"
    wanted = "annon-edhellen"
    with pytest.raises(ToolCallError, match="it answered 401 Unauthorized"):
        await server.call(ECHO, {})
    # With the line break of the file that it was read from.
    environment["KEY"] = f"{wanted}\n"
    assert await server.call(ECHO, {}) == "hello"
    wanted = environment["KEY"] = "edro-hi-ammen"
    assert [tool.name for tool in await server.definitions()] == ["far.echo"]


@pytest.mark.parametrize("secret", ["mellon\r\nX-Other: 1", "m\u00e9llon-mellon"])
async def test_an_invalid_header_is_named_without_its_secret(
    web: Serve, far: Any, caplog: pytest.LogCaptureFixture, secret: str
) -> None:
    caplog.set_level("DEBUG")
    served = web(Session())
    server = far(served.url, {"KEY": secret}, headers={"Authorization": "Bearer ${KEY}"})
    message = r"the header Authorization cannot be sent: the value of 'Bearer \$\{KEY\}'"
    with pytest.raises(ConfigurationError, match=message) as raised:
        await server.call(ECHO, {})
    assert "llon" not in caplog.text + str(raised.value)
    assert served.requests == []


async def test_a_broken_connection_is_opened_again(web: Serve, far: Any) -> None:
    session = Session()
    asks = {"jsonrpc": "2.0", "id": "s", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 5}}

    def served(request: WebRequest) -> Answer:
        if request.method == "POST" and "method" not in request.json:
            raise ConnectionResetError("it does not want to be answered")
        return session(request)

    def ask(request: WebRequest) -> Answer:
        return Answer(f"data: {json.dumps(asks)}\n\n", headers={"content-type": "text/event-stream"})

    server = far(web(served).url)
    session.calls = ask
    with pytest.raises(ToolCallError, match="The next call starts it again"):
        await server.call(ECHO, {})
    session.calls = lambda request: session.result(request, "hello again")
    assert await server.call(ECHO, {}) == "hello again"
