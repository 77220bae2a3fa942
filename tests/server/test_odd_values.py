"""Texts, numbers and names that JSON or UTF-8 cannot hold are carried, or refused with the field they are in."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from carrel.client import Client
from tests.server.conftest import NewServer
from tests.support.server_process import ServerProcess, create_session, run_command, write_dataset

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def session(server: ServerProcess) -> str:
    with server.client() as client:
        return create_session(client, dataset="demo", sample_id="calc-1")


@pytest.mark.parametrize("code", ["10**5000", "[{'a': -10**5000}]"])
def test_a_large_integer_is_carried(server: ServerProcess, session: str, code: str) -> None:
    with server.client() as client:
        received = client.post(f"/sessions/{session}/run", json={"code": code})
        assert received.status_code == 200
        assert received.json()["value"] is None
        assert '"$":"int"' in received.text
        stream = client.post(f"/sessions/{session}/run", json={"code": code}, headers={"Accept": "text/event-stream"})
        assert "event: result" in stream.text
    with Client(base_url=server.url, api_key=server.key) as remote:
        assert remote.sessions.run(session, code=code).value == eval(code)


def test_a_message_with_a_lone_surrogate_stays_readable(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client)
    body = rb'{"messages": [{"role": "user", "content": "a\ud800b", "n": 1e400, "i": 123456789012345678901234567890}]}'
    assert client.post(f"/sessions/{session}/conversation", content=body, headers=JSON).status_code == 200
    answer = client.get(f"/sessions/{session}/conversation")
    [message] = answer.json()["messages"]
    assert (message["content"], message["n"], message["i"]) == ("a\ud800b", None, 123456789012345678901234567890)
    assert rb"a\ud800b" in answer.content
    fork = client.post(f"/sessions/{session}/fork").json()["session_id"]
    assert client.get(f"/sessions/{fork}/conversation").json()["messages"] == [message]
    with Client(base_url=server.url, api_key=server.key) as remote:
        assert remote.sessions.conversation(session)["messages"] == [message]
    for each in (session, fork):
        client.delete(f"/sessions/{each}")


def test_a_number_with_too_many_digits_is_refused_with_its_field(client: httpx.Client, session: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "a", "meta": {"n": [%s]}}]}' % (b"9" * 5000)
    answer = client.post(f"/sessions/{session}/conversation", content=body, headers=JSON)
    assert answer.status_code == 422
    [fault] = answer.json()["detail"]
    assert fault["loc"] == ["body", "messages", 0]
    assert fault["msg"].startswith("meta.n.0: ")
    ttl = client.post("/sessions", content=b'{"ttl_minutes": %s}' % (b"9" * 5000), headers=JSON)
    assert (ttl.status_code, ttl.json()["detail"][0]["loc"]) == (422, ["body", "ttl_minutes"])


def test_all_invalid_json_gets_the_same_error(client: httpx.Client, session: str) -> None:
    for body, words in ((b"{", "not JSON"), (b'"\xff"', "not UTF-8"), (b"[" * 100_000, "nested too deeply")):
        answer = client.post(f"/sessions/{session}/exec", content=body, headers=JSON)
        assert answer.status_code == 422
        assert words in answer.json()["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/sessions", rb'{"files": {"a": "\ud800"}}', "files"),
        ("/sessions", rb'{"files": {"a\ud800": ""}}', "files"),
        ("/sessions/{}/exec", rb'{"command": "true", "env": {"A": "\ud800"}}', "env"),
        ("/sessions/{}/exec", rb'{"command": "\ud800"}', "command"),
        ("/sessions/{}/run", rb'{"code": "\ud800"}', "code"),
    ],
)
def test_a_text_that_cannot_be_kept_is_refused_with_its_field(
    client: httpx.Client, session: str, route: str, body: bytes, field: str
) -> None:
    answer = client.post(route.format(session), content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][:2] == ["body", field]


def test_names_that_are_not_utf_8(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client, dataset="demo", sample_id="calc-1")
    made = r"mkdir $(printf 'd\377'); printf text > $(printf 'd\377/n\351'); printf x > '%FF'"
    assert run_command(client, session, made)["exit_code"] == 0
    entries = {each["name"]: each for each in client.get(f"/sessions/{session}/files").json()["entries"]}
    assert entries["d%FF"]["percent_encoded"] is True
    assert entries["%FF"]["percent_encoded"] is False
    assert client.get(f"/sessions/{session}/files/d%FF/").json()["entries"][0]["name"] == "n%E9"
    assert client.get(f"/sessions/{session}/files/d%FF/n%E9").text == "text"
    assert client.put(f"/sessions/{session}/files/d%FF/new%FE", content=b"new").json()["path"] == "d%FF/new%FE"
    assert run_command(client, session, r"cat $(printf 'd\377/new\376')")["stdout"] == "new"
    missing = client.get(f"/sessions/{session}/files/missing%FF")
    assert (missing.status_code, "missing" in missing.json()["detail"]) == (404, True)
    changes = client.get(f"/sessions/{session}/diff").json()["changes"]
    assert {each["path"] for each in changes if each["percent_encoded"]} == {"d%FF/n%E9", "d%FF/new%FE"}
    assert client.get(f"/sessions/{session}/events?follow=0").text.count("new%FE") == 1
    job = client.post(f"/sessions/{session}/verify", headers={"Prefer": "wait=55"}).json()
    assert job["status"] == "completed"
    assert job["result"]["outcome"] == "not_solved"
    with Client(base_url=server.url, api_key=server.key) as remote:
        names = sorted(each.name for each in remote.sessions.list_files(session, "d\udcff"))
        assert names == ["new\udcfe", "n\udce9"]
        assert remote.sessions.read_file(session, "d\udcff/n\udce9") == b"text"
        remote.sessions.write_file(session, "d\udcff/n\udce9", "changed")
        assert remote.sessions.read_file(session, f"d\udcff/{names[1]}") == b"changed"
        assert remote.sessions.read_file(session, "%FF") == b"x"
        assert "d\udcff/n\udce9" in [each.path for each in remote.sessions.diff(session).changes]
    client.delete(f"/sessions/{session}")


def test_a_dataset_with_an_odd_name_or_text_affects_only_itself(new_server: NewServer, tmp_path: Path) -> None:
    folder = tmp_path / "datasets"
    write_dataset(folder / "good", [{"sample_id": "a"}])
    write_dataset(folder / "odd\udcff", [{"sample_id": "a"}])
    (write_dataset(folder / "text", [{"sample_id": "a"}]) / "dataset.yaml").write_text(r'description: "\uD800"')
    with new_server("--datasets", folder).client() as client:
        assert [each["name"] for each in client.get("/datasets").json()] == ["good"]
        assert client.get("/samples").json()["total_count"] == 1
