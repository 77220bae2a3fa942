"""Lists of sessions: newest first, by number or by cursor, also when there are a million of them."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from carrel.server.session_lists import SessionLists
from carrel.storage.base import Store
from carrel.storage.memory import MemoryStore
from tests.server.conftest import NewServer
from tests.support.server_process import create_session


async def filled(store: Store, counts: dict[str, int]) -> SessionLists:
    """Return lists of Ann's with so many ids per day, numbered from the oldest to the newest."""
    number = 0
    for day, count in counts.items():
        ids = [str(number + offset).encode() for offset in range(count)]
        number += count
        await store.append(f"server/lists/ann/all/{day}.0000.jsonl", ids)
    return SessionLists(store)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_pages_by_number_and_by_cursor_are_the_same(size: int) -> None:
    lists = await filled(MemoryStore(), {"2026-01-01": 5, "2026-01-03": 1, "2026-02-01": 12})
    wanted = [str(number) for number in reversed(range(18))]
    cursor, by_cursor, number = None, [], 0
    while True:
        page = await lists.page("ann", "all", 0, size, cursor)
        assert page.total_count == 18
        assert page.ids == (await lists.page("ann", "all", number * size, size, None)).ids
        by_cursor += page.ids
        number += 1
        cursor = page.next_cursor
        if cursor is None:
            break
    assert by_cursor == wanted
    assert (await lists.page("ann", "all", 18, size, None)).ids == []
    assert (await lists.page("bob", "all", 0, size, None)).total_count == 0


async def test_a_cursor_is_not_moved_by_new_sessions() -> None:
    lists = await filled(MemoryStore(), {"2026-01-01": 6})
    first = await lists.page("ann", "all", 0, 2, None)
    await lists.add("ann", "all", "new")
    second = await lists.page("ann", "all", 0, 2, first.next_cursor)
    assert (first.ids, second.ids, second.total_count) == (["5", "4"], ["3", "2"], 7)


def test_lists_over_http(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        sessions = [create_session(client) for _ in range(4)]
        client.delete(f"/sessions/{sessions[1]}")

        def listed(**query: object) -> tuple[list[int], int, bool]:
            answer = client.get("/sessions", params={name: str(value) for name, value in query.items()}).json()
            return (
                [sessions.index(each["session_id"]) for each in answer["sessions"]],
                answer["total_count"],
                answer["has_more"],
            )

        assert listed() == ([3, 2, 1, 0], 4, False)
        assert listed(page_size=3) == ([3, 2, 1], 4, True)
        assert listed(page_size=3, page=2) == ([0], 4, False)
        assert listed(status="ready") == ([3, 2, 0], 3, False)
        assert listed(status="ready", page_size=2, page=2) == ([0], 3, False)
        assert listed(status="closed") == ([1], 1, False)
        assert listed(status="error") == ([], 0, False)
        cursor = client.get("/sessions?page_size=2").json()["next_cursor"]
        assert listed(page_size=2, cursor=cursor) == ([1, 0], 4, False)
        wrong = client.get("/sessions?cursor=yesterday")
        assert (wrong.status_code, "next_cursor" in wrong.json()["detail"]) == (422, True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_with_a_million_closed_sessions(new_server: NewServer, tmp_path: Path) -> None:
    """It starts in under a second, takes less than 150 MB, and lists them by page."""
    server = new_server()
    with server.client() as client:
        one = create_session(client)
        client.delete(f"/sessions/{one}")
        record = client.get(f"/sessions/{one}").json()
    server.stop()
    write_closed(server.data / "server", record, 1_000_000)
    begun = time.monotonic()
    server.start()
    seconds = time.monotonic() - begun
    with server.client() as client:
        assert create_session(client)
        check_pages(client)
        with open(f"/proc/{server.pid}/statm") as pages:
            resident = int(pages.read().split()[1]) * 4096
    print(f"started in {seconds:.2f} s, {resident / 1e6:.0f} MB")
    assert resident < 150e6


def write_closed(root: Path, record: dict[str, object], count: int) -> None:
    days: dict[str, list[str]] = {}
    first: date = datetime.now(UTC).date() - timedelta(days=100)
    for number in range(count):
        session_id = f"{number:032x}"
        folder = root / "sessions" / session_id
        os.mkdir(folder, 0o700)
        (folder / "record.json").write_text(json.dumps({**record, "session_id": session_id}))
        days.setdefault((first + timedelta(days=number * 100 // count)).isoformat(), []).append(session_id)
    for day, ids in days.items():
        for name in ("all", "closed"):
            (root / "lists" / "local" / name / f"{day}.0000.jsonl").write_text("".join(f"{id_}\n" for id_ in ids))


def check_pages(client: httpx.Client) -> None:
    answer = client.get("/sessions?page_size=100").json()
    assert answer["total_count"] == 1_000_002
    assert len(answer["sessions"]) == 100
    answer = client.get(f"/sessions?page_size=100&cursor={answer['next_cursor']}").json()
    assert len(answer["sessions"]) == 100
    answer = client.get("/sessions?page_size=100&page=10001").json()
    assert [each["session_id"] for each in answer["sessions"]] == [f"{1:032x}", f"{0:032x}"]
    assert client.get("/sessions?status=closed&page_size=1").json()["total_count"] == 1_000_001
