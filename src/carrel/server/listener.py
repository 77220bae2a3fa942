"""A uvicorn server that reports when it listens and ends its sessions first, and the socket it listens on."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn

from carrel.errors import ConfigurationError, ExecutionError


class Listener(uvicorn.Server):
    """Calls `on_listening` when it listens. A signal ends it: it calls `on_end`, and then sends the last answers."""

    def __init__(
        self, config: uvicorn.Config, *, on_listening: Callable[[], None], on_end: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._on_end = on_end

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End in order after SIGINT and SIGTERM; a second one does not wait for the last answers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def end(self) -> None:
        """Begin to end the server."""
        # Not by handle_exit: sse-starlette replaces it with a function that cuts streams off.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._on_end()
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves this out after a second signal, and the loop would report it as an error.
            await self.lifespan.shutdown()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this address; port 0 chooses a free one."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as problem:
        raise ConfigurationError(f"{host} is not an address to listen on: {problem}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Send small answers at once; waiting for more data would delay them by 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as problem:
        bound.close()
        if problem.errno == errno.EADDRINUSE:
            reason = "another program uses this port; name another one, or 0 for any free port (`--port`)"
        else:
            reason = problem.strerror or str(problem)
        raise ExecutionError(f"cannot listen on {host}:{port}: {reason}") from None
    return bound


def url_of(bound: socket.socket, host: str) -> str:
    """Return the URL of a bound socket."""
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
