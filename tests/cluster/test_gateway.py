"""The whole HTTP API through a gateway in front of two nodes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import codeset
import httpx
import pytest

from carrel import Client
from carrel.errors import TooMany
from tests.cluster.conftest import NewCluster
from tests.support.cluster import ClusterProcesses, nodes_of, wait_for
from tests.support.preloaded_python import preloaded_python
from tests.support.server_process import create_session, run_command


@pytest.fixture
def spread(client: httpx.Client) -> Iterator[dict[str, str]]:
    """A ready session of the demo on each node, by node."""
    found: dict[str, str] = {}
    made = []
    while len(found) < 2:
        made.append(create_session(client, dataset="demo", sample_id="calc-1"))
        found[client.get(f"/sessions/{made[-1]}").json()["node"]] = made[-1]
        assert len(made) < 40
    yield found
    for session_id in made:
        client.delete(f"/sessions/{session_id}")


def test_commands_code_and_files_of_sessions_on_both_nodes(client: httpx.Client, spread: dict[str, str]) -> None:
    for node, session_id in spread.items():
        assert run_command(client, session_id, f"echo {node} > where; cat where")["stdout"] == f"{node}\n"
        assert client.post(f"/sessions/{session_id}/run", json={"code": "x = 6\nx * 7"}).json()["value"] == 42
        data = bytes(range(256)) * 4096
        assert client.put(f"/sessions/{session_id}/files/data.bin", content=data).json()["size"] == len(data)
        assert client.get(f"/sessions/{session_id}/files/data.bin").content == data
        assert "where" in client.get(f"/sessions/{session_id}/diff").json()["diff"]


def test_a_fork_is_on_the_node_of_its_parent(client: httpx.Client, spread: dict[str, str]) -> None:
    for node, session_id in spread.items():
        client.post(f"/sessions/{session_id}/run", json={"code": "x = 'parent'"})
        fork = client.post(f"/sessions/{session_id}/fork").json()
        assert fork["node"] == node
        value = client.post(f"/sessions/{fork['session_id']}/run", json={"code": "x"}).json()["value"]
        assert value == "parent"
        client.delete(f"/sessions/{fork['session_id']}")


def test_a_node_neither_pauses_nor_closes_a_session_of_another(
    cluster: ClusterProcesses, client: httpx.Client, spread: dict[str, str]
) -> None:
    (_, session_id), (other, _) = spread.items()
    with cluster.client(cluster.nodes[other]) as direct:
        assert direct.delete(f"/sessions/{session_id}").status_code == 421
        assert direct.post(f"/sessions/{session_id}/pause").json()["code"] == "SessionElsewhere"
    assert client.get(f"/sessions/{session_id}").json()["status"] == "ready"


def test_a_verdict_and_its_output(client: httpx.Client, spread: dict[str, str]) -> None:
    for session_id in spread.values():
        job = client.post(f"/sessions/{session_id}/verify", headers={"Prefer": "wait=55"}).json()
        assert (job["status"], job["result"]["is_success"]) == ("completed", False)
        assert client.get(f"/sessions/{session_id}/verify/{job['job_id']}/output").status_code == 200


def test_output_is_streamed_as_it_is_written(client: httpx.Client, spread: dict[str, str]) -> None:
    session_id = next(iter(spread.values()))
    body = {"command": "echo one; until test -e go; do sleep 0.05; done; echo two"}
    with client.stream("POST", f"/sessions/{session_id}/exec?stream=1", json=body) as answer:
        lines = answer.iter_lines()
        assert any("one" in line for line in lines)
        client.put(f"/sessions/{session_id}/files/go", content=b"")
        rest = list(lines)
    assert any("two" in line for line in rest)
    assert any(line == "event: done" for line in rest)


def test_code_is_stopped_when_its_reader_leaves(client: httpx.Client, spread: dict[str, str]) -> None:
    session_id = next(iter(spread.values()))
    code = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)"
    headers = {"Accept": "text/event-stream"}
    with client.stream("POST", f"/sessions/{session_id}/run", json={"code": code}, headers=headers) as answer:
        assert any("begun" in line for line in answer.iter_lines())
    assert client.post(f"/sessions/{session_id}/run", json={"code": "'next'"}).json()["value"] == "next"


def test_a_large_download_arrives_whole(client: httpx.Client, spread: dict[str, str]) -> None:
    session_id = next(iter(spread.values()))
    run_command(client, session_id, "head -c 30000000 /dev/zero > big")
    with client.stream("GET", f"/sessions/{session_id}/files/big") as answer:
        assert sum(map(len, answer.iter_bytes())) == 30_000_000


def test_lists_show_the_sessions_of_all_nodes(client: httpx.Client, spread: dict[str, str]) -> None:
    listed = client.get("/sessions", params={"status": "ready"}).json()
    assert set(spread.values()) <= {each["session_id"] for each in listed["sessions"]}
    assert {node["name"] for node in nodes_of(client)} == {"n1", "n2"}


def test_a_repeated_create_gets_the_same_session_whichever_gateway(cluster: ClusterProcesses) -> None:
    other = cluster.add_gateway()
    headers = {"Idempotency-Key": "once", "Prefer": "wait=55"}
    body = {"dataset": "demo", "sample_id": "calc-1"}
    with cluster.client() as one, cluster.client(other) as two, ThreadPoolExecutor(8) as threads:
        work = [
            threads.submit((one, two)[number % 2].post, "/sessions", json=body, headers=headers) for number in range(8)
        ]
        answers = [each.result().json() for each in work]
        assert len({answer["session_id"] for answer in answers}) == 1
        session_id = answers[0]["session_id"]
        assert two.get(f"/sessions/{session_id}").json()["status"] == "ready"
        assert run_command(two, session_id, "echo same")["stdout"] == "same\n"
        one.delete(f"/sessions/{session_id}")
        assert two.get(f"/sessions/{session_id}").json()["status"] == "closed"


def test_a_create_with_an_id_of_its_own(client: httpx.Client) -> None:
    assert create_session(client, session_id="mine") == "mine"
    again = client.post("/sessions", json={"session_id": "mine"})
    assert (again.status_code, again.json()["code"]) == (409, "SessionExists")
    assert run_command(client, "mine", "echo here")["stdout"] == "here\n"
    client.delete("/sessions/mine")


def test_every_route_of_a_node_is_answered_through_the_gateway(
    cluster: ClusterProcesses, client: httpx.Client, spread: dict[str, str]
) -> None:
    """Each route gets the status that its node gives directly; the bodies of successes have the same fields."""
    node, session_id = next(iter(spread.items()))
    job = client.post(f"/sessions/{session_id}/verify", headers={"Prefer": "wait=55"}).json()["job_id"]
    interaction = run_command(client, session_id, "true")["interaction_id"]
    values = {
        "dataset": "demo",
        "sample_id": "calc-1",
        "session_id": session_id,
        "interaction_id": interaction,
        "job_id": job,
        "path": "calc.py",
        "checkpoint_id": "none",
        "approval_id": f"{session_id}.{'0' * 32}",
    }
    bodies: dict[str, Any] = {
        "/sessions": {"dataset": "demo", "sample_id": "calc-1"},
        "/sessions/{session_id}/exec": {"command": "true"},
        "/sessions/{session_id}/run": {"code": "1"},
        "/sessions/{session_id}/str_replace": {"file_path": "calc.py", "str_to_replace": "\0", "str_to_insert": ""},
        "/sessions/{session_id}/conversation": {"messages": [{"role": "user", "content": "x"}]},
        "/sessions/{session_id}/rewind": {"to": "none"},
        "/sessions/{session_id}": {"ttl_minutes": 30},
        "/approvals/{approval_id}": {"decision": "approve"},
    }
    made: list[str] = []

    def request(to: httpx.Client, method: str, path: str) -> tuple[int, Any]:
        url = path.removeprefix("/api/v1")
        body = bodies.get(url) if method != "GET" else None
        for name, value in values.items():
            url = url.replace(f"{{{name}}}", value)
        params = {"follow": 0} if url.endswith("/events") else {}
        answer = to.request(method, url, json=body, params=params)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        shape = sorted(answer.json()) if is_json and isinstance(answer.json(), dict) else answer.headers["content-type"]
        if method == "POST" and is_json and "session_id" in answer.json() and answer.json()["session_id"] != session_id:
            made.append(answer.json()["session_id"])
        return answer.status_code, shape

    schema = client.get(client.base_url.join("/openapi.json")).json()
    routes = [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]
    # The session itself is closed last.
    routes.sort(key=lambda route: route == ("DELETE", "/api/v1/sessions/{session_id}"))
    assert len(routes) >= 36
    with cluster.client(cluster.nodes[node]) as direct:
        for method, path in routes:
            assert request(client, method, path) == request(direct, method, path), (method, path)
    for each in made:
        client.delete(f"/sessions/{each}")


def test_the_public_client_works_unchanged(cluster: ClusterProcesses) -> None:
    client = codeset.Codeset(api_key=cluster.key, base_url=cluster.gateways[0].url)
    session = client.sessions.create(dataset="demo", sample_id="calc-1")
    done = client.sessions.execute_command(session_id=session.session_id, command="ls")
    assert "calc.py" in (done.stdout or "")
    job = client.sessions.verify.start(session_id=session.session_id)

    def has_ended() -> bool:
        found = client.sessions.verify.status(job_id=job.job_id, session_id=session.session_id)
        return found.status == "completed" and found.result is not None and not found.result.is_success

    wait_for(has_ended)
    client.sessions.close(session_id=session.session_id)


def test_keys_are_checked_by_the_gateway(cluster: ClusterProcesses) -> None:
    with cluster.client(key="wrong") as client:
        assert client.get("/sessions").status_code == 401
        assert client.get("/health").json()["status"] == "healthy"


def test_the_page_shows_the_sessions_of_all_nodes(cluster: ClusterProcesses, spread: dict[str, str]) -> None:
    url = cluster.gateways[0].url.removesuffix("/api/v1")
    with httpx.Client(base_url=url, headers={"Origin": url}, timeout=60) as page:
        assert page.get("/").status_code == 303
        assert page.post("/enter", data={"key": cluster.key}).status_code == 303
        text = page.get("/").text
        for session_id in spread.values():
            assert session_id in text
            assert page.get(f"/s/{session_id}/tree").status_code == 200
            assert "family" in page.get(f"/s/{session_id}/tree", headers={"Accept": "application/json"}).json()


def test_one_id_joins_the_gateway_and_the_trace_on_the_node(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    node = cluster.add_node("n1", "--log-requests")
    gateway = cluster.add_gateway("--log-requests")
    with cluster.client() as client:
        assert client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        session_id = create_session(client)
        url, body = f"/sessions/{session_id}/exec", {"command": "true"}
        own = client.post(url, json=body, headers={"X-Request-Id": "mine", "Prefer": "wait=50"})
        made = client.post(url, json=body, headers={"X-Request-Id": "a b", "Prefer": "wait=50"})
        ids = [answer.headers.get_list("x-request-id") for answer in (own, made)]
        assert ids[0] == ["mine"]
        steps = client.get(f"/sessions/{session_id}/trace").json()["lines"]
        assert [[step["request"]] for step in steps if step["kind"] == "command"] == ids
    [passed_on] = [line for line in gateway.stderr.splitlines() if "(request mine)" in line]
    assert passed_on.startswith(f"note: POST /api/v1{url}: 200 after ")
    assert " by node n1 " in passed_on
    [answered] = [line for line in node.stderr.splitlines() if "(request mine)" in line]
    assert answered.startswith(f"note: POST /api/v1{url}: 200 after ")


def test_metrics_of_the_gateway(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    assert 'carrel_gateway_nodes{state="ready"} 2.0' in text
    assert 'route="/sessions/{session_id}/exec"' in text


def test_bodies_have_a_limit(client: httpx.Client, spread: dict[str, str]) -> None:
    session_id = next(iter(spread.values()))
    large = b"x" * (64 * 1024 * 1024 + 1)
    assert client.put(f"/sessions/{session_id}/files/big", content=large).status_code == 413
    assert client.post("/sessions", content=large).status_code == 413


def test_a_full_node_is_left_out_and_a_full_cluster_is_a_429(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.add_node("n1", "--max-sessions", 1)
    cluster.add_node("n2", "--max-sessions", 2)
    cluster.add_gateway()
    with cluster.client() as client:
        # Faster than the renewals, so the gateway also meets a node that is full without knowing it.
        made = [client.post("/sessions", json={}).json() for _ in range(3)]
        assert sorted(each["node"] for each in made) == ["n1", "n2", "n2"]
        for _ in range(5):  # What the gateway knows is older or newer.
            full = client.post("/sessions", json={})
            assert (full.status_code, full.json()["code"]) == (429, "TooManySessions")
        for number in range(6):
            # There is room at once, whatever the last renewal said.
            client.delete(f"/sessions/{made[number]['session_id']}")
            made.append(client.post("/sessions", json={}).json())
            assert client.get(f"/sessions/{made[-1]['session_id']}").status_code == 200, made[-1]
        assert client.post("/sessions", json={}).status_code == 429
        with (
            Client(base_url=cluster.gateways[0].url, api_key=cluster.key, max_retries=0) as own,
            pytest.raises(TooMany),
        ):
            own.sessions.create()


def test_without_nodes_nothing_is_done(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.add_gateway()
    with cluster.client() as client:
        answer = client.post("/sessions", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "NodeUnreachable")
        assert answer.headers["retry-after"] == "1"
        assert client.get("/health").json()["status"] == "no_nodes"
        assert client.get("/datasets").status_code == 503
        cluster.add_node("late")
        wait_for(lambda: client.post("/sessions", json={}).status_code == 200)


def test_many_sessions_answer_at_once(client: httpx.Client) -> None:
    with ThreadPoolExecutor(20) as threads:
        ids = list(threads.map(lambda _: create_session(client), range(20)))
        seen = threading.Lock()

        def ask(session_id: str) -> str:
            with seen:
                pass
            return str(run_command(client, session_id, f"echo {session_id}")["stdout"]).strip()

        assert list(threads.map(ask, ids)) == ids
        assert [
            json.dumps(each) for each in threads.map(lambda id_: client.delete(f"/sessions/{id_}").status_code, ids)
        ]


def test_an_agent_runs_on_the_cluster(cluster: ClusterProcesses, tmp_path: Path) -> None:
    agent = "sed -i '36s/if/while/;38s/total/product/;39s/return result/result = result/' calc.py; echo $WHO > who"
    words = ["task", "run", "demo", "calc-1", "--agent", agent, "--attempts", "3"]
    more = ["--server", cluster.gateways[0].url, "--env", "WHO=ada", "--base", str(tmp_path), "--json"]
    env = {**os.environ, "CARREL_API_KEY": cluster.key, "CARREL_HOME": str(tmp_path)}
    done = preloaded_python().run(["-m", "carrel", *words, *more], env, tmp_path, 200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["summary"]["attempts"], found["summary"]["solved"]) == (3, 3)
    [line, *_] = (Path(found["run"]) / "results.jsonl").read_text().splitlines()
    with cluster.client() as client:
        session = client.get(f"/sessions/{json.loads(line)['session_id']}").json()
        assert session["status"] == "closed"
    assert "+ada" in (next(Path(found["run"]).glob("agents/*/patch.diff"))).read_text()
    wrong = preloaded_python().run(["-m", "carrel", *words, *more, "--mount", "."], env, tmp_path, 60)
    assert (wrong.returncode, "--server" in wrong.stderr) == (2, True)
