"""A server that is killed, stopped and started again: nothing that was answered is lost, and nothing is left over."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import NewServer
from tests.support.server_process import ServerProcess, create_session, run_command, write_dataset

SLOW = {"dataset": "small", "sample_id": "slow"}


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A sample whose set-up takes long, and one whose tests do."""
    return write_dataset(
        tmp_path / "datasets" / "small",
        [
            {"sample_id": "slow", "environment": {"setup": ["sleep 600"]}},
            {"sample_id": "long", "verify": {"command": "sleep 600"}},
        ],
    ).parent


def test_killed_while_everything_runs(new_server: NewServer, slow: Path) -> None:
    server = new_server("--datasets", slow)
    with server.client() as client:
        session = create_session(client, dataset="small", sample_id="long")
        done = run_command(client, session, "echo kept")
        message = {"role": "user", "content": [{"type": "text", "text": "kept too"}]}
        client.post(f"/sessions/{session}/conversation", json={"messages": [message]})
        job = client.post(f"/sessions/{session}/verify").json()["job_id"]
        making = client.post("/sessions", json=SLOW).json()["session_id"]
        other = create_session(client)
        running = client.post(f"/sessions/{other}/exec", json={"command": "sleep 600 & sleep 600"}).json()
        closed = create_session(client)
        client.delete(f"/sessions/{closed}")
    server.kill()
    server.start()
    with server.client() as client:
        statuses = {each["session_id"]: each for each in client.get("/sessions").json()["sessions"]}
        assert {id_: each["status"] for id_, each in statuses.items()} == {
            session: "terminated",
            making: "error",
            other: "terminated",
            closed: "closed",
        }
        assert statuses[session]["error"]["code"] == "interrupted"
        kept = client.get(f"/sessions/{session}/interactions/{done['interaction_id']}").json()
        assert (kept["stdout"], kept["exit_code"]) == ("kept\n", 0)
        assert len(client.get(f"/sessions/{session}/conversation").json()["messages"]) == 1
        verdict = client.get(f"/sessions/{session}/verify/{job}").json()
        assert (verdict["status"], verdict["error"]["code"]) == ("error", "interrupted")
        cut = client.get(f"/sessions/{other}/interactions/{running['interaction_id']}").json()
        assert (cut["exit_code"], cut["success"]) == (-1000, False)
        assert "stopped" in cut["message"]
        assert client.post(f"/sessions/{session}/exec", json={"command": "true"}).status_code == 409
        assert client.delete(f"/sessions/{session}").status_code == 200
        assert run_command(client, create_session(client), "echo more")["stdout"] == "more\n"


@pytest.mark.parametrize("moment", [0.0, pytest.param(0.01, marks=pytest.mark.slow), 0.05, 0.2])
def test_killed_at_any_moment_of_a_session(new_server: NewServer, moment: float) -> None:
    """What was answered before the kill is there after it, whatever was being done."""
    server = new_server()
    answered: dict[str, dict[str, Any]] = {}

    def work() -> None:
        with server.client() as client:
            try:
                while True:
                    session = create_session(client, dataset="demo", sample_id="calc-1")
                    answer = run_command(client, session, f"echo {session}")
                    answered[session] = answer
                    client.post(f"/sessions/{session}/verify", headers={"Prefer": "wait=0.05"})
                    fork = client.post(f"/sessions/{session}/fork").json().get("session_id", session)
                    client.delete(f"/sessions/{session}")
                    client.delete(f"/sessions/{fork}")
            except httpx.TransportError:
                return

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + 60
    while not answered and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(moment)
    server.kill()
    for worker in workers:
        worker.join()
    for _ in range(2):  # It is killed again when it has started.
        server.start()
        server.kill()
    server.start()
    assert answered
    assert list((server.data / "server" / "live" / "main").iterdir()) == []
    with server.client() as client:
        for session, answer in answered.items():
            kept = client.get(f"/sessions/{session}/interactions/{answer['interaction_id']}").json()
            assert kept["stdout"] == f"{session}\n"
        listed = client.get("/sessions").json()["sessions"]
        assert not {each["status"] for each in listed} & {"creating", "ready"}
        assert set(answered) <= {each["session_id"] for each in listed}
        assert len({each["session_id"] for each in listed}) == len(listed)


def test_a_request_repeated_after_a_kill_is_not_done_twice(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:
        session = client.post("/sessions", json={}, headers={"Idempotency-Key": "s", "Prefer": "wait=55"}).json()
        at = f"/sessions/{session['session_id']}/exec"
        begun = client.post(at, json={"command": "sleep 600"}, headers={"Idempotency-Key": "c"}).json()
    server.kill()
    # As if the answers had been lost with the server.
    shutil.rmtree(server.data / "server" / "answers")
    server.start()
    with server.client() as client:
        again = client.post("/sessions", json={}, headers={"Idempotency-Key": "s", "Prefer": "wait=5"}).json()
        assert (again["session_id"], again["status"]) == (session["session_id"], "terminated")
        command = client.post(at, json={"command": "sleep 600"}, headers={"Idempotency-Key": "c", "Prefer": "wait=5"})
        assert command.json()["interaction_id"] == begun["interaction_id"]
        assert command.json()["exit_code"] == -1000


def test_stopped_in_order(new_server: NewServer) -> None:
    """Waiting requests are answered, streams end, and the next server knows that the sessions were stopped."""
    server = new_server()
    with server.client() as client:
        session = create_session(client)
        answer: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: answer.append(run_command(client, session, "echo so far; sleep 600")))
        waiting.start()
        until = time.monotonic() + 60
        with server.client() as other:
            while "interaction" not in other.get(f"/sessions/{session}/events?follow=0").text:
                assert time.monotonic() < until
        with server.client() as reader, reader.stream("GET", f"/sessions/{session}/events") as events:
            next(events.iter_lines())
            assert server.stop() == 0
        waiting.join()
    assert answer[0]["exit_code"] == -1000
    assert "stopped" in answer[0]["message"]
    server.start()
    with server.client() as client:
        after = client.get(f"/sessions/{session}").json()
        assert (after["status"], after["error"]["message"]) == ("terminated", "the server was stopped")


def test_a_second_server_on_one_folder_names_the_first(new_server: NewServer) -> None:
    server = new_server()
    second = ServerProcess(server.folder / "second", "--data", server.data)
    with pytest.raises(AssertionError, match=rf"did not start: 2 .*another server \(.*:{server.pid}:"):
        second.start()


def first_process_of(marker: str) -> int:
    """Of the session in which a process has this word in its command line."""
    own = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if marker.encode() in path.read_bytes() and b"sleep" in path.read_bytes()
    )
    while True:
        about = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{own}/status").read_text().splitlines() if ":\t" in line
        )
        if about["NSpid"].split()[-1] == "1":
            return own
        own = int(about["PPid"])


def test_a_session_ends_when_its_processes_are_killed(new_server: NewServer, slow: Path) -> None:
    with new_server("--datasets", slow).client() as client:
        session = create_session(client, dataset="small", sample_id="long")
        client.post(f"/sessions/{session}/exec", json={"command": "sleep 600.25", "background": True})
        failing = run_command(client, session, "exit 3")
        assert (failing["exit_code"], failing["status"]) == (3, "completed")
        running = client.post(f"/sessions/{session}/exec", json={"command": "sleep 600"}).json()["interaction_id"]
        os.kill(first_process_of("600.25"), signal.SIGKILL)
        answer = client.get(f"/sessions/{session}/interactions/{running}", headers={"Prefer": "wait=55"}).json()
        assert (answer["exit_code"], answer["status"]) == (-1000, "error")
        assert "the session's processes died while the command ran" in answer["message"]
        until = time.monotonic() + 60
        while (record := client.get(f"/sessions/{session}").json())["status"] == "ready" and time.monotonic() < until:
            time.sleep(0.05)
        assert record["status"] == "terminated"
        assert "what was changed in its files is gone" in record["error"]["message"]
        assert client.post(f"/sessions/{session}/verify").status_code == 409
