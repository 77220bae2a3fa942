"""What ended long ago is forgotten where the server is told to, whole, and nothing else is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from carrel.server.ledger import SESSIONS, Ledger, log_of
from carrel.session import MemoryStorage
from carrel.storage.base import Store
from carrel.wire.answers import SessionRecord
from tests.server.conftest import NewServer
from tests.server.serving_process import executed, ready

MESSAGE = {"role": "user", "content": [{"type": "text", "text": "remember"}]}


def test_what_ended_long_ago_is_forgotten(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        old, new = ready(client), ready(client)
        for session in (old, new):
            executed(client, session, "echo said in it")
            client.post(f"/sessions/{session}/conversation", json={"messages": [MESSAGE]})
            client.delete(f"/sessions/{session}")
    server.stop()
    log = server.data / SESSIONS
    aged = []
    for line in map(json.loads, log.read_text().splitlines()):
        if line["session_id"] == old and line["closed_at"]:
            line["closed_at"] = (datetime.now(UTC) - timedelta(days=10)).isoformat()
        aged.append(json.dumps(line))
    log.write_text("\n".join(aged) + "\n")
    for words in ((), ("--keep", "5"), ("--keep", "5")):
        server._words[:] = words
        server.start()
        with server.client() as client:
            told = [session["session_id"] for session in client.get("/sessions").json()["sessions"]]
            assert told == ([new] if words else [new, old])
            assert client.get(f"/sessions/{old}").status_code == (404 if words else 200)
            assert len(client.get(f"/sessions/{new}/conversation").json()["messages"]) == 1
        server.stop()
    left = [path for path in server.data.rglob("*") if old in path.name or (path.is_file() and old in path.read_text())]
    assert left == []


@pytest.fixture
async def store() -> Store:
    return MemoryStorage().store


def a_session(name: str) -> SessionRecord:
    now = datetime.now(UTC)
    times = {"requested_at": now, "expires_at": now, "closed_at": now}
    return SessionRecord(
        session_id=name, dataset="", sample_id="", status="closed", user_id="u", ttl_minutes=30, **times
    )


async def test_forgotten_for_good_and_the_log_with_it(store: Store) -> None:
    ledger = Ledger(store)
    for name in ("a", "b", "c"):
        await ledger.keep(a_session(name))
    await ledger.forget("b")
    assert list(ledger.sessions) == ["a", "c"]
    assert [block async for block in store.read(log_of("b"))] == []
    again = Ledger(store)
    await again.open()
    assert list(again.sessions) == ["a", "c"]
    assert [len(block.records) async for block in store.read(SESSIONS)] == [2]


async def test_killed_right_after_a_session_was_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(store)
    for name in ("a", "b"):
        await ledger.keep(a_session(name))

    async def killed(key: str) -> bool:
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", killed)
        with pytest.raises(ConnectionResetError):
            await ledger.forget("b")
    again = Ledger(store)
    await again.open()
    assert list(again.sessions) == ["a"]
    assert [block async for block in store.read(log_of("b"))] == []


@pytest.mark.parametrize("whole", [True, False])
async def test_killed_while_the_log_is_rewritten(store: Store, whole: bool) -> None:
    """Before its last line the old log counts; after it, the new one does, whatever is left of the old."""
    first = Ledger(store)
    for name in ("a", "b"):
        await first.keep(a_session(name))
    line = a_session("a").model_dump_json().encode()
    await store.append("server/sessions-rewritten.jsonl", [line, b'{"whole":true}'] if whole else [line])
    for _ in range(2):
        again = Ledger(store)
        await again.open()
        assert list(again.sessions) == (["a"] if whole else ["a", "b"])
