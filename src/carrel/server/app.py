"""The FastAPI app of a server, and serving it until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvicorn
from fastapi import APIRouter, FastAPI

from carrel.errors import ConfigurationError
from carrel.execution import temp_dirs
from carrel.server.auth import ApiKeys, AuthMiddleware
from carrel.server.dependencies import add_error_handlers
from carrel.server.listener import Listener, bind, is_loopback, url_of
from carrel.server.middleware import BodyLimitMiddleware, EdgeMiddleware, IdempotencyMiddleware, Metrics
from carrel.server.responses import PREFIX
from carrel.server.routes import datasets, sessions, workspace
from carrel.server.session_manager import SessionManager
from carrel.server.settings import ServerSettings, open_storage
from carrel.tasks.dataset import Datasets
from carrel.version import __version__

_DESCRIPTION = "Task sessions: a sample, commands, a verdict. All but /health needs `Authorization: Bearer KEY`."
_LAST_ANSWERS_SECONDS = 5
"""How long the last answers may take when the server is stopped."""


def create_app(manager: SessionManager, keys: ApiKeys) -> FastAPI:
    """Return an app for the sessions of this manager, which the caller starts and shuts down."""
    app = FastAPI(title="carrel", version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None)
    app.state.manager = manager
    app.state.metrics = metrics = Metrics()
    metrics.count_live(lambda: manager.live_count)
    routes = APIRouter(prefix=PREFIX)
    for router in (datasets.open_routes, datasets.router, sessions.router, workspace.router):
        routes.include_router(router)
    app.include_router(routes)
    add_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(IdempotencyMiddleware, answers=manager.answers)
    app.add_middleware(BodyLimitMiddleware, limit=manager.settings.max_body)
    app.add_middleware(AuthMiddleware, keys=keys, settings=manager.settings)
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
        manager = SessionManager(storage, Datasets(settings.datasets, demo=settings.demo), settings)
        with bind(settings.host, settings.port) as bound:
            url = url_of(bound, settings.host) + PREFIX
            await manager.start()
            # As late as possible: a key that is not printed is lost.
            key = await keys.add("local") if needs_key else None
            listener = Listener(
                _uvicorn_config(create_app(manager, keys)),
                on_listening=lambda: on_listening(url, key),
                on_end=manager.shutdown,
            )
            watcher = asyncio.create_task(_end_when_lost(manager, listener))
            try:
                await listener.serve(sockets=[bound])
            finally:
                watcher.cancel()
    finally:
        await key_storage.close()
        await storage.close()


async def _end_when_lost(manager: SessionManager, listener: Listener) -> None:
    """End the server when it has lost its store, since another one may have taken it."""
    await manager.lost()
    listener.end()


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        timeout_keep_alive=75,
        lifespan="on",
    )
