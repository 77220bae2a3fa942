"""Reads Claude Code transcripts: `~/.claude/projects/<project>/<session>.jsonl` and the files of its agents."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carrel.conversation.entries import decode
from carrel.conversation.formats.anthropic import NAME as PROVIDER
from carrel.conversation.importers.claude_draft import KIND, ClaudeDraft
from carrel.conversation.importers.claude_lines import DUPLICATE, line_of, node_of
from carrel.conversation.importers.draft import text_of
from carrel.conversation.importers.lines import records, wanted_records
from carrel.conversation.importers.report import OTHER_BRANCH, SUB_SESSION, Imported, ImportReport
from carrel.conversation.importers.tree import Node, Tree
from carrel.errors import ImportRefused

_OWN_TYPES = frozenset(
    {
        "agent-name",
        "agent-setting",
        "ai-title",
        "attachment",
        "custom-title",
        "file-history-delta",
        "file-history-snapshot",
        "last-prompt",
        "permission-mode",
        "progress",
        "queue-operation",
        "summary",
    }
)
_LINES_LOOKED_AT = 20
_TITLES = {"custom-title": "customTitle", "agent-name": "agentName", "ai-title": "aiTitle"}


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line is one of Claude Code's."""
    kind = text_of(record.get("type"))
    if kind in ("user", "assistant"):
        return isinstance(record.get("message"), dict)
    if kind == "system":
        return "subtype" in record or "uuid" in record
    return kind in _OWN_TYPES and "payload" not in record


@dataclass
class _Survey:
    """What the first reading finds: the shape of the file, none of its text."""

    report: ImportReport
    lanes: dict[str, list[Node]] = field(default_factory=dict)
    """The main conversation under "", each agent's under its own name."""
    lane_of: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    session_id: str = ""
    cwd: str = ""
    pinned: str | None = None
    """Where the program itself says that the conversation ends."""
    copied: dict[int, str] = field(default_factory=dict)
    """The lines that a fork took over, each with the session that it is from."""

    def take(self, number: int, record: dict[str, Any]) -> None:
        line = line_of(record)
        self._note(line.kind, record)
        if origin := _copied_from(record):
            self.copied[number] = origin
        lane = self._lane(number, record)
        nodes = self.lanes.get(lane, [])
        node = node_of(number, record, line.speaks, nodes[-1].id if nodes else None)
        if node is not None:
            if node.id in self.lane_of:
                self.report.ignore("duplicate", DUPLICATE)
                return
            self.lane_of[node.id] = lane
            self.lanes.setdefault(lane, []).append(node)
        if line.speaks:
            self.pinned = None if not lane else self.pinned
        elif line.ignored is not None:
            self.report.ignore(line.kind, line.ignored)
        else:
            self.report.not_known(line.kind)

    def _lane(self, number: int, record: dict[str, Any]) -> str:
        if record.get("isSidechain") is not True:
            # What the program streams out names the call that started an agent instead.
            return text_of(record.get("parent_tool_use_id"))
        agent = text_of(record.get("agentId"))
        return agent or self.lane_of.get(text_of(record.get("parentUuid"))) or f"side-{number}"

    def _note(self, kind: str, record: dict[str, Any]) -> None:
        self.session_id = text_of(record.get("sessionId") or record.get("session_id")) or self.session_id
        self.cwd = self.cwd or text_of(record.get("cwd"))
        if kind in _TITLES:
            self.titles[kind] = text_of(record.get(_TITLES[kind]) or record.get("title"))
        elif kind == "summary":
            self.titles[f"summary {record.get('leafUuid')}"] = text_of(record.get("summary"))
        elif kind == "last-prompt" and record.get("explicit") is True:
            self.pinned = text_of(record.get("leafUuid")) or None

    def title(self) -> str:
        for kind in _TITLES:
            if self.titles.get(kind):
                return self.titles[kind]
        # Summaries of other sessions are written into the file too; one of this session names a line of it.
        own = [
            title
            for key, title in self.titles.items()
            if key.startswith("summary ") and key.removeprefix("summary ") in self.lane_of
        ]
        return own[-1] if own else ""


@dataclass
class _Plan:
    """One session to be made in the second reading."""

    imported: Imported
    draft: ClaudeDraft
    lines: set[int]
    inherited: set[int] = field(default_factory=set)
    """Of a branch: the lines that it shares with the conversation, which counts them."""
    copied: set[int] = field(default_factory=set)
    """Of a fork: the lines that are its parent's, and stand in this file all the same."""


def read(path: Path, *, all_branches: bool = False) -> Iterator[Imported]:
    """The session of one file, then the sub-sessions in it, then (when asked for) the branches it went back from."""
    survey = _Survey(ImportReport(str(path), KIND))
    for number, record in records(path, survey.report):
        survey.take(number, record)
    plans = list(_plans(path, survey, all_branches))
    wanted: dict[int, list[_Plan]] = {}
    for plan in plans:
        for line in plan.lines:
            wanted.setdefault(line, []).append(plan)
    for number, record in wanted_records(path, set(wanted)):
        for plan in wanted[number]:
            _feed(plan, number, record)
    for plan in plans:
        yield _finished(plan)


def _plans(path: Path, survey: _Survey, all_branches: bool) -> Iterator[_Plan]:
    lanes = {name: nodes for name, nodes in survey.lanes.items() if any(node.speaks for node in nodes)}
    # A file of its own for an agent has nothing but the agent's lines.
    first = "" if "" in lanes else next(iter(lanes), "")
    parent = survey.session_id if first else None
    source_id = first or (path.stem if path.stem.count("-") == 4 else survey.session_id or path.stem)
    survey.report.source_id = source_id
    title = _agent_title(path) if first else survey.title()
    main = Imported(KIND, source_id, survey.report, title, PROVIDER, cwd=survey.cwd, parent=parent)
    plans = list(_lane_plans(main, Tree(lanes.get(first, [])), survey.pinned, all_branches))
    if survey.copied and not first:
        plans[0].copied = set(survey.copied)
        main.parent = survey.copied[max(survey.copied)]
    yield from plans
    for lane, nodes in lanes.items():
        if lane == first:
            continue
        name = f"{source_id}.{lane}" if lane.startswith("side-") else lane
        spoken = sum(node.speaks for node in nodes)
        survey.report.ignore(SUB_SESSION, lines=spoken)
        report = ImportReport(str(path), KIND, name, lines=spoken)
        sub = Imported(KIND, name, report, "", PROVIDER, cwd=survey.cwd, parent=source_id)
        yield from _lane_plans(sub, Tree(nodes), None, all_branches)


def _lane_plans(imported: Imported, tree: Tree, pinned: str | None, all_branches: bool) -> Iterator[_Plan]:
    leaf = tree.find(pinned) or tree.last()
    taken = tree.path(leaf) if leaf else []
    lines = _spoken(taken)
    left_out = len(_spoken(tree.nodes) - lines)
    if left_out:
        imported.report.ignore(OTHER_BRANCH, lines=left_out)
    yield _Plan(imported, ClaudeDraft(imported.report), lines)
    if not all_branches:
        return
    for number, end in enumerate(tree.branches(taken), 1):
        branch_id = f"{imported.source_id}.branch-{number}"
        report = ImportReport(imported.report.path, KIND, branch_id)
        branch = Imported(KIND, branch_id, report, "", PROVIDER, cwd=imported.cwd, parent=imported.source_id)
        yield _Plan(branch, ClaudeDraft(report), _spoken(tree.path(end)), inherited=lines)


def _spoken(nodes: Iterable[Node]) -> set[int]:
    return {node.line for node in nodes if node.speaks}


def _feed(plan: _Plan, number: int, record: dict[str, Any]) -> None:
    if plan.inherited and plan.imported.forked_at is None and number not in plan.inherited:
        plan.draft.close()
        plan.imported.forked_at = len(plan.draft.entries)
        report = plan.draft.report
        report.imported = report.merged = 0
        report.ignored.clear()
    if plan.copied and plan.imported.forked_at is None and number not in plan.copied:
        plan.draft.close()
        plan.imported.forked_at = len(plan.draft.entries) or None
        plan.copied = set()
    plan.draft.take(number, record)


def _finished(plan: _Plan) -> Imported:
    plan.draft.close()
    if plan.copied:
        plan.imported.forked_at = len(plan.draft.entries) or None
    plan.imported.model = plan.draft.model
    if plan.inherited:
        plan.imported.report.lines = plan.imported.report.accounted
    return plan.draft.finish(plan.imported)


def _copied_from(record: dict[str, Any]) -> str:
    origin = record.get("forkedFrom")
    return text_of(origin.get("sessionId")) if isinstance(origin, dict) else ""


def forked_from(path: Path) -> str:
    """The session that a file was forked from, as its first lines say; empty when it was not."""
    head = itertools.islice(records(path, ImportReport(str(path), KIND)), _LINES_LOOKED_AT)
    try:
        return next(filter(None, (_copied_from(record) for _, record in head)), "")
    except ImportRefused:
        return ""


def _agent_title(path: Path) -> str:
    """What an agent was started for, from the small file beside its own."""
    try:
        about = decode(path.with_suffix(".meta.json").read_bytes())
    except OSError:
        return ""
    return text_of(about.get("description"))


def agent_files(path: Path) -> list[Path]:
    """The files of the agents that a session started: beside it in older versions, in its own folder in newer ones."""
    beside = [file for file in sorted(path.parent.glob("agent-*.jsonl")) if file != path and _belongs(file, path.stem)]
    own_folder = path.parent / path.stem / "subagents"
    return [*beside, *sorted(own_folder.rglob("agent-*.jsonl"))]


def _belongs(file: Path, session_id: str) -> bool:
    report = ImportReport(str(file), KIND)
    for _, record in records(file, report):
        return record.get("sessionId") == session_id
    return False
