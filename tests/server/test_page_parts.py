"""What the pages are made of: the tree, the outline of a conversation, and the axis of time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from carrel import user_text_message
from carrel.conversation.export.html_page import items_of
from carrel.conversation.messages import assistant_message, build_message, text_block, tool_result_block, tool_use_block
from carrel.conversation.replay import Numbered
from carrel.server.web.outline import only_kinds, outline_of
from carrel.server.web.rows import SessionRow
from carrel.server.web.tree import TreeNode, family_of, lanes_of, ordered, points_of
from carrel.server.web.views import bars
from carrel.session import RecordedPoint
from carrel.wire.answers import CheckpointRecord
from carrel.wire.verification import Job, VerificationResult


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
    live = [CheckpointRecord(id=id_, made_at=datetime.now(UTC)) for id_ in ("c2", "unrecorded")]
    points = points_of(TreeNode(0, "session", row("a")), labels, checkpoints, live)
    sessions = [
        TreeNode(0, "session", row("a")),
        TreeNode(1, "session", row("b", "a"), 4),
        TreeNode(2, "session", row("c", "b"), 2),
    ]
    nodes = ordered(sessions, {"a": points})
    assert [(node.kind, node.name or node.session.id) for node in nodes] == [
        ("session", "a"),
        ("checkpoint", "before"),
        ("session", "b"),
        ("session", "c"),
        ("label", "good"),
        ("checkpoint", "c2"),
        ("checkpoint", "unrecorded"),
    ]
    assert [node.is_live for node in nodes if node.kind == "checkpoint"] == [False, True, True]
    assert [node.point for node in nodes if node.kind != "session"] == ["c1", "6", "c2", "unrecorded"]
    circle = [TreeNode(0, "session", row("a", "b")), TreeNode(1, "session", row("b", "a"))]
    assert [node.session.id for node in ordered(circle, {})] == ["a", "b"]


def test_lanes_go_on_to_the_next_sibling() -> None:
    assert lanes_of([0, 1, 2, 1]) == [[], [(0, True)], [(0, True), (1, False)], [(0, False)]]


def conversation() -> list[Numbered]:
    """A prompt with two calls, of which the second fails, an answer, a label, and another prompt."""
    calls = [tool_use_block(tool_id=id_, name=id_, input={}) for id_ in ("look", "edit")]
    results = [
        tool_result_block(tool_use_id="look", model_text="seen"),
        tool_result_block(tool_use_id="edit", model_text="no", is_error=True),
    ]
    entries = [
        user_text_message("repair it"),
        assistant_message([{"type": "thinking", "text": "hm"}, text_block("I look."), *calls]),
        build_message("user", results),
        {"role": "rewind", "meta": {"aside": "label", "at_seq": 2, "text": "good"}},
        user_text_message("thanks"),
    ]
    for minute, entry in enumerate(entries):
        entry.setdefault("meta", {})["created_at"] = f"2026-01-01T10:0{minute}:00+00:00"
    return list(enumerate(entries, 1))


def test_an_outline_has_prompts_with_their_calls_events_and_verdicts() -> None:
    moment = datetime(2026, 1, 1, 10, 3, 30, tzinfo=UTC)
    job = Job(job_id="j", session_id="s", status="completed", created_at=moment, result=VerificationResult())
    early, late = (
        job.model_copy(update={"completed_at": moment}),
        job.model_copy(update={"completed_at": moment.replace(hour=12)}),
    )
    lines = outline_of(conversation(), [early, late], is_end=True)
    assert [(line.kind, line.seq) for line in lines] == [
        ("prompt", 1),
        ("event", 2),
        ("verdict", 0),
        ("prompt", 5),
        ("verdict", 0),
    ]
    assert [(call.seq, call.name, call.is_error) for call in lines[0].calls] == [(2, "look", False), (2, "edit", True)]
    assert [line.kind for line in outline_of(conversation()[:3], [late])] == ["prompt"], (
        "the verdict is of later entries"
    )
    assert [line.text for line in outline_of(conversation()[1:2])] == ["Continued"]


def test_single_kinds_of_entries_are_shown() -> None:
    def shown(*kinds: str) -> list[tuple[int, int]]:
        items = only_kinds(items_of(conversation(), {}), kinds)
        return [(item.seq, len(item.parts)) for item in items if item.kind == "message"]

    assert shown("prompts") == [(1, 1), (5, 1)]
    assert shown("calls") == [(2, 2)]
    assert shown("errors") == [(2, 1)]
    assert shown("thinking", "answers") == [(2, 2)]
    assert only_kinds(items_of(conversation()[:1], {}), ["errors"]) == [], "no day without entries"


def test_long_pauses_are_cut_from_the_axis_and_named() -> None:
    def step(start: str, seconds: float) -> dict[str, Any]:
        return {"started_at": f"2026-01-01T{start}+00:00", "duration": seconds}

    steps = [step("10:00:00", 10), step("10:00:11", 10), step("12:00:21", 10), {"started_at": "", "duration": None}]
    places = bars(steps)
    assert [pause for _, _, pause in places] == ["", "", "2 hours", ""]
    starts = [round(start) for start, _, _ in places]
    assert starts == [0, 34, 69, 69], "30 seconds of work, and a second for each pause"
    assert bars([]) == []
