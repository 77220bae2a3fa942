"""Clients work while nodes, gateways and connections to the store break; nothing may be lost or done twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from random import Random

import httpx
import pytest

from carrel.session import open_shared_storage
from tests.cluster.conftest import NewCluster
from tests.support.cluster import nodes_of, store_proxy, wait_for
from tests.support.cluster_chaos import (
    ChaosClient,
    Tally,
    check_acknowledged,
    disturb,
    left_running,
    restart_ended,
)
from tests.support.lease_monitor import LeaseMonitor
from tests.support.ports import free_port
from tests.support.real_redis import RealRedis


@pytest.mark.slow  # until it is green many times in a row; then `real`, so that `make test-real` runs it
@pytest.mark.timeout(600)
def test_a_minute_of_chaos(new_cluster: NewCluster, start_redis: Callable[..., RealRedis]) -> None:
    run_chaos(new_cluster, start_redis, seed=122, seconds=60, clients=60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_minutes_of_chaos(new_cluster: NewCluster, start_redis: Callable[..., RealRedis]) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    run_chaos(new_cluster, start_redis, seed=seed, seconds=600, clients=60)


def run_chaos(
    new_cluster: NewCluster, start_redis: Callable[..., RealRedis], *, seed: int, seconds: float, clients: int
) -> None:
    redis = start_redis()
    monitor = LeaseMonitor(redis.port)
    cluster = new_cluster(redis.url)
    tally = Tally()
    with ExitStack() as stack:
        names = ("n1", "n2", "n3", "g1", "g2")
        proxies = {name: stack.enter_context(store_proxy(redis.port)) for name in names}
        for name in names[:3]:
            cluster.add_node(name, store=f"redis://127.0.0.1:{proxies[name].port}/0")
        for name in names[3:]:
            cluster.add_gateway(store=f"redis://127.0.0.1:{proxies[name].port}/0", port=free_port())
        gateways = dict(zip(names[3:], cluster.gateways, strict=True))
        headers = {"Authorization": f"Bearer {cluster.key}"}
        limits = httpx.Limits(max_connections=200)

        async def work() -> list[str]:
            async with httpx.AsyncClient(headers=headers, timeout=30, limits=limits, trust_env=False) as http:
                until = time.monotonic() + seconds
                urls = [gateway.url for gateway in cluster.gateways]
                working = [
                    ChaosClient(http, urls, Random(f"{seed} {number}"), tally, until) for number in range(clients)
                ]
                *disturbed, _ = await asyncio.gather(
                    disturb(cluster.nodes, proxies, Random(f"{seed} nodes"), until),
                    disturb(gateways, proxies, Random(f"{seed} gateways"), until),
                    asyncio.gather(*(each.work() for each in working)),
                )
                await restart_ended({**cluster.nodes, **gateways})
                return [f"{len(events)}: {', '.join(events)}" for events in disturbed]

        async def check() -> None:
            async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
                await check_acknowledged(http, cluster.gateways[0].url, tally)

        print(*asyncio.run(work()), tally.done, tally.refused, sep="\n")
        with cluster.client() as client:
            wait_for(lambda: len(nodes_of(client)) == 3)
        asyncio.run(check())
        assert left_running(cluster) == []
    monitor.close()
    assert tally.wrong == []
    assert monitor.wrong == []
    check_logs(monitor, tally)
    asyncio.run(check_store(redis.url))
    # It has really been used, also on a slow machine.
    assert all(tally.done[each] for each in ("create", "exec", "run", "fork", "pause", "verify", "close"))


def check_logs(monitor: LeaseMonitor, tally: Tally) -> None:
    """Each session has ended with all that ran in it, and nothing was begun more often than there were keys for it."""
    work = {each.session_id: each for each in tally.work}
    assert monitor.entries > len(work)
    forks = Counter(str(record["parent_session_id"]) for record in monitor.sessions.values())
    assert forks.pop("None") <= tally.creates
    for session_id, record in monitor.sessions.items():
        assert (session_id, record["lifecycle"]) != (session_id, "live")
        assert (session_id, monitor.unfinished[session_id]) == (session_id, set())
        begun = monitor.operations[session_id]
        assert max(begun.values(), default=1) == 1, (session_id, begun)
        if session_id in work:
            assert len(begun) <= work[session_id].keys["exec"] + work[session_id].keys["verify"], session_id
            assert forks[session_id] <= work[session_id].keys["fork"], session_id
    assert set(work) <= set(monitor.sessions)


async def check_store(url: str) -> None:
    """No session is marked as live, and no lease is left."""
    async with open_shared_storage(url) as storage:
        assert await storage.store.list("server/live") == []
        assert await storage.store.list("cluster/nodes") == []
