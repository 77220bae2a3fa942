"""From settings to a server that listens, and to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from carrel.errors import ConfigurationError
from carrel.execution import temp_dirs
from carrel.home import resolve_carrel_home
from carrel.server.app import make_app
from carrel.server.edge import PREFIX, Bounds
from carrel.server.front_desk import FrontDesk, Rules
from carrel.server.keys import Keys, data_folder
from carrel.server.listening import Listener, bound, is_loopback, url_of
from carrel.session import FileStorage
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
    await asyncio.to_thread(temp_dirs.remove_abandoned)
    kept_keys = storage if settings.keys is None else FileStorage(settings.keys)
    try:
        keys = Keys(kept_keys.store)
        first = not await keys.list()
        if first and not is_loopback(settings.host):
            raise ConfigurationError(
                f"there is no key yet, so {settings.host} is not listened on: `carrel keys add NAME` makes one"
            )
        cache = settings.cache or resolve_carrel_home() / "cache"
        desk = FrontDesk(storage, Datasets(settings.datasets), cache.expanduser().absolute(), settings.rules)
        with bound(settings.host, settings.port) as line:
            url = url_of(line, settings.host) + PREFIX
            await desk.open()
            # Not before nothing else can fail: who is not told it has no other way to it.
            made = await keys.add("local") if first else None
            config = _config(desk, keys, settings)
            server = Listener(config, listening=lambda: listening(url, made), ending=desk.close)
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
