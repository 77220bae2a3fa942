"""What the pages are made of: the tree, the outline of a conversation, and the axis of time."""

from __future__ import annotations

from typing import Any

from carrel.server.web.rows import SessionRow
from carrel.server.web.tree import Node, family_of, lanes_of, ordered, points_of
from carrel.session import RecordedPoint


def row(id_: str, parent: str = "") -> SessionRow:
    return SessionRow(id=id_, title=id_, state="", updated_at="", parent=parent)


def meta(id_: str, parent: str | None = None, at: int | None = None) -> dict[str, Any]:
    return {"id": id_, "parent_session_id": parent, "forked_at_seq": at, "created_at": id_}


def test_a_family_has_ancestors_and_all_forks() -> None:
    metas = {
        each["id"]: each for each in (meta("a"), meta("c", "a", 9), meta("b", "a", 3), meta("d", "b", 1), meta("x"))
    }
    expected = [(0, "a"), (1, "b"), (2, "d"), (1, "c")]
    assert [(depth, each["id"]) for depth, each in family_of(metas, "d")] == expected
    assert [(depth, each["id"]) for depth, each in family_of(metas, "alone")] == [(0, "alone")]
    circle = {"a": meta("a", "b"), "b": meta("b", "a")}
    assert sorted(each["id"] for _, each in family_of(circle, "a")) == ["a", "b"]


def test_points_and_forks_follow_as_in_the_log() -> None:
    checkpoints = [RecordedPoint("c1", "before", 4, 1.0, 2, 1), RecordedPoint("c2", "", 8, 2.0, 3, 1)]
    labels = {"labels": [{"text": "good", "at_seq": 6}]}
    points = points_of(row("a"), labels, checkpoints, {"c2"}, 1)
    sessions = [
        Node(0, "session", row("a")),
        Node(1, "session", row("b", "a"), 4),
        Node(2, "session", row("c", "b"), 2),
    ]
    nodes = ordered(sessions, {"a": points})
    assert [(node.kind, node.name or node.session.id) for node in nodes] == [
        ("session", "a"),
        ("checkpoint", "before"),
        ("session", "b"),
        ("session", "c"),
        ("label", "good"),
        ("checkpoint", "c2"),
    ]
    assert [node.is_live for node in nodes if node.kind == "checkpoint"] == [False, True]
    assert [node.point for node in nodes if node.kind != "session"] == ["c1", "6", "c2"]
    circle = [Node(0, "session", row("a", "b")), Node(1, "session", row("b", "a"))]
    assert [node.session.id for node in ordered(circle, {})] == ["a", "b"]


def test_lanes_go_on_to_the_next_sibling() -> None:
    assert lanes_of([0, 1, 2, 1]) == [[], [(0, True)], [(0, True), (1, False)], [(0, False)]]
