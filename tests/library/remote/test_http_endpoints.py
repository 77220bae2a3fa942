"""Endpoints of a real HTTP server: what is sent, what comes back, and what goes wrong."""

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from carrel.errors import ConfigurationError, ToolCallError, ToolTimeoutError
from carrel.library.tools.definitions import HttpDefinition
from carrel.library.tools.http import LONGEST_ERROR, LONGEST_ERROR_READ, HttpProvider
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import ToolProvider
from tests.support.ports import free_port
from tests.support.web_server import Answer, WebRequest, WebServer

Serve = Callable[[Callable[[WebRequest], Answer]], WebServer]
ENDPOINTS: dict[str, Any] = {
    "get_repo": {"method": "GET", "path": "/repos/{owner}/{repo}", "description": "Repository metadata"},
    "search": {
        "path": "/search",
        "params": {
            "q": {"type": "string", "required": True, "description": "What to look for"},
            "per-page": {"type": "integer", "default": 30},
            "label": {"type": "array", "items": {"type": "string"}, "name": "labels"},
            "trace": {"in": "header", "name": "X-Trace", "type": "string"},
        },
    },
    "create": {"method": "post", "path": "items", "params": {"name": {"type": "string", "required": True}, "n": {}}},
    "login": {"method": "POST", "path": "/login", "sends": "form", "params": {"user": {}, "pass": {}}},
    "put": {"method": "PUT", "path": "/blob/{id}", "params": {"data": {"in": "payload"}}},
    "head": {"method": "HEAD", "path": "/head", "timeout": 5, "approval": "ask", "headers": {"X-Own": "${KEY}"}},
}


@pytest.fixture
async def service() -> AsyncIterator[Callable[..., HttpProvider]]:
    """The endpoints above at a URL."""
    made: list[HttpProvider] = []

    def make(url: str, **fields: Any) -> HttpProvider:
        headers = {"Authorization": "Bearer ${KEY}"}
        given = {"name": "git", "type": "http", "base_url": url, "headers": headers, "endpoints": ENDPOINTS} | fields
        made.append(HttpProvider(HttpDefinition(**given), Secrets({"KEY": "mellon-mellon"})))
        return made[-1]

    yield make
    for provider in made:
        await provider.close()


async def call(
    provider: HttpProvider, name: str, stream: Callable[[str], None] | None = None, /, **arguments: Any
) -> Any:
    tools = {tool.name: tool for tool in await provider.definitions()}
    return await provider.call(tools[f"git.{name}"], arguments, stream)


async def test_path_parameters_of_an_endpoint_come_first(service: Any) -> None:
    provider = service("http://127.0.0.1:1")
    assert isinstance(provider, ToolProvider)
    tools = {tool.name: tool for tool in await provider.definitions()}
    assert await provider.definitions() is await provider.definitions()
    repo = tools["git.get_repo"]
    assert (repo.description, repo.positional) == ("Repository metadata", ("owner", "repo"))
    assert repo.parameters["required"] == ["owner", "repo"]
    search = tools["git.search"]
    assert search.positional == ("q", "per_page", "label", "trace")
    assert search.parameters["properties"]["q"] == {"type": "string", "description": "What to look for"}
    assert search.parameters["required"] == ["q"]
    assert (tools["git.head"].timeout, tools["git.head"].approval, repo.timeout) == (5, "ask", 60)


async def test_where_arguments_are_sent(web: Serve, service: Any) -> None:
    served = web(lambda request: Answer({"path": request.path}))
    provider = service(f"{served.url}/api/?v=2", query={"key": "${KEY}"})
    assert await call(provider, "get_repo", owner="ada", repo="a/b") == {"path": "/api/repos/ada/a%2Fb"}
    await call(provider, "search", q="x y", label=["a", "b"], trace="t1")
    await call(provider, "create", name="n", n=None)
    await call(provider, "login", user="ada", pass_="p&q")
    await call(provider, "put", id=7, data=b"\x00\x01")
    repo, search, create, login, put = served.requests
    assert repo.headers["authorization"] == "Bearer mellon-mellon"
    assert repo.query == [("v", "2"), ("key", "mellon-mellon")]
    assert search.query[2:] == [("q", "x y"), ("per-page", "30"), ("labels", "a"), ("labels", "b")]
    assert search.headers["x-trace"] == "t1"
    assert (create.method, create.path, create.json) == ("POST", "/api/items", {"name": "n", "n": None})
    assert login.body == b"user=ada&pass=p%26q"
    assert (put.method, put.path, put.body) == ("PUT", "/api/blob/7", b"\x00\x01")


async def test_answers_are_data(web: Serve, service: Any) -> None:
    answers = {
        "/repos/a/json": Answer({"n": 12345678901234567890123}),
        "/repos/a/problem": Answer('{"x": 1}', headers={"content-type": "application/problem+json"}),
        "/repos/a/text": Answer("grüße".encode("latin-1"), headers={"content-type": "text/plain; charset=latin-1"}),
        "/repos/a/bytes": Answer(b"\x89PNG", headers={"content-type": "image/png"}),
        "/repos/a/nothing": Answer(status=204),
        "/head": Answer(headers={"X-Count": "7"}),
    }
    provider = service((served := web(lambda request: answers[request.path])).url)
    assert await call(provider, "get_repo", owner="a", repo="json") == {"n": 12345678901234567890123}
    assert await call(provider, "get_repo", owner="a", repo="problem") == {"x": 1}
    assert await call(provider, "get_repo", owner="a", repo="text") == "grüße"
    assert await call(provider, "get_repo", owner="a", repo="bytes") == b"\x89PNG"
    assert await call(provider, "get_repo", owner="a", repo="nothing") is None
    assert (await call(provider, "head"))["headers"]["x-count"] == "7"
    assert served.requests[-1].headers["x-own"] == "mellon-mellon"


@pytest.mark.parametrize(
    "content_type", ["application/x-ndjson", "application/x-www-form-urlencoded", "application/csv"]
)
async def test_text_in_other_types(web: Serve, service: Any, content_type: str) -> None:
    served = web(lambda _: Answer(b'{"a": 1}\n{"a": 2}\n', headers={"content-type": content_type}))
    assert await call(service(served.url), "get_repo", owner="a", repo="b") == '{"a": 1}\n{"a": 2}\n'


async def test_an_invalid_redirect_is_an_error(web: Serve, service: Any) -> None:
    with pytest.raises(ToolCallError, match="GET /repos/a/b answered 302 Found"):
        await call(service(web(lambda _: Answer(status=302)).url), "get_repo", owner="a", repo="b")


async def test_an_error_has_status_and_answer_but_no_secret(web: Serve, service: Any) -> None:
    def answer(request: WebRequest) -> Answer:
        return Answer(f"no such thing for {request.headers['authorization']}", 404)

    with pytest.raises(ToolCallError) as failed:
        await call(service(web(answer).url), "get_repo", owner="a", repo="b")
    assert str(failed.value) == ("git.get_repo: GET /repos/a/b answered 404 Not Found: no such thing for Bearer ${KEY}")
    assert failed.value.status == 404


async def test_secrets_are_not_substituted_in_arguments(web: Serve, service: Any) -> None:
    served = web(lambda _: Answer({}))
    await call(service(served.url), "search", q="${KEY}", trace="${KEY}")
    assert served.requests[0].query[0] == ("q", "${KEY}")
    assert served.requests[0].headers["x-trace"] == "${KEY}"
    with pytest.raises(ConfigurationError, match="NOT_THERE is not set"):
        await call(service(served.url, headers={"X": "${NOT_THERE}"}), "search", q="x")
    assert len(served.requests) == 1


async def test_faulty_services(web: Serve, service: Any) -> None:
    over = threading.Event()

    def answer(request: WebRequest) -> Answer:
        match request.path.rpartition("/")[2]:
            case "hang":
                over.wait()
                return Answer()
            case "flood":
                return Answer(endless(b"x" * 65536), headers={"content-type": "text/plain"})
            case "drip":
                return Answer(dripping(over), headers={"content-type": "text/plain"})
            case "nonsense":
                return Answer("{oops", headers={"content-type": "application/json"})
            case _:
                return Answer("fine")

    served = web(answer)
    provider, hurried = service(served.url, timeout=60), service(served.url, timeout=0.3)
    try:
        for kind in ("hang", "drip"):
            with pytest.raises(ToolTimeoutError, match=f"GET /repos/a/{kind} took longer than 0.3 s"):
                await call(hurried, "get_repo", owner="a", repo=kind)
        with pytest.raises(ToolCallError, match="answered with more than 32 MiB"):
            await call(provider, "get_repo", owner="a", repo="flood")
        with pytest.raises(ToolCallError, match="invalid JSON"):
            await call(provider, "get_repo", owner="a", repo="nonsense")
        slow = asyncio.create_task(call(provider, "get_repo", owner="a", repo="hang"))
        await asyncio.sleep(0.1)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert await call(provider, "get_repo", owner="a", repo="b") == "fine"
    finally:
        over.set()
    away = service(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ToolCallError, match="GET /repos/a/b could not reach the service"):
        await call(away, "get_repo", owner="a", repo="b")


async def test_text_is_streamed(web: Serve, service: Any) -> None:
    go_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield "grü".encode()[:3]
        go_on.wait()
        yield "ü".encode()[1:] + b"n"

    expected: list[str] = []

    def tell(text: str) -> None:
        expected.append(text)
        go_on.set()

    provider = service(web(lambda _: Answer(pieces(), headers={"content-type": "text/plain"})).url)
    assert await call(provider, "get_repo", tell, owner="a", repo="b") == "grün"
    assert expected == ["gr", "ün"]


async def test_redirects_send_secrets_only_to_the_same_host(web: Serve, service: Any) -> None:
    other = web(lambda request: Answer({"from": request.path}))

    def answer(request: WebRequest) -> Answer:
        match request.path:
            case "/repos/a/near":
                return Answer(status=301, headers={"Location": "/repos/a/found"})
            case "/repos/a/far":
                return Answer(status=302, headers={"Location": f"{other.url}/there"})
            case "/repos/a/round":
                return Answer(status=302, headers={"Location": "/repos/a/round"})
            case "/items":
                return Answer(status=307, headers={"Location": f"{other.url}/there"})
            case _:
                return Answer({"from": request.path})

    served = web(answer)
    provider = service(served.url, headers={"Authorization": "Bearer ${KEY}", "X-Api-Key": "${KEY}"})
    assert await call(provider, "get_repo", owner="a", repo="near") == {"from": "/repos/a/found"}
    assert served.requests[-1].headers["x-api-key"] == "mellon-mellon"
    assert await call(provider, "get_repo", owner="a", repo="far") == {"from": "/there"}
    assert "mellon" not in str(other.requests[0])
    with pytest.raises(ToolCallError, match=r"git\.get_repo: owner cannot be '\.\.', because it would change"):
        await call(provider, "get_repo", owner="..", repo="x")
    with pytest.raises(ToolCallError, match="GET /repos/a/round redirects more than 5 times"):
        await call(provider, "get_repo", owner="a", repo="round")
    with pytest.raises(ToolCallError, match=re.escape("redirects POST to 127.0.0.1, which is not followed")):
        await call(provider, "create", name="x")
    assert len(other.requests) == 1


async def test_a_connection_that_was_closed_is_opened_again(service: Any) -> None:
    lines: list[bytes] = []

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request of a connection, and closes it at the second."""
        lines.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\ndone")
        lines.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    try:
        provider = service(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for number in range(2):
            assert await call(provider, "get_repo", owner="a", repo=str(number)) == "done"
        assert [line.split()[1] for line in lines] == [b"/repos/a/0", b"/repos/a/1", b"/repos/a/1"]
        with pytest.raises(ToolCallError, match="POST /items failed"):
            await call(provider, "create", name="x")
        assert [line.split()[0] for line in lines].count(b"POST") == 1
        await provider.close()
    finally:
        server.close()


async def test_fifty_concurrent_calls(web: Serve, service: Any) -> None:
    together = threading.Barrier(50)

    def answer(_: WebRequest) -> Answer:
        together.wait(60)
        return Answer("done")

    provider = service(web(answer).url)
    calls = (call(provider, "get_repo", owner="a", repo=str(number)) for number in range(50))
    assert await asyncio.gather(*calls) == ["done"] * 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "ftp://x"}, "base_url"),
        ({"name": "list"}, "another name"),
        ({"endpoints": {}}, "endpoints"),
        ({"endpoints": {"a": {"path": "/", "methd": "GET"}}}, "endpoints.a.methd"),
        ({"endpoints": {"a": {"path": "/", "method": "FETCH"}}}, "endpoints.a.method"),
        ({"endpoints": {"a": {"path": "/x", "params": {"y": {"in": "path"}}}}}, "y is a parameter of the path"),
        ({"headers": {"bad name": "x"}}, "headers"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_a_wrong_definition_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"name": "git", "type": "http", "base_url": "http://127.0.0.1:1", "endpoints": ENDPOINTS} | change
    with pytest.raises(ValidationError, match=message):
        HttpDefinition(**given)


def endless(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def dripping(over: threading.Event) -> Iterator[bytes]:
    while not over.wait(0.05):
        yield b"."


@pytest.mark.parametrize("shown", [LONGEST_ERROR, LONGEST_ERROR_READ])
async def test_a_shortened_error_has_no_part_of_a_secret(web: Serve, shown: int) -> None:
    key = "sk-LIVE-0123456789abcdefXYZ"
    served = web(
        lambda request: Answer("~" * int(dict(request.query)["n"]) + request.headers["authorization"], status=400)
    )
    definition = {
        "name": "it",
        "type": "http",
        "base_url": served.url,
        "headers": {"Authorization": "${KEY}"},
        "endpoints": {"get": {"path": "/", "params": {"n": {"type": "integer"}}}},
    }
    endpoints = HttpProvider(HttpDefinition(**definition), Secrets({"KEY": key}))
    try:
        (tool,) = await endpoints.definitions()
        for padding in range(shown - len(key) - 1, shown, 5):
            with pytest.raises(ToolCallError) as failed:
                await endpoints.call(tool, {"n": padding})
            assert key[:5] not in str(failed.value)
    finally:
        await endpoints.close()


async def test_logs_of_requests_have_no_secret(web: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = web(lambda request: Answer({}, headers={"X-Echo": request.headers["authorization"]}))
    definition = {
        "name": "it",
        "type": "http",
        "base_url": served.url,
        "headers": {"Authorization": "${KEY}"},
        "query": {"api_key": "${KEY}"},
        "endpoints": {"get": {"path": "/"}},
    }
    endpoints = HttpProvider(HttpDefinition(**definition), Secrets({"KEY": "sk-LIVE-0123456789"}))
    with caplog.at_level(logging.DEBUG):
        (tool,) = await endpoints.definitions()
        await endpoints.call(tool, {})
        await endpoints.close()
    assert served.requests[0].query == [("api_key", "sk-LIVE-0123456789")]
    assert "api_key=${KEY}" in caplog.text or "api_key=%24%7BKEY%7D" in caplog.text
    assert "LIVE" not in caplog.text


async def test_an_empty_parameter_of_the_base_url_is_sent(web: Serve, service: Any) -> None:
    served = web(lambda _: Answer({}))
    provider = service(f"{served.url}/v1?flag=&key=k")
    await call(provider, "head")
    assert served.requests[0].query == [("flag", ""), ("key", "k")]
