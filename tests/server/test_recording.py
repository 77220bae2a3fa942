"""What is recorded of a session: its trace, its variables, and after its end its diff, verdicts and conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_process import create_session, run_command


@pytest.fixture
def session(client: httpx.Client) -> Iterator[str]:
    session_id = create_session(client, dataset="demo", sample_id="calc-1")
    yield session_id
    client.delete(f"/sessions/{session_id}")


def trace(client: httpx.Client, session: str, after: int = 0, **query: int) -> dict[str, Any]:
    page: dict[str, Any] = client.get(f"/sessions/{session}/trace", params={"after": after, **query}).json()
    return page


def test_the_trace_has_every_step(client: httpx.Client, session: str) -> None:
    at = f"/sessions/{session}"
    client.post(f"{at}/run", json={"code": "workflows.create('w', 'def run():\\n    return 2\\n')\nworkflows.w()"})
    run_command(client, session, "exit 3")
    client.post(f"{at}/run", json={"code": "1/0"})
    client.post(f"{at}/checkpoints", json={"label": "here"})
    client.post(f"{at}/rewind", json={"to": "here"})
    client.post(f"{at}/verify", headers={"Prefer": "wait=55"})
    lines = trace(client, session)["lines"]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    steps = [(line["kind"], line["name"], line["outcome"]) for line in lines]
    assert steps == [
        ("workflow", "w", "ok"),
        ("run", "workflows.create('w', 'def run():\\n    return 2\\n')", "ok"),
        ("command", "exit 3", "ok"),
        ("run", "1/0", "error"),
        ("checkpoint", "here", "ok"),
        ("rewind", "here", "ok"),
        ("verify", "calc-1", "ok"),
    ]
    assert lines[0]["parent"] == lines[1]["id"]
    assert (lines[2]["exit_code"], lines[3]["error_type"]) == (3, "ZeroDivisionError")
    assert lines[6]["verdict"] == "not_solved"
    page = trace(client, session, 2, limit=3)
    assert ([line["seq"] for line in page["lines"]], page["has_more"]) == ([3, 4, 5], True)
    fork = client.post(f"{at}/fork").json()["session_id"]
    run_command(client, fork, "echo in the fork")
    assert [line["name"] for line in trace(client, fork)["lines"]] == ["echo in the fork"]
    client.delete(f"/sessions/{fork}")
    client.delete(at)
    assert trace(client, session)["lines"] == lines


def test_a_closed_session_keeps_its_diff_and_verdict(client: httpx.Client, session: str) -> None:
    run_command(client, session, "echo '# more' >> calc.py; printf '\\377' > \"$(printf 'odd\\377')\"")
    job = client.post(f"/sessions/{session}/verify", headers={"Prefer": "wait=55"}).json()
    live = client.get(f"/sessions/{session}/diff").json()
    assert "+# more" in live["diff"]
    assert [change["path"] for change in live["changes"]] == ["calc.py", "odd%FF"]
    client.post(f"/sessions/{session}/exec", json={"command": "sleep 600"})
    client.delete(f"/sessions/{session}")
    assert client.get(f"/sessions/{session}/diff").json() == live
    assert client.get(f"/sessions/{session}/verify/{job['job_id']}").json() == job
    assert client.get(f"/sessions/{session}").json()["lifecycle"] == "ended"


def test_a_session_that_is_closed_while_its_code_runs_keeps_its_diff(client: httpx.Client, session: str) -> None:
    code = "open('new.txt', 'w').write('new\\n')\nprint('begun', flush=True)\nwhile True: pass"
    headers = {"Accept": "text/event-stream"}
    body = {"code": code, "timeout": 600}
    with client.stream("POST", f"/sessions/{session}/run", json=body, headers=headers) as answer:
        assert "begun" in next(line for line in answer.iter_lines() if line.startswith("data"))
        with httpx.Client(base_url=client.base_url, headers=client.headers, timeout=60) as other:
            other.delete(f"/sessions/{session}")
            assert "+new" in other.get(f"/sessions/{session}/diff").json()["diff"]


def test_variables(client: httpx.Client, session: str) -> None:
    assert client.get(f"/sessions/{session}/variables").json() == {"variables": []}
    code = """
import json
type = sorted = globals = None
_private = 1
text, numbers = "x" * 1000, list(range(5))
class Odd:
    def __repr__(self):
        raise ValueError
odd = Odd()
half = chr(0xd800)
"""
    assert client.post(f"/sessions/{session}/run", json={"code": code}).json()["is_ok"]
    variables = {each["name"]: each for each in client.get(f"/sessions/{session}/variables").json()["variables"]}
    assert set(variables) == {"Odd", "globals", "half", "json", "numbers", "odd", "sorted", "text", "type"}
    assert (variables["numbers"]["type"], variables["numbers"]["preview"]) == ("list", "[0, 1, 2, 3, 4]")
    assert variables["text"]["size"] > 1000
    assert len(variables["text"]["preview"]) < 300
    assert "Odd object" in variables["odd"]["preview"]


def test_the_conversation_by_pages(client: httpx.Client, session: str) -> None:
    where = f"/sessions/{session}/conversation"
    messages = [{"role": "user", "content": f"message {number}"} for number in range(1, 8)]
    client.post(where, json={"messages": messages})

    def page(**query: int) -> tuple[list[str], int, bool]:
        answer = client.get(where, params=query).json()
        texts = [message["content"] for message in answer["messages"]]
        return [text.removeprefix("message ") for text in texts], answer["first"], answer["has_more"]

    assert page() == (list("1234567"), 1, False)
    assert page(limit=3) == (list("567"), 5, True)
    assert page(limit=3, before=5) == (list("234"), 2, True)
    assert page(limit=3, before=2) == (["1"], 1, False)
    assert page(before=100, limit=100) == (list("1234567"), 1, False)


def test_variables_and_files_at_a_point(client: httpx.Client) -> None:
    session = create_session(client)
    at = f"/sessions/{session}"
    client.post(f"{at}/run", json={"code": "x = 1\nopen('a.txt', 'w').write('one\\n')"})
    client.post(f"{at}/checkpoints", json={"label": "first"})
    client.post(f"{at}/conversation", json={"messages": [{"role": "user", "content": "go on"}]})
    client.post(f"{at}/run", json={"code": "x = 2\nimport os\nos.mkdir('d')\nopen('d/b.bin', 'wb').write(b'\\0')"})
    run_command(client, session, "echo two >> a.txt")
    client.post(f"{at}/checkpoints", json={"label": "second"})
    client.delete(at)  # What was recorded stays.

    def variables(point: str) -> dict[str, str]:
        found = client.get(f"{at}/variables", params={"at": point}).json()["variables"]
        return {each["name"]: each["preview"] for each in found if each["type"] == "int"}

    assert [variables(point) for point in ("start", "first", "second", "now")] == [
        {},
        {"x": "1"},
        {"x": "2"},
        {"x": "2"},
    ]
    assert variables("1") == {"x": "2"}, "after the only entry"
    assert client.get(f"{at}/files/a.txt", params={"at": "first"}).content == b"one\n"
    assert client.get(f"{at}/files/a.txt", params={"at": "now"}).content == b"one\ntwo\n"
    listed = client.get(f"{at}/files", params={"at": "second"}).json()["entries"]
    assert [(each["name"], each["kind"]) for each in listed] == [("a.txt", "file"), ("d", "folder")]
    assert client.get(f"{at}/files/d/", params={"at": "second"}).json()["entries"][0]["name"] == "b.bin"
    diff = client.get(f"{at}/diff", params={"from": "first", "at": "second"}).json()
    assert "+two" in diff["diff"]
    assert [(each["path"], each["kind"]) for each in diff["changes"]] == [("a.txt", "modified"), ("d/b.bin", "added")]
    missing = (
        "variables?at=nowhere",
        "variables?at=2",
        "diff?from=nowhere",
        "files/a.txt?at=start",
        "files/d/b.bin?at=now",
    )
    assert [client.get(f"{at}/{path}").status_code for path in missing] == [404] * len(missing)
