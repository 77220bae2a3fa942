"""The desk without HTTP: a session that cannot be written down leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from carrel.assembly import MemoryStorage
from carrel.errors import StorageWriteError
from carrel.server.front_desk import FrontDesk, Rules
from carrel.server.wire import NewSession
from carrel.tasks.dataset import Datasets
from tests.execution.processes import descendants


class FullDisk(MemoryStorage):
    """One whose logs take nothing more, once it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        honest = self.store.append

        async def append(key: str, records: Sequence[bytes], **how: Any) -> int:
            if self.full:
                raise StorageWriteError("the disk is full")
            return await honest(key, records, **how)

        self.store.append = append  # type: ignore[method-assign]


async def test_a_session_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    storage = FullDisk()
    desk = FrontDesk(storage, Datasets(tmp_path), tmp_path / "cache", Rules(max_sessions=1))
    await desk.open()
    try:
        first = await desk.ready(await desk.create("ada", NewSession()), 30)
        await desk.close_session("ada", first.session_id)
        before = set(descendants(os.getpid()))
        storage.full = True
        for _ in range(2):
            with pytest.raises(StorageWriteError, match="disk is full"):
                await desk.create("ada", NewSession(), once="0" * 64)
        assert desk.alive == 0
        assert len(desk.sessions_of("ada")) == 1
        storage.full = False
        # One place may have been built ahead meanwhile, its init and its worker; two sessions would be more.
        assert len(set(descendants(os.getpid())) - before) <= 2
        again = await desk.ready(await desk.create("ada", NewSession(), once="0" * 64), 30)
        assert again.status == "ready"
    finally:
        await desk.close()
