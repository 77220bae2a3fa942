"""One id joins an answer, the server's log and the steps of a trace that a request has caused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from carrel import Client
from carrel.errors import SessionNotFound
from tests.server.conftest import NewServer
from tests.support.server_process import ServerProcess, create_session

ECHO = "name: echo\ncommand: echo\nschema: {positional: [{name: text, type: string, required: true}]}\n"


def steps(client: httpx.Client, session_id: str) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = client.get(f"/sessions/{session_id}/trace").json()["lines"]
    return lines


def test_an_answer_has_the_id_of_its_request(client: httpx.Client) -> None:
    assert client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    for odd in ("a b", "", "x" * 101):
        assert client.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"] not in ("", odd)


def test_steps_have_the_id_of_the_request_that_caused_them(client: httpx.Client) -> None:
    session_id = create_session(client)
    for number, (path, body) in enumerate(
        [
            ("exec", {"command": "true"}),
            ("run", {"code": "x = 1"}),
            ("checkpoints", {"label": "here"}),
        ]
    ):
        url = f"/sessions/{session_id}/{path}"
        answer = client.post(url, json=body, headers={"X-Request-Id": f"r{number}", "Prefer": "wait=50"})
        assert answer.is_success, answer.text
    found = {step["kind"]: step.get("request") for step in steps(client, session_id)}
    assert {kind: found[kind] for kind in ("command", "run", "checkpoint")} == {
        "command": "r0",
        "run": "r1",
        "checkpoint": "r2",
    }


def test_a_call_of_code_has_the_id_of_the_run(new_server: NewServer, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "echo.yaml").write_text(ECHO)
    server = new_server("--tools", tmp_path / "tools")
    with server.client() as client:
        made = client.post("/sessions", json={}, headers={"X-Request-Id": "made", "Prefer": "wait=50"}).json()
        url = f"/sessions/{made['session_id']}/run"
        answer = client.post(url, json={"code": "tools.echo(text='hi')"}, headers={"X-Request-Id": "ran"})
        assert answer.json()["error"] is None, answer.text
        found = {step["kind"]: step.get("request") for step in steps(client, made["session_id"])}
        assert found == {"run": "ran", "tool": "ran"}


def test_errors_of_the_client_have_it(server: ServerProcess) -> None:
    with Client(base_url=server.url, api_key=server.key, default_headers={"X-Request-Id": "lost-1"}) as client:
        with pytest.raises(SessionNotFound) as caught:
            client.sessions.retrieve(session_id="0" * 32)
        assert caught.value.__cause__.request_id == "lost-1"  # type: ignore[union-attr]


def test_a_line_for_each_request(new_server: NewServer) -> None:
    server = new_server("--log-requests")
    with server.client() as client:
        client.get("/datasets", headers={"X-Request-Id": "seen"})
    server.stop()
    [line] = [line for line in server.stderr.splitlines() if "(request seen)" in line]
    assert line.startswith("note: GET /api/v1/datasets: 200 after ")
