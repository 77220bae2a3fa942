"""A cluster for the tests of one file, and clusters of their own for tests that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from tests.support.cluster import ClusterProcesses
from tests.support.real_redis import RealRedis

NewCluster = Callable[..., ClusterProcesses]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, redis_server: RealRedis) -> Iterator[ClusterProcesses]:
    """Two nodes and a gateway that all tests of a file share, on an empty database of the Redis."""
    store = f"{redis_server.url[:-1]}1"
    redis.from_url(store).flushdb()
    running = ClusterProcesses(tmp_path_factory.mktemp("cluster"), store)
    running.add_node("n1")
    running.add_node("n2")
    running.add_gateway()
    yield running
    running.end()


@pytest.fixture
def client(cluster: ClusterProcesses) -> Iterator[httpx.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def new_cluster(tmp_path: Path, start_redis: Callable[..., RealRedis]) -> Iterator[NewCluster]:
    """`new_cluster()`: one on a Redis of its own, without nodes; `new_cluster(url)`: on another store."""
    made: list[ClusterProcesses] = []

    def make(store: str | None = None) -> ClusterProcesses:
        made.append(ClusterProcesses(tmp_path / f"cluster-{len(made)}", store or start_redis().url))
        return made[-1]

    yield make
    for each in made:
        each.end()
