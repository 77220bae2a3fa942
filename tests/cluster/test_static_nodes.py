"""`carrel cluster up` and `down` for nodes at a list of URLs, which something else starts."""

from __future__ import annotations

import os
import socket

import pytest

from carrel.cluster import open_cluster
from carrel.cluster.static_nodes import StaticNodes
from carrel.errors import ConfigurationError, NodeNotFound
from tests.cluster.conftest import NewCluster
from tests.support.cluster import CarrelProcess, ClusterProcesses, wait_for
from tests.support.preloaded_python import preloaded_python


def carrel(cluster: ClusterProcesses, *words: str) -> tuple[int, str]:
    env = {**os.environ, "CARREL_HOME": str(cluster.folder / "home")}
    done = preloaded_python().run(["-m", "carrel", "cluster", *words, "--store", cluster.store], env)
    return done.returncode, done.stdout + done.stderr


def options(*nodes: CarrelProcess) -> list[str]:
    return [word for node in nodes for word in ("--url", node.url)]


async def test_nodes_at_urls_are_awaited_drained_and_ended(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    first, second = cluster.add_node("n1"), cluster.add_node("n2")
    assert carrel(cluster, "up", *options(first, second)) == (0, "2 nodes run.\n")

    cluster.add_gateway()
    with cluster.client() as client:
        session_id = ""
        while not session_id or client.get(f"/sessions/{session_id}").json()["node"] != "n2":
            session_id = client.post("/sessions", json={}, headers={"Prefer": "wait=55"}).json()["session_id"]
        # The second one ends only after its session: until then it can be taken back.
        assert carrel(cluster, "up", "--nodes", "1", *options(first, second)) == (0, "1 nodes run.\n")
        wait_for(lambda: _states(client) == {"n1": "ready", "n2": "draining"})
        assert carrel(cluster, "up", *options(first, second)) == (0, "2 nodes run.\n")
        wait_for(lambda: _states(client) == {"n1": "ready", "n2": "ready"})

    assert carrel(cluster, "down", *options(first, second)) == (0, "2 nodes were ended.\n")
    wait_for(lambda: first.has_ended() and second.has_ended())


def _states(client: object) -> dict[str, str]:
    nodes = client.get("/nodes").json()["nodes"]  # type: ignore[attr-defined]
    return {node["name"]: node["state"] for node in nodes}


async def test_nodes_that_do_not_come_are_named(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        wrong = f"http://127.0.0.1:{bound.getsockname()[1]}"
        there = cluster.add_node("n1")
        cluster.add_node("n2", "--url", wrong)
        async with open_cluster(cluster.store) as nodes:
            with pytest.raises(NodeNotFound) as caught:
                await StaticNodes(nodes, [there.url, "http://127.0.0.1:1", wrong], patience=0).wanted(None)
    first, second = str(caught.value).split("; ", 2)[:2]
    assert first == "no node has joined from http://127.0.0.1:1"
    assert second.startswith("run `carrel serve --join --url http://127.0.0.1:1")
    assert f"the node at {wrong} has a lease, but does not answer at this URL" in str(caught.value)
    assert there.url.removesuffix("/api/v1") not in str(caught.value).replace(wrong, "")


@pytest.mark.parametrize("url", ["n1", "redis://127.0.0.1:6379/0", "http://", "http://127.0.0.1:8765/other"])
async def test_what_is_no_url_of_a_node_is_refused(cluster: ClusterProcesses, url: str) -> None:
    async with open_cluster(cluster.store) as nodes:
        with pytest.raises(ConfigurationError, match="is not the URL of a node; expected http://HOST:PORT"):
            StaticNodes(nodes, [url])


async def test_more_nodes_than_urls_are_refused(cluster: ClusterProcesses) -> None:
    async with open_cluster(cluster.store) as nodes:
        with pytest.raises(ConfigurationError, match="3 nodes are wanted, but only 1 URLs are given"):
            await StaticNodes(nodes, ["http://127.0.0.1:1"]).wanted(3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["up", "--url", "http://m1:1", "--ray-address", "auto"], "leave --ray-address out"),
        (["up", "--url", "http://m1:1", "--follow"], "are for nodes on Ray"),
        (["down", "--url", "m1:8765"], "'m1:8765' is not the URL of a node"),
    ],
)
def test_wrong_options(cluster: ClusterProcesses, words: list[str], problem: str) -> None:
    code, text = carrel(cluster, *words)
    assert code == 2
    assert problem in text
