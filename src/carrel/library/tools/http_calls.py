"""Requests to one service: with its secrets, within its time, never to another host with what is this one's."""

import asyncio
import codecs
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from carrel.errors import ToolCallError, ToolTimeoutError
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.http_answers import decoded, is_text, value_of
from carrel.library.tools.http_request import Operation, Prepared, prepared
from carrel.library.tools.request_logs import hidden_in_logs
from carrel.library.tools.seam import Stream, Tool
from carrel.library.tools.secrets import Secrets

if TYPE_CHECKING:
    import httpx2

LARGEST_ANSWER = 32 * 1024 * 1024
MOST_REDIRECTS = 5
LONGEST_COMPLAINT = 2000
LONGEST_READ = 64 * 1024
"""Bytes of a complaint that are read at all."""

_LEADS_ELSEWHERE = frozenset((301, 302, 303, 307, 308))
"""What is left of these says not where."""
_HARMLESS_TWICE = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "QUERY"))


class HttpCaller:
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
        operation: Operation,
        arguments: Mapping[str, Any],
        stream: Stream | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer as data; `ToolCallError` with its status when that is an error.

        `headers`: more that the definition sends; only in what it says are secrets filled in, never in arguments."""
        try:
            request = prepared(operation, arguments)
        except ToolCallError as problem:
            raise ToolCallError(f"{tool.name}: {problem}") from None
        what = f"{request.method} {request.path}"
        try:
            async with asyncio.timeout(tool.timeout):
                fixed = self._secrets.fill_headers({**self._headers, **(headers or {})})
                with hidden_in_logs(self._secrets):
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
            httpx2 = await in_a_thread(lambda: import_module("httpx2"))
            # How long an answer may take is each call's own matter.
            self._client = self._client or httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=30))
        return self._client

    async def _call(
        self, what: str, base_url: str, request: Prepared, fixed: Mapping[str, str], stream: Stream | None
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

    async def _read(self, response: "httpx2.Response", stream: Stream | None) -> bytes:
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
