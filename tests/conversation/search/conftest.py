"""A store in files that searches by words only."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carrel.conversation.store import SessionStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with SessionStore(tmp_path / "sessions", embedder=False) as store:
        yield store
