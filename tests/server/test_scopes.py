"""What a key may do: its scope, and the session it may be limited to."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Carrel, carrel, environment, home
from tests.server.test_isolation import routes, send
from tests.support.server_process import ServerProcess, create_session, run_command

__all__ = ["carrel", "environment", "home"]

LISTS = ("fail_to_pass", "pass_to_pass", "fail_to_fail")
HIDDEN = {"patch": "", "test_patch": "", "non_code_patch": "", **{name: [] for name in LISTS}}


@pytest.fixture(scope="module")
def sample(server: ServerProcess) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.get("/samples?dataset=demo&search=calc-1").json()["samples"][0]
        return found


@pytest.fixture(scope="module")
def agent(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(server.add_key("local", "--scope", "agent")) as client:
        yield client


def secrets_of(sample: dict[str, Any]) -> list[str]:
    """Names of tests, and lines of the two patches."""
    tests = [name.rpartition("::")[2] for kind in LISTS for name in sample[kind]]
    lines = [*sample["patch"].splitlines(), *sample["test_patch"].splitlines()]
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    return tests + [line for line in added if len(line) > 12 and "/" not in line]


def test_an_agent_does_not_see_how_a_sample_is_solved_or_judged(sample: dict[str, Any], agent: httpx.Client) -> None:
    assert all(sample[name] for name in ("patch", "test_patch", "fail_to_pass"))
    shown = agent.get("/samples?dataset=demo&search=calc-1").json()["samples"][0]
    assert shown == {**sample, **HIDDEN}
    packed = agent.get("/samples/demo/calc-1/download").content
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        texts = [file.read().decode() for entry in archive if (file := archive.extractfile(entry)) is not None]
    new = [line[1:] for line in sample["patch"].splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(texts) >= 3
    assert not [line for line in new for text in texts if line in text.splitlines()]


def test_an_agent_works_and_is_judged_but_sees_no_tests(
    server: ServerProcess, sample: dict[str, Any], agent: httpx.Client
) -> None:
    secrets = secrets_of(sample)
    assert len(secrets) > 3
    session = create_session(agent, dataset="demo", sample_id="calc-1")
    assert run_command(agent, session, "ls")["exit_code"] == 0
    headers = {"Prefer": "wait=55", "Idempotency-Key": "verify"}
    with server.client() as full:
        whole = full.post(f"/sessions/{session}/verify", headers=headers)
        job_id = whole.json()["job_id"]
        assert [secret for secret in secrets if secret in whole.text], "the others see the tests"
    judged = agent.post(f"/sessions/{session}/verify", headers=headers)
    assert judged.json()["job_id"] != job_id, "it does not get the answer to another key"
    assert (judged.json()["result"]["is_success"], judged.json()["result"]["outcome"]) == (False, "not_solved")
    assert judged.json()["result"]["failed"] == whole.json()["result"]["failed"] > 0
    answers = [
        judged,
        agent.get(f"/sessions/{session}/verify/{job_id}"),
        agent.delete(f"/sessions/{session}/verify/{job_id}"),
        agent.get(f"/sessions/{session}/events?follow=0"),
        agent.get(f"/sessions/{session}"),
        agent.get("/sessions"),
        agent.get(f"/sessions/{session}/conversation"),
        agent.get("/metrics"),
    ]
    for answer in answers:
        assert answer.status_code == 200
        assert [secret for secret in secrets if secret in answer.text] == [], answer.request.url
    assert "not_solved" in answers[3].text
    for stream in ("stdout", "stderr", "report"):
        refused = agent.get(f"/sessions/{session}/verify/{job_id}/output?stream={stream}")
        assert (refused.status_code, refused.json()["code"]) == (403, "KeyNotAccepted")
    agent.delete(f"/sessions/{session}")


def test_a_reader_changes_nothing(server: ServerProcess) -> None:
    with server.client() as client, server.client(server.add_key("local", "--scope", "read")) as reader:
        session = create_session(client, files={"note": "text"})
        done = run_command(client, session, "cat note")["interaction_id"]
        ids = {
            "session_id": session,
            "interaction_id": done,
            "job_id": "job_1",
            "checkpoint_id": "c",
            "path": "note",
            "approval_id": "a",
        }
        tried = set()
        for method, path in routes(server):
            if method != "get":
                tried.add(method)
                answer = send(reader, method, path, ids)
                assert (answer.status_code, answer.json()["code"]) == (403, "KeyNotAccepted"), (method, path)
                assert "only for reading" in answer.json()["detail"]
        assert tried >= {"post", "put", "patch", "delete"}
        assert reader.get(f"/sessions/{session}/interactions/{done}").json()["stdout"] == "text"
        assert reader.get(f"/sessions/{session}/files/note").text == "text"
        assert session in reader.get("/sessions").text
        with server.client(server.add_key("other", "--scope", "read")) as other:
            assert other.get(f"/sessions/{session}").status_code == 404
        client.delete(f"/sessions/{session}")


def test_a_key_for_one_session(server: ServerProcess) -> None:
    with server.client() as client:
        mine, other = create_session(client), create_session(client)
        with server.client(server.add_key("local", "--session", mine)) as limited:
            assert run_command(limited, mine, "echo here")["stdout"] == "here\n"
            assert [each["session_id"] for each in limited.get("/sessions").json()["sessions"]] == [mine]
            ids = {
                "session_id": other,
                "interaction_id": "i",
                "job_id": "j",
                "checkpoint_id": "c",
                "path": "p",
                "approval_id": "a",
            }
            for method, path in routes(server):
                if "{session_id}" in path:
                    assert send(limited, method, path, ids).status_code == 404, (method, path)
                elif path not in ("/health", "/sessions") or method == "post":
                    refused = send(limited, method, path, ids)
                    assert (refused.status_code, mine in refused.json()["detail"]) == (403, True), (method, path)
            assert limited.post(f"/sessions/{mine}/fork").status_code == 403
            assert limited.post(f"/sessions/{mine}/fork/", follow_redirects=True).status_code == 403
            assert limited.delete(f"/sessions/{mine}").status_code == 200
        client.delete(f"/sessions/{other}")


def test_keys_on_the_command_line(carrel: Carrel, tmp_path: Path) -> None:
    data = ("--data", tmp_path)
    key = carrel("keys", "add", "ann", "--scope", "agent", "--session", "a1", "--expires", "7d", *data).stdout
    assert len(key.split()) == 1
    [shown] = json.loads(carrel("keys", "list", "--json", *data).stdout)
    assert (shown["scope"], shown["session"], shown["expires_at"] > shown["created_at"]) == ("agent", "a1", True)
    assert "agent" in carrel("keys", "list", *data).stdout
    assert "full, agent, read" in carrel("keys", "add", "bob", "--scope", "all", *data, code=2).stderr
    assert "soon" in carrel("keys", "add", "bob", "--expires", "soon", *data, code=2).stderr
    assert "a/b" in carrel("keys", "add", "bob", "--session", "a/b", *data, code=2).stderr
    assert "agent" in carrel("keys", "revoke", "ann", "--scope", "read", *data, code=2).stderr
    assert "ann (agent, session a1)" in carrel("keys", "revoke", "ann", "--session", "a1", *data).stdout
