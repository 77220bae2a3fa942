"""A socket to listen on, and a server that says when it does and ends in order."""

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
    """One that says when it listens, and ends what it serves first: who waits for that gets an answer."""

    def __init__(
        self, config: uvicorn.Config, *, listening: Callable[[], None], ending: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._ending = ending

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are how a server ends, and no failure; a second one does not wait for the last answers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_end)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _asked_to_end(self) -> None:
        # Not handle_exit: a library for streams puts another in its place, which cuts answers off.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._ending()
        await super().shutdown(sockets)
        if self.force_exit:
            # Left out after a second signal, and then told as an error when the loop is closed.
            await self.lifespan.shutdown()


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound there, 0 being a port that is free; an error that says why it cannot be."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        line = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as problem:
        raise ConfigurationError(f"{host} is no address to listen on: {problem}") from None
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(address)
        # Answers go out at once; waiting for more to send would cost a small one 40 ms.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as problem:
        line.close()
        if problem.errno == errno.EADDRINUSE:
            reason = "another program uses this port; choose another one, or 0 for any free port"
        else:
            reason = problem.strerror or str(problem)
        raise ExecutionError(f"cannot listen on {host}:{port}: {reason}") from None
    return line


def url_of(line: socket.socket, host: str) -> str:
    """Where a bound socket is reached."""
    return f"http://{f'[{host}]' if ':' in host else host}:{line.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
