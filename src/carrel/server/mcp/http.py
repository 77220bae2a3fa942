"""The MCP server over HTTP: which requests are accepted, and a shutdown that completes the answers under way."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.server.listener import Listener, bind, is_loopback, url_of
from carrel.server.mcp.server import make_server
from carrel.session import Session

PATH = "/mcp"
_MAX_RESULT = 1_000_000
"""Bytes. The official client refuses an event of more than 1 MiB and then has no result at all."""
_MAX_REQUEST = 64 * 1024 * 1024
_IDLE_TIMEOUT = 24 * 3600
"""Seconds without a request after which a client has to connect again, which few clients can."""
_SHUTDOWN_TIMEOUT = 5
"""Seconds to complete answers under way when the server is stopped."""
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


async def serve_http(
    session: Session,
    host: str,
    port: int,
    *,
    runtime_deps: bool = True,
    listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve any number of clients over HTTP until a signal; `listening` is called with the address."""
    server = await make_server(session, runtime_deps=runtime_deps)
    server.max_result = _MAX_RESULT
    with bind(host, port) as listener:
        app = server.streamable_http_app(
            streamable_http_path=PATH,
            max_request_body_size=_MAX_REQUEST,
            session_idle_timeout=_IDLE_TIMEOUT,
            transport_security=_security(host),
        )
        guarded = OriginGuard(app, host)

        async def end() -> None:
            await session.close()
            await guarded.close()

        config = uvicorn.Config(
            guarded,
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
            lifespan="on",
        )
        url = url_of(listener, host) + PATH
        await Listener(config, on_listening=lambda: listening(url), on_end=end).serve(sockets=[listener])


def _security(host: str) -> TransportSecuritySettings:
    """Return what the SDK checks: for a loopback address, that the request names this machine."""
    names = {*_LOCAL_NAMES, f"[{host}]" if ":" in host else host}
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=is_loopback(host),
        allowed_hosts=[f"{name}:*" for name in names],
        allowed_origins=[f"http://{name}:*" for name in names],
    )


class OriginGuard:
    """Refuses pages of other sites, and ends open streams when the server stops."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._is_local = is_loopback(host)
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._active: set[asyncio.Event] = set()
        self._closed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_foreign(Headers(scope=scope)):
            refusal = PlainTextResponse("requests from pages of other sites are refused\n", status_code=403)
            await refusal(scope, receive, send)
            return
        # No events are stored for replay; the SDK would refuse a client that wants to resume a stream.
        headers = [pair for pair in scope["headers"] if pair[0] != b"last-event-id"]
        await self._forward({**scope, "headers": headers}, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        """Return whether the request comes from a web page of another site.

        The page's host name may have been pointed to this machine after the page was loaded (DNS rebinding), so the
        name has to be an IP address or a name of this machine."""
        origin = headers.get("origin")
        if origin is None or self._is_local:
            return False  # not a browser, which always sends it; on a loopback address, the SDK checks it
        try:
            page = urlsplit(origin)
            name = (page.hostname or "").lower()
        except ValueError:
            return True
        same_host = page.netloc.lower() == headers.get("host", "").lower()
        return not same_host or not (name in self._names or _is_ip_address(name))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = complete = False
        done = asyncio.Event()
        self._active.add(done)

        async def send_and_note(message: Message) -> None:
            nonlocal started, complete
            started = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, lambda: self._receive(receive), send_and_note)
            if started and not complete:
                # A stream that was stopped: the client sees its end and not a broken connection.
                with contextlib.suppress(OSError):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._active.discard(done)
            done.set()

    async def _receive(self, receive: Receive) -> Message:
        """Return the next message; once the guard is closed, a disconnect, which ends endless streams."""
        message, closed = asyncio.ensure_future(receive()), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([message, closed], return_when=asyncio.FIRST_COMPLETED)
            return await message if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            closed.cancel()

    async def close(self) -> None:
        """Wait a second for answers under way, then end the streams that would stay open."""
        waiting = [asyncio.ensure_future(done.wait()) for done in self._active]
        if waiting:
            _, unfinished = await asyncio.wait(waiting, timeout=1)
            for one in unfinished:
                one.cancel()
        self._closed.set()


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
