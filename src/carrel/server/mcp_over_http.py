"""The MCP front over HTTP: who may ask, and an end that leaves nobody without an answer."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.server.listening import Listener, bound, is_loopback, url_of

PATH = "/mcp"
LARGEST_ANSWER = 1_000_000
"""Bytes. The official client refuses an event of more than 1 MiB, and then has no answer at all."""
_LARGEST_REQUEST = 64 * 1024 * 1024
_FORGOTTEN_AFTER = 24 * 3600
"""Seconds without a request after which a client is not known any more: few can cope with that."""
_LAST_ANSWERS = 5
"""Seconds that answers under way have when the server is stopped."""
_ON_THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]")


async def serve_over_http(
    server: MCPServer[Any],
    host: str,
    port: int,
    *,
    listening: Callable[[str], None],
    ending: Callable[[], Awaitable[None]],
) -> None:
    """Serve until a signal ends it. `listening` is told the address; `ending` ends what is under way."""
    with bound(host, port) as line:
        app = server.streamable_http_app(
            streamable_http_path=PATH,
            max_request_body_size=_LARGEST_REQUEST,
            session_idle_timeout=_FORGOTTEN_AFTER,
            transport_security=_checks(host),
        )
        door = Door(app, host)

        async def end() -> None:
            await ending()
            await door.close()

        config = uvicorn.Config(
            door,
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_ANSWERS,
            lifespan="on",
        )
        url = url_of(line, host) + PATH
        await Listener(config, listening=lambda: listening(url), ending=end).serve(sockets=[line])


def _checks(host: str) -> TransportSecuritySettings:
    """What the SDK checks: on this machine alone, that it was asked by a name of this machine."""
    names = {*_ON_THIS_MACHINE, f"[{host}]" if ":" in host else host}
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=is_loopback(host),
        allowed_hosts=[f"{name}:*" for name in names],
        allowed_origins=[f"http://{name}:*" for name in names],
    )


class Door:
    """What stands before the SDK's routes."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._is_local = is_loopback(host)
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._inside: set[asyncio.Event] = set()
        self._closed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._is_strange(headers):
            refusal = PlainTextResponse("web pages of another site are not answered\n", status_code=403)
            await refusal(scope, receive, send)
            return
        # No answer is kept to be sent again; the SDK would not answer who asks for one.
        asked = [pair for pair in scope["headers"] if pair[0] != b"last-event-id"]
        await self._pass({**scope, "headers": asked}, receive, send)

    def _is_strange(self, headers: Headers) -> bool:
        """Whether a browser asks for the page of another site.

        Such a page may have a name that leads here since it was loaded (DNS rebinding), so its own address has to be
        one that nobody can give to another machine: a number, or a name that this one goes by."""
        origin = headers.get("origin")
        if origin is None or self._is_local:
            return False  # no browser, which always says so; and on this machine alone, the SDK looks
        try:
            page = urlsplit(origin)
            name = (page.hostname or "").lower()
        except ValueError:
            return True
        return page.netloc.lower() != headers.get("host", "").lower() or not (name in self._names or _is_number(name))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = whole = False
        over = asyncio.Event()
        self._inside.add(over)

        async def told(message: Message) -> None:
            nonlocal begun, whole
            begun = True
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, lambda: self._heard(receive), told)
            if begun and not whole:
                # A stream that was ended: its reader sees the end, and not a connection that broke.
                with contextlib.suppress(OSError):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._inside.discard(over)
            over.set()

    async def _heard(self, receive: Receive) -> Message:
        """What the client says; at the end, that it is gone, by which streams that have no end are ended."""
        asked, closed = asyncio.ensure_future(receive()), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([asked, closed], return_when=asyncio.FIRST_COMPLETED)
            return await asked if asked.done() else {"type": "http.disconnect"}
        finally:
            asked.cancel()
            closed.cancel()

    async def close(self) -> None:
        """Answers under way get a moment; then streams on which nothing may ever come are ended."""
        waited = [asyncio.ensure_future(over.wait()) for over in self._inside]
        if waited:
            _, left = await asyncio.wait(waited, timeout=1)
            for one in left:
                one.cancel()
        self._closed.set()


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
