"""The outline of a conversation, and which kinds of its entries are shown. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from carrel.conversation.export import describe_event, time_of
from carrel.conversation.export.html_page import Item, PagePart, Pairs
from carrel.conversation.log_entries import note_kind
from carrel.conversation.messages import blocks_of, meta_of
from carrel.conversation.replay import Numbered
from carrel.server.web.comparison import step_of
from carrel.text import single_line
from carrel.wire.verification import Job

KINDS = ("prompts", "answers", "thinking", "calls", "errors")
"""Kinds of entries that can be shown alone; `errors` are calls that failed."""
_BRIEF = 120
"""Characters that are shown of an entry."""


@dataclass(frozen=True)
class OutlineCall:
    """A call in an outline."""

    seq: int
    name: str
    is_error: bool


@dataclass
class OutlineLine:
    """A prompt with the calls that follow it, an event, or a verdict."""

    kind: Literal["prompt", "event", "verdict"]
    seq: int
    """The entry to which the line leads; 0 for a verdict."""
    text: str
    calls: list[OutlineCall] = field(default_factory=list)


def outline_of(entries: Sequence[Numbered], jobs: Sequence[Job] = (), *, is_end: bool = False) -> list[OutlineLine]:
    """Return the outline of some entries; `is_end`: they are the last ones, so the last verdicts follow them.

    A verdict stands before the first entry that was written after it."""
    pairs = Pairs(entry for _, entry in entries)
    verdicts = [
        (job.completed_at, OutlineLine("verdict", 0, job.outcome)) for job in jobs if job.completed_at and job.outcome
    ]
    lines: list[OutlineLine] = []
    for index, (seq, entry) in enumerate(entries):
        when = time_of(entry)
        while when is not None and verdicts and verdicts[0][0] < when:
            verdict = verdicts.pop(0)[1]
            if index:  # Else it belongs to earlier entries.
                lines.append(verdict)
        note = note_kind(entry)
        if (words := describe_event(seq, entry)) is not None:
            if note in (None, "fork", "label"):
                at = meta_of(entry).get("at_seq")
                lines.append(OutlineLine("event", at if note == "label" and type(at) is int else seq, words))
            continue
        if entry.get("role") == "user" and any(block.get("type") == "text" for block in blocks_of(entry)):
            lines.append(OutlineLine("prompt", seq, step_of(seq, entry).text[:_BRIEF]))
        for block in blocks_of(entry):
            if block.get("type") == "tool_use":
                if not lines:
                    lines.append(OutlineLine("event", seq, "Continued"))
                result = pairs.result_of(block)
                is_error = result is not None and bool(result.get("is_error"))
                lines[-1].calls.append(OutlineCall(seq, single_line(block.get("name") or "tool")[:_BRIEF], is_error))
    return [*lines, *(line for _, line in verdicts)] if is_end else lines


def only_kinds(items: Sequence[Item], kinds: Collection[str]) -> list[Item]:
    """Return what a conversation's page shows of these kinds."""
    found: list[Item] = []
    for item in items:
        if item.kind == "day":
            if found and found[-1].kind == "day":
                found.pop()
            found.append(item)
        elif item.kind == "message" and (parts := [part for part in item.parts if _kind_of(item, part) & {*kinds}]):
            found.append(replace(item, parts=parts, continued=False))
        elif item.kind == "mark" and item.tone == "error" and "errors" in kinds:
            found.append(item)
    return found[:-1] if found and found[-1].kind == "day" else found


def _kind_of(item: Item, part: PagePart) -> set[str]:
    if part.kind == "thinking":
        return {"thinking"}
    if part.call is not None:
        return {"calls", "errors"} if part.call.state in ("error", "interrupted") else {"calls"}
    return {"prompts" if item.role == "user" else "answers"}
