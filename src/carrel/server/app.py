"""The app: routes, errors and the edge put together around a front desk."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from carrel.server import place_routes, task_routes
from carrel.server.api_page import POLICY, api_page
from carrel.server.asking import answer_errors
from carrel.server.edge import PREFIX, Bounds, Edge
from carrel.server.front_desk import FrontDesk
from carrel.server.keys import Keys
from carrel.server.metrics import Metrics
from carrel.server.once import Once
from carrel.version import __version__

ABOUT = "Task sessions: a sample, commands, a verdict. Everything but /health needs `Authorization: Bearer KEY`."


def make_app(desk: FrontDesk, keys: Keys, bounds: Bounds | None = None) -> FastAPI:
    """An app whose sessions are the desk's; who made the desk opens and closes it."""
    app = FastAPI(title="carrel", version=__version__, description=ABOUT, docs_url=None, redoc_url=None)
    app.state.desk = desk
    app.state.metrics = metrics = Metrics()
    metrics.watch_alive(lambda: desk.alive)
    routes = APIRouter(prefix=PREFIX)
    for part in (task_routes.health, task_routes.router, place_routes.router):
        routes.include_router(part)
    app.include_router(routes)

    @app.get("/docs", include_in_schema=False)
    def docs(request: Request) -> HTMLResponse:
        page = api_page(app.openapi(), str(request.base_url).rstrip("/"))
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    answer_errors(app)
    # The last one added is the outermost.
    app.add_middleware(Once, answers=desk.answers)
    app.add_middleware(Edge, keys=keys, bounds=bounds or Bounds(), metrics=metrics)
    return app
