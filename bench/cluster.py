"""A cluster on this machine: what the gateway adds, many live sessions, and grouped appends to Postgres.

    python bench/cluster.py [--sessions 1000] [--nodes 3] [--no-postgres]

Everything runs on one machine, so that ratios and CPU times count, not rates."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from carrel.storage.postgres.store import PostgresStore
from tests.support.cluster import CarrelProcess, ClusterProcesses
from tests.support.real_postgres import RealPostgres
from tests.support.real_redis import RealRedis
from tests.support.server_process import descendants

CALLS = 200
RECORD = b"x" * 300


def cpu_seconds(pid: int) -> float:
    """The processor time of one process, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def memory_mb(process: CarrelProcess) -> float:
    """The memory of a process and those below it, shared pages divided among those that share them."""
    total = 0
    for pid in (process.pid, *(pid for pid, _ in descendants(process.pid))):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


async def create(http: httpx.AsyncClient, url: str) -> str:
    answer = await http.post(f"{url}/sessions", json={}, headers={"Prefer": "wait=55"})
    answer.raise_for_status()
    session_id: str = answer.json()["session_id"]
    return session_id


async def execute(http: httpx.AsyncClient, url: str, session_id: str) -> float:
    began = time.perf_counter()
    body = {"command": "true"}
    answer = await http.post(f"{url}/sessions/{session_id}/exec", json=body, headers={"Prefer": "wait=55"})
    assert answer.json()["exit_code"] == 0, answer.text
    return time.perf_counter() - began


async def measure_gateway(http: httpx.AsyncClient, cluster: ClusterProcesses) -> None:
    gateway = cluster.gateways[0]
    session_id = await create(http, gateway.url)
    record = (await http.get(f"{gateway.url}/sessions/{session_id}")).json()
    node = cluster.nodes[record["node"]]
    took: dict[str, list[float]] = {"direct": [], "gateway": []}
    cpu = 0.0
    for _ in range(CALLS):
        # By turns, so that what else the machine does counts for both.
        took["direct"].append(await execute(http, node.url, session_id))
        before = cpu_seconds(gateway.pid)
        took["gateway"].append(await execute(http, gateway.url, session_id))
        cpu += (cpu_seconds(gateway.pid) - before) / CALLS
    direct, through = (statistics.median(took[name]) * 1000 for name in ("direct", "gateway"))
    print(
        f"exec of `true`, median: node {direct:.1f} ms, gateway {through:.1f} ms, added {through - direct:.1f} ms (4)"
    )
    print(f"CPU of the gateway for a call: {cpu * 1000:.2f} ms (1.2)")

    async def creates(urls: list[str]) -> float:
        began = time.perf_counter()
        made = await asyncio.gather(*(create(http, urls[number % len(urls)]) for number in range(60)))
        seconds = time.perf_counter() - began
        await asyncio.gather(*(http.delete(f"{gateway.url}/sessions/{each}") for each in made))
        return 60 / seconds

    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    # Counted from the second round on: the first one starts what each node has once.
    for number in range(6):
        found = {"direct": await creates([each.url for each in cluster.nodes.values()])}
        found["gateway"] = await creates([gateway.url])
        for name in rates if number else ():
            rates[name].append(found[name])
    direct, through = statistics.median(rates["direct"]), statistics.median(rates["gateway"])
    print(f"creates per second: nodes {direct:.0f}, gateway {through:.0f}: {through / direct:.0%} (85 %)")


async def measure_many(http: httpx.AsyncClient, cluster: ClusterProcesses, count: int) -> None:
    url = cluster.gateways[0].url
    empty = sum(map(memory_mb, cluster.nodes.values()))
    began = time.perf_counter()
    turn = asyncio.Semaphore(32)

    async def create_one() -> str:
        async with turn:
            return await create(http, url)

    sessions = await asyncio.gather(*(create_one() for _ in range(count)))
    print(f"{count} sessions created in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    await asyncio.gather(*(execute(http, url, each) for each in sessions))
    print(f"each answered at once: {time.perf_counter() - began:.1f} s")
    memory = sum(map(memory_mb, cluster.nodes.values())) - empty
    print(f"memory: {memory / count:.1f} MB a session (10)")


async def measure_appends() -> None:
    server = RealPostgres(fsync="on").start()
    try:
        for writers in (1, 8, 64):
            store = PostgresStore(server.url, f"bench-{uuid.uuid4().hex[:8]}")

            async def single(key: str, store: PostgresStore = store) -> None:
                words = "append(%s, %s::bytea[], %s, %s, %s::bigint, %s, %s)"
                await store._call(key, words, key, [RECORD], True, True, None, guard=None)

            async def grouped(key: str, store: PostgresStore = store) -> None:
                await store.append(key, [RECORD], sync=True)

            rates = {}
            for name, append in (("single", single), ("grouped", grouped)):
                until = time.perf_counter() + 3

                async def write(number: int, name: str = name, append: object = append, until: float = until) -> int:
                    count = 0
                    while time.perf_counter() < until:
                        await append(f"{name}-{number}")  # type: ignore[operator]
                        count += 1
                    return count

                rates[name] = sum(await asyncio.gather(*map(write, range(writers)))) / 3
            ratio = rates["grouped"] / rates["single"]
            goal = " (4)" if writers == 64 else ""
            print(
                f"appends to Postgres, {writers} writers: one transaction each {rates['single']:,.0f} a second,"
                f" grouped {rates['grouped']:,.0f}: {ratio:.1f} x{goal}"
            )
            await store.close()
    finally:
        server.remove()


async def measure(cluster: ClusterProcesses, sessions: int) -> None:
    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=200)
    headers = {"Authorization": f"Bearer {cluster.key}"}
    async with httpx.AsyncClient(headers=headers, timeout=300, limits=limits, trust_env=False) as http:
        await measure_gateway(http, cluster)
        await measure_many(http, cluster, sessions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--no-postgres", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        redis = RealRedis(Path(folder)).start()
        cluster = ClusterProcesses(Path(folder) / "cluster", redis.url)
        try:
            for number in range(options.nodes):
                cluster.add_node(f"n{number}", "--max-sessions", options.sessions, lease=60)
            cluster.add_gateway()
            asyncio.run(measure(cluster, options.sessions))
        finally:
            cluster.end()
            redis.kill()
    if not options.no_postgres:
        asyncio.run(measure_appends())


if __name__ == "__main__":
    main()
