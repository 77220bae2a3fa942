"""Reads pi sessions: `~/.pi/agent/sessions/<project>/<time>_<id>.jsonl`, versions 1 to 3."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carrel.conversation.importers.draft import iso, text_of
from carrel.conversation.importers.lines import records, wanted_records
from carrel.conversation.importers.pi_blocks import KIND
from carrel.conversation.importers.pi_draft import PiDraft
from carrel.conversation.importers.report import OTHER_BRANCH, Imported, ImportReport
from carrel.conversation.importers.tree import Node, Tree

NEWEST_VERSION = 3

_SETTING = "a setting; each answer says itself which model gave it"
_NO_CONVERSATION = {
    "session": "the header; what it says is kept as the session's",
    "model_change": _SETTING,
    "thinking_level_change": _SETTING,
    "session_info": "the session's name",
    "custom": "the state of an extension, not seen by the model",
    "ephemeral": "context for one request only",
}
_SPEAKS = frozenset({"message", "custom_message", "branch_summary", "compaction", "label"})
_DUPLICATE = "the same id stands earlier in the file"


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line is the header of a pi session."""
    return record.get("type") == "session" and isinstance(record.get("id"), str) and "payload" not in record


@dataclass
class _Survey:
    """What the first reading finds: the shape of the file, none of its text."""

    report: ImportReport
    header: dict[str, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    indexes: list[str] = field(default_factory=list)
    """The id of each record in order, the header being the first: version 1 refers to entries so."""
    labels: dict[str, int] = field(default_factory=dict)
    """The line that labels an entry last."""
    name: str = ""

    def take(self, number: int, record: dict[str, Any]) -> None:
        kind = text_of(record.get("type"))
        if kind == "session" and not self.header:
            self.header = record
        id_ = text_of(record.get("id")) if kind != "session" else ""
        self.indexes.append(id_ or f"line {number}")
        if kind == "session_info":
            self.name = text_of(record.get("name"))
        if kind == "label":
            self.labels[text_of(record.get("targetId"))] = number
        if kind != "session" and not self._place(number, record, id_, kind in _SPEAKS):
            self.report.ignore("duplicate", _DUPLICATE)
        elif kind in _NO_CONVERSATION:
            self.report.ignore(kind, _NO_CONVERSATION[kind])
        elif kind not in _SPEAKS:
            self.report.not_known(kind or "no type")

    def _place(self, number: int, record: dict[str, Any], id_: str, speaks: bool) -> bool:
        if id_ in self.ids:
            return False
        parent = record.get("parentId")
        if not id_:
            # Version 1 has no ids: each entry follows the one before it.
            self.nodes.append(Node(number, f"line {number}", None, speaks, goes_on=True))
        else:
            self.ids.add(id_)
            self.nodes.append(Node(number, id_, parent if isinstance(parent, str) else None, speaks))
        return True


def read(path: Path, *, all_branches: bool = False) -> Iterator[Imported]:
    """The session of one file: the branch that ends in its last line, then (when asked for) the others."""
    survey = _Survey(ImportReport(str(path), KIND))
    for number, record in records(path, survey.report):
        survey.take(number, record)
    header = survey.header
    version = header.get("version", 1)
    if isinstance(version, int) and version > NEWEST_VERSION:
        survey.report.problems.append(
            f"the file says version {version}, known are 1 to {NEWEST_VERSION}: look at what is counted as unknown"
        )
    source_id = survey.report.source_id = text_of(header.get("id")) or path.stem
    main = _imported(survey, survey.report, source_id)
    main.title = survey.name
    main.parent = _parent_of(header)
    tree = Tree(survey.nodes)
    leaf = survey.nodes[-1] if survey.nodes else None
    taken = tree.path(leaf) if leaf else []
    lines = _spoken(taken)
    left_out = len(_spoken(tree.nodes) - lines)
    if left_out:
        survey.report.ignore(OTHER_BRANCH, lines=left_out)
    yield _drafted(path, main, lines, survey)
    for number, end in enumerate(tree.branches(taken) if all_branches else [], 1):
        branch_id = f"{source_id}.branch-{number}"
        branch = _imported(survey, ImportReport(str(path), KIND, branch_id), branch_id)
        branch.parent = source_id
        yield _drafted(path, branch, _spoken(tree.path(end)), survey, inherited=lines)


def _imported(survey: _Survey, report: ImportReport, source_id: str) -> Imported:
    header = survey.header
    return Imported(
        KIND,
        source_id,
        report,
        provider=text_of(header.get("provider")),
        model=text_of(header.get("modelId")),
        cwd=text_of(header.get("cwd")),
        created_at=iso(header.get("timestamp")),
    )


def _parent_of(header: dict[str, Any]) -> str | None:
    """The id of the session this one was forked from; the header names its file, `<time>_<id>.jsonl`."""
    file = text_of(header.get("parentSession") or header.get("branchedFrom"))
    return file.replace("\\", "/").split("/")[-1].removesuffix(".jsonl").split("_")[-1] or None


def _spoken(nodes: Iterable[Node]) -> set[int]:
    return {node.line for node in nodes if node.speaks}


def _drafted(
    path: Path, imported: Imported, lines: set[int], survey: _Survey, inherited: set[int] | None = None
) -> Imported:
    draft = PiDraft(imported.report, survey.indexes, survey.labels)
    for number, record in wanted_records(path, lines):
        if inherited and imported.forked_at is None and number not in inherited:
            imported.forked_at = len(draft.entries)
            draft.report.imported = draft.report.merged = 0
            draft.report.ignored.clear()
        draft.take(number, record)
    if inherited is not None:
        imported.report.lines = imported.report.accounted
    imported.provider = draft.provider or imported.provider
    imported.model = draft.model or imported.model
    return draft.finish(imported)
