"""The failure table of docs/cluster.md: nodes, gateways and stores that are killed, stopped, cut off and restarted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import httpx
import pytest

from carrel.server.node import descendants
from tests.cluster.conftest import NewCluster
from tests.support.cluster import LEASE, ClusterProcesses, StoreProxy, nodes_of, store_proxy, wait_for
from tests.support.missing_parts import skip_without
from tests.support.preloaded_python import preloaded_python
from tests.support.real_postgres import NoPostgres, RealPostgres
from tests.support.real_redis import RealRedis
from tests.support.server_process import create_session, run_command

Status = tuple[int, str]
COUNTING = {"command": "while true; do echo x >> ticks; sleep 0.05; done", "background": True}


@pytest.fixture
def pair(new_cluster: NewCluster) -> ClusterProcesses:
    """Two nodes and a gateway."""
    cluster = new_cluster()
    cluster.add_node("n1")
    cluster.add_node("n2")
    cluster.add_gateway()
    return cluster


def session_on(client: httpx.Client, node: str) -> str:
    """Create sessions until one is on this node."""
    for _ in range(60):
        session_id = create_session(client)
        if client.get(f"/sessions/{session_id}").json()["node"] == node:
            return session_id
    raise AssertionError(f"no session came to {node}")


def execute(client: httpx.Client, session_id: str) -> Status:
    answer = client.post(f"/sessions/{session_id}/exec", json={"command": "true"}, headers={"Prefer": "wait=55"})
    return answer.status_code, answer.json().get("code", "")


def until_lost(client: httpx.Client, session_id: str) -> set[Status]:
    """Run commands until the session is lost, and return all other answers."""
    seen: set[Status] = set()

    def is_lost() -> bool:
        status = execute(client, session_id)
        seen.add(status)
        return status == (409, "NodeLost")

    wait_for(is_lost)
    return seen - {(409, "NodeLost")}


def assert_lost(client: httpx.Client, session_id: str, node: str) -> None:
    record = client.get(f"/sessions/{session_id}").json()
    assert (record["status"], record["lifecycle"], record["node"]) == ("terminated", "ended", node)
    assert record["error"]["code"] == "node_lost"


def ticks(client: httpx.Client, session_id: str) -> int:
    return len(client.get(f"/sessions/{session_id}/files/ticks").content)


def test_a_node_that_is_killed(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        lost, kept = session_on(client, "n1"), session_on(client, "n2")
        done = run_command(client, lost, "echo before")
        began = client.post(f"/sessions/{lost}/exec", json={"command": "sleep 600"}).json()["interaction_id"]
        pair.nodes["n1"].kill()
        assert until_lost(client, lost) <= {(503, "NodeUnreachable"), (502, "NodeUncertain")}
        assert_lost(client, lost, "n1")
        # What was acknowledged is still there, and what ran has an end.
        assert client.get(f"/sessions/{lost}/interactions/{done['interaction_id']}").json()["stdout"] == "before\n"
        interrupted = client.get(f"/sessions/{lost}/interactions/{began}").json()
        assert (interrupted["status"], interrupted["exit_code"]) == ("error", -1000)
        assert "n1 was lost" in interrupted["message"]
        assert execute(client, kept) == (200, "")
        assert client.get(f"/sessions/{create_session(client)}").json()["node"] == "n2"
        assert [node["name"] for node in client.get("/nodes").json()["nodes"]] == ["n2"]


def test_a_node_that_dies_during_a_call(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = session_on(client, "n1")
        answers: list[httpx.Response] = []
        body, headers = {"command": "touch begun; sleep 600"}, {"Prefer": "wait=55", "Idempotency-Key": "k"}

        def call() -> None:
            with pair.client() as other:
                answers.append(other.post(f"/sessions/{session_id}/exec", json=body, headers=headers))

        calling = threading.Thread(target=call)
        calling.start()
        wait_for(lambda: client.get(f"/sessions/{session_id}/files/begun").status_code == 200)
        pair.nodes["n1"].kill()
        calling.join(60)
        assert (answers[0].status_code, answers[0].json()["code"]) == (502, "NodeUncertain")
        until_lost(client, session_id)
        # The command had begun, so a repeat gets its end and does not begin it again.
        again = client.post(f"/sessions/{session_id}/exec", json=body, headers=headers).json()
        assert (again["status"], again["exit_code"]) == ("error", -1000)


def test_a_stream_of_a_node_that_dies_breaks_without_its_end(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = session_on(client, "n1")
        body = {"command": "echo one; sleep 600"}
        with client.stream("POST", f"/sessions/{session_id}/exec?stream=1", json=body) as answer:
            lines = answer.iter_lines()
            assert any("one" in line for line in lines)
            pair.nodes["n1"].kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)


def test_a_node_that_is_stopped_for_longer_than_its_lease(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = session_on(client, "n1")
        client.post(f"/sessions/{session_id}/exec", json=COUNTING)
        node = pair.nodes["n1"]
        node.send_signal(signal.SIGSTOP)
        until_lost(client, session_id)
        assert_lost(client, session_id, "n1")
        node.send_signal(signal.SIGCONT)
        # It learns that its lease was taken, ends its sessions and itself, and writes nothing about them.
        wait_for(node.has_ended)
        assert node.end() != 0
        assert_lost(client, session_id, "n1")
        assert "lost its lease" in node.stderr


def test_a_node_that_is_stopped_for_a_moment_goes_on(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = session_on(client, "n1")
        pair.nodes["n1"].send_signal(signal.SIGSTOP)
        threading.Timer(LEASE / 6, pair.nodes["n1"].send_signal, [signal.SIGCONT]).start()
        assert execute(client, session_id) == (200, "")


def test_a_durable_session_of_a_lost_node_resumes_on_another(new_cluster: NewCluster) -> None:
    """Through two gateways at once, which both had it on the node that is lost."""
    cluster = new_cluster()
    for name in ("n1", "n2", "n3"):
        cluster.add_node(name)
    for _ in range(2):
        cluster.add_gateway()
    with cluster.client() as client, cluster.client(cluster.gateways[1]) as other:
        session_id = create_session(client, durable=True)
        where, both = f"/sessions/{session_id}", (client, other)

        def run(through: httpx.Client, code: str) -> Any:
            return through.post(f"{where}/run", json={"code": code}).json()

        node = client.get(where).json()["node"]
        assert run(client, "x = 41; open('kept', 'w').write('saved')")["is_ok"]
        assert client.post(f"{where}/pause").json()["lifecycle"] == "paused"
        assert client.post(f"{where}/resume").json()["node"] == node
        assert run(other, "x = 0; open('later', 'w').write('not saved'); x")["value"] == 0
        cluster.nodes[node].kill()
        # Only when its lease has run out may another node have it.
        assert client.post(f"{where}/resume").status_code == 503
        for through in both:  # each gateway looks at the leases for itself
            until_lost(through, session_id)
        record = other.get(where).json()
        assert (record["status"], record["lifecycle"], record["error"]["code"]) == ("terminated", "paused", "node_lost")

        def resume(through: httpx.Client) -> dict[str, Any]:
            record: dict[str, Any] = through.post(f"{where}/resume").json()
            return record if record.get("status") == "ready" else {}

        with ThreadPoolExecutor(2) as threads:
            # The killed process holds its lock on the files for six seconds, and that may be longer than the lease.
            first, second = threads.map(lambda through: wait_for(lambda: resume(through)), both)
        assert first["node"] == second["node"] != node
        code = "import os; x = x + 1; [x, open('kept').read(), os.path.exists('later')]"
        for value, through in enumerate(both, 42):
            assert run(through, code)["value"] == [value, "saved", False]
        # The old name, started again, does not have it.
        cluster.nodes[node].start()
        wait_for(lambda: len(nodes_of(client)) == len(nodes_of(other)) == 3)
        for value, through in enumerate(both, 44):
            assert run(through, code)["value"] == [value, "saved", False]


def test_a_name_is_used_again_after_a_kill(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = session_on(client, "n1")
        pair.nodes["n1"].kill()
        # It waits until its own lease is overdue, or a gateway has settled it.
        pair.nodes["n1"].start()
        wait_for(lambda: len(nodes_of(client)) == 2)
        assert_lost(client, session_id, "n1")
        assert session_on(client, "n1")


def test_a_name_of_a_living_node_is_refused(pair: ClusterProcesses) -> None:
    with pytest.raises(AssertionError, match="is alive; use another name"):
        pair.add_node("n1")


@pytest.fixture(params=["redis", pytest.param("postgres", marks=pytest.mark.real)])
def server(request: pytest.FixtureRequest, start_redis: Callable[..., RealRedis]) -> Iterator[RealRedis | RealPostgres]:
    """A store that keeps its data when it is killed."""
    if request.param == "redis":
        yield start_redis(appendonly="yes", appendfsync="always")
        return
    try:
        postgres = RealPostgres().start()
    except NoPostgres as reason:
        skip_without(f"no Postgres: {reason}")
    yield postgres
    postgres.remove()


def through(proxy: StoreProxy, server: RealRedis | RealPostgres) -> str:
    """Return the URL of a store behind its proxy."""
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.fixture
def cut(new_cluster: NewCluster, server: RealRedis | RealPostgres) -> Iterator[tuple[ClusterProcesses, StoreProxy]]:
    """A cluster whose first node reaches the store through a proxy."""
    cluster = new_cluster(server.url)
    with store_proxy(server.port) as proxy:
        cluster.add_node("n1", store=through(proxy, server))
        yield cluster, proxy


@pytest.mark.parametrize("how", ["swallow", "reset"])
def test_a_node_that_is_cut_off_for_longer_than_its_lease(
    cut: tuple[ClusterProcesses, StoreProxy], how: Literal["swallow", "reset"]
) -> None:
    cluster, proxy = cut
    cluster.add_node("n2")
    cluster.add_gateway()
    with cluster.client() as client, cluster.client(cluster.nodes["n1"]) as direct:
        session_id = session_on(client, "n1")
        client.post(f"/sessions/{session_id}/exec", json=COUNTING)
        proxy.set(how)
        wait_for(lambda: direct.get("/health").json()["status"] == "frozen")
        assert direct.get(f"/sessions/{session_id}").json()["code"] == "NodeUnreachable"
        until_lost(client, session_id)
        assert_lost(client, session_id, "n1")
        proxy.set("pass")
        wait_for(cluster.nodes["n1"].has_ended)
        assert_lost(client, session_id, "n1")


@pytest.mark.parametrize("how", ["swallow", "reset"])
def test_a_node_that_is_cut_off_freezes_and_continues(
    cut: tuple[ClusterProcesses, StoreProxy], how: Literal["swallow", "reset"]
) -> None:
    """Without a gateway its lease is not taken, so it has its sessions still when the store is back."""
    cluster, proxy = cut
    with cluster.client(cluster.nodes["n1"]) as client:
        session_id = create_session(client)
        assert client.post(f"/sessions/{session_id}/run", json={"code": "x = 41"}).json()["is_ok"]
        assert client.post(f"/sessions/{session_id}/exec", json=COUNTING).status_code == 200
        wait_for(lambda: ticks(client, session_id) > 5)
        proxy.set(how)
        wait_for(lambda: client.get("/health").json()["status"] == "frozen")
        # Its processes stand still: only a look from outside can show it.
        wait_for(lambda: not [each for each in processes_below(cluster.nodes["n1"].pid) if each not in "TZ"])
        assert client.post(f"/sessions/{session_id}/exec", json={"command": "true"}).status_code == 503
        proxy.set("pass")
        wait_for(lambda: client.get("/health").json()["status"] == "healthy")
        wait_for(lambda: execute(client, session_id) == (200, ""))
        before = ticks(client, session_id)
        wait_for(lambda: ticks(client, session_id) > before)
        assert client.post(f"/sessions/{session_id}/run", json={"code": "x + 1"}).json()["value"] == 42


def test_a_frozen_node_can_be_ended(cut: tuple[ClusterProcesses, StoreProxy]) -> None:
    cluster, proxy = cut
    with cluster.client(cluster.nodes["n1"]) as client:
        assert client.post(f"/sessions/{create_session(client)}/exec", json=COUNTING).status_code == 200
        proxy.set("reset")
        wait_for(lambda: client.get("/health").json()["status"] == "frozen")
    cluster.nodes["n1"].end()


def processes_below(pid: int) -> list[str]:
    """The states of all processes that a process has started."""
    return [state for _, state in descendants(pid)]


def test_a_node_that_ends_its_sessions_when_it_is_cut_off(
    new_cluster: NewCluster, server: RealRedis | RealPostgres
) -> None:
    cluster = new_cluster(server.url)
    with store_proxy(server.port) as proxy:
        cluster.add_node("n1", "--on-store-lost", "end", store=through(proxy, server))
        with cluster.client(cluster.nodes["n1"]) as client:
            session_id = create_session(client)
            assert client.post(f"/sessions/{session_id}/exec", json=COUNTING).status_code == 200
            proxy.set("reset")
            wait_for(lambda: client.get("/health").json()["status"] == "frozen")
            wait_for(lambda: "end its sessions" in cluster.nodes["n1"].stderr)
            proxy.set("pass")
            wait_for(lambda: client.get(f"/sessions/{session_id}").json().get("status") == "terminated")
            assert create_session(client)


def test_a_slow_store_only_slows_down(cut: tuple[ClusterProcesses, StoreProxy]) -> None:
    cluster, proxy = cut
    proxy.set("delay")
    with cluster.client(cluster.nodes["n1"]) as client:
        assert execute(client, create_session(client)) == (200, "")


def test_a_store_that_is_restarted(new_cluster: NewCluster, server: RealRedis | RealPostgres) -> None:
    cluster = new_cluster(server.url)
    cluster.add_node("n1")
    cluster.add_gateway()
    with cluster.client() as client:
        session_id = create_session(client)
        done = run_command(client, session_id, "echo before")["interaction_id"]
        server.kill()
        assert execute(client, session_id)[0] == 503
        server.start()
        wait_for(lambda: execute(client, session_id) == (200, ""))
        assert client.get(f"/sessions/{session_id}/interactions/{done}").json()["stdout"] == "before\n"


def test_all_processes_of_a_node_that_are_killed(new_cluster: NewCluster, server: RealRedis | RealPostgres) -> None:
    """As the end of its machine."""
    cluster = new_cluster(server.url)
    cluster.add_node("n1")
    cluster.add_node("n2")
    cluster.add_gateway()
    with cluster.client() as client:
        session_id = session_on(client, "n1")
        done = run_command(client, session_id, "echo before")["interaction_id"]
        client.post(f"/sessions/{session_id}/exec", json=COUNTING)
        node = cluster.nodes["n1"]
        for pid in [node.pid, *(pid for pid, _ in descendants(node.pid))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert until_lost(client, session_id) <= {(503, "NodeUnreachable"), (502, "NodeUncertain")}
        assert_lost(client, session_id, "n1")
        assert client.get(f"/sessions/{session_id}/interactions/{done}").json()["stdout"] == "before\n"
        assert client.get(f"/sessions/{create_session(client)}").json()["node"] == "n2"
        node.kill()
        node.start()
        wait_for(lambda: len(nodes_of(client)) == 2)
        assert execute(client, session_on(client, "n1")) == (200, "")


def test_a_gateway_that_is_killed_in_the_middle_of_a_create(pair: ClusterProcesses) -> None:
    second = pair.add_gateway()
    headers, body = {"Idempotency-Key": "one", "Prefer": "wait=55"}, {"dataset": "demo", "sample_id": "calc-1"}
    broken: list[Exception] = []

    def create() -> None:
        with pair.client() as client:
            try:
                client.post("/sessions", json=body, headers=headers)
            except httpx.TransportError as problem:
                broken.append(problem)

    creating = threading.Thread(target=create)
    creating.start()
    with pair.client(second) as client:
        wait_for(lambda: client.get("/sessions").json()["total_count"] == 1)
        pair.gateways[0].kill()
        creating.join(60)
        record = client.post("/sessions", json=body, headers=headers).json()
        assert record["status"] == "ready"
        assert client.get("/sessions").json()["total_count"] == 1
        assert execute(client, record["session_id"]) == (200, "")


def test_a_node_is_drained(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = session_on(client, "n1")
        for other in client.get("/sessions", params={"status": "ready"}).json()["sessions"]:
            if other["session_id"] != session_id:
                client.delete(f"/sessions/{other['session_id']}")
        words = ["-m", "carrel", "cluster", "drain", "n1", "--store", pair.store]
        assert preloaded_python().run(words, os.environ).returncode == 0
        wait_for(lambda: [node["name"] for node in nodes_of(client)] == ["n2"])
        assert execute(client, session_id) == (200, "")
        assert {client.get(f"/sessions/{create_session(client)}").json()["node"] for _ in range(5)} == {"n2"}
        client.delete(f"/sessions/{session_id}")
        wait_for(pair.nodes["n1"].has_ended)
        assert pair.nodes["n1"].end() == 0
        # Until the gateway sees that the node has ended, it answers that the node cannot be reached.
        wait_for(lambda: client.get(f"/sessions/{session_id}").json().get("status") == "closed")


def test_a_drained_node_pauses_its_durable_sessions_at_the_deadline(pair: ClusterProcesses) -> None:
    with pair.client() as client:
        session_id = create_session(client, durable=True)
        where = f"/sessions/{session_id}"
        node = client.get(where).json()["node"]
        assert client.post(f"{where}/run", json={"code": "x = 41"}).json()["is_ok"]
        words = ["-m", "carrel", "cluster", "drain", node, "--deadline", "1s", "--store", pair.store]
        assert preloaded_python().run(words, os.environ).returncode == 0
        wait_for(pair.nodes[node].has_ended)
        assert pair.nodes[node].end() == 0
        wait_for(lambda: client.post(f"{where}/resume").json().get("status") == "ready")
        assert client.get(where).json()["node"] != node
        assert client.post(f"{where}/run", json={"code": "x + 1"}).json()["value"] == 42
