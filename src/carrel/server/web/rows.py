"""Rows of the list of sessions, and the values by which it is filtered. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrel.wire.answers import SessionRecord


@dataclass(frozen=True)
class SessionRow:
    """A session in the list."""

    id: str
    title: str
    state: str
    updated_at: str
    model: str = ""
    messages: int | None = None
    tokens: int | None = None
    parent: str = ""
    outcome: str = ""
    """Of the last verification."""
    tags: Sequence[str] = ()
    found: str = ""
    """The part of the conversation that a search has found, and the number of its entry."""
    found_seq: int = 0


def row_of(session_id: str, meta: Mapping[str, Any], record: SessionRecord | None) -> SessionRow:
    updated = meta.get("updated_at") or (record.requested_at.isoformat() if record and record.requested_at else "")
    parent = meta.get("parent_session_id") or (record.parent_session_id if record is not None else "")
    return SessionRow(
        id=session_id,
        title=title_of(meta, record) or "Untitled",
        state=state_of(meta, record),
        updated_at=str(updated),
        model=str(meta.get("model") or ""),
        messages=meta.get("message_count"),
        tokens=meta.get("total_tokens"),
        parent=str(parent or ""),
        tags=[str(tag) for tag in meta.get("tags") or ()],
    )


_SHOWN_VALUES = 12
"""Values of one filter, the most frequent ones."""


def facets_of(meta: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The values of a session by which the list can be filtered."""
    return {
        "kind": ["fork"] if meta.get("parent_session_id") else [],
        "state": ["archived"] if meta.get("archived_at") else [],
        "model": [str(meta["model"])] if meta.get("model") else [],
        "tag": [str(tag) for tag in meta.get("tags") or ()],
    }


def count_facets(metas: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return for each filter how many sessions each of its values has, the most frequent first."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for meta in metas:
        for name, values in facets_of(meta).items():
            for value in values:
                counts[name][value] += 1
    return {name: dict(counted.most_common(_SHOWN_VALUES)) for name, counted in counts.items() if counted}


def title_of(meta: Mapping[str, Any], record: SessionRecord | None) -> str:
    if record is not None and record.dataset:
        return f"{record.dataset} / {record.sample_id}"
    return str(meta.get("title") or "")


def state_of(meta: Mapping[str, Any], record: SessionRecord | None) -> str:
    if record is not None:
        return record.status
    return "archived" if meta.get("archived_at") else ""
