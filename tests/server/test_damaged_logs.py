"""A damaged line in any of the server's logs affects only itself: the server starts, and reports the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carrel.server.keys import opened_keys
from tests.server.conftest import NewServer
from tests.server.serving_process import executed, ready

DAMAGED = b'\x00\x00\x00 not JSON\n[1]\n{}\n{"type":5}\n{"forgotten":"../.."}\n{"revoked":[]}\n\xff\n'


def damage(log: Path) -> None:
    """Put damaged lines before the first line, and after the last."""
    log.write_bytes(DAMAGED + log.read_bytes() + DAMAGED)


def test_the_server_starts_and_knows_the_rest(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        session = ready(client)
        done = executed(client, session, "echo kept")
        headers = {"Idempotency-Key": "k"}
        noted = client.post(f"/sessions/{session}/checkpoints", json={"label": "a"}, headers=headers)
        client.delete(f"/sessions/{session}")
    server.stop()
    logs = sorted(path for path in (server.data / "server").rglob("*.jsonl"))
    assert [path.name for path in logs] == ["answers.jsonl", "keys.jsonl", "log.jsonl", "sessions.jsonl"]
    for log in logs:
        damage(log)
    server.start()
    with server.client() as client:
        assert client.get(f"/sessions/{session}").json()["status"] == "closed"
        kept = client.get(f"/sessions/{session}/interactions/{done['interaction_id']}").json()
        assert kept["stdout"] == "kept\n"
        assert "kept" in client.get(f"/sessions/{session}/events").text
        again = client.post(f"/sessions/{session}/checkpoints", json={"label": "a"}, headers=headers)
        assert (again.text, again.headers["idempotent-replayed"]) == (noted.text, "true")
        assert executed(client, ready(client), "echo goes on")["stdout"] == "goes on\n"


def test_a_session_that_was_running_is_ended_though_its_log_is_damaged(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        session = ready(client)
        running = client.post(f"/sessions/{session}/exec", json={"command": "sleep 600"}).json()["interaction_id"]
    server.kill()
    damage(server.data / "server" / "sessions" / session / "log.jsonl")
    server.start()
    with server.client() as client:
        assert client.get(f"/sessions/{session}").json()["status"] == "terminated"
        assert client.get(f"/sessions/{session}/interactions/{running}").json()["exit_code"] == -1000


async def test_a_damaged_key_is_reported_with_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened_keys(tmp_path) as keys:
        key = await keys.add("ann")
    log = tmp_path / "server" / "keys.jsonl"
    log.write_bytes(json.dumps({"name": "bob", "sha256": 5}).encode() + b"\n" + log.read_bytes())
    async with opened_keys(tmp_path) as keys:
        assert [each.name for each in await keys.list()] == ["ann"]
        assert await keys.find(key) is not None
    assert "server/keys.jsonl, line 1 is damaged" in caplog.text
