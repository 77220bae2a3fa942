"""Compare two points of one or two sessions in conversation, variables, files and tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal

from carrel.conversation.export import describe_event
from carrel.conversation.log_entries import note_kind
from carrel.conversation.messages import ConversationMessage, blocks_of, tool_result_text
from carrel.conversation.redaction import redact_secrets
from carrel.conversation.replay import Numbered
from carrel.server.web.archive import MAX_COMPARED, Archive, SessionView, differing_entries
from carrel.server.web.login import Visitor
from carrel.session import Point, RecordedDiff, RecordedState, VariableChange, compare_variables
from carrel.text import single_line
from carrel.wire.answers import WorkspaceDiff
from carrel.wire.verification import VerificationResult

_BRIEF = 200
"""Characters that are shown of an entry."""
_FILE_HEAD = re.compile(r"^diff --git .*$", re.MULTILINE)


@dataclass(frozen=True)
class ComparedStep:
    """An entry in one line."""

    seq: int
    role: str
    text: str


@dataclass(frozen=True)
class Pair:
    """Two entries, files or tests beside each other; None where only one session has it."""

    kind: Literal["same", "differs", "only_a", "only_b"]
    name: str = ""
    a: ComparedStep | str | None = None
    b: ComparedStep | str | None = None


def step_of(seq: int, entry: ConversationMessage) -> ComparedStep:
    """Return an entry in one line: its text, the calls that it makes, or the results that it brings."""
    parts = []
    for block in blocks_of(entry):
        match block.get("type"):
            case "text":
                parts.append(str(block.get("text") or ""))
            case "tool_use":
                parts.append(f"{block.get('name')} {json.dumps(block.get('input'), default=str)}")
            case "tool_result":
                parts.append(("error: " if block.get("is_error") else "") + tool_result_text(block))
            case other:
                parts.append(f"[{other}]")
    text = describe_event(seq, entry) or " · ".join(part[: 2 * _BRIEF] for part in parts)
    is_result = bool(blocks_of(entry)) and all(block.get("type") == "tool_result" for block in blocks_of(entry))
    return ComparedStep(seq, "result" if is_result else str(entry.get("role") or ""), single_line(text)[:_BRIEF])


def align_steps(a: Sequence[Numbered], b: Sequence[Numbered]) -> list[Pair]:
    """Return the entries of two conversations beside each other: equal ones on one line."""
    # Notes, such as where a session was forked and what it was renamed to, are no part of the conversation.
    one, two = [[step_of(*each) for each in side if note_kind(each[1]) is None] for side in (a, b)]
    matcher = SequenceMatcher(None, [(s.role, s.text) for s in one], [(s.role, s.text) for s in two], autojunk=False)
    pairs: list[Pair] = []
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        if kind == "equal":
            pairs += [Pair("same", a=x, b=y) for x, y in zip(one[a1:a2], two[b1:b2], strict=True)]
            continue
        for index in range(max(a2 - a1, b2 - b1)):
            left = one[a1 + index] if a1 + index < a2 else None
            right = two[b1 + index] if b1 + index < b2 else None
            pairs.append(Pair("differs" if left and right else "only_a" if left else "only_b", a=left, b=right))
    return pairs


def compare_diffs(a: WorkspaceDiff | None, b: WorkspaceDiff | None) -> list[Pair]:
    """Return the files that either session has changed; those that differ come first."""
    changes = [{change.path: change for change in (diff.changes if diff else [])} for diff in (a, b)]
    hunks = [_hunks(diff.diff if diff else "") for diff in (a, b)]
    pairs = []
    for path in sorted({*changes[0], *changes[1]}):
        found = [of.get(path) for of in changes]
        words = [f"{change.kind}, {change.size:,} bytes" if change is not None else None for change in found]
        texts = [next((hunk for name, hunk in of.items() if name.endswith(f"b/{path}")), "") for of in hunks]
        pairs.append(_pair(path, words[0], words[1], is_same=texts[0] == texts[1] and words[0] == words[1]))
    return sorted(pairs, key=lambda pair: pair.kind == "same")


def file_pairs(a: RecordedState, b: RecordedState, diff: RecordedDiff) -> list[Pair]:
    """Return the files that are not as at the start in either state; those that differ come first."""
    differing = {change.path for change in diff.changes}
    pairs = []
    for path in sorted({*a.files, *b.files}):
        words = [
            f"{entry[0]}, {entry[1]:,} bytes" if (entry := state.files.get(path)) is not None else "as at the start"
            for state in (a, b)
        ]
        pairs.append(_pair(path, words[0], words[1], is_same=path not in differing))
    return sorted(pairs, key=lambda pair: pair.kind == "same")


def variable_pairs(changes: Sequence[VariableChange]) -> list[Pair]:
    """Return variables beside each other; those that differ come first."""
    pairs = []
    for change in changes:
        words = [f"{each.type} {each.preview}" if each is not None else None for each in (change.a, change.b)]
        pairs.append(_pair(change.name, words[0], words[1], is_same=change.kind in ("same", "perhaps")))
    return pairs


def _hunks(diff: str) -> dict[str, str]:
    """Return the part of each file in a diff, by its first line."""
    starts = [match.start() for match in _FILE_HEAD.finditer(diff)]
    parts = [diff[start:end] for start, end in pairwise([*starts, len(diff)])]
    return {part.partition("\n")[0]: part for part in parts}


def compare_tests(a: VerificationResult | None, b: VerificationResult | None) -> list[Pair]:
    """Return the tests of two verdicts; those that differ come first."""
    outcomes = [test_outcomes(result) for result in (a, b)]
    names = sorted({*outcomes[0], *outcomes[1]})
    pairs = [_pair(name, outcomes[0].get(name), outcomes[1].get(name)) for name in names]
    return sorted(pairs, key=lambda pair: pair.kind == "same")


def test_outcomes(result: VerificationResult | None) -> dict[str, str]:
    """Return passed, failed or skipped for each test."""
    if result is None:
        return {}
    kinds = (("passed", result.passes), ("failed", result.failures), ("skipped", result.skips))
    return {test.name: kind for kind, tests in kinds for test in tests}


def _pair(name: str, a: str | None, b: str | None, *, is_same: bool | None = None) -> Pair:
    if a is None or b is None:
        return Pair("only_b" if a is None else "only_a", name, a, b)
    return Pair("same" if (a == b if is_same is None else is_same) else "differs", name, a, b)


# --- two points -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of two points that are compared."""

    archive: Archive
    session: SessionView
    point: Point
    state: RecordedState

    @property
    def result(self) -> VerificationResult | None:
        """The last verdict before the point."""
        for job in reversed(self.session.jobs):
            ended = job.completed_at.timestamp() if job.completed_at is not None else 0.0
            if job.result is not None and (self.point.name == "now" or ended <= (self.state.at or 0.0)):
                return job.result
        return None


async def compare_sides(a: Side, b: Side, visitor: Visitor) -> tuple[dict[str, Any], str]:
    """Return how two points differ, and the differences of their files as one text."""
    common, *rest = await differing_entries(a.archive, a.session.id, a.point.seq, b.archive, b.session.id, b.point.seq)
    if visitor.is_guest:
        rest = [[(seq, redact_secrets(entry)) for seq, entry in entries] for entries in rest]
    is_now = a.point.name == b.point.name == "now"
    diffs = [await side.archive.diff(visitor.user, side.session) for side in (a, b)] if is_now else [None, None]
    changed = await a.archive.differing_files(a.state, b.state) if a.archive is b.archive else None
    pairs = file_pairs(a.state, b.state, changed) if changed is not None else []
    data = {
        "common": common,
        "conversation": align_steps(*rest),
        "variables": variable_pairs(compare_variables(a.state, b.state)),
        "files": pairs or compare_diffs(*diffs),
        "tests": compare_tests(a.result, b.result) if visitor.sees_tests else [],
        "is_complete": max(map(len, rest)) < MAX_COMPARED,
    }
    return data, changed.diff if changed is not None else ""
