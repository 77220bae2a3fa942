"""The tree of a session: its ancestors, all their forks, and their checkpoints and labels. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from carrel.server.web.rows import SessionRow
from carrel.session import RecordedPoint
from carrel.wire.answers import CheckpointRecord

SHOWN = 200
"""Sessions on one page of a tree."""
_MAX_LANES = 24
"""Lanes that are drawn."""


@dataclass(frozen=True)
class TreeNode:
    """A row of the tree: a session, or a point of the session above it."""

    depth: int
    kind: Literal["session", "checkpoint", "label"]
    session: SessionRow
    seq: int = 0
    """The entry at which the point is, or after which the session was forked; 0 if it is not known."""
    name: str = ""
    point: str = ""
    """How addresses name the point."""
    variables: int = 0
    files: int = 0
    is_live: bool = False
    """Whether variables and files can be taken back to the checkpoint."""


def family_of(metas: Mapping[str, Mapping[str, Any]], session_id: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the session, its ancestors and all their forks, each with its depth, a parent before its forks."""
    root, seen = session_id, {session_id}
    while (parent := metas.get(root, {}).get("parent_session_id")) in metas and parent not in seen:
        root = str(parent)
        seen.add(root)
    children: dict[str, list[Mapping[str, Any]]] = {}
    for meta in sorted(metas.values(), key=lambda meta: (forked_at(meta), str(meta.get("created_at")))):
        children.setdefault(str(meta.get("parent_session_id")), []).append(meta)
    found: list[tuple[int, Mapping[str, Any]]] = []
    waiting: list[tuple[int, Mapping[str, Any]]] = [(0, metas.get(root, {"id": root}))]
    while waiting:
        depth, meta = waiting.pop()
        found.append((depth, meta))
        waiting += [(depth + 1, child) for child in reversed(children.pop(meta["id"], [])) if child["id"] != root]
    return found


def forked_at(meta: Mapping[str, Any]) -> int:
    """Return the entry after which a session was forked; 0 if it was not."""
    return int(meta.get("forked_at_seq") or 0)


def points_of(
    session: TreeNode,
    meta: Mapping[str, Any],
    recorded: Sequence[RecordedPoint],
    live: Sequence[CheckpointRecord],
) -> list[TreeNode]:
    """Return the checkpoints and labels of a session as nodes."""
    depth, row = session.depth + 1, session.session
    ids = {point.id for point in live}
    nodes = [
        TreeNode(depth, "checkpoint", row, p.seq, p.label or p.id, p.id, p.variables, p.files, p.id in ids)
        for p in recorded
    ]
    # Without recording, it is not known where a checkpoint is in the log.
    unrecorded = [point for point in live if point.id not in {each.id for each in recorded}]
    nodes += [TreeNode(depth, "checkpoint", row, 0, p.label or p.id, p.id, is_live=True) for p in unrecorded]
    for label in meta.get("labels") or ():
        nodes.append(TreeNode(depth, "label", row, int(label["at_seq"]), str(label["text"]), str(label["at_seq"])))
    return nodes


def ordered(sessions: Sequence[TreeNode], points: Mapping[str, Sequence[TreeNode]]) -> list[TreeNode]:
    """Return nodes in the order of the page: below a session its points and forks, as they follow in its log."""
    below: defaultdict[str, list[TreeNode]] = defaultdict(list)
    roots: list[TreeNode] = []
    ids = {node.session.id for node in sessions}
    for index, node in enumerate(sessions):
        (below[node.session.parent] if index and node.session.parent in ids else roots).append(node)
    for session_id, nodes in points.items():
        # A fork stands after the point at which it was made.
        below[session_id] = sorted([*nodes, *below[session_id]], key=lambda node: node.seq or math.inf)
    found: list[TreeNode] = []
    waiting = roots[::-1]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if node.kind == "session":
            waiting += reversed(below.pop(node.session.id, []))
    return found


def lanes_of(depths: Sequence[int]) -> list[list[tuple[int, bool]]]:
    """Return the lines of each row of a tree: the lane, and whether it goes on below the row."""
    found: list[list[tuple[int, bool]]] = []
    below: set[int] = set()
    for depth in reversed(depths):
        shown = range(min(depth, _MAX_LANES))
        found.append([(lane, lane + 1 in below) for lane in shown if lane + 1 in below or lane == depth - 1])
        below = {other for other in below if other < depth} | {depth}
    return found[::-1]
