"""Durable sessions over HTTP: pause, resume, and the restart or the death of the server."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from carrel.client import Client
from carrel.server.session_manager import SessionManager
from carrel.server.settings import ServerSettings
from carrel.session import FileStorage
from carrel.tasks.dataset import Datasets
from carrel.wire.requests import CreateSession
from tests.server.conftest import NewServer
from tests.support.server_process import ServerProcess, create_session, run_command


def run(client: httpx.Client, session: str, code: str) -> dict[str, Any]:
    answer = client.post(f"/sessions/{session}/run", json={"code": code})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["error"] is None, found
    return found


def state_folder(server: ServerProcess, session: str) -> Path:
    found = list(server.folder.rglob(f"sessions/{session}/workspace-state"))
    return found[0] if found else server.folder / "missing"


def test_pause_and_resume(client: httpx.Client, server: ServerProcess) -> None:
    session = create_session(client, durable=True)
    run(client, session, "x = 5; g = (n for n in [])")
    run_command(client, session, "echo made > made")
    paused = client.post(f"/sessions/{session}/pause").json()
    assert (paused["status"], paused["lifecycle"], paused["durable"]) == ("closed", "paused", True)
    assert client.post(f"/sessions/{session}/pause").json()["lifecycle"] == "paused"
    assert client.post(f"/sessions/{session}/run", json={"code": "1"}).status_code == 409
    resumed = client.post(f"/sessions/{session}/resume").json()
    assert (resumed["status"], resumed["lifecycle"]) == ("ready", "live")
    assert client.post(f"/sessions/{session}/resume").json()["status"] == "ready"
    result = run(client, session, "[x, open('made').read()]")
    assert (result["value"], result["state"]) == ([5, "made\n"], "restored")
    assert "g (g: TypeError" in result["state_reason"]
    assert client.get("/sessions?status=closed").json()["sessions"] == []
    # The first DELETE pauses it, the second removes what is kept.
    client.delete(f"/sessions/{session}")
    assert client.get(f"/sessions/{session}").json()["lifecycle"] == "paused"
    assert state_folder(server, session).exists()
    client.delete(f"/sessions/{session}")
    assert client.get(f"/sessions/{session}").json()["lifecycle"] == "ended"
    assert not state_folder(server, session).exists()
    assert client.post(f"/sessions/{session}/resume").status_code == 409


def test_only_a_durable_session_can_be_paused(client: httpx.Client) -> None:
    session = create_session(client)
    refused = client.post(f"/sessions/{session}/pause")
    assert (refused.status_code, "not durable" in refused.text) == (409, True)
    client.delete(f"/sessions/{session}")
    assert client.get(f"/sessions/{session}").json()["lifecycle"] == "ended"
    assert client.post(f"/sessions/{session}/resume").status_code == 409
    assert client.post("/sessions/nothing/pause").status_code == 404


def test_a_durable_session_of_a_sample_and_the_client(server: ServerProcess) -> None:
    with Client(base_url=server.url, api_key=server.key) as client:
        samples = client.samples.list(dataset="demo").samples
        session = client.sessions.create(dataset="demo", sample_id=samples[0].sample_id, durable=True)
        session.run("x = 1; open('new_file', 'w').write('new')")
        assert session.pause().lifecycle == "paused"
        session = client.sessions.resume(session.session_id)
        assert session.run("x, open('new_file').read()").value == (1, "new")
        assert any(change.path == "new_file" for change in session.changed_files())
        assert session.verify().status == "completed"
        session.close()


def test_a_server_that_is_stopped_or_killed_offers_its_durable_sessions_again(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        session = create_session(client, durable=True)
        run(client, session, "x = 1; open('f', 'w').write('1')")
    server.stop()
    server.start()
    with server.client() as client:
        record = client.get(f"/sessions/{session}").json()
        assert (record["status"], record["lifecycle"]) == ("closed", "paused")
        client.post(f"/sessions/{session}/resume")
        assert run(client, session, "x = x + 1; open('f', 'w').write('2'); x")["value"] == 2
    server.kill()
    server.start()
    with server.client() as client:
        record = client.get(f"/sessions/{session}").json()
        assert (record["status"], record["lifecycle"], record["error"]["code"]) == ("closed", "paused", "interrupted")
        assert client.post(f"/sessions/{session}/resume").json()["error"] is None
        result = run(client, session, "[x, open('f').read()]")["value"]
        assert result[1] == "2"
        assert result[0] in (1, 2)


async def test_a_durable_session_is_paused_when_its_time_is_over_and_removed_after_the_retention(
    tmp_path: Path,
) -> None:
    storage = FileStorage(tmp_path / "store")
    settings = ServerSettings(cache=tmp_path / "cache", retention=timedelta(seconds=0), sandbox="off")
    manager = SessionManager(storage, Datasets(None), settings)
    await manager.start()
    record = await manager.create("ann", CreateSession(durable=True, session_id="kept"))
    await manager.wait_ready("ann", "kept", 30)
    hosted = await manager.hosted("ann", "kept")
    await hosted.workspace().session.run("x = 1")
    await hosted.extend(record.requested_at or record.expires_at, 1)
    supervisor = manager._supervisors.get("kept")
    if supervisor is not None:
        await supervisor
    assert (await manager.get("ann", "kept")).lifecycle == "paused"
    assert (tmp_path / "store/sessions/kept/workspace-state").exists()
    await manager.sweep()
    assert not (tmp_path / "store/sessions/kept").exists()
    await manager.shutdown()
