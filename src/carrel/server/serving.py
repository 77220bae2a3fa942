"""From settings to a server that listens, and to its end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from carrel.assembly import FileStorage
from carrel.errors import ConfigurationError, ExecutionError
from carrel.home import resolve_carrel_home
from carrel.server.app import make_app
from carrel.server.edge import PREFIX, Bounds
from carrel.server.front_desk import FrontDesk, Rules
from carrel.server.keys import Keys, data_folder
from carrel.tasks.dataset import Datasets

_LAST_ANSWERS = 5
"""Seconds that answers under way have when the server is stopped."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and what it works with."""

    host: str = "127.0.0.1"
    port: int = 8765
    """0 takes one that is free."""
    data: Path | None = None
    """Where keys, sessions and their logs are kept; None is `server` in carrel's own folder."""
    keys: Path | None = None
    """Another folder with the keys, for servers that share them; None is the one of `data`."""
    datasets: Path | None = None
    """A folder of datasets; None is carrel's own, and the demo."""
    cache: Path | None = None
    """For unpacked files and set-up layers; None is carrel's own."""
    rules: Rules = field(default_factory=Rules)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def folder(self) -> Path:
        return data_folder(self.data)


async def serve(settings: ServerSettings, listening: Callable[[str, str | None], None]) -> None:
    """Serve until a signal ends it; `listening` is told the address, and the key where one was made."""
    storage = FileStorage(settings.folder)
    settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept_keys = storage if settings.keys is None else FileStorage(settings.keys)
    try:
        keys = Keys(kept_keys.store)
        first = not await keys.list()
        if first and not _is_loopback(settings.host):
            raise ConfigurationError(
                f"there is no key yet, so {settings.host} is not listened on: `carrel keys add NAME` makes one"
            )
        cache = settings.cache or resolve_carrel_home() / "cache"
        desk = FrontDesk(storage, Datasets(settings.datasets), cache.expanduser().absolute(), settings.rules)
        server = _Server(_config(desk, keys, settings), desk)
        with _bound(settings.host, settings.port) as line:
            port = line.getsockname()[1]
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            await desk.open()
            # Not before nothing else can fail: who is not told it has no other way to it.
            made = await keys.add("local") if first else None
            server.listening = lambda: listening(f"http://{host}:{port}{PREFIX}", made)
            await server.serve(sockets=[line])
    finally:
        await kept_keys.close()
        await storage.close()


def _config(desk: FrontDesk, keys: Keys, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(desk, keys, settings.bounds),
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS,
        timeout_keep_alive=75,
        lifespan="on",
    )


class _Server(uvicorn.Server):
    """One that says when it listens, and that ends its sessions first: who waits for them gets an answer."""

    def __init__(self, config: uvicorn.Config, desk: FrontDesk) -> None:
        super().__init__(config)
        self._desk = desk
        self.listening: Callable[[], None] = lambda: None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are how a server ends, and no failure; a second one does not wait for the last answers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._desk.close()
        await super().shutdown(sockets)
        if self.force_exit:
            # Left out after a second signal, and then told as an error when the loop is closed.
            await self.lifespan.shutdown()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        line = socket.socket(family, kind, proto)
    except OSError as problem:
        raise ConfigurationError(f"{host} is no address to listen on: {problem}") from None
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(address)
        # Answers go out at once; waiting for more to send would cost a small one 40 ms.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as problem:
        line.close()
        raise ExecutionError(f"{host}:{port} cannot be listened on: {problem}") from None
    return line
