"""Nodes on a Ray cluster of several raylets on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import NewCluster
from tests.support.cluster import ClusterProcesses, nodes_of, wait_for
from tests.support.missing_parts import skip_without
from tests.support.preloaded_python import preloaded_python
from tests.support.server_process import create_session, run_command

pytestmark = pytest.mark.real


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster with three nodes."""
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 -- an extra
    except ImportError:
        skip_without("no ray: pip install 'carrel-sessions[ray]'")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def carrel(cluster: ClusterProcesses, ray_cluster: Any, *words: str) -> str:
    env = {**os.environ, "CARREL_HOME": str(cluster.folder / "home"), "CARREL_SANDBOX": "auto"}
    command = ["-m", "carrel", "cluster", *words, "--store", cluster.store, "--ray-address", ray_cluster.address]
    done = preloaded_python().run(command, env, Path(cluster.folder), 280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_nodes_on_ray(new_cluster: NewCluster, ray_cluster: Any) -> None:
    cluster = new_cluster()
    assert "3 nodes run" in carrel(cluster, ray_cluster, "up")
    cluster.add_gateway()
    with cluster.client() as client:
        wait_for(lambda: len(nodes_of(client)) == 3)
        made = [create_session(client) for _ in range(6)]
        example = [str(Path(__file__).parents[2] / "examples" / "ray_rollouts.py")]
        own = {"CARREL_BASE_URL": cluster.gateways[0].url, "CARREL_API_KEY": cluster.key}
        env = {**os.environ, **own, "RAY_ADDRESS": ray_cluster.address}
        done = subprocess.run([sys.executable, *example], env=env, capture_output=True, text=True, timeout=200)
        assert "rewards: [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]" in done.stdout, done.stdout + done.stderr
        # A raylet that dies takes its actor with it, and neither the node nor its sessions.
        ray_cluster.remove_node(next(iter(ray_cluster.worker_nodes)), allow_graceful=False)
        for session_id in made:
            assert run_command(client, session_id, "echo here")["stdout"] == "here\n"
        assert len(nodes_of(client)) == 3
        # One that comes gets a node.
        ray_cluster.add_node(num_cpus=1)
        carrel(cluster, ray_cluster, "up")
        wait_for(lambda: len(nodes_of(client)) == 4)
        # Also the one without a raylet, which only an order in the store reaches.
        assert "4 nodes were ended" in carrel(cluster, ray_cluster, "down")
        wait_for(lambda: nodes_of(client) == [])
