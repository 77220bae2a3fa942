"""Tools of an HTTP service: its endpoints, the client they share, and its answers as data."""

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
from carrel.library.tools.http_request import (
    UNSET,
    ApiOperation,
    HttpRequest,
    Location,
    RequestParameter,
    build_request,
)
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


def parse_body(content_type: str, charset: str, body: bytes) -> Any:
    """Return JSON as data, text as str, an empty body as None, and anything else as bytes; `ValueError` for invalid
    JSON."""
    if not body:
        return None
    if is_json(content_type):
        return json.loads(body)
    if is_text(content_type):
        return decode(body, charset)
    if not content_type:
        try:
            return body.decode()
        except UnicodeDecodeError:
            return body
    return body


def decode(body: bytes, charset: str) -> str:
    """Decode a text in its declared charset, if that is known."""
    try:
        return body.decode(charset or "utf-8", "replace")
    except LookupError:
        return body.decode("utf-8", "replace")


LARGEST_ANSWER = 32 * 1024 * 1024
MOST_REDIRECTS = 5
LONGEST_ERROR = 2000
"""Characters of the answer in the message of an error."""
LONGEST_ERROR_READ = 64 * 1024
"""Bytes of the answer that are decoded for that."""

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_REPEATABLE = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "QUERY"))


class HttpClient:
    """The HTTP client of one definition."""

    def __init__(self, secrets: Secrets, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
        self._secrets = secrets
        self._headers = headers
        self._query = query
        self._client: httpx2.AsyncClient | None = None
        self._is_closed = False

    async def call(
        self,
        tool: Tool,
        base_url: str,
        operation: ApiOperation,
        arguments: Mapping[str, Any],
        on_output: OnOutput | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the answer as data; `ToolCallError` with its status when that is an error.

        `headers`: further headers of the definition; secrets are substituted in these, never in arguments."""
        try:
            request = build_request(operation, arguments)
        except ToolCallError as error:
            raise ToolCallError(f"{tool.name}: {error}") from None
        label = f"{tool.name}: {request.method} {request.path}"
        try:
            async with asyncio.timeout(tool.timeout):
                fixed = self._secrets.substitute_headers({**self._headers, **(headers or {})})
                with redacted_http_logs(self._secrets):
                    return await self._call(label, base_url, request, fixed, on_output)
        except TimeoutError:
            raise ToolTimeoutError(f"{label} took longer than {tool.timeout:g} s") from None

    async def fetch(self, url: str, seconds: float) -> bytes:
        """Return the body at a URL; the request contains none of the service's secrets."""
        client = await self._open()
        try:
            async with asyncio.timeout(seconds):
                response = await self._send(client, client.build_request("GET", url), frozenset())
                body = await self._read(response, None)
        except TimeoutError:
            raise ToolCallError(f"{url} did not answer within {seconds:g} s") from None
        except _http_errors() as error:
            raise ToolCallError(f"{url} {_describe(error)}") from None
        if response.status_code >= 400:
            raise ToolCallError(f"{url} answered {response.status_code} {response.reason_phrase}".rstrip())
        return body

    async def close(self) -> None:
        """Close the connections; closing twice has no effect."""
        self._is_closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _open(self) -> "httpx2.AsyncClient":
        if self._is_closed:
            raise ToolCallError("the session of this tool is closed")
        if self._client is None:
            httpx2 = await run_in_thread(lambda: import_module("httpx2"))
            # Each call has its own limit for the answer.
            self._client = self._client or httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=30))
        return self._client

    async def _call(
        self, label: str, base_url: str, request: HttpRequest, fixed: Mapping[str, str], on_output: OnOutput | None
    ) -> Any:
        client = await self._open()
        url = urlsplit(base_url)
        query: list[Any] = [
            *parse_qsl(url.query, keep_blank_values=True),
            *self._secrets.substitute_all(self._query).items(),
            *request.query,
        ]
        fixed_names = {name.lower() for name in fixed}
        own = {name: value for name, value in request.headers.items() if name.lower() not in fixed_names}
        target = url._replace(path=url.path.rstrip("/") + request.path, query="", fragment="").geturl()
        try:
            built = client.build_request(
                request.method,
                target,
                params=query or None,
                headers={"Accept": "application/json, */*;q=0.8", **own, **fixed},
                content=request.content,
            )
            response = await self._send(client, built, frozenset(name.lower() for name in (*fixed, *own)))
            body = await self._read(response, on_output)
        except _http_errors() as error:
            raise ToolCallError(self._secrets.redact(f"{label} {_describe(error)}")) from None
        kind = response.headers.get("content-type", "")
        if response.status_code >= 400 or response.status_code in _REDIRECTS:
            raise self._error(label, response, body)
        if request.method == "HEAD":
            return {"status": response.status_code, "headers": dict(response.headers)}
        try:
            return parse_body(kind, response.charset_encoding or "", body)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"{label} answered with invalid JSON: {error}") from None

    def _error(self, label: str, response: "httpx2.Response", body: bytes) -> ToolCallError:
        # Redacted before it is shortened: a part of a secret would not be recognized.
        text = decode(body[:LONGEST_ERROR_READ], response.charset_encoding or "").encode("utf-8", "replace")
        redacted = self._secrets.redact_piece(text, cut_end=len(body) > LONGEST_ERROR_READ)
        answer = redacted.decode("utf-8", "replace").strip()[:LONGEST_ERROR]
        status = self._secrets.redact(f"{label} answered {response.status_code} {response.reason_phrase}".rstrip())
        error = ToolCallError(f"{status}: {answer}" if answer else status)
        error.status = response.status_code
        return error

    async def _send(
        self, client: "httpx2.AsyncClient", request: "httpx2.Request", private: frozenset[str]
    ) -> "httpx2.Response":
        """Return the answer with its body unread. Redirects are followed; to another host without `private` headers."""
        for _ in range(MOST_REDIRECTS + 1):
            response = await _send_once_or_twice(client, request)
            redirected = response.next_request
            if redirected is None:
                return response
            await response.aclose()
            before, after = request.url, redirected.url
            if (before.scheme, before.host, before.port) != (after.scheme, after.host, after.port):
                if redirected.method not in ("GET", "HEAD") or (before.scheme, after.scheme) == ("https", "http"):
                    raise ToolCallError(f"redirects {request.method} to {after.host}, which is not followed")
                for name in {*private, "authorization", "cookie"} & set(redirected.headers):
                    del redirected.headers[name]
            request = redirected
        raise ToolCallError(f"redirects more than {MOST_REDIRECTS} times")

    async def _read(self, response: "httpx2.Response", on_output: OnOutput | None) -> bytes:
        stream = on_output if is_text(response.headers.get("content-type", "")) else None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        body = bytearray()
        try:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > LARGEST_ANSWER:
                    raise ToolCallError(f"answered with more than {LARGEST_ANSWER // 2**20} MiB")
                if stream is not None and (text := decoder.decode(piece)):
                    stream(text)
        finally:
            await response.aclose()
        return bytes(body)


async def _send_once_or_twice(client: "httpx2.AsyncClient", request: "httpx2.Request") -> "httpx2.Response":
    """Return the answer with its body unread.

    The service may just have closed a connection that was kept open; a request that may be repeated is sent again."""
    import httpx2  # noqa: PLC0415 -- already imported here

    try:
        return await client.send(request, stream=True, follow_redirects=False)
    except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
        if request.method not in _REPEATABLE:
            raise
        return await client.send(request, stream=True, follow_redirects=False)


def _http_errors() -> tuple[type[Exception], ...]:
    import httpx2  # noqa: PLC0415 -- already imported here; slow to import

    return (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ToolCallError, OSError)


def _describe(error: Exception) -> str:
    if isinstance(error, ToolCallError):
        return str(error)
    if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
        return f"could not reach the service: {error}"
    return f"failed: {str(error) or type(error).__name__}"


FORM = "application/x-www-form-urlencoded"
_IN_QUERY = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
_PATH_VALUE: Mapping[str, Any] = {"type": ["string", "integer"]}
"""Schema of a parameter of the path that the definition does not describe."""


class HttpProvider:
    """The tool provider of a service's endpoints."""

    def __init__(self, definition: HttpDefinition, secrets: Secrets) -> None:
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._client = HttpClient(secrets, definition.headers, definition.query)
        self._operations: dict[str, tuple[ApiOperation, Mapping[str, str]]] = {}
        self._tools = [self._make_tool(word, name) for word, name in python_names(definition.endpoints).items()]

    def _make_tool(self, word: str, name: str) -> Tool:
        definition, endpoint = self._definition, self._definition.endpoints[name]
        operation, parameters = make_operation(endpoint)
        tool = definition.make_tool(
            word,
            parameters,
            description=endpoint.description,
            tags=endpoint.tags,
            approval=endpoint.approval,
            timeout=endpoint.timeout,
        )
        self._operations[tool.name] = operation, endpoint.headers
        return tool

    async def definitions(self) -> Sequence[Tool]:
        """Return the tools, which never change."""
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        """Return the service's answer: JSON as data, text as str, anything else as bytes."""
        operation, headers = self._operations[tool.name]
        return await self._client.call(tool, self._definition.base_url, operation, arguments, on_output, headers)

    async def close(self) -> None:
        await self._client.close()


def make_operation(endpoint: Endpoint) -> tuple[ApiOperation, dict[str, Any]]:
    """Return the request of an endpoint, and the schema of its arguments: those of the path first."""
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
        location: Location = "query" if endpoint.method in _IN_QUERY else "body"
        location = "path" if wire in in_path else (given.location if given is not None else None) or location
        default = schema.get("default", UNSET)
        properties[word] = schema
        if default is UNSET and (name in undescribed or location == "path" or (given is not None and given.required)):
            required.append(word)
        style = "simple" if location == "path" else "form"
        parts.append(RequestParameter(word, wire, location, default, style=style))
    operation = ApiOperation(
        method=endpoint.method,
        path=endpoint.path if endpoint.path.startswith("/") else f"/{endpoint.path}",
        parts=tuple(parts),
        content_type=FORM if endpoint.sends == "form" else "application/json",
    )
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return operation, schema
