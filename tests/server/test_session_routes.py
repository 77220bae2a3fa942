"""Routes of sessions beyond those of the public client: code, files, streams, conversation, forks, idempotency."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from carrel.guest.worker import values
from tests.support.server_process import ServerProcess, create_session, run_command


@pytest.fixture
def session(client: httpx.Client) -> Iterator[str]:
    """A session without a sample."""
    session_id = create_session(client)
    yield session_id
    assert client.delete(f"/sessions/{session_id}").status_code == 200


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    kind, seq = "", None
    for line in lines:
        name, _, content = line.partition(": ")
        if name == "event":
            kind = content
        elif name == "id":
            seq = int(content)
        elif name == "data":
            yield kind, json.loads(content), seq


def test_code_keeps_its_variables(client: httpx.Client, session: str) -> None:
    client.post(f"/sessions/{session}/run", json={"code": "x = {1, 2}"})
    received = client.post(f"/sessions/{session}/run", json={"code": "print('hi'); x"}).json()
    assert received["is_ok"]
    assert received["stdout"] == "hi\n"
    assert received["value"] is None, "JSON has no sets"
    assert values.decode(received["packed"]) == {1, 2}
    plain = client.post(f"/sessions/{session}/run", json={"code": "[1, {'a': 2.0}]"}).json()
    assert plain["value"] == [1, {"a": 2.0}]
    wrong = client.post(f"/sessions/{session}/run", json={"code": "1/0"}).json()
    assert (wrong["is_ok"], wrong["error_type"]) == (False, "ZeroDivisionError")
    late = client.post(f"/sessions/{session}/run", json={"code": "while True: pass", "timeout": 0.3}).json()
    assert (late["error_type"], late["state"]) == ("Timeout", "kept")


def test_code_can_use_its_library(client: httpx.Client, session: str) -> None:
    code = """
artifacts.save('found/it.json', {'n': 1})
workflows.create('twice', 'def run(n: int):\\n    return 2 * n\\n', 'Twice a number')
workflows.twice(artifacts.load('found/it.json')['n'])
"""
    received = client.post(f"/sessions/{session}/run", json={"code": code}).json()
    assert received["value"] == 2, received["error"]
    fork = client.post(f"/sessions/{session}/fork").json()["session_id"]
    client.post(f"/sessions/{session}/run", json={"code": "artifacts.save('found/it.json', {'n': 50})"})
    kept = client.post(f"/sessions/{fork}/run", json={"code": "workflows.twice(artifacts.load('found/it.json')['n'])"})
    assert kept.json()["value"] == 2, kept.json()["error"]
    refused = client.post(f"/sessions/{session}/run", json={"code": "deps.add('left-pad')"}).json()
    assert refused["error_type"] == "RuntimeDepsDisabledError"
    client.delete(f"/sessions/{fork}")


def test_output_of_code_is_streamed(client: httpx.Client, session: str) -> None:
    code = "import time\nfor n in range(3):\n    print(n, flush=True)\n    time.sleep(0.05)\nn"
    with client.stream(
        "POST", f"/sessions/{session}/run", json={"code": code}, headers={"Accept": "text/event-stream"}
    ) as answer:
        received = list(events(answer.iter_lines()))
    assert "".join(data["text"] for kind, data, _ in received if kind == "output") == "0\n1\n2\n"
    assert received[-1][0] == "result"
    assert received[-1][1]["value"] == 2


def test_output_of_a_command_is_streamed_to_a_client_that_accepts_events(client: httpx.Client, session: str) -> None:
    body, headers = {"command": "echo one; echo two"}, {"Accept": "text/event-stream"}
    with client.stream("POST", f"/sessions/{session}/exec", json=body, headers=headers) as answer:
        received = list(events(answer.iter_lines()))
    assert (received[0][0], received[-1][0]) == ("begun", "done")
    assert "".join(data["text"] for kind, data, _ in received if kind == "output") == "one\ntwo\n"


def test_every_error_names_its_class(client: httpx.Client, session: str, server: ServerProcess) -> None:
    def code(answer: httpx.Response, status: int) -> str:
        assert answer.status_code == status, answer.text
        return str(answer.json()["code"])

    assert code(httpx.get(f"{server.url}/sessions"), 401) == "KeyNotAccepted"
    large = client.put(f"/sessions/{session}/files/a", content=b"x" * (65 * 1024 * 1024))
    assert code(large, 413) == "RequestRefused"
    once = {"Idempotency-Key": "the refusals"}
    assert client.post(f"/sessions/{session}/exec", json={"command": "true"}, headers=once).status_code == 200
    again = client.post(f"/sessions/{session}/exec", json={"command": "false"}, headers=once)
    assert code(again, 422) == "RequestRefused"
    assert code(client.get("/no/such/route"), 404) == "NotFoundThere"
    assert code(client.put("/sessions"), 405) == "RequestRefused"
    assert code(client.get(f"/sessions/{session}/interactions/none"), 404) == "InteractionNotFound"
    assert code(client.get(f"/sessions/{session}/verify/none"), 404) == "JobNotFound"


def test_the_error_for_an_unknown_dataset_does_not_show_the_folder(client: httpx.Client) -> None:
    received = client.post("/sessions", json={"dataset": "nothing", "sample_id": "a"})
    assert received.status_code == 404
    assert received.json() == {"detail": "there is no dataset 'nothing'; there is: demo", "code": "DatasetNotFound"}


def test_every_route_shows_the_duration_of_a_session(client: httpx.Client, session: str) -> None:
    assert client.get(f"/sessions/{session}").json()["duration_seconds"] > 0
    assert client.patch(f"/sessions/{session}", json={"ttl_minutes": 5}).json()["duration_seconds"] > 0
    fork = client.post(f"/sessions/{session}/fork").json()
    assert fork["duration_seconds"] >= 0
    client.delete(f"/sessions/{fork['session_id']}")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "a/", "", ".", "a\0b", "x" * 5000])
def test_a_file_that_cannot_be_in_the_workspace_is_refused_at_once(client: httpx.Client, path: str) -> None:
    refused = client.post("/sessions", json={"files": {path: "text"}})
    assert refused.status_code == 422, refused.text
    assert refused.json()["detail"][0]["loc"][:2] == ["body", "files"]
    assert "not the path of a file" in refused.json()["detail"][0]["msg"]


def test_running_code_is_stopped(client: httpx.Client, session: str, server: ServerProcess) -> None:
    with (
        server.client() as other,
        client.stream(
            "POST",
            f"/sessions/{session}/run",
            json={"code": "print('begun', flush=True)\nwhile True: pass"},
            headers={"Accept": "text/event-stream"},
        ) as answer,
    ):
        received = events(answer.iter_lines())
        assert next(received)[1]["text"] == "begun\n"
        interrupted = other.post(f"/sessions/{session}/interrupt").json()
        assert (interrupted["session_id"], interrupted["interrupted"]) == (session, True)
        assert list(received)[-1][1]["error_type"] == "KeyboardInterrupt"
    assert client.post(f"/sessions/{session}/interrupt").json()["interrupted"] is False


def test_code_is_stopped_when_its_reader_leaves(client: httpx.Client, session: str) -> None:
    with client.stream(
        "POST",
        f"/sessions/{session}/run",
        json={"code": "n = 0\nprint('begun', flush=True)\nwhile True: n += 1", "timeout": 3600},
        headers={"Accept": "text/event-stream"},
    ) as answer:
        assert next(events(answer.iter_lines()))[1]["text"] == "begun\n"
    after = client.post(f"/sessions/{session}/run", json={"code": "n >= 0"}).json()
    assert after["value"] is True


def test_output_of_a_command_is_streamed(client: httpx.Client, session: str) -> None:
    body = {"command": "for i in 1 2 3; do echo $i; sleep 0.05; done; echo é >&2; exit 4"}
    with client.stream("POST", f"/sessions/{session}/exec?stream=1", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        received = list(events(answer.iter_lines()))
    assert received[0][0] == "begun"
    written = [(data["stream"], data["text"]) for kind, data, _ in received if kind == "output"]
    assert "".join(text for stream, text in written if stream == "stdout") == "1\n2\n3\n"
    assert "".join(text for stream, text in written if stream == "stderr") == "é\n"
    assert received[-1][0] == "done"
    assert (received[-1][1]["exit_code"], received[-1][1]["stdout"]) == (4, "1\n2\n3\n")


def test_a_command_continues_when_its_reader_leaves(client: httpx.Client, session: str) -> None:
    body = {"command": "echo begun; sleep 0.3; echo ended > left; echo ended"}
    with client.stream("POST", f"/sessions/{session}/exec?stream=1", json=body) as answer:
        received = events(answer.iter_lines())
        interaction = next(received)[1]["interaction_id"]
        assert next(received)[1]["text"] == "begun\n"
    done = client.get(f"/sessions/{session}/interactions/{interaction}", headers={"Prefer": "wait=55"}).json()
    assert (done["exit_code"], done["stdout"]) == (0, "begun\nended\n")


def test_standard_input_folder_and_variables(client: httpx.Client, session: str) -> None:
    received = run_command(
        client, session, "cat; pwd; echo $WORD", stdin="from here\n", cwd="/tmp", env={"WORD": "said"}
    )
    assert received["stdout"] == "from here\n/tmp\nsaid\n"


def test_commands_are_for_bash(client: httpx.Client, session: str) -> None:
    assert run_command(client, session, "[[ abc == a* ]] && echo ${BASH_VERSION:+bash}")["stdout"] == "bash\n"


def sleeping(client: httpx.Client, session: str, number: int) -> None:
    """Wait until so many processes of the session sleep."""
    until = time.monotonic() + 60
    while run_command(client, session, "pgrep -c sleep")["stdout"] != f"{number}\n":
        assert time.monotonic() < until


@pytest.mark.parametrize("command", ["kill -STOP -1; sleep 300", "while :; do kill -STOP -1; done"])
def test_the_time_limit_of_a_command_that_stops_all_processes(client: httpx.Client, session: str, command: str) -> None:
    received = run_command(client, session, command, command_timeout=2)
    assert (received["exit_code"], received["timed_out"]) == (124, True)
    assert run_command(client, session, "echo on")["stdout"] == "on\n"


def test_the_output_before_the_time_limit_is_kept(client: httpx.Client, session: str) -> None:
    received = run_command(
        client, session, "echo first; trap '' TERM INT; sleep 300 & sleep 300; wait", command_timeout=2
    )
    assert (received["exit_code"], received["timed_out"], received["success"]) == (124, True, False)
    assert received["stdout"] == "first\n"
    assert "time limit" in received["message"]
    sleeping(client, session, 0)


def test_a_background_process_survives_its_command(client: httpx.Client, session: str) -> None:
    assert run_command(client, session, "sleep 100 & echo started")["stdout"] == "started\n"
    sleeping(client, session, 1)
    received = run_command(client, session, "echo out; sleep 0.2; exit 5", background=True)
    assert received["exit_code"] == 0
    assert received["pid"] > 0
    until = time.monotonic() + 60
    while run_command(client, session, f"cat {received['output']}.exit")["stdout"] != "5\n":
        assert time.monotonic() < until
    assert client.get(f"/sessions/{session}/files/{received['output']}").content == b"out\n"


def test_large_outputs_arrive_completely(client: httpx.Client, session: str) -> None:
    received = run_command(client, session, "head -c 5000000 /dev/zero | tr '\\0' 'x'")
    assert received["stdout"] == "x" * 5_000_000
    again = client.get(f"/sessions/{session}/interactions/{received['interaction_id']}").json()
    assert again["stdout"] == received["stdout"]


def test_files_are_written_and_read(client: httpx.Client, session: str) -> None:
    data = bytes(range(256)) * 1000
    assert client.put(f"/sessions/{session}/files/a/b%20c.bin", content=data).json() == {
        "path": "a/b c.bin",
        "size": len(data),
    }
    assert client.get(f"/sessions/{session}/files/a/b%20c.bin").content == data
    workspace = client.get(f"/sessions/{session}/files").json()
    assert [(entry["name"], entry["kind"]) for entry in workspace["entries"]] == [("a", "folder")]
    listed = client.get(f"/sessions/{session}/files/a").json()
    assert [(entry["name"], entry["kind"], entry["size"]) for entry in listed["entries"]] == [
        ("b c.bin", "file", len(data))
    ]
    missing = client.get(f"/sessions/{session}/files/none")
    assert (missing.status_code, missing.json()["code"]) == (404, "FileNotFoundError")
    assert client.get(f"/sessions/{session}/files/a/").json() == listed
    assert client.get(f"/sessions/{session}/files/a/b%20c.bin/").json()["code"] == "NotADirectoryError"
    assert client.put(f"/sessions/{session}/files/a", content=b"").status_code == 409


def test_the_diff(client: httpx.Client) -> None:
    session = create_session(client, dataset="demo", sample_id="calc-1", files={"new.txt": "new\n"})
    run_command(client, session, "rm README.md; echo '# more' >> calc.py")
    received = client.get(f"/sessions/{session}/diff").json()
    kinds = {change["path"]: change["kind"] for change in received["changes"]}
    assert kinds == {"README.md": "deleted", "calc.py": "modified", "new.txt": "added"}
    assert "+# more" in received["diff"]
    client.delete(f"/sessions/{session}")


def test_messages_are_kept_with_the_session(client: httpx.Client, session: str) -> None:
    assert client.get(f"/sessions/{session}/conversation").json() == {
        "session": None,
        "messages": [],
        "first": 1,
        "has_more": False,
    }
    message = {"role": "user", "content": [{"type": "text", "text": "Repair it"}]}
    assert client.post(f"/sessions/{session}/conversation", json={"messages": [message]}).json() == {"count": 1}
    received = client.get(f"/sessions/{session}/conversation").json()
    assert received["session"]["id"] == session
    assert received["messages"][0]["content"][0]["text"] == "Repair it"
    wrong = [
        {"role": 5},
        {"role": "bogus", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": 3},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": "x", "meta": 3},
        {"role": "rewind", "meta": {"rewind_to": 0}},
        {"role": "compact", "content": "all of it", "meta": {}},
    ]
    for each in wrong:
        refused = client.post(f"/sessions/{session}/conversation", json={"messages": [message, each]})
        assert refused.status_code == 422, each
        assert refused.json()["detail"][0]["loc"] == ["body", "messages", 1]
    assert len(client.get(f"/sessions/{session}/conversation").json()["messages"]) == 1
    more = [{"role": role, "content": "x"} for role in ("system", "assistant", "tool")]
    assert client.post(f"/sessions/{session}/conversation", json={"messages": more}).json() == {"count": 4}


def test_a_call_that_waits_for_its_result_is_not_declared_interrupted(client: httpx.Client, session: str) -> None:
    """The agent is at the other end of the connection: neither what it posts nor who looks at it ends its call."""
    where = f"/sessions/{session}/conversation"
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}
    found = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "model_text": "found"}]}
    assert client.post(where, json={"messages": [call]}).json() == {"count": 1}
    assert "interrupted" in client.get(where).text, "what a provider would refuse is repaired in the answer"
    assert client.post(where, json={"messages": [found]}).json() == {"count": 2}
    assert [m["content"][0]["type"] for m in client.get(where).json()["messages"]] == ["tool_use", "tool_result"]
    assert "interrupted" not in client.get(where).text


def test_a_rewind_restores_conversation_variables_and_files(client: httpx.Client, session: str) -> None:
    say = {"messages": [{"role": "user", "content": "hello"}]}
    where = f"/sessions/{session}"
    client.post(f"{where}/conversation", json=say)
    client.post(f"{where}/run", json={"code": "x = 1"})
    run_command(client, session, "echo before > file")
    point = client.post(f"{where}/checkpoints", json={"label": "before"}, headers={"Idempotency-Key": "a" * 24}).json()
    again = client.post(f"{where}/checkpoints", json={"label": "before"}, headers={"Idempotency-Key": "a" * 24}).json()
    assert (point["label"], point["messages"], again) == ("before", 1, point)
    assert client.get(f"{where}/checkpoints").json() == {"checkpoints": [point]}

    for to in (point["id"], "before", 1):
        client.post(f"{where}/conversation", json=say)
        client.post(f"{where}/run", json={"code": "x = 2"})
        run_command(client, session, "echo after > file")
        rewound = client.post(f"{where}/rewind", json={"to": to}).json()
        assert (rewound["session_id"], rewound["status"], rewound["checkpoint"]) == (session, "ready", point)
        assert client.post(f"{where}/run", json={"code": "x"}).json()["value"] == 1
        assert run_command(client, session, "cat file")["stdout"] == "before\n"
        assert len(client.get(f"{where}/conversation").json()["messages"]) == 1
    kinds = client.get(f"{where}/events", params={"follow": False}).text
    assert (kinds.count("event: checkpoint"), kinds.count("event: rewind")) == (1, 3)

    refused = client.post(f"{where}/rewind", json={"to": "nowhere"})
    assert (refused.status_code, refused.json()["code"]) == (409, "ForkRefused")
    for odd in (b"1.5", b"true", b"null", rb'"\ud83d"'):
        assert client.post(f"{where}/rewind", content=b'{"to": %b}' % odd).status_code == 422
    assert client.delete(f"{where}/checkpoints/{point['id']}").json() == point
    assert client.delete(f"{where}/checkpoints/{point['id']}").status_code == 409


def test_a_fork_has_files_variables_and_messages(client: httpx.Client, session: str) -> None:
    client.post(f"/sessions/{session}/run", json={"code": "x = 1"})
    run_command(client, session, "echo before > file")
    messages = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    client.post(f"/sessions/{session}/conversation", json=messages)
    fork = client.post(f"/sessions/{session}/fork").json()
    assert (fork["status"], fork["parent_session_id"]) == ("ready", session)
    client.post(f"/sessions/{session}/run", json={"code": "x = 2"})
    run_command(client, session, "echo after > file")
    assert client.post(f"/sessions/{fork['session_id']}/run", json={"code": "x"}).json()["value"] == 1
    assert run_command(client, fork["session_id"], "cat file")["stdout"] == "before\n"
    assert len(client.get(f"/sessions/{fork['session_id']}/conversation").json()["messages"]) == 1
    client.delete(f"/sessions/{fork['session_id']}")


def test_events_from_a_number_on(client: httpx.Client, server: ServerProcess) -> None:
    session = create_session(client)
    run_command(client, session, "echo one")
    now = client.get(f"/sessions/{session}/events?follow=0")
    assert [seq for _, _, seq in events(iter(now.text.splitlines()))] == [1, 2, 3, 4]
    with server.client() as other, other.stream("GET", f"/sessions/{session}/events") as answer:
        received = events(answer.iter_lines())
        seen = [next(received) for _ in range(4)]
        assert [(kind, seq) for kind, _, seq in seen] == [
            ("session", 1),
            ("session", 2),
            ("interaction", 3),
            ("interaction", 4),
        ]
        run_command(client, session, "echo two")
        assert next(received)[1]["command"] == "echo two"
        client.delete(f"/sessions/{session}")
        rest = list(received)
    assert (rest[-1][0], rest[-1][1]["status"]) == ("session", "closed")
    last = rest[-1][2]
    again = client.get(f"/sessions/{session}/events?from_seq={last}")
    assert [seq for _, _, seq in events(iter(again.text.splitlines()))] == [last]
    resumed = client.get(f"/sessions/{session}/events", headers={"Last-Event-ID": "4"})
    assert next(events(iter(resumed.text.splitlines())))[2] == 5


def test_a_request_repeated_with_the_same_key_is_done_once(client: httpx.Client, session: str) -> None:
    body, headers = {"command": "echo x >> count; wc -l < count"}, {"Idempotency-Key": "k1", "Prefer": "wait=55"}
    first = client.post(f"/sessions/{session}/exec", json=body, headers=headers)
    second = client.post(f"/sessions/{session}/exec", json=body, headers=headers)
    assert first.json() == second.json()
    assert second.headers["idempotent-replayed"] == "true"
    assert run_command(client, session, "cat count")["stdout"] == "x\n"
    other = client.post(f"/sessions/{session}/exec", json={"command": "true"}, headers=headers)
    assert other.status_code == 422
    made = [client.post("/sessions", json={}, headers={"Idempotency-Key": "k2"}).json() for _ in range(2)]
    assert made[0] == made[1]
    client.delete(f"/sessions/{made[0]['session_id']}")


def test_a_verification_is_cancelled(client: httpx.Client) -> None:
    session = create_session(client, dataset="demo", sample_id="calc-1")
    run_command(client, session, "printf 'import time\\ntime.sleep(100)\\n' >> calc.py")
    job = client.post(f"/sessions/{session}/verify").json()
    cancelled = client.delete(f"/sessions/{session}/verify/{job['job_id']}").json()
    assert cancelled["status"] == "cancelled"
    assert client.get(f"/sessions/{session}/verify/{job['job_id']}").json() == cancelled
    client.delete(f"/sessions/{session}")


def test_a_session_without_a_sample_cannot_be_verified(client: httpx.Client, session: str) -> None:
    assert client.post(f"/sessions/{session}/verify").status_code == 409


def test_metrics(client: httpx.Client, session: str) -> None:
    text = client.get("/metrics").text
    assert "carrel_sessions_alive 1.0" in text
    assert 'carrel_http_requests_total{method="POST",route="/sessions",status="200"}' in text


def test_security_headers(client: httpx.Client) -> None:
    headers = client.get("/datasets", headers={"Origin": "http://elsewhere.example"}).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers
