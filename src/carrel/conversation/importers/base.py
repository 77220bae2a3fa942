"""Shared parts of the importers: the result and its report, reading JSON lines, the tree of lines, building a log."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carrel.conversation.log_entries import (
    BLANK,
    UNREADABLE,
    build_compact_event,
    build_note,
    build_rewind_event,
    decode,
)
from carrel.conversation.messages import ConversationMessage, MessageBlock, blocks_of, build_message, meta_of
from carrel.conversation.replay import visible_after
from carrel.conversation.session_state import title_from
from carrel.errors import ImportRefused

OTHER_BRANCH = "other branch"
SUB_SESSION = "sub-session"
BLANK_LINE = "blank line"
DUPLICATE = "duplicate"
EMPTY_MESSAGE = "empty message"

_COMMON_REASONS = {
    OTHER_BRANCH: "a branch that is not part of the conversation; all_branches=True imports it as its own session",
    SUB_SESSION: "part of a sub-session, which is imported as its own session",
    BLANK_LINE: "empty",
    DUPLICATE: "a line with the same id stands earlier in the file",
    EMPTY_MESSAGE: "a message without content",
}

MAX_LINE = 128 * 1024 * 1024
"""A longer line is reported as unreadable and skipped without being held in memory."""
_CHUNK = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_TIME = "unknown"


@dataclass
class ImportReport:
    """Where every line of a session file went: `lines` is always the sum of the five counts below it."""

    path: str
    kind: str
    source_id: str = ""
    lines: int = 0
    imported: int = 0
    """Lines that became an entry of the log."""
    merged: int = 0
    """Lines whose content was added to the entry of another line."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Lines of a known kind without conversation, by kind; `reasons` says why."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Lines of an unknown kind or shape, by kind."""
    unreadable: list[int] = field(default_factory=list)
    """The numbers of the lines that are not JSON objects."""
    reasons: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What else the user should know, one sentence each."""
    refused: str | None = None
    """Why this file could not be read at all; set only when a whole folder is imported."""
    session_id: str | None = None
    """The id under which the session was stored; set by the store."""
    already_here: str | None = None
    """The session that an earlier import made from the same source; set by the store."""
    appended: int = 0
    """How many entries were added to that session because the source has grown."""
    with_secrets: int = 0
    """Written entries in which `redact_secrets` finds something in the source; a store with `redact=` replaces it."""

    @property
    def left_out(self) -> int:
        """Number of lines in branches that are not part of the conversation."""
        return self.ignored.get(OTHER_BRANCH, 0)

    @property
    def accounted(self) -> int:
        """Sum of the five counts."""
        return (
            self.imported + self.merged + sum(self.ignored.values()) + sum(self.unknown.values()) + len(self.unreadable)
        )

    def add_ignored(self, kind: str, reason: str | None = None, lines: int = 1) -> None:
        self.ignored[kind] = self.ignored.get(kind, 0) + lines
        self.reasons.setdefault(kind, reason or _COMMON_REASONS.get(kind, ""))

    def add_unknown(self, kind: str) -> None:
        self.unknown[kind] = self.unknown.get(kind, 0) + 1


@dataclass
class ImportedSession:
    """One session as it was read. Without messages there is nothing to store; the report says why."""

    kind: str
    source_id: str
    report: ImportReport
    title: str = ""
    provider: str = ""
    model: str = ""
    cwd: str = ""
    created_at: str | None = None
    messages: list[ConversationMessage] = field(default_factory=list)
    """Log entries in order; sequence numbers inside them count from 1, the first of this list."""
    parent: str | None = None
    """The source id of the session that started this one or that it was forked from; yielded before this one."""
    forked_at: int | None = None
    """For a branch: how many entries at the start belong to the parent. None for any other session."""
    named_by_file: bool = False
    """Whether the source id is only the file name, which another session may have too."""
    meta: dict[str, Any] = field(default_factory=dict)
    """More fields for `meta.json`; only from a folder of carrel's own format."""


def check_readable(path: Path) -> None:
    """Raise `ImportRefused` unless `path` is a readable regular file; reading a pipe or a device might never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ImportRefused(f"{path} cannot be read: {reason}") from None
    if not stat.S_ISREG(mode):
        raise ImportRefused(f"{path} is not a regular file; give a session file or a folder of them")
    if not os.access(path, os.R_OK):
        raise ImportRefused(f"{path} cannot be read: permission denied")


def read_lines(path: Path, max_line: int = MAX_LINE) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number from 1; None for one that is too long. Raises `ImportRefused`."""
    check_readable(path)
    try:
        with path.open("rb", buffering=_CHUNK) as file:
            number = 0
            while line := file.readline(max_line + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if len(line) <= max_line or line.endswith(b"\n"):
                    yield number, line
                    continue
                while rest := file.readline(_CHUNK):
                    if rest.endswith(b"\n"):
                        break
                yield number, None
    except OSError as problem:
        raise ImportRefused(f"{path} cannot be read: {problem.strerror or problem}") from None


def read_records(
    path: Path, report: ImportReport, max_line: int = MAX_LINE
) -> Iterator[tuple[int, ConversationMessage]]:
    """Yield each line that is a JSON object; the report counts all lines and lists the others."""
    last_problem = 0
    for number, line in read_lines(path, max_line):
        report.lines = number
        record = None if line is None else decode(line)
        if record is None:
            report.problems.append(f"line {number} is longer than {max_line:,} bytes")
            report.unreadable.append(number)
        elif record is BLANK:
            report.add_ignored(BLANK_LINE)
        elif record.get("role") == UNREADABLE and "reason" in meta_of(record):
            report.unreadable.append(number)
            last_problem = number if line is not None and not line.endswith(b"\n") else 0
        else:
            yield number, record
    if last_problem and last_problem == report.lines:
        report.problems.append(
            f"line {last_problem}, the last, is cut off: it was still being written, or the disk was full"
        )


def read_selected(path: Path, numbers: set[int]) -> Iterator[tuple[int, ConversationMessage]]:
    """Yield the records of the lines with these numbers; other lines are not parsed."""
    left = len(numbers)
    for number, line in read_lines(path):
        if left == 0:
            return
        if number in numbers and line is not None:
            left -= 1
            yield number, decode(line)


def text_of(value: object) -> str:
    """Return a text field's value, and an empty text for a value of any other type."""
    return value if isinstance(value, str) else ""


def dicts_of(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list, and an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def iso(value: object) -> str | None:
    """Convert ISO text or milliseconds since 1970 to the log's time format; None for anything else."""
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            moment = datetime.fromtimestamp(value / 1000, UTC)
        else:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def kind_set(names: str) -> frozenset[str]:
    """Return the kinds of line in a text of names."""
    return frozenset(names.split())


def reasons_by_kind(kinds: dict[str, str]) -> dict[str, str]:
    """Map each kind of line to the reason it is ignored; `kinds` has the names for each reason as one text."""
    return {kind: reason for reason, names in kinds.items() for kind in names.split()}


@dataclass(slots=True)
class SourceNode:
    """A line of the file in the tree of lines, without its text."""

    line: int
    id: str
    parent: str | None
    has_content: bool
    """Whether it may become a log entry; other lines only connect the chain."""
    is_continuation: bool = False
    """Whether it follows the preceding line when it names no parent (a compaction starts a new chain on purpose)."""
    message_id: str = ""
    """Shared by the pieces of one answer."""
    call_ids: tuple[str, ...] = ()
    result_ids: tuple[str, ...] = ()
    kept_ids: tuple[str, ...] = ()
    """For a compaction: the lines that stay visible after it."""


class LineTree:
    """The lines of one conversation with all its branches, in file order."""

    def __init__(self, nodes: Sequence[SourceNode]) -> None:
        self.nodes = nodes
        self._by_id = {node.id: node for node in nodes}
        self._parent: dict[str, str | None] = {}
        previous: str | None = None
        for node in nodes:
            parent = node.parent if node.parent in self._by_id and node.parent != node.id else None
            # A missing parent was on an unreadable line or in another file: use the preceding line instead.
            is_lost = parent is None and (node.parent is not None or node.is_continuation)
            self._parent[node.id] = previous if is_lost else parent
            previous = node.id

    def last(self) -> SourceNode | None:
        """Return the last line with content."""
        return next((node for node in reversed(self.nodes) if node.has_content), None)

    def find(self, id_: object) -> SourceNode | None:
        return self._by_id.get(id_) if isinstance(id_, str) else None

    def path(self, leaf: SourceNode) -> list[SourceNode]:
        """Return the lines from the first one to `leaf`, with lines that belong to them but are off the chain."""
        on_path: dict[str, SourceNode] = {}
        current: str | None = leaf.id
        while current is not None and current not in on_path:
            on_path[current] = self._by_id[current]
            current = self._parent[current]
        self._add_parallel_calls(on_path)
        self._add_compactions(on_path, leaf)
        return sorted(on_path.values(), key=lambda node: node.line)

    def _add_parallel_calls(self, on_path: dict[str, SourceNode]) -> None:
        """Add parallel calls: siblings, each with its result as a child, of which the chain contains only one."""
        message_ids = {node.message_id for node in on_path.values() if node.message_id}
        if not message_ids:
            return
        call_ids: set[str] = set()
        for node in self.nodes:
            if node.message_id in message_ids:
                on_path.setdefault(node.id, node)
                call_ids.update(node.call_ids)
        result_ids = {id_ for node in on_path.values() for id_ in node.result_ids}
        for node in self.nodes:
            is_missing = call_ids.issuperset(node.result_ids) and result_ids.isdisjoint(node.result_ids)
            if node.result_ids and is_missing and node.id not in on_path:
                on_path[node.id] = node
                result_ids.update(node.result_ids)

    def _add_compactions(self, on_path: dict[str, SourceNode], leaf: SourceNode) -> None:
        """Add compactions that kept messages visible: the chain continues from those messages, past the compaction."""
        added: set[str] = set()
        for node in self.nodes:
            if node.line > leaf.line or node.id in on_path:
                continue
            follows = self._parent[node.id] in added and (node.is_continuation or not node.has_content)
            if follows or any(id_ in on_path for id_ in node.kept_ids):
                on_path[node.id] = node
                added.add(node.id)

    def branch_ends(self, excluded: Iterable[SourceNode]) -> list[SourceNode]:
        """Return the last line of each branch that is not among the excluded lines."""
        excluded_ids = {node.id for node in excluded}
        nearest_content: dict[str, str | None] = {}
        followed: set[str] = set()
        ends: list[SourceNode] = []
        for node in self.nodes:
            parent = self._parent[node.id]
            above = nearest_content.get(parent) if parent is not None else None
            nearest_content[node.id] = node.id if node.has_content else above
            if node.has_content and node.id not in excluded_ids:
                ends.append(node)
                if above is not None:
                    followed.add(above)
        return [node for node in ends if node.id not in followed]


def content_lines(nodes: Iterable[SourceNode]) -> set[int]:
    """Return the numbers of the lines with content."""
    return {node.line for node in nodes if node.has_content}


class LogBuilder:
    """Builds log entries from the lines of a file and counts the lines in the report."""

    def __init__(self, kind: str, report: ImportReport) -> None:
        self.kind = kind
        self.report = report
        self.entries: list[ConversationMessage] = []
        self.seq_of: dict[str, int] = {}
        """The entry that each source id was added to."""
        self.inherited = 0
        """How many entries at the start are another session's; nothing is added to them."""

    def source(self, line: int, id_: object = None, *, injected: bool = False) -> dict[str, Any]:
        """Return an entry's `meta.source`; `injected` marks text that the program inserted and no user typed."""
        source: dict[str, Any] = {"kind": self.kind, "line": line}
        if isinstance(id_, str) and id_:
            source["id"] = id_
        if injected:
            source["injected"] = True
        return source

    def add_message(
        self,
        role: str,
        blocks: list[MessageBlock],
        source: dict[str, Any],
        created_at: str | None,
        meta: dict[str, Any] | None = None,
    ) -> ConversationMessage:
        """Append a message; consecutive tool results are merged into one message."""
        last = self.last()
        if last is not None and role == "user" and _only_results(blocks) and _is_results(last):
            self.extend(last, blocks, source)
            return last
        fields = {"created_at": created_at, "source": source, **(meta or {})}
        return self.append(build_message(role, blocks, meta={k: v for k, v in fields.items() if v not in (None, "")}))

    def last(self) -> ConversationMessage | None:
        """Return the last entry unless it is inherited."""
        return self.entries[-1] if len(self.entries) > self.inherited else None

    def append(self, entry: ConversationMessage) -> ConversationMessage:
        self.entries.append(entry)
        self.report.imported += 1
        id_ = (meta_of(entry).get("source") or {}).get("id")
        if id_:
            self.seq_of[id_] = len(self.entries)
        return entry

    def extend(self, message: ConversationMessage, blocks: list[MessageBlock], source: dict[str, Any]) -> None:
        """Add blocks to a message that was appended before."""
        message["content"].extend(blocks)
        self.add_merged(message, source)

    def add_merged(self, message: ConversationMessage, source: dict[str, Any]) -> None:
        """Count a line whose content was added to `message`."""
        self.report.merged += 1
        id_ = source.get("id")
        if id_:
            first = meta_of(message).get("source") or {}
            first.setdefault("also", []).append(id_)
            if first.get("id") in self.seq_of:
                self.seq_of[id_] = self.seq_of[first["id"]]

    def add_compact(
        self,
        summary: str,
        source: dict[str, Any],
        created_at: str | None,
        *,
        provider: str = "",
        model: str = "",
        keep_from_seq: int | None = None,
        native: dict[str, Any] | None = None,
    ) -> ConversationMessage:
        """Append a compact event; the messages that its summary replaces stay in the log."""
        count = len(visible_after(list(enumerate(self.entries, 1))))
        event = build_compact_event(summary, provider=provider, model=model, compacted_count=count)
        more = {"created_at": created_at, "source": source, "keep_from_seq": keep_from_seq, "native": native}
        event["meta"].update({key: value for key, value in more.items() if value})
        return self.append(event)

    def add_rewind(self, to_seq: int, source: dict[str, Any], created_at: str | None) -> None:
        """Append a rewind to what was visible right after entry `to_seq`."""
        numbered = list(enumerate(self.entries, 1))
        # Readers that do not know `to_seq` cut their own list, which must not grow by that.
        cut = min(len(visible_after(numbered, to_seq)), len(visible_after(numbered)))
        self._append_event(build_rewind_event(cut, to_seq=to_seq, created_at=created_at or _NO_TIME), source)

    def add_label(self, text: str, at_seq: int, source: dict[str, Any], created_at: str | None) -> None:
        self._append_event(build_note("label", text=text, at_seq=at_seq, created_at=created_at or _NO_TIME), source)

    def _append_event(self, event: ConversationMessage, source: dict[str, Any]) -> None:
        if event["meta"]["created_at"] == _NO_TIME:
            del event["meta"]["created_at"]
        event["meta"]["source"] = source
        self.append(event)

    def start_branch(self, session: ImportedSession) -> None:
        """Mark the entries so far as shared with the parent; their lines are counted in the parent's report."""
        session.forked_at = len(self.entries)
        self.report.imported = self.report.merged = 0
        self.report.ignored.clear()

    def finish(self, session: ImportedSession) -> ImportedSession:
        """Put the entries into the session and fill in the title and date that they imply."""
        session.messages = self.entries
        own = self.entries[session.forked_at or 0 :]
        session.title = session.title or first_title(own) or first_title(self.entries)
        session.created_at = session.created_at or next(
            (meta_of(entry)["created_at"] for entry in self.entries if meta_of(entry).get("created_at")), None
        )
        return session


def first_title(entries: list[ConversationMessage]) -> str:
    """Return a title made from the first text that a user typed."""
    typed = (entry for entry in entries if not (meta_of(entry).get("source") or {}).get("injected"))
    return next(filter(None, map(title_from, typed)), "")


def _only_results(blocks: list[MessageBlock]) -> bool:
    return bool(blocks) and all(block.get("type") == "tool_result" for block in blocks)


def _is_results(message: ConversationMessage) -> bool:
    return message.get("role") == "user" and _only_results(blocks_of(message))
