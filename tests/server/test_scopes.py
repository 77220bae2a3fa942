"""What a key may do: its scope, the one session it may be limited to, and its end."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from carrel.errors import ApiKeyNotFound, ConfigurationError
from carrel.server.edge import Bounds, Edge
from carrel.server.keys import Keys, opened_keys
from carrel.server.metrics import Metrics
from carrel.storage.base import Stamp
from carrel.storage.memory import MemoryStore
from tests.cli.conftest import Carrel, carrel, environment, home
from tests.server.serving_process import Serving, executed, ready
from tests.server.test_isolation import asked, routes

__all__ = ["carrel", "environment", "home"]

LISTS = ("fail_to_pass", "pass_to_pass", "fail_to_fail")
HIDDEN = {"patch": "", "test_patch": "", "non_code_patch": "", **{name: [] for name in LISTS}}


@pytest.fixture(scope="module")
def sample(server: Serving) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.get("/samples?dataset=demo&search=calc-1").json()["samples"][0]
        return found


@pytest.fixture(scope="module")
def agent(server: Serving) -> Iterator[httpx.Client]:
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
    told = agent.get("/samples?dataset=demo&search=calc-1").json()["samples"][0]
    assert told == {**sample, **HIDDEN}
    packed = agent.get("/samples/demo/calc-1/download").content
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        texts = [file.read().decode() for entry in archive if (file := archive.extractfile(entry)) is not None]
    new = [line[1:] for line in sample["patch"].splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(texts) >= 3
    assert not [line for line in new for text in texts if line in text.splitlines()]


def test_an_agent_works_and_is_judged_but_sees_no_tests(
    server: Serving, sample: dict[str, Any], agent: httpx.Client
) -> None:
    secrets = secrets_of(sample)
    assert len(secrets) > 3
    session = ready(agent, dataset="demo", sample_id="calc-1")
    assert executed(agent, session, "ls")["exit_code"] == 0
    headers = {"Prefer": "wait=55", "Idempotency-Key": "verify"}
    with server.client() as full:
        whole = full.post(f"/sessions/{session}/verify", headers=headers)
        job_id = whole.json()["job_id"]
        assert [secret for secret in secrets if secret in whole.text], "the others see the tests"
    judged = agent.post(f"/sessions/{session}/verify", headers=headers)
    assert judged.json()["job_id"] != job_id, "it is not given the answer that another key got"
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


def test_a_reader_changes_nothing(server: Serving) -> None:
    with server.client() as client, server.client(server.add_key("local", "--scope", "read")) as reader:
        session = ready(client, files={"note": "text"})
        done = executed(client, session, "cat note")["interaction_id"]
        ids = {"session_id": session, "interaction_id": done, "job_id": "job_1", "checkpoint_id": "c", "path": "note"}
        tried = set()
        for method, path in routes(server):
            if method != "get":
                tried.add(method)
                answer = asked(reader, method, path, ids)
                assert (answer.status_code, answer.json()["code"]) == (403, "KeyNotAccepted"), (method, path)
                assert "only for reading" in answer.json()["detail"]
        assert tried >= {"post", "put", "patch", "delete"}
        assert reader.get(f"/sessions/{session}/interactions/{done}").json()["stdout"] == "text"
        assert reader.get(f"/sessions/{session}/files/note").text == "text"
        assert session in reader.get("/sessions").text
        with server.client(server.add_key("other", "--scope", "read")) as other:
            assert other.get(f"/sessions/{session}").status_code == 404
        client.delete(f"/sessions/{session}")


def test_a_key_for_one_session(server: Serving) -> None:
    with server.client() as client:
        mine, other = ready(client), ready(client)
        with server.client(server.add_key("local", "--session", mine)) as limited:
            assert executed(limited, mine, "echo here")["stdout"] == "here\n"
            assert [each["session_id"] for each in limited.get("/sessions").json()["sessions"]] == [mine]
            ids = {"session_id": other, "interaction_id": "i", "job_id": "j", "checkpoint_id": "c", "path": "p"}
            for method, path in routes(server):
                if "{session_id}" in path:
                    assert asked(limited, method, path, ids).status_code == 404, (method, path)
                elif path not in ("/health", "/sessions") or method == "post":
                    refused = asked(limited, method, path, ids)
                    assert (refused.status_code, mine in refused.json()["detail"]) == (403, True), (method, path)
            assert limited.post(f"/sessions/{mine}/fork").status_code == 403
            assert limited.post(f"/sessions/{mine}/fork/", follow_redirects=True).status_code == 403
            assert limited.delete(f"/sessions/{mine}").status_code == 200
        client.delete(f"/sessions/{other}")


async def test_a_key_ends(tmp_path: Path) -> None:
    async with opened_keys(tmp_path) as keys:
        over = await keys.add("ann", lifetime=timedelta(seconds=-1))
        assert await keys.find(over, look_again=True) is None
        assert await keys.list() == []
        valid = await keys.add("ann", lifetime=timedelta(days=7))
        found = await keys.find(valid)
        assert found is not None
        assert found.expires_at is not None
        assert found.expires_at - found.created_at == timedelta(days=7)
        assert await keys.find(over) is None


async def test_a_user_has_keys_with_several_limits(tmp_path: Path) -> None:
    async with opened_keys(tmp_path) as keys:
        full, agent = await keys.add("ann"), await keys.add("ann", scope="agent")
        one = await keys.add("ann", scope="agent", session="a1")
        with pytest.raises(ConfigurationError, match=r"ann \(agent, session a1\) already"):
            await keys.add("ann", scope="agent", session="a1")
        with pytest.raises(ApiKeyNotFound):
            await keys.revoke("ann", scope="read")
        assert len(await keys.revoke("ann", session="a1")) == 1
        assert [await keys.find(key) is not None for key in (full, agent, one)] == [True, True, False]
        await keys.revoke("ann", scope="agent")
        assert [await keys.find(key) is not None for key in (full, agent)] == [True, False]
        await keys.add("ann", scope="agent")
        assert len(await keys.revoke("ann")) == 2


async def test_a_key_of_an_earlier_version_may_do_everything(tmp_path: Path) -> None:
    async with opened_keys(tmp_path) as keys:
        key = await keys.add("ann")
    log = tmp_path / "server" / "keys.jsonl"
    entry = json.loads(log.read_text())
    log.write_text(json.dumps({name: entry[name] for name in ("name", "sha256", "created_at")}) + "\n")
    async with opened_keys(tmp_path) as keys:
        found = await keys.find(key)
    assert found is not None
    assert (found.scope, found.session, found.expires_at) == ("full", None, None)


def test_keys_as_they_are_typed(carrel: Carrel, tmp_path: Path) -> None:
    data = ("--data", tmp_path)
    key = carrel("keys", "add", "ann", "--scope", "agent", "--session", "a1", "--expires", "7d", *data).stdout
    assert len(key.split()) == 1
    [told] = json.loads(carrel("keys", "list", "--json", *data).stdout)
    assert (told["scope"], told["session"], told["expires_at"] > told["created_at"]) == ("agent", "a1", True)
    assert "agent" in carrel("keys", "list", *data).stdout
    assert "full, agent, read" in carrel("keys", "add", "bob", "--scope", "all", *data, code=2).stderr
    assert "7" in carrel("keys", "add", "bob", "--expires", "7", *data, code=2).stderr
    assert "a/b" in carrel("keys", "add", "bob", "--session", "a/b", *data, code=2).stderr
    assert "agent" in carrel("keys", "revoke", "ann", "--scope", "read", *data, code=2).stderr
    assert "ann (agent, session a1)" in carrel("keys", "revoke", "ann", "--session", "a1", *data).stdout


class Counting(MemoryStore):
    """A store that counts how often it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def stamp(self, key: str) -> Stamp | None:
        self.looks += 1
        return await super().stamp(key)


async def test_wrong_keys_beyond_the_rate_do_not_reach_the_log_of_keys() -> None:
    store = Counting()
    keys = Keys(store)
    good = await keys.add("ann")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    edge = Edge(app, keys, Bounds(wrong_keys_per_second=0.001), Metrics())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://test/api/v1") as client:

        async def status(key: str) -> int:
            return (await client.get("/sessions", headers={"Authorization": f"Bearer {key}"})).status_code

        codes = [await status(f"wrong-{number}") for number in range(60)]
        assert (codes[0], codes[-1]) == (401, 429)
        keys._looked = float("inf")  # the list is not looked at again because a second has gone
        before = store.looks
        assert {await status(f"wrong-{number}") for number in range(500)} == {429}
        assert store.looks == before
        assert await status(good) == 200
