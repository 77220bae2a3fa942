"""docs/server.md names every route."""

from __future__ import annotations

import re
from pathlib import Path

from carrel.server.app import make_app
from carrel.server.front_desk import FrontDesk, Rules
from carrel.server.keys import Keys
from carrel.session import MemoryStorage
from carrel.tasks.dataset import Datasets

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")


async def test_every_route_is_on_the_page(tmp_path: Path) -> None:
    storage = MemoryStorage()
    app = make_app(FrontDesk(storage, Datasets(tmp_path), tmp_path, Rules()), Keys(storage.store))
    told = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    written = set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`?]*)", PAGE))
    assert told == written
    assert len(told) == 31
