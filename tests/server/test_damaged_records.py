"""A damaged record or line affects only itself: the server starts, and reports what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carrel.server.auth import open_keys
from tests.server.conftest import NewServer
from tests.support.server_process import create_session, run_command

DAMAGED = b'\x00\x00\x00 not JSON\n[1]\n{}\n{"type":5}\n{"forgotten":"../.."}\n{"revoked":[]}\n\xff\n'


def damage(log: Path) -> None:
    """Write damaged lines before the first line, and after the last."""
    log.write_bytes(DAMAGED + log.read_bytes() + DAMAGED)


def test_the_server_starts_and_knows_the_rest(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        session, damaged = create_session(client), create_session(client)
        done = run_command(client, session, "echo kept")
        client.delete(f"/sessions/{session}")
    server.kill()
    root = server.data / "server"
    logs = sorted(path for path in root.rglob("*.jsonl"))
    assert {path.parent.parent.name for path in logs} == {"sessions", "local"}
    for log in logs:
        damage(log)
    for record in (root / "sessions" / damaged / "record.json", root / "keys" / "damaged.json"):
        record.write_bytes(DAMAGED)
    (root / "live" / "main" / "..x").write_bytes(b"")
    server.start()
    with server.client() as client:
        assert client.get(f"/sessions/{session}").json()["status"] == "closed"
        assert client.get(f"/sessions/{damaged}").status_code == 404
        listed = client.get("/sessions").json()["sessions"]
        assert [each["session_id"] for each in listed] == [session]
        kept = client.get(f"/sessions/{session}/interactions/{done['interaction_id']}").json()
        assert kept["stdout"] == "kept\n"
        assert "kept" in client.get(f"/sessions/{session}/events").text
        assert run_command(client, create_session(client), "echo more")["stdout"] == "more\n"
    assert "is damaged and ignored" in server.stderr


def test_a_live_session_is_ended_though_its_log_is_damaged(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        session = create_session(client)
        running = client.post(f"/sessions/{session}/exec", json={"command": "sleep 600"}).json()["interaction_id"]
    server.kill()
    damage(server.data / "server" / "sessions" / session / "log.jsonl")
    server.start()
    with server.client() as client:
        assert client.get(f"/sessions/{session}").json()["status"] == "terminated"
        assert client.get(f"/sessions/{session}/interactions/{running}").json()["exit_code"] == -1000


async def test_a_damaged_key_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_keys(tmp_path) as keys:
        key = await keys.add("ann")
    (tmp_path / "server" / "keys" / "other.json").write_text(json.dumps({"name": "bob", "sha256": 5}))
    async with open_keys(tmp_path) as keys:
        assert [each.name for each in await keys.list()] == ["ann"]
        assert await keys.find(key) is not None
    assert "server/keys/other.json is damaged" in caplog.text


def test_the_data_of_an_earlier_version_is_taken_over(new_server: NewServer) -> None:
    """It kept all sessions in one log, and all keys in another."""
    server = new_server()
    with server.client() as client:
        session, deleted = create_session(client), "0" * 32
        record = client.get(f"/sessions/{session}").json()
        client.delete(f"/sessions/{session}")
        ended = client.get(f"/sessions/{session}").json()
    server.stop()
    root = server.data / "server"
    [old_key] = [json.loads(path.read_text()) for path in (root / "keys").iterdir()]
    for folder in ("keys", "key-names", "lists"):
        for path in (root / folder).rglob("*.json*"):
            path.unlink()
    (root / "sessions" / session / "record.json").unlink()
    other = {**ended, "session_id": deleted}
    gone = {"forgotten": deleted}
    (root / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (record, other, ended, gone)))
    fields = {name: old_key[name] for name in ("name", "sha256", "created_at")}
    revoked = {**fields, "name": "bob", "sha256": "0" * 64}
    lines = (fields, revoked, {"revoked": "bob"})
    (root / "keys.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    server.start()
    with server.client() as client:
        listed = client.get("/sessions").json()["sessions"]
        assert [(each["session_id"], each["status"]) for each in listed] == [(session, "closed")]
        assert [key["name"] for key in server.keys("list")] == ["local"]
    assert not [path for path in (root / "sessions.jsonl", root / "keys.jsonl") if path.exists()]
