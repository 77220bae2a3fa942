"""HTTP connections to nodes: plain asyncio with httptools, which costs half of what a general client does."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

from carrel.errors import CarrelError

Headers = Sequence[tuple[bytes, bytes]]
_CONNECT_SECONDS = 3.0
_KEEP_SECONDS = 30.0
"""How long an unused connection is kept: less than nodes keep it."""
_MAX_WAITING = 256 * 1024
"""Bytes of an answer that wait for a slow client; then the node waits too."""


class NotConnected(CarrelError, ConnectionError):
    """A node takes no connection: nothing was sent."""


class ConnectionBroken(CarrelError, ConnectionError):
    """A connection broke during a request."""

    def __init__(self, message: str, *, was_idle: bool = False) -> None:
        """`was_idle`: the node had closed it before the request, so nothing was done."""
        super().__init__(message)
        self.was_idle = was_idle


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, for one request at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._pieces: deque[bytes] = deque()
        self._waiting = 0
        self._has_head = self._is_complete = self._is_paused = False
        self._received = self._is_head = False
        self._closed: str | None = None
        self.uses = 0
        self.idle_since = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    # --- asyncio's side ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, problem: Exception | None) -> None:
        if self._closed is None:
            self._closed = str(problem) if problem is not None else "the node closed the connection"
        self._writable.set()
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        self._received = True
        if self._parser is None or self._is_complete:
            self.abort("the node sent something without a request")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as problem:
            self.abort(f"the node's answer is not HTTP: {problem}")

    def eof_received(self) -> None:
        """An answer without a length ends here; any other is incomplete."""

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- the parser's side ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._has_head = True
            # The parser does not know that the answer to a HEAD has no body.
            self._is_complete = self._is_head
            self._changed.set()
        else:
            self.headers = []

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._waiting += len(data)
        if self._waiting > _MAX_WAITING and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._changed.set()

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            self._changed.set()

    # --- the gateway's side -----------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent."""
        return self._closed is None and self._transport is not None and not self._transport.is_closing()

    @property
    def can_be_kept(self) -> bool:
        """Whether the answer is complete and the node keeps the connection open."""
        ended = self._is_complete and not self._is_head and not self._pieces
        return self.is_usable and ended and bool(self._parser.should_keep_alive())

    def abort(self, reason: str) -> None:
        """Close it at once; a request that waits gets `ConnectionBroken`."""
        if self._closed is None:
            self._closed = reason
        if self._transport is not None:
            self._transport.abort()
        self._changed.set()

    async def request(self, method: str, target: bytes, headers: Headers, body: bytes | AsyncIterator[bytes]) -> None:
        """Send a request and wait for the head of its answer: `status` and `headers`."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces.clear()
        self._waiting = 0
        self._has_head = self._is_complete = self._received = False
        self.headers = []
        self.uses += 1
        self._is_head = method == "HEAD"
        head = [b"%b %b HTTP/1.1\r\n" % (method.encode("ascii"), target)]
        head += [b"%b: %b\r\n" % pair for pair in headers]
        if isinstance(body, bytes):
            if body or method in ("POST", "PUT", "PATCH"):
                head.append(b"content-length: %d\r\n" % len(body))
            self._transport.write(b"".join([*head, b"\r\n", body]))
        else:
            self._transport.write(b"".join([*head, b"transfer-encoding: chunked\r\n\r\n"]))
            async for piece in body:
                if piece:
                    await self._writable.wait()
                    if self._closed is not None:
                        break
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._transport.write(b"0\r\n\r\n")
        while not self._has_head:
            if self._closed is not None:
                was_idle = self.uses > 1 and not self._received
                raise ConnectionBroken(f"{self._address}: {self._closed}", was_idle=was_idle)
            self._changed.clear()
            await self._changed.wait()

    async def next_piece(self) -> bytes:
        """Return the next bytes of the answer's body, b"" at its end; ConnectionBroken if it breaks off."""
        while not self._pieces:
            if self._is_complete:
                return b""
            if self._closed is not None:
                raise ConnectionBroken(f"{self._address}: {self._closed}")
            self._changed.clear()
            await self._changed.wait()
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        """Return the whole body."""
        parts = []
        while piece := await self.next_piece():
            parts.append(piece)
        return b"".join(parts)


class NodeConnections:
    """The connections to one node."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        # Another program may have written anything to the store: one wrong node must not end the gateway.
        self._host = parts.hostname if parts.scheme in ("http", "https") else None
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: deque[Connection] = deque()
        self._used: set[Connection] = set()

    async def take(self, *, fresh: bool = False) -> Connection:
        """Return a connection, with `fresh` a new one; NotConnected if the node takes none."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_usable and time.monotonic() - connection.idle_since < _KEEP_SECONDS:
                self._used.add(connection)
                return connection
            connection.abort("it was not used for long")
        if self._host is None:
            raise NotConnected(f"{self.url!r} is not the URL of a node; expected http://host:port")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Connection(self.url), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as problem:
            raise NotConnected(f"{self.url} takes no connection: {problem or 'no answer'}") from None
        self._used.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if its answer was not read to the end."""
        self._used.discard(connection)
        if connection.can_be_kept:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort("its answer was not read to the end")

    def close(self, reason: str, *, all_of_them: bool = True) -> None:
        """Close the connections that are not used, or all of them."""
        while self._idle:
            self._idle.pop().abort(reason)
        for connection in list(self._used) if all_of_them else ():
            connection.abort(reason)
