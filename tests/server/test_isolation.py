"""Users never see each other's sessions, files or jobs: every route of the API is tried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, create_session, run_command

SECRET = "only-hers-4711"
BODIES: dict[tuple[str, str], Any] = {
    ("post", "/sessions/{session_id}/exec"): {"command": "cat secret"},
    ("post", "/sessions/{session_id}/run"): {"code": "open('secret').read()"},
    ("post", "/sessions/{session_id}/str_replace"): {
        "file_path": "secret",
        "str_to_replace": SECRET,
        "str_to_insert": "gone",
    },
    ("post", "/sessions/{session_id}/conversation"): {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "intruder"}]}]
    },
    ("post", "/sessions/{session_id}/rewind"): {"to": SECRET},
    ("patch", "/sessions/{session_id}"): {"ttl_minutes": 1},
    ("put", "/sessions/{session_id}/files/{path}"): b"overwritten",
    ("post", "/sessions"): {},
    ("post", "/approvals/{approval_id}"): {"decision": "approve"},
}
WITHOUT_SESSION = {
    "/health",
    "/datasets",
    "/samples",
    "/samples/{dataset}/{sample_id}/download",
    "/metrics",
    "/nodes",
    "/sessions",
    "/approvals",
}
"""Routes without a session in them; the last two list the user's own."""


@pytest.fixture(scope="module")
def hers(server: ServerProcess) -> Iterator[dict[str, str]]:
    """A session with a file, an interaction, a job and a checkpoint."""
    with server.client() as client:
        session = create_session(client, dataset="demo", sample_id="calc-1", files={"secret": SECRET})
        interaction = run_command(client, session, "cat secret")["interaction_id"]
        messages = [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]
        client.post(f"/sessions/{session}/conversation", json={"messages": messages})
        job = client.post(f"/sessions/{session}/verify", headers={"Prefer": "wait=55"}).json()["job_id"]
        point = client.post(f"/sessions/{session}/checkpoints", json={"label": SECRET}).json()["id"]
        ids = {"session_id": session, "interaction_id": interaction, "job_id": job, "checkpoint_id": point}
        ids["approval_id"] = f"{session}.{'0' * 32}"
        yield {**ids, "path": "secret"}
        client.delete(f"/sessions/{session}")


def routes(server: ServerProcess) -> list[tuple[str, str]]:
    schema = httpx.get(server.url.replace("/api/v1", "/openapi.json"), timeout=60).json()
    return [
        (method, path.removeprefix("/api/v1"))
        for path, methods in schema["paths"].items()
        for method in methods
        if method in ("get", "post", "put", "patch", "delete", "head")
    ]


def send(client: httpx.Client, method: str, path: str, values: dict[str, str]) -> httpx.Response:
    body = BODIES.get((method, path))
    address = path.format(**values, dataset="demo", sample_id="calc-1")
    given = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    return client.request(method, address, **given)


def test_another_users_session_does_not_exist_for_any_route(server: ServerProcess, hers: dict[str, str]) -> None:
    walked = routes(server)
    nothing = {**hers, "session_id": "0" * 32, "approval_id": f"{'0' * 32}.{'0' * 32}"}
    with server.client(server.add_key("intruder")) as other:
        for method, path in walked:
            if path in WITHOUT_SESSION:
                continue
            answer = send(other, method, path, hers)
            assert answer.status_code == 404, (method, path, answer.text)
            assert SECRET not in answer.text
            missing = send(other, method, path, nothing)
            expected_text = answer.text.replace(hers["session_id"], nothing["session_id"])
            assert (missing.status_code, missing.text) == (404, expected_text), (
                "the answer does not reveal that it exists"
            )
        assert other.get("/sessions").json()["sessions"] == []
        assert hers["session_id"] not in other.get("/metrics").text
    assert len(walked) > 20
    with server.client() as client:
        assert run_command(client, hers["session_id"], "cat secret; ls")["stdout"].startswith(SECRET)
        assert len(client.get(f"/sessions/{hers['session_id']}/conversation").json()["messages"]) == 1
        assert client.get(f"/sessions/{hers['session_id']}").json()["status"] == "ready"
        assert len(client.get(f"/sessions/{hers['session_id']}/checkpoints").json()["checkpoints"]) == 1


def test_without_a_key_nothing_but_health_is_answered(server: ServerProcess, hers: dict[str, str]) -> None:
    key = server.key
    for given in (None, "Bearer wrong", f"Bearer {key[:-1]}", f"Bearer {key}x", f"Basic {key}", key):
        headers = {} if given is None else {"Authorization": given}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as stranger:
            for method, path in routes(server)[:: 1 if given is None else 9]:
                answer = send(stranger, method, path, hers)
                if path == "/health":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code in (401, 429), (method, path, answer.text)
                assert set(answer.json()) == {"detail", "code"}


def test_too_many_wrong_keys_have_to_wait(new_server: Any) -> None:
    server = new_server()
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer guess"}, timeout=60) as guessing:
        codes = [guessing.get("/sessions").status_code]
        while codes[-1] == 401 and len(codes) < 2000:
            codes.append(guessing.get("/sessions").status_code)
    assert codes[0] == 401
    assert codes[-1] == 429
    with server.client() as client:
        assert client.get("/sessions").status_code == 200, "a valid key is not affected"


def test_a_key_that_is_revoked_is_refused_while_the_server_runs(server: ServerProcess) -> None:
    key = server.add_key("leaver")
    with server.client(key) as client:
        assert client.get("/sessions").status_code == 200
        server.keys("revoke", "leaver")
        until = time.monotonic() + 60
        while client.get("/sessions").status_code == 200:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_keys_are_kept_as_hashes(server: ServerProcess) -> None:
    key = server.add_key("hashed")
    kept = b"".join(path.read_bytes() for path in server.data.rglob("*") if path.is_file())
    assert b"hashed" in kept
    assert key.encode() not in kept
    assert [entry["name"] for entry in server.keys("list")][:1] == ["hashed"]
