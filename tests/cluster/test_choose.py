"""Which node gets a new session."""

from __future__ import annotations

from collections import Counter
from random import Random

from carrel.cluster.nodes import choose
from carrel.wire.answers import NodeInfo


def node(name: str, sessions: int = 0, free: int = 100, **more: object) -> NodeInfo:
    return NodeInfo.model_validate({"name": name, "url": "http://x", "sessions": sessions, "free_slots": free, **more})


def test_no_node_with_room_is_none() -> None:
    assert choose([], "", Random(1)) is None
    full, draining, frozen = node("a", free=0), node("b", state="draining"), node("c", state="frozen")
    assert choose([full, draining, frozen], "d/s", Random(1)) is None
    chosen = choose([full, draining, frozen, node("d", 99, 1)], "d/s", Random(1))
    assert chosen is not None
    assert chosen.name == "d"


def test_the_emptier_of_two_is_chosen() -> None:
    assert {choose([node("a", 5), node("b", 4)], "", Random(seed)).name for seed in range(20)} == {"b"}  # type: ignore[union-attr]


def test_a_sample_stays_with_its_nodes_until_they_are_fuller_than_the_mean() -> None:
    nodes = [node(f"n{number}", 10) for number in range(40)]
    random = Random(7)
    names = {choose(nodes, "demo/calc-1", random).name for _ in range(500)}  # type: ignore[union-attr]
    assert len(names) == 8
    assert {choose(nodes, "demo/slug-1", random).name for _ in range(500)} != names  # type: ignore[union-attr]
    fuller = [each.model_copy(update={"sessions": 60}) if each.name in names else each for each in nodes]
    chosen = Counter(choose(fuller, "demo/calc-1", random).name for _ in range(1000))  # type: ignore[union-attr]
    # Two of any nodes are both among these eight in one of 28 cases.
    assert sum(chosen[name] for name in names) < 100


def test_most_samples_keep_their_nodes_when_one_goes() -> None:
    nodes = [node(f"n{number}", 0) for number in range(20)]
    kept = 0
    for number in range(50):
        before = {choose(nodes, f"d/{number}", Random(seed)).name for seed in range(200)}  # type: ignore[union-attr]
        after = {choose(nodes[1:], f"d/{number}", Random(seed)).name for seed in range(200)}  # type: ignore[union-attr]
        assert before - {"n0"} <= after
        kept += before == after
    assert kept >= 20


def test_without_samples_sessions_spread_evenly() -> None:
    nodes = {f"n{number}": node(f"n{number}") for number in range(10)}
    random, counts = Random(3), Counter[str]()
    for _ in range(1000):
        name = choose([each.model_copy(update={"sessions": counts[each.name]}) for each in nodes.values()], "", random)
        assert name is not None
        counts[name.name] += 1
    assert max(counts.values()) <= 105
