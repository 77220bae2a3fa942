"""docs/server.md names every route."""

from __future__ import annotations

import re
from pathlib import Path

from carrel.server.app import create_app
from carrel.server.auth import ApiKeys
from carrel.server.session_manager import SessionManager
from carrel.session import MemoryStorage
from carrel.tasks.dataset import Datasets

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")


async def test_every_route_is_on_the_page(tmp_path: Path) -> None:
    storage = MemoryStorage()
    app = create_app(SessionManager(storage, Datasets(tmp_path)), ApiKeys(storage.store))
    routes = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    documented = set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`?]*)", PAGE))
    assert routes == documented
    assert len(routes) == 39
