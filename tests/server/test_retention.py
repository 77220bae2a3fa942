"""Records of sessions that ended long ago are deleted after the retention, completely; all others stay."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from carrel.server.records import RecordStore
from carrel.server.session_lists import SessionLists
from carrel.storage.memory import MemoryStore
from carrel.wire.answers import SessionRecord
from tests.server.conftest import NewServer
from tests.support.server_process import create_session, run_command

MESSAGE = {"role": "user", "content": [{"type": "text", "text": "remember"}]}


def test_sessions_that_ended_long_ago_are_deleted(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        old, new = create_session(client), create_session(client)
        for session in (old, new):
            run_command(client, session, "echo output")
            client.post(f"/sessions/{session}/conversation", json={"messages": [MESSAGE]})
            client.delete(f"/sessions/{session}")
    server.stop()
    record = server.data / "server" / "sessions" / old / "record.json"
    fields = json.loads(record.read_text())
    fields["closed_at"] = (datetime.now(UTC) - timedelta(days=10)).isoformat()
    record.write_text(json.dumps(fields))
    # Its day in the lists, too.
    for name in ("all", "closed"):
        for segment in (server.data / "server" / "lists" / "local" / name).iterdir():
            ids = segment.read_text().splitlines()
            day = (datetime.now(UTC) - timedelta(days=10)).date().isoformat()
            segment.with_name(f"{day}.0000.jsonl").write_text(f"{old}\n")
            segment.write_text("".join(f"{id_}\n" for id_ in ids if id_ != old))
    for options in ((), ("--retention", "5d"), ("--retention", "5d")):
        server.options[:] = options
        server.start()
        with server.client() as client:
            until = time.monotonic() + 60
            while options and client.get(f"/sessions/{old}").status_code != 404:
                assert time.monotonic() < until
                time.sleep(0.02)
            listed = [session["session_id"] for session in client.get("/sessions").json()["sessions"]]
            assert listed == ([new] if options else [new, old])
            assert client.get(f"/sessions/{old}").status_code == (404 if options else 200)
            assert len(client.get(f"/sessions/{new}/conversation").json()["messages"]) == 1
        server.stop()
    left = [path for path in server.data.rglob("*") if old in path.name or (path.is_file() and old in path.read_text())]
    assert left == []


def a_record(name: str, **changes: Any) -> SessionRecord:
    now = datetime.now(UTC)
    fields = {"requested_at": now, "expires_at": now, "closed_at": now, "status": "closed", "user_id": "ann"}
    return SessionRecord.model_validate({"session_id": name, **fields, **changes})


async def add_ended(records: RecordStore, name: str, **changes: Any) -> SessionRecord:
    record = a_record(name, **changes)
    await records.add_session(record.model_copy(update={"status": "creating"}))
    await records.save_session(record)
    return record


async def ids(records: RecordStore, **how: Any) -> list[str]:
    found = await records.list_sessions(
        "ann", how.get("status"), page=how.get("page", 1), page_size=how.get("page_size", 100), cursor=how.get("cursor")
    )
    return [record.session_id for record in found.sessions]


async def test_a_deleted_session_leaves_nothing() -> None:
    store = MemoryStore()
    records = RecordStore(store)
    for name in ("a", "b", "c"):
        await add_ended(records, name)
    deleted = []
    async for record in records.sweep(datetime.now(UTC)):
        deleted.append(record.session_id)
        await records.delete_session(record)
    assert set(deleted) == {"a", "b", "c"}
    assert await ids(records) == []
    assert await store.list() == []


async def test_sessions_that_are_left_stay_in_the_lists() -> None:
    records = RecordStore(MemoryStore())
    for name in ("a", "b", "c", "d"):
        await add_ended(records, name, closed_at=datetime.now(UTC) + timedelta(hours=name in "bd"))
    async for record in records.sweep(datetime.now(UTC) + timedelta(minutes=1)):
        await records.delete_session(record)
    assert await ids(records) == ["d", "b"]
    assert await ids(records, status="closed") == ["d", "b"]
    await add_ended(records, "e")
    assert set(await ids(records)) == {"e", "d", "b"}


async def test_a_crash_during_the_deletion_is_made_good_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    records = RecordStore(store)
    for name in ("a", "b"):
        await add_ended(records, name)

    async def crash(key: str, **_: Any) -> bool:
        raise ConnectionResetError

    async def sweep() -> None:
        async for record in RecordStore(store).sweep(datetime.now(UTC)):
            await RecordStore(store).delete_session(record)

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", crash)
        with pytest.raises(ConnectionResetError):
            await sweep()
    await sweep()
    assert await store.list() == []


async def test_an_id_that_is_added_during_the_cleaning_is_not_lost() -> None:
    lists = SessionLists(MemoryStore())
    await lists.add("ann", "all", "gone")
    await lists.add("ann", "all", "left")

    async def is_left(session_id: str) -> bool:
        if session_id == "gone":
            await lists.add("ann", "all", "new")
        return session_id != "gone"

    await lists.clean("ann", datetime.now(UTC).date(), is_left)
    page = await lists.page("ann", "all", 0, 10, None)
    assert page.ids == ["new", "left", "gone"]


async def test_an_interrupted_creation_is_listed_once() -> None:
    """A server that is killed between two writes leaves a session that the next start completes."""
    for written in ("record", "lists"):
        store = MemoryStore()
        record = a_record("a", status="terminated")
        await store.put("server/live/main/a", b"{}")
        await store.put("server/sessions/a/record.json", record.model_dump_json().encode())
        if written == "lists":
            await SessionLists(store).add("ann", "all", "a")
            await SessionLists(store).add("ann", "terminated", "a")
        for _ in range(2):
            assert await RecordStore(store).sessions_left_live() == []
        records = RecordStore(store)
        assert (await ids(records), await ids(records, status="terminated")) == (["a"], ["a"])
        assert await store.list("server/live") == []


async def test_the_mark_of_a_session_that_was_never_written_is_removed() -> None:
    store = MemoryStore()
    await store.put("server/live/main/a", b"{}")
    assert await RecordStore(store).sessions_left_live() == []
    assert await store.list() == []
