"""The FastAPI app of a server, and serving it until a signal."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.types import ASGIApp

from carrel.errors import ConfigurationError, ServerBusy
from carrel.execution import temp_dirs
from carrel.request_id import with_request_id
from carrel.server.auth import ApiKeys, AuthMiddleware
from carrel.server.dependencies import add_error_handlers
from carrel.server.listener import Listener, bind, is_loopback, url_of
from carrel.server.middleware import (
    BodyLimitMiddleware,
    EdgeMiddleware,
    IdempotencyMiddleware,
    Metrics,
    requests_logger,
)
from carrel.server.node import FrozenMiddleware, Node
from carrel.server.responses import PREFIX
from carrel.server.routes import datasets, sessions, workspace
from carrel.server.schema import GROUPS, describe_fields, operation_id
from carrel.server.session_manager import SessionManager
from carrel.server.settings import ServerSettings, open_storage
from carrel.server.web.archive import Archive, Runs
from carrel.server.web.login import Logins
from carrel.server.web.pages import Pages
from carrel.session import FileStorage
from carrel.storage.memory import MemoryStore
from carrel.tasks.dataset import Datasets
from carrel.version import __version__

_DESCRIPTION = "Task sessions: a sample, commands, a verdict. All but /health needs `Authorization: Bearer KEY`."
_LAST_ANSWERS_SECONDS = 5
"""How long the last answers may take when the server is stopped."""
_STORE_LOST = "the node could not reach its store"


def create_app(manager: SessionManager, keys: ApiKeys) -> FastAPI:
    """Return an app for the sessions of this manager, which the caller starts and shuts down."""
    app = FastAPI(
        title="carrel",
        version=__version__,
        description=_DESCRIPTION,
        openapi_tags=[{"name": name, "description": text} for name, text in GROUPS.items()],
        generate_unique_id_function=operation_id,
        # The bodies of answers are described as they are read, because some are written by functions.
        separate_input_output_schemas=False,
        docs_url=None,
        redoc_url=None,
    )
    app.openapi = describe_fields(app)  # type: ignore[method-assign]
    app.state.manager = manager
    app.state.metrics = metrics = Metrics()
    metrics.count_live(lambda: manager.live_count)
    routes = APIRouter(prefix=PREFIX)
    for router in (datasets.open_routes, datasets.router, sessions.router, workspace.router):
        routes.include_router(router)
    app.include_router(routes)
    add_error_handlers(app)
    mode = manager.settings.page or ("act" if is_loopback(manager.settings.host) else "read")
    if mode != "off":
        logins = Logins(manager.storage.store, keys, may_act=mode == "act")
        archives = {"server": Archive(manager.storage, manager)}
        app.router.routes.extend(Pages(archives, logins, host=manager.settings.host, manager=manager).routes())
    # The last one added is the outermost.
    app.add_middleware(IdempotencyMiddleware, answers=manager.answers)
    app.add_middleware(BodyLimitMiddleware, limit=manager.settings.max_body)
    app.add_middleware(AuthMiddleware, keys=keys, settings=manager.settings)
    if manager.node is not None:
        app.add_middleware(FrozenMiddleware, node=manager.node)
    app.add_middleware(EdgeMiddleware, metrics=metrics)
    return app


async def serve(settings: ServerSettings, on_listening: Callable[[str, str | None], None]) -> None:
    """Serve until a signal; `on_listening` gets the URL, and the key if one was created because there was none."""
    storage = open_storage(settings.store)
    key_storage = storage if settings.keys is None else open_storage(settings.keys)
    try:
        await asyncio.to_thread(temp_dirs.remove_abandoned)
        keys = ApiKeys(key_storage.store)
        needs_key = not await keys.exist()
        if needs_key and not is_loopback(settings.host):
            raise ConfigurationError(
                f"there is no key yet, so the server does not listen on {settings.host}; "
                "create one with `carrel keys add NAME`"
            )
        with bind(settings.host, settings.port) as bound:
            own_url = url_of(bound, settings.host)
            node = Node(storage, settings, (settings.url or own_url).rstrip("/")) if settings.join else None
            if node is not None:
                await node.join()
            manager = SessionManager(storage, Datasets(settings.datasets, demo=settings.demo), settings, node)
            try:
                await manager.start()
                # As late as possible: a key that is not printed is lost.
                key = await keys.add("local") if needs_key else None
                await _listen(manager, keys, bound, lambda: on_listening(own_url + PREFIX, key))
            finally:
                if node is not None:
                    await node.leave()
            if node is not None and node.is_lost:
                raise ServerBusy(f"node {node.name} lost its lease: its sessions were ended; start it again")
    finally:
        await key_storage.close()
        await storage.close()


async def _listen(
    manager: SessionManager, keys: ApiKeys, bound: socket.socket, on_listening: Callable[[], None]
) -> None:
    """Serve on a socket until a signal, or until the store belongs to another server."""

    def listening() -> None:
        if (node := manager.node) is not None:
            node.start(lambda: manager.info(node.url), lambda: asyncio.ensure_future(manager.end_all(_STORE_LOST)))
        on_listening()

    config = uvicorn_config(create_app(manager, keys), log_requests=manager.settings.log_requests)
    listener = Listener(config, on_listening=listening, on_end=manager.shutdown)
    watcher = asyncio.create_task(_end_when_lost(manager, listener))
    try:
        await listener.serve(sockets=[bound])
    finally:
        watcher.cancel()


async def serve_page(base: Path, port: int, on_listening: Callable[[str], None]) -> None:
    """Serve the web page of a base folder on this machine until a signal; `on_listening` gets a link that logs in."""
    host = "127.0.0.1"
    runs = Runs(base / "runs")
    archives = {"local": Archive(FileStorage(base), runs=runs)}
    if (base / "server").is_dir():
        archives["server"] = Archive(FileStorage(base / "server"))
    logins = Logins(MemoryStore(), None, may_act=True)
    app = Starlette(routes=Pages(archives, logins, host=host, runs=runs).routes())
    app.add_middleware(EdgeMiddleware, metrics=Metrics())
    with bind(host, port) as bound:
        link = f"{url_of(bound, host)}/enter#{await logins.new_link()}"

        async def end() -> None:
            for archive in archives.values():
                await archive.conversations.close()

        await Listener(uvicorn_config(app), on_listening=lambda: on_listening(link), on_end=end).serve(sockets=[bound])


async def _end_when_lost(manager: SessionManager, listener: Listener) -> None:
    """End the server when it has lost its store, since another one may have taken it."""
    await manager.lost()
    listener.end()


class _LogFormatter(logging.Formatter):
    """What uvicorn reports, with the id of the request."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return with_request_id(super().formatMessage(record))


_LOG_CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": _LogFormatter, "fmt": "%(levelname)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"uvicorn": {"handlers": ["stderr"], "propagate": False}},
}


def uvicorn_config(app: ASGIApp, *, log_requests: bool = False) -> uvicorn.Config:
    """Return how uvicorn serves an app; with `log_requests`, a line is logged for each request."""
    if log_requests:
        requests_logger.setLevel(logging.INFO)
    return uvicorn.Config(
        app,
        loop="asyncio",
        log_level="warning",
        log_config=_LOG_CONFIG,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        timeout_keep_alive=75,
        lifespan="on",
    )
