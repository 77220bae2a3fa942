"""Placement and capacity of a cluster, computed: `python bench/simulation.py`.

Placement: 10 gateways put a burst of 10,000 creates over 300 samples on 100 nodes. Each gateway sees the sessions of
the nodes as they were at the last renewal, and what it placed itself since. Counted are the fullest node against the
mean, and the pairs of node and sample, each of which prepares the sample once.

Capacity: the table of docs/cluster.md, from the assumptions in `LOAD` and the measured costs in `COSTS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from carrel.cluster.nodes import choose
from carrel.wire.answers import NodeInfo

NODES, GATEWAYS, CREATES, SAMPLES = 100, 10, 10_000, 300
RENEWALS = 20
"""How often the gateways learn the true numbers during the burst."""

Chooser = Callable[[Sequence[NodeInfo], str, Random], NodeInfo | None]


def least_loaded(nodes: Sequence[NodeInfo], sample: str, random: Random) -> NodeInfo:
    return min(nodes, key=lambda node: node.sessions)


def any_node(nodes: Sequence[NodeInfo], sample: str, random: Random) -> NodeInfo:
    return random.choice(nodes)


def emptier_of_two(nodes: Sequence[NodeInfo], sample: str, random: Random) -> NodeInfo | None:
    return choose(nodes, "", random)


RULES: dict[str, Chooser] = {
    "least loaded": least_loaded,
    "random": any_node,
    "emptier of two": emptier_of_two,
    "emptier of two among eight (carrel)": choose,
}


def place(rule: Chooser, seed: int = 1, creates: int = CREATES) -> tuple[float, int]:
    """Return the fullest node against the mean, and the number of preparations."""
    random = Random(seed)
    samples = [f"d/{number}" for number in range(SAMPLES)]
    true: Counter[str] = Counter()
    prepared: set[tuple[str, str]] = set()
    views: list[dict[str, NodeInfo]] = []
    for number in range(creates):
        if number % (creates // RENEWALS) == 0:
            fresh = [
                NodeInfo(name=f"n{each}", url="", sessions=true[f"n{each}"], free_slots=creates)
                for each in range(NODES)
            ]
            views = [{node.name: node for node in fresh} for _ in range(GATEWAYS)]
        view, sample = random.choice(views), random.choice(samples)
        found = rule(list(view.values()), sample, random)
        assert found is not None
        view[found.name] = found.model_copy(update={"sessions": found.sessions + 1})
        true[found.name] += 1
        prepared.add((found.name, sample))
    return max(true.values()) / (creates / NODES), len(prepared)


@dataclass(frozen=True)
class Load:
    """What each live session does."""

    seconds_between_execs: float = 10
    cpu_seconds: float = 0.3
    minutes: float = 10
    cores: int = 32
    memory_mb: float = 128 * 1024
    used: float = 0.7
    """The part of a node's cores that is used at most."""
    memory_used: float = 0.8


@dataclass(frozen=True)
class Costs:
    """Measured with the prototype, on one core each."""

    gateway_ms: float = 1.075
    """CPU of a gateway for one exec."""
    node_ms: float = 2.3
    """CPU of a node's server process for one exec."""
    session_mb: float = 7.5
    appends_per_exec: float = 2
    appends_per_session: float = 6
    redis_appends: float = 3_000
    postgres_appends: float = 3_650


LOAD, COSTS = Load(), Costs()


def capacity(live: int) -> dict[str, float]:
    """Return what so many live sessions need."""
    execs = live / LOAD.seconds_between_execs
    creates = live / (LOAD.minutes * 60)
    appends = execs * COSTS.appends_per_exec + creates * COSTS.appends_per_session
    return {
        "exec per second": execs,
        "creates per second": creates,
        "appends per second": appends,
        "cores for gateways": execs * COSTS.gateway_ms / 1000,
        "nodes, by work": execs * LOAD.cpu_seconds / (LOAD.cores * LOAD.used),
        "nodes, by memory": live * COSTS.session_mb / (LOAD.memory_mb * LOAD.memory_used),
        "nodes, by one server process each": execs * COSTS.node_ms / 1000,
        "of one Redis": appends / COSTS.redis_appends,
        "of one Postgres": appends / COSTS.postgres_appends,
    }


def main() -> None:
    print(f"{CREATES} creates of {SAMPLES} samples, {GATEWAYS} gateways, {NODES} nodes")
    for name, rule in RULES.items():
        fullest, preparations = place(rule)
        print(f"  {name:<38} fullest {fullest:.2f} x the mean, {preparations:>6,} preparations")
    print()
    sizes = (1_000, 10_000, 100_000)
    columns = [capacity(size) for size in sizes]
    print(f"{'':<36}" + "".join(f"{size:>10,}" for size in sizes))
    for row in columns[0]:
        print(f"{row:<36}" + "".join(f"{column[row]:>10,.3g}" for column in columns))


if __name__ == "__main__":
    main()
