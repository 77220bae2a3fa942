"""Importer for Claude Code transcripts: `~/.claude/projects/<project>/<session>.jsonl` and the files of its agents."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from carrel.conversation.formats.anthropic import NAME as PROVIDER
from carrel.conversation.formats.anthropic import from_anthropic
from carrel.conversation.formats.turns import native_block, rest
from carrel.conversation.importers.base import (
    DUPLICATE,
    EMPTY_MESSAGE,
    OTHER_BRANCH,
    SUB_SESSION,
    ImportedSession,
    ImportReport,
    LineTree,
    LogBuilder,
    SourceNode,
    content_lines,
    dicts_of,
    iso,
    kind_set,
    read_records,
    read_selected,
    reasons_by_kind,
    text_of,
)
from carrel.conversation.log_entries import decode
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    flatten_message_text,
    text_block,
)
from carrel.conversation.usage import token_counts
from carrel.errors import ImportRefused

KIND = "claude-code"

_SETTINGS = "settings or internal state of the program"
_PROGRESS = "progress, figures or a notice of the program"
_FILE_BACKUPS = "backups of files, for undoing edits"
_REPEATED = "repeated from other lines"
_REQUEST = "how a request to the model went; the answer has its own lines"

_IGNORED_TYPES = reasons_by_kind(
    {
        "a title; the newest one names the session": "summary custom-title ai-title agent-name",
        _SETTINGS: """
            tag mode permission-mode agent-setting agent-color isolation-latch atis-latch history-suppression
            attribution-snapshot content-replacement fork-context-ref frame-link bridge-session observer-ref relocated
            ended-by-model speculation-accept worktree-state pr-link rate_limit_event
        """,
        _FILE_BACKUPS: "file-history-snapshot file-history-delta",
        _REPEATED: "cost-state tools-used last-prompt queue-operation stream_event",
        _PROGRESS: "progress tool_progress started result",
    }
)
_IGNORED_SYSTEM = reasons_by_kind(
    {
        _SETTINGS: "init atis_latch bridge_status session_state_changed",
        _FILE_BACKUPS: "file_snapshot",
        _REPEATED: "cost_state tools_used away_summary",
        "old tool results were shortened for the model; here they are complete": "microcompact_boundary",
        _PROGRESS: """
            informational turn_duration api_error api_metrics stop_hook_summary hook_started hook_progress
            hook_response memory_saved permission_retry scheduled_task_fire agents_killed task_notification
            task_started task_progress task_updated task_summary status model_fallback model_refusal_fallback
            model_refusal_no_fallback model_consent_fallback api_retry notification permission_denied plugin_install
            memory_recall post_turn_summary thinking_tokens turn_starting background_tasks
        """,
    }
) | {"": _PROGRESS}
_NO_SUMMARY = "a compaction without a summary; the messages before it stay visible"

_RECOGNIZED_TYPES = kind_set(
    """
    agent-name agent-setting ai-title attachment custom-title file-history-delta file-history-snapshot last-prompt
    permission-mode progress queue-operation summary
    """
)
_INJECTED_STARTS = ("<command-", "<local-command-", "Caveat: ", "<task-notification", "<system-reminder", "<bash-std")
_TITLES = {"custom-title": "customTitle", "agent-name": "agentName", "ai-title": "aiTitle"}
_LINES_EXAMINED = 20
_REQUIRED = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",), "text": ("text",)}


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line was written by Claude Code."""
    kind = text_of(record.get("type"))
    if kind in ("user", "assistant"):
        return isinstance(record.get("message"), dict)
    if kind == "system":
        return "subtype" in record or "uuid" in record
    return kind in _RECOGNIZED_TYPES and "payload" not in record


def read(path: Path, *, all_branches: bool = False) -> Iterator[ImportedSession]:
    """Yield the session of one file, then the sub-sessions in it, then (with `all_branches`) its other branches.

    The file is read twice: first for its structure, then for the content of the lines that are imported."""
    survey = _ClaudeSurvey(ImportReport(str(path), KIND))
    for number, record in read_records(path, survey.report):
        survey.add(number, record)
    plans = list(_plans(path, survey, all_branches))
    plans_by_line: dict[int, list[_SessionPlan]] = {}
    for plan in plans:
        for line in plan.lines:
            plans_by_line.setdefault(line, []).append(plan)
    for number, record in read_selected(path, set(plans_by_line)):
        for plan in plans_by_line[number]:
            plan.add(number, record)
    for plan in plans:
        yield plan.finish()


def agent_files(path: Path) -> list[Path]:
    """Return the files of a session's agents: beside it in older versions, in the session's folder in newer ones."""
    beside = [file for file in sorted(path.parent.glob("agent-*.jsonl")) if file != path and _belongs(file, path.stem)]
    own_folder = path.parent / path.stem / "subagents"
    return [*beside, *sorted(own_folder.rglob("agent-*.jsonl"))]


def _belongs(file: Path, session_id: str) -> bool:
    records = read_records(file, ImportReport(str(file), KIND))
    return next((record.get("sessionId") == session_id for _, record in records), False)


def forked_from(path: Path) -> str:
    """Return the id of the session that a file was forked from, or an empty text."""
    head = itertools.islice(read_records(path, ImportReport(str(path), KIND)), _LINES_EXAMINED)
    try:
        return next(filter(None, (_copied_from(record) for _, record in head)), "")
    except ImportRefused:
        return ""


def _copied_from(record: dict[str, Any]) -> str:
    origin = record.get("forkedFrom")
    return text_of(origin.get("sessionId")) if isinstance(origin, dict) else ""


def _agent_title(path: Path) -> str:
    """Return an agent's task description from the `.meta.json` file beside its transcript."""
    try:
        about = decode(path.with_suffix(".meta.json").read_bytes())
    except OSError:
        return ""
    return text_of(about.get("description"))


class _LineKind(NamedTuple):
    """The kind of a line: it has content, or it is ignored for a reason, or (neither) it is unknown."""

    name: str
    has_content: bool = False
    ignored: str | None = None


def _kind_of(record: dict[str, Any]) -> _LineKind:
    kind = text_of(record.get("type"))
    message = record.get("message")
    if kind in ("user", "assistant"):
        message = message if isinstance(message, dict) else {}
        if not isinstance(message.get("content"), str | list):
            return _LineKind(f"{kind} without content")
        if kind == "assistant" and (record.get("isApiErrorMessage") or message.get("model") == "<synthetic>"):
            return _LineKind("synthetic answer", ignored="an error or a placeholder that the program wrote")
        if record.get("isVisibleInTranscriptOnly") and not record.get("isCompactSummary"):
            return _LineKind("transcript only", ignored="shown in the transcript only, never sent to the model")
        return _LineKind(kind, has_content=True)
    if kind == "system":
        return _system_kind(record)
    if kind == "attachment":
        return _attachment_kind(record)
    if kind.startswith("marble-origami-"):
        return _LineKind(kind, ignored=_SETTINGS)
    if kind.startswith("api-request"):
        return _LineKind(kind, ignored=_REQUEST)
    return _LineKind(kind or "no type", ignored=_IGNORED_TYPES.get(kind))


def _system_kind(record: dict[str, Any]) -> _LineKind:
    subtype = text_of(record.get("subtype"))
    if subtype == "compact_boundary":
        return _LineKind("compact", has_content=True)
    if subtype == "local_command" and isinstance(record.get("content"), str):
        return _LineKind("command", has_content=True)
    name = f"system/{subtype}" if subtype else "system"
    subtype = subtype.replace("-", "_")
    return _LineKind(name, ignored=_REQUEST if subtype.startswith("api_request") else _IGNORED_SYSTEM.get(subtype))


def _attachment_kind(record: dict[str, Any]) -> _LineKind:
    attachment = record.get("attachment")
    if not isinstance(attachment, dict):
        return _LineKind("attachment without content")
    kind = text_of(attachment.get("type"))
    if kind == "queued_command" and isinstance(attachment.get("prompt"), str | list):
        return _LineKind("queued", has_content=True)
    return _LineKind(f"attachment/{kind}", ignored="context that the program added around a turn")


def _is_injected(record: dict[str, Any], text: str) -> bool:
    """Whether a user line was written by the program: a caveat, a command's output, a notice."""
    origin = record.get("origin")
    is_typed = not isinstance(origin, dict) or origin.get("kind") in (None, "human")
    return bool(record.get("isMeta")) or not is_typed or text.startswith(_INJECTED_STARTS)


def _node_of(number: int, record: dict[str, Any], has_content: bool, previous: str | None) -> SourceNode | None:
    """Return the line's place in the tree, if it has one. A line without ids follows the preceding line."""
    id_ = record.get("uuid")
    if not isinstance(id_, str) or not id_:
        return SourceNode(number, f"line {number}", previous, has_content) if has_content else None
    parent = record.get("parentUuid")
    # A first line has the parent null; a line without the field follows the preceding line.
    is_continuation = "parentUuid" not in record
    parent = parent if isinstance(parent, str) else None
    node = SourceNode(number, id_, parent, has_content, is_continuation=is_continuation)
    if record.get("subtype") == "compact_boundary":
        logical = record.get("logicalParentUuid")
        node.parent = node.parent or (logical if isinstance(logical, str) else None)
        node.is_continuation = True
        node.kept_ids = _kept_ids(record)
    elif record.get("isCompactSummary"):
        node.is_continuation = True
    elif has_content:
        _add_tool_ids(node, record.get("message"))
    return node


def _add_tool_ids(node: SourceNode, message: object) -> None:
    if not isinstance(message, dict):
        return
    parts = dicts_of(message.get("content"))
    if message.get("role") == "assistant":
        node.message_id = text_of(message.get("id"))
        node.call_ids = tuple(str(part.get("id")) for part in parts if part.get("type") == "tool_use")
    else:
        node.result_ids = tuple(str(part.get("tool_use_id")) for part in parts if part.get("type") == "tool_result")


def _kept_ids(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the lines that a compaction left visible, the first one first."""
    metadata = record.get("compactMetadata")
    if not isinstance(metadata, dict):
        return ()
    segment, messages = metadata.get("preservedSegment"), metadata.get("preservedMessages")
    if isinstance(messages, dict) and isinstance(messages.get("uuids"), list):
        return tuple(id_ for id_ in messages["uuids"] if isinstance(id_, str))
    if isinstance(segment, dict):
        return tuple(id_ for id_ in (segment.get("headUuid"), segment.get("tailUuid")) if isinstance(id_, str))
    return ()


@dataclass
class _ClaudeSurvey:
    """What the first reading finds: the structure of the file, without its text."""

    report: ImportReport
    threads: dict[str, list[SourceNode]] = field(default_factory=dict)
    """The lines of the main conversation under "", those of each agent under its id."""
    thread_of: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    session_id: str = ""
    cwd: str = ""
    explicit_leaf: str | None = None
    """The line that the program itself names as the end of the conversation."""
    copied: dict[int, str] = field(default_factory=dict)
    """The lines that a fork copied, each with the id of the session it was copied from."""

    def add(self, number: int, record: dict[str, Any]) -> None:
        kind = _kind_of(record)
        self._add_metadata(kind.name, record)
        if origin := _copied_from(record):
            self.copied[number] = origin
        thread = self._thread(number, record)
        nodes = self.threads.get(thread, [])
        node = _node_of(number, record, kind.has_content, nodes[-1].id if nodes else None)
        if node is not None:
            if node.id in self.thread_of:
                self.report.add_ignored(DUPLICATE)
                return
            self.thread_of[node.id] = thread
            self.threads.setdefault(thread, []).append(node)
        if kind.has_content:
            self.explicit_leaf = None if not thread else self.explicit_leaf
        elif kind.ignored is not None:
            self.report.add_ignored(kind.name, kind.ignored)
        else:
            self.report.add_unknown(kind.name)

    def _thread(self, number: int, record: dict[str, Any]) -> str:
        if record.get("isSidechain") is not True:
            # Streamed output names the call that started an agent instead.
            return text_of(record.get("parent_tool_use_id"))
        agent = text_of(record.get("agentId"))
        return agent or self.thread_of.get(text_of(record.get("parentUuid"))) or f"side-{number}"

    def _add_metadata(self, kind: str, record: dict[str, Any]) -> None:
        self.session_id = text_of(record.get("sessionId") or record.get("session_id")) or self.session_id
        self.cwd = self.cwd or text_of(record.get("cwd"))
        if kind in _TITLES:
            self.titles[kind] = text_of(record.get(_TITLES[kind]) or record.get("title"))
        elif kind == "summary":
            self.titles[f"summary {record.get('leafUuid')}"] = text_of(record.get("summary"))
        elif kind == "last-prompt" and record.get("explicit") is True:
            self.explicit_leaf = text_of(record.get("leafUuid")) or None

    def title(self) -> str:
        for kind in _TITLES:
            if self.titles.get(kind):
                return self.titles[kind]
        # The file may contain summaries of other sessions; a summary of this session names one of its lines.
        own = [
            title
            for key, title in self.titles.items()
            if key.startswith("summary ") and key.removeprefix("summary ") in self.thread_of
        ]
        return own[-1] if own else ""


class _ClaudeLogBuilder(LogBuilder):
    """Builds one session from the lines of one chain: merges the pieces of an answer and the lines of a compaction."""

    def __init__(self, report: ImportReport) -> None:
        super().__init__(KIND, report)
        self.model = ""
        self._answers: dict[str, ConversationMessage] = {}
        self._boundary: tuple[int, dict[str, Any]] | None = None

    def add_line(self, number: int, record: dict[str, Any]) -> None:
        if record.get("isCompactSummary"):
            self._add_summary(number, record)
            return
        self.close()
        match _kind_of(record).name:
            case "assistant":
                self._add_answer(number, record)
            case "compact":
                self._boundary = (number, record)
            case "command":
                self._add_user(number, record, record.get("content"), injected=True)
            case "queued":
                attachment = record["attachment"]
                injected = attachment.get("commandMode") == "task-notification" or _is_injected(attachment, "")
                self._add_user(number, record, attachment.get("prompt"), injected=injected)
            case "user":
                self._add_user(number, record, record["message"].get("content"))

    def close(self) -> None:
        """Count a compaction whose summary did not follow."""
        if self._boundary is not None:
            self._boundary = None
            self.report.add_ignored("compaction without summary", _NO_SUMMARY)

    def _add_user(self, number: int, record: dict[str, Any], content: object, *, injected: bool = False) -> None:
        blocks = _blocks(content)
        if not blocks:
            self.report.add_ignored(EMPTY_MESSAGE)
            return
        injected = injected or _is_injected(record, flatten_message_text({"content": blocks}))
        source = self.source(number, record.get("uuid"), injected=injected)
        self.add_message("user", blocks, source, iso(record.get("timestamp")))

    def _add_answer(self, number: int, record: dict[str, Any]) -> None:
        answer = record["message"]
        blocks = _blocks(answer.get("content"))
        source = self.source(number, record.get("uuid"))
        id_ = text_of(answer.get("id"))
        message = self._answers.get(id_) if id_ else None
        if message is not None:
            _add_piece(message, blocks)
            self.add_merged(message, source)
        elif blocks:
            message = self.append(_answer(answer, blocks, source, iso(record.get("timestamp"))))
            self._answers[id_] = message
            self.model = text_of(answer.get("model")) or self.model
        else:
            self.report.add_ignored(EMPTY_MESSAGE)
            return
        # Each piece repeats the usage so far, so the last one has the total.
        if isinstance(answer.get("usage"), dict):
            message["meta"]["usage"] = token_counts(answer["usage"])
            message["meta"]["native"] = {**message["meta"].get("native", {}), "usage": answer["usage"]}
        if answer.get("stop_reason"):
            message["meta"]["stop_reason"] = answer["stop_reason"]

    def _add_summary(self, number: int, record: dict[str, Any]) -> None:
        line, boundary = self._boundary or (number, {})
        self._boundary = None
        content = record["message"].get("content") if isinstance(record.get("message"), dict) else None
        summary = flatten_message_text({"content": _blocks(content)}, include_thinking=False)
        if not summary:
            self.report.add_ignored(EMPTY_MESSAGE, lines=2 if boundary else 1)
            return
        metadata = boundary.get("compactMetadata")
        figures = metadata if isinstance(metadata, dict) else {}
        kept = [self.seq_of[id_] for id_ in _kept_ids(boundary) if id_ in self.seq_of]
        self.add_compact(
            summary,
            self.source(line, boundary.get("uuid") or record.get("uuid")),
            iso(boundary.get("timestamp") or record.get("timestamp")),
            provider=PROVIDER,
            model=self.model,
            keep_from_seq=min(kept, default=None),
            native={name: figures[name] for name in ("trigger", "preTokens", "postTokens") if name in figures},
        )
        if boundary:
            self.add_merged(self.entries[-1], self.source(number, record.get("uuid")))
        self._answers.clear()


def _answer(
    answer: dict[str, Any], blocks: list[MessageBlock], source: dict[str, Any], created_at: str | None
) -> ConversationMessage:
    message = assistant_message(
        blocks,
        provider=PROVIDER,
        model=text_of(answer.get("model")),
        provider_message_id=text_of(answer.get("id")),
        native_meta=rest(answer, "content", "role", "type", "id", "model", "stop_reason", "usage"),
    )
    if created_at:
        message["meta"]["created_at"] = created_at
    message["meta"]["source"] = source
    return message


def _add_piece(message: ConversationMessage, blocks: list[MessageBlock]) -> None:
    """Add one more piece of an answer: usually the next block, sometimes all blocks so far."""
    known = message["content"]
    if blocks[: len(known)] == known:
        message["content"] = blocks
        return
    calls = {block.get("id") for block in known if block.get("type") == "tool_use"}
    known.extend(block for block in blocks if block.get("type") != "tool_use" or block.get("id") not in calls)


def _blocks(content: object) -> list[MessageBlock]:
    """Convert a message's content, a text or a list; a block of unknown form is kept as it is."""
    if isinstance(content, str):
        return [text_block(content)] if content else []
    blocks: list[MessageBlock] = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, str):
            blocks.append(text_block(part))
        elif isinstance(part, dict) and _is_complete(part):
            blocks += from_anthropic({"role": "user", "content": [part]})[0]["content"]
        elif isinstance(part, dict):
            blocks.append(native_block(PROVIDER, part))
    return blocks


def _is_complete(part: dict[str, Any]) -> bool:
    """Whether a block, and all blocks inside it, have the fields that their type requires."""
    required = _REQUIRED.get(str(part.get("type")), ())
    inner = part.get("content") if part.get("type") == "tool_result" else None
    return all(isinstance(part.get(name), str) for name in required) and (
        not isinstance(inner, list) or all(isinstance(each, dict) and _is_complete(each) for each in inner)
    )


@dataclass
class _SessionPlan:
    """One session that the second reading builds."""

    session: ImportedSession
    builder: _ClaudeLogBuilder
    lines: set[int]
    inherited: set[int] = field(default_factory=set)
    """For a branch: the lines that it shares with the conversation, in whose report they are counted."""
    copied: set[int] = field(default_factory=set)
    """For a fork: its parent's lines, which this file contains as well."""

    def add(self, number: int, record: dict[str, Any]) -> None:
        session, builder = self.session, self.builder
        if self.inherited and session.forked_at is None and number not in self.inherited:
            builder.close()
            builder.start_branch(session)
        if self.copied and session.forked_at is None and number not in self.copied:
            builder.close()
            session.forked_at = len(builder.entries) or None
            self.copied = set()
        builder.add_line(number, record)

    def finish(self) -> ImportedSession:
        self.builder.close()
        if self.copied:
            self.session.forked_at = len(self.builder.entries) or None
        self.session.model = self.builder.model
        if self.inherited:
            self.session.report.lines = self.session.report.accounted
        return self.builder.finish(self.session)


def _plans(path: Path, survey: _ClaudeSurvey, all_branches: bool) -> Iterator[_SessionPlan]:
    threads = {name: nodes for name, nodes in survey.threads.items() if content_lines(nodes)}
    # An agent's own file contains only the agent's lines.
    first = "" if "" in threads else next(iter(threads), "")
    parent = survey.session_id if first else None
    source_id = first or (path.stem if path.stem.count("-") == 4 else survey.session_id or path.stem)
    survey.report.source_id = source_id
    title = _agent_title(path) if first else survey.title()
    main = ImportedSession(KIND, source_id, survey.report, title, PROVIDER, cwd=survey.cwd, parent=parent)
    plans = list(_thread_plans(main, LineTree(threads.pop(first, [])), survey.explicit_leaf, all_branches))
    if survey.copied and not first:
        plans[0].copied = set(survey.copied)
        main.parent = survey.copied[max(survey.copied)]
    yield from plans
    for thread, nodes in threads.items():
        name = f"{source_id}.{thread}" if thread.startswith("side-") else thread
        count = len(content_lines(nodes))
        survey.report.add_ignored(SUB_SESSION, lines=count)
        report = ImportReport(str(path), KIND, name, lines=count)
        sub_session = ImportedSession(KIND, name, report, "", PROVIDER, cwd=survey.cwd, parent=source_id)
        yield from _thread_plans(sub_session, LineTree(nodes), None, all_branches)


def _thread_plans(
    session: ImportedSession, tree: LineTree, explicit_leaf: str | None, all_branches: bool
) -> Iterator[_SessionPlan]:
    leaf = tree.find(explicit_leaf) or tree.last()
    path = tree.path(leaf) if leaf else []
    lines = content_lines(path)
    left_out = len(content_lines(tree.nodes) - lines)
    if left_out:
        session.report.add_ignored(OTHER_BRANCH, lines=left_out)
    yield _SessionPlan(session, _ClaudeLogBuilder(session.report), lines)
    for number, end in enumerate(tree.branch_ends(path) if all_branches else [], 1):
        branch_id = f"{session.source_id}.branch-{number}"
        report = ImportReport(session.report.path, KIND, branch_id)
        branch = ImportedSession(KIND, branch_id, report, "", PROVIDER, cwd=session.cwd, parent=session.source_id)
        yield _SessionPlan(branch, _ClaudeLogBuilder(report), content_lines(tree.path(end)), inherited=lines)
