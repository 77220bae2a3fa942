"""Tools of an HTTP service: its endpoints, the client they share, and answers as data."""

import asyncio
import codecs
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from carrel.errors import ToolCallError, ToolTimeoutError
from carrel.library.names import python_names
from carrel.library.tools.definitions import Endpoint, HttpDefinition
from carrel.library.tools.http_request import UNSET, ApiOperation, HttpRequest, Place, RequestParameter, build_request
from carrel.library.tools.secrets import Secrets, redacted_http_logs
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, run_in_thread

if TYPE_CHECKING:
    import httpx2

_TEXT = (
    "text/",
    "application/csv",
    "application/graphql",
    "application/javascript",
    "application/jsonl",
    "application/ndjson",
    "application/toml",
    "application/x-ndjson",
    "application/x-www-form-urlencoded",
    "application/x-yaml",
    "application/xml",
    "application/yaml",
)
_TEXT_ENDS = ("+xml", "+yaml")


def is_json(content_type: str) -> bool:
    kind = _kind(content_type)
    return kind == "application/json" or kind.endswith("+json")


def is_text(content_type: str) -> bool:
    kind = _kind(content_type)
    return is_json(kind) or kind.startswith(_TEXT) or kind.endswith(_TEXT_ENDS)


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def value_of(content_type: str, charset: str, body: bytes) -> Any:
    """JSON as data, text as text, anything else as bytes; nothing is None. `ValueError` for JSON that is none."""
    if not body:
        return None
    if is_json(content_type):
        return json.loads(body)
    if is_text(content_type):
        return decoded(body, charset)
    if not content_type:
        try:
            return body.decode()
        except UnicodeDecodeError:
            return body
    return body


def decoded(body: bytes, charset: str) -> str:
    """The text, in the charset it claims where there is one."""
    try:
        return body.decode(charset or "utf-8", "replace")
    except LookupError:
        return body.decode("utf-8", "replace")


LARGEST_ANSWER = 32 * 1024 * 1024
MOST_REDIRECTS = 5
LONGEST_COMPLAINT = 2000
LONGEST_READ = 64 * 1024
"""Bytes of a complaint that are read at all."""

_LEADS_ELSEWHERE = frozenset((301, 302, 303, 307, 308))
"""What is left of these says not where."""
_HARMLESS_TWICE = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "QUERY"))


class HttpClient:
    """What all calls of one definition share."""

    def __init__(self, secrets: Secrets, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
        self._secrets = secrets
        self._headers = headers
        self._query = query
        self._client: httpx2.AsyncClient | None = None
        self._closed = False

    async def call(
        self,
        tool: Tool,
        base_url: str,
        operation: ApiOperation,
        arguments: Mapping[str, Any],
        stream: OnOutput | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer as data; `ToolCallError` with its status when that is an error.

        `headers`: more that the definition sends; only in what it says are secrets filled in, never in arguments."""
        try:
            request = build_request(operation, arguments)
        except ToolCallError as problem:
            raise ToolCallError(f"{tool.name}: {problem}") from None
        what = f"{request.method} {request.path}"
        try:
            async with asyncio.timeout(tool.timeout):
                fixed = self._secrets.fill_headers({**self._headers, **(headers or {})})
                with redacted_http_logs(self._secrets):
                    return await self._call(f"{tool.name}: {what}", base_url, request, fixed, stream)
        except TimeoutError:
            raise ToolTimeoutError(f"{tool.name}: {what} took longer than {tool.timeout:g} s") from None

    async def fetch(self, url: str, seconds: float) -> bytes:
        """What is at a URL, asked without the service's secrets."""
        client = await self._opened()
        try:
            async with asyncio.timeout(seconds):
                response = await self._sent(client, client.build_request("GET", url), frozenset())
                body = await self._read(response, None)
        except TimeoutError:
            raise ToolCallError(f"{url} did not answer within {seconds:g} s") from None
        except _failures() as problem:
            raise ToolCallError(f"{url} {_words(problem)}") from None
        if response.status_code >= 400:
            raise ToolCallError(f"{url} answered {response.status_code} {response.reason_phrase}".rstrip())
        return body

    async def close(self) -> None:
        """Let go of the connections; twice is harmless."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _opened(self) -> "httpx2.AsyncClient":
        if self._closed:
            raise ToolCallError("the session that this tool belonged to was closed")
        if self._client is None:
            httpx2 = await run_in_thread(lambda: import_module("httpx2"))
            # How long an answer may take is each call's own matter.
            self._client = self._client or httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=30))
        return self._client

    async def _call(
        self, what: str, base_url: str, request: HttpRequest, fixed: Mapping[str, str], stream: OnOutput | None
    ) -> Any:
        client = await self._opened()
        url = urlsplit(base_url)
        query: list[Any] = [
            *parse_qsl(url.query, keep_blank_values=True),
            *self._secrets.fill_all(self._query).items(),
            *request.query,
        ]
        settled = {name.lower() for name in fixed}
        asked = {name: value for name, value in request.headers.items() if name.lower() not in settled}
        whole = url._replace(path=url.path.rstrip("/") + request.path, query="", fragment="").geturl()
        try:
            given = client.build_request(
                request.method,
                whole,
                params=query or None,
                headers={"Accept": "application/json, */*;q=0.8", **asked, **fixed},
                content=request.content,
            )
            response = await self._sent(client, given, frozenset(name.lower() for name in (*fixed, *asked)))
            body = await self._read(response, stream)
        except _failures() as problem:
            raise ToolCallError(self._secrets.hide(f"{what} {_words(problem)}")) from None
        kind = response.headers.get("content-type", "")
        if response.status_code >= 400 or response.status_code in _LEADS_ELSEWHERE:
            raise self._refused(what, response, body)
        if request.method == "HEAD":
            return {"status": response.status_code, "headers": dict(response.headers)}
        try:
            return value_of(kind, response.charset_encoding or "", body)
        except (ValueError, RecursionError) as problem:
            raise ToolCallError(f"{what} answered with what it calls JSON and is none: {problem}") from None

    def _refused(self, what: str, response: "httpx2.Response", body: bytes) -> ToolCallError:
        # What is secret goes before the rest is cut off, and here also where it is cut off first.
        part = decoded(body[:LONGEST_READ], response.charset_encoding or "").encode("utf-8", "replace")
        clear = self._secrets.hide_cut(part, end=len(body) > LONGEST_READ)
        said = clear.decode("utf-8", "replace").strip()[:LONGEST_COMPLAINT]
        text = self._secrets.hide(f"{what} answered {response.status_code} {response.reason_phrase}".rstrip())
        problem = ToolCallError(f"{text}: {said}" if said else text)
        problem.status = response.status_code
        return problem

    async def _sent(
        self, client: "httpx2.AsyncClient", request: "httpx2.Request", private: frozenset[str]
    ) -> "httpx2.Response":
        """The answer, its body unread. Redirects are followed; to another host without what is private."""
        for _ in range(MOST_REDIRECTS + 1):
            response = await _answered(client, request)
            following = response.next_request
            if following is None:
                return response
            await response.aclose()
            before, after = request.url, following.url
            if (before.scheme, before.host, before.port) != (after.scheme, after.host, after.port):
                if following.method not in ("GET", "HEAD") or (before.scheme, after.scheme) == ("https", "http"):
                    raise ToolCallError(f"redirects {request.method} to {after.host}, which is not followed")
                for name in {*private, "authorization", "cookie"} & set(following.headers):
                    del following.headers[name]
            request = following
        raise ToolCallError(f"redirects more than {MOST_REDIRECTS} times")

    async def _read(self, response: "httpx2.Response", stream: OnOutput | None) -> bytes:
        told = stream if is_text(response.headers.get("content-type", "")) else None
        words = codecs.getincrementaldecoder("utf-8")("replace")
        body = bytearray()
        try:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > LARGEST_ANSWER:
                    raise ToolCallError(f"answered with more than {LARGEST_ANSWER // 2**20} MiB")
                if told is not None and (text := words.decode(piece)):
                    told(text)
        finally:
            await response.aclose()
        return bytes(body)


async def _answered(client: "httpx2.AsyncClient", request: "httpx2.Request") -> "httpx2.Response":
    """The answer, its body unread. A kept connection that the service had closed just then costs no call:

    it is asked once more where asking twice does no more than asking once."""
    import httpx2  # noqa: PLC0415 -- loaded by now

    try:
        return await client.send(request, stream=True, follow_redirects=False)
    except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
        if request.method not in _HARMLESS_TWICE:
            raise
        return await client.send(request, stream=True, follow_redirects=False)


def _failures() -> tuple[type[Exception], ...]:
    import httpx2  # noqa: PLC0415 -- loaded by now; slow where it is not needed

    return (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ToolCallError, OSError)


def _words(problem: Exception) -> str:
    if isinstance(problem, ToolCallError):
        return str(problem)
    if type(problem).__name__ in ("ConnectError", "ConnectTimeout"):
        return f"could not reach the service: {problem}"
    return f"failed: {str(problem) or type(problem).__name__}"


FORM = "application/x-www-form-urlencoded"
_IN_QUERY = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
_PATH_VALUE: Mapping[str, Any] = {"type": ["string", "integer"]}
"""Of a parameter that stands in the path and is described nowhere."""


class HttpProvider:
    """A service and what can be asked of it."""

    def __init__(self, definition: HttpDefinition, secrets: Secrets) -> None:
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._caller = HttpClient(secrets, definition.headers, definition.query)
        self._operations: dict[str, tuple[ApiOperation, Mapping[str, str]]] = {}
        self._tools = [self._learned(word, name) for word, name in python_names(definition.endpoints).items()]

    def _learned(self, word: str, name: str) -> Tool:
        given, endpoint = self._definition, self._definition.endpoints[name]
        operation, parameters = operation_of(endpoint)
        tool = Tool(
            name=f"{self.name}.{word}",
            description=endpoint.description,
            parameters=parameters,
            positional=tuple(parameters["properties"]),
            tags=(*given.tags, *endpoint.tags),
            approval=endpoint.approval or given.approval,
            timeout=endpoint.timeout or given.timeout,
            stream=given.stream,
        )
        self._operations[tool.name] = operation, endpoint.headers
        return tool

    async def definitions(self) -> Sequence[Tool]:
        """Always the same; nothing has to run for that."""
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
        """The service's answer: JSON as data, text as text, anything else as bytes."""
        operation, headers = self._operations[tool.name]
        return await self._caller.call(tool, self._definition.base_url, operation, arguments, stream, headers)

    async def close(self) -> None:
        await self._caller.close()


def operation_of(endpoint: Endpoint) -> tuple[ApiOperation, dict[str, Any]]:
    """The request an endpoint stands for, and the schema of its arguments: those of the path first."""
    in_path = endpoint.path_names
    described = {given.name or name: name for name, given in endpoint.params.items()}
    undescribed = [name for name in in_path if name not in described]
    names = [described.get(name, name) for name in in_path]
    names += [name for name in endpoint.params if name not in names]
    properties: dict[str, Any] = {}
    required: list[str] = []
    parts: list[RequestParameter] = []
    for word, name in python_names(names).items():
        given = endpoint.params.get(name)
        schema = dict(_PATH_VALUE) if given is None else given.value_schema
        wire = (given.name if given is not None else None) or name
        place: Place = "path" if wire in in_path else (given.place if given is not None else None) or _usual(endpoint)
        default = schema.get("default", UNSET)
        properties[word] = schema
        if default is UNSET and (name in undescribed or place == "path" or (given is not None and given.required)):
            required.append(word)
        parts.append(RequestParameter(word, wire, place, default, style="simple" if place == "path" else "form"))
    operation = ApiOperation(
        method=endpoint.method,
        path=endpoint.path if endpoint.path.startswith("/") else f"/{endpoint.path}",
        parts=tuple(parts),
        content_type=FORM if endpoint.sends == "form" else "application/json",
    )
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return operation, schema


def _usual(endpoint: Endpoint) -> Place:
    return "query" if endpoint.method in _IN_QUERY else "body"
