"""Importer for pi sessions: `~/.pi/agent/sessions/<project>/<time>_<id>.jsonl`, versions 1 to 3."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from carrel.conversation.formats.openai_responses import from_openai_responses
from carrel.conversation.formats.turns import keep_native, native_block
from carrel.conversation.importers.base import (
    DUPLICATE,
    EMPTY_MESSAGE,
    OTHER_BRANCH,
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
from carrel.conversation.messages import (
    MessageBlock,
    assistant_message,
    image_block,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
)

KIND = "pi"
NEWEST_VERSION = 3

_IGNORED = reasons_by_kind(
    {
        "the header or the name, kept as the session's metadata": "session session_info",
        "a setting; each answer names its own model": "model_change thinking_level_change",
        "context or state that is not part of the conversation": "custom ephemeral",
    }
)
_WITH_CONTENT = kind_set("message custom_message branch_summary compaction label")
_NOT_SENT = "a command that the user ran without showing it to the model"
_OLD_LABEL = "a label that was removed, changed later, or is on another branch"
_NO_SUMMARY = "a compaction without a summary; the messages before it stay visible"
_REASONING_FIELDS = ("reasoning_content", "reasoning")


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line is the header of a pi session."""
    return record.get("type") == "session" and isinstance(record.get("id"), str) and "payload" not in record


def read(path: Path, *, all_branches: bool = False) -> Iterator[ImportedSession]:
    """Yield the branch that ends in the file's last line, then (with `all_branches`) the others.

    The file is read twice: first for its structure, then for the content of the lines that are imported."""
    survey = _PiSurvey(ImportReport(str(path), KIND))
    for number, record in read_records(path, survey.report):
        survey.add(number, record)
    header = survey.header
    version = header.get("version", 1)
    if isinstance(version, int) and version > NEWEST_VERSION:
        survey.report.problems.append(
            f"the file has version {version}, and only 1 to {NEWEST_VERSION} are known: check the unknown lines"
        )
    source_id = survey.report.source_id = text_of(header.get("id")) or path.stem
    main = survey.session(survey.report)
    main.title = survey.name
    main.parent = _parent_of(header)
    tree = LineTree(survey.nodes)
    main_path = tree.path(survey.nodes[-1]) if survey.nodes else []
    lines = content_lines(main_path)
    left_out = len(content_lines(tree.nodes) - lines)
    if left_out:
        survey.report.add_ignored(OTHER_BRANCH, lines=left_out)
    yield _build(path, main, lines, survey)
    for number, end in enumerate(tree.branch_ends(main_path) if all_branches else [], 1):
        branch = survey.session(ImportReport(str(path), KIND, f"{source_id}.branch-{number}"))
        branch.parent = source_id
        yield _build(path, branch, content_lines(tree.path(end)), survey, inherited=lines)


def _parent_of(header: dict[str, Any]) -> str | None:
    """Return the id of the session this one was forked from; the header has its file name, `<time>_<id>.jsonl`."""
    file = text_of(header.get("parentSession") or header.get("branchedFrom"))
    return file.replace("\\", "/").split("/")[-1].removesuffix(".jsonl").split("_")[-1] or None


@dataclass
class _PiSurvey:
    """What the first reading finds: the structure of the file, without its text."""

    report: ImportReport
    header: dict[str, Any] = field(default_factory=dict)
    nodes: list[SourceNode] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    indexes: list[str] = field(default_factory=list)
    """The id of each record in order, the header first; version 1 refers to entries by this index."""
    labels: dict[str, int] = field(default_factory=dict)
    """The line that labels an entry last."""
    name: str = ""

    def add(self, number: int, record: dict[str, Any]) -> None:
        kind = text_of(record.get("type"))
        if kind == "session" and not self.header:
            self.header = record
        id_ = text_of(record.get("id")) if kind != "session" else ""
        self.indexes.append(id_ or f"line {number}")
        if kind == "session_info":
            self.name = text_of(record.get("name"))
        if kind == "label":
            self.labels[text_of(record.get("targetId"))] = number
        if kind != "session" and not self._add_node(number, record, id_, kind in _WITH_CONTENT):
            self.report.add_ignored(DUPLICATE)
        elif kind in _IGNORED:
            self.report.add_ignored(kind, _IGNORED[kind])
        elif kind not in _WITH_CONTENT:
            self.report.add_unknown(kind or "no type")

    def _add_node(self, number: int, record: dict[str, Any], id_: str, has_content: bool) -> bool:
        """Add a line to the tree; False when its id is a duplicate."""
        if id_ in self.ids:
            return False
        parent = record.get("parentId")
        if not id_:
            # Version 1 has no ids: each entry follows the preceding one.
            self.nodes.append(SourceNode(number, f"line {number}", None, has_content, is_continuation=True))
        else:
            self.ids.add(id_)
            self.nodes.append(SourceNode(number, id_, parent if isinstance(parent, str) else None, has_content))
        return True

    def session(self, report: ImportReport) -> ImportedSession:
        """Return a session without messages, with the metadata of the header."""
        return ImportedSession(
            KIND,
            report.source_id,
            report,
            provider=text_of(self.header.get("provider")),
            model=text_of(self.header.get("modelId")),
            cwd=text_of(self.header.get("cwd")),
            created_at=iso(self.header.get("timestamp")),
        )


def _build(
    path: Path, session: ImportedSession, lines: set[int], survey: _PiSurvey, inherited: set[int] | None = None
) -> ImportedSession:
    """Read some lines into a session; `inherited` are the lines that a branch shares with the conversation."""
    builder = _PiLogBuilder(session.report, survey.indexes, survey.labels)
    for number, record in read_selected(path, lines):
        if inherited and session.forked_at is None and number not in inherited:
            builder.start_branch(session)
        builder.add_line(number, record)
    if inherited is not None:
        session.report.lines = session.report.accounted
    session.provider = builder.provider or session.provider
    session.model = builder.model or session.model
    return builder.finish(session)


class _PiLogBuilder(LogBuilder):
    """Builds the log from the entries of one branch; consecutive tool results become one message."""

    def __init__(self, report: ImportReport, indexes: list[str], labels: dict[str, int]) -> None:
        super().__init__(KIND, report)
        self.provider = ""
        self.model = ""
        self._call_ids: dict[str, str] = {}
        """The ids of calls in our blocks, by pi's ids."""
        self._indexes = indexes
        self._labels = labels

    def add_line(self, number: int, record: dict[str, Any]) -> None:
        before = self.report.imported + self.report.merged
        match record.get("type"):
            case "message":
                self._add_message(number, record, record.get("message"))
            case "custom_message":
                self._add_user(number, record, record.get("content"), injected=True)
            case "branch_summary":
                self._add_branch_summary(number, record, record.get("summary"))
            case "compaction":
                self._add_compaction(number, record)
            case "label":
                self._add_label(number, record)
        if not record.get("id") and self.report.imported + self.report.merged > before:
            self.seq_of[f"line {number}"] = len(self.entries)

    def _add_message(self, number: int, record: dict[str, Any], message: object) -> None:
        if not isinstance(message, dict):
            self.report.add_unknown("message without content")
            return
        match message.get("role"):
            case "user":
                self._add_user(number, record, message.get("content"))
            case "assistant":
                self._add_answer(number, record, message)
            case "toolResult":
                self._add_result(number, record, message)
            case "custom" | "hookMessage":
                self._add_user(number, record, message.get("content"), injected=True)
            case "bashExecution" if message.get("excludeFromContext"):
                self.report.add_ignored("bashExecution", _NOT_SENT)
            case "bashExecution":
                self._add_user(number, record, _command(message))
            case "branchSummary":
                self._add_branch_summary(number, record, message.get("summary"))
            case "compactionSummary":
                self._add_compaction(number, {**record, **message, "id": record.get("id")})
            case role:
                self.report.add_unknown(f"message/{role}")

    def _add_user(self, number: int, record: dict[str, Any], content: object, *, injected: bool = False) -> None:
        blocks = _blocks(content)
        if not blocks:
            self.report.add_ignored(EMPTY_MESSAGE)
            return
        self.add_message("user", blocks, self.source(number, record.get("id"), injected=injected), _time(record))

    def _add_answer(self, number: int, record: dict[str, Any], answer: dict[str, Any]) -> None:
        api = text_of(answer.get("api"))
        blocks = _blocks(answer.get("content"), api)
        call_ids = [str(part.get("id")) for part in dicts_of(answer.get("content")) if part.get("type") == "toolCall"]
        self._call_ids |= {id_: _split_call_id(id_, api)[0] for id_ in call_ids}
        if not blocks:
            self.report.add_ignored(EMPTY_MESSAGE)
            return
        self.provider = text_of(answer.get("provider")) or self.provider
        self.model = text_of(answer.get("model")) or self.model
        message = assistant_message(
            blocks,
            provider=text_of(answer.get("provider")),
            model=text_of(answer.get("model")),
            provider_message_id=text_of(answer.get("responseId")),
            stop_reason=text_of(answer.get("stopReason")),
            usage=_usage(answer.get("usage")),
            native_meta={"api": answer.get("api"), "error": text_of(answer.get("errorMessage")) or None},
        )
        fields = {"created_at": _time(record), "source": self.source(number, record.get("id"))}
        message.setdefault("meta", {}).update({name: value for name, value in fields.items() if value})
        self.append(message)

    def _add_result(self, number: int, record: dict[str, Any], result: dict[str, Any]) -> None:
        id_ = text_of(result.get("toolCallId"))
        if not id_:
            self.report.add_unknown("toolResult without a call")
            return
        inner = _blocks(result.get("content"))
        texts = [str(block["text"]) for block in inner if block.get("type") == "text"]
        block = tool_result_block(
            tool_use_id=self._call_ids.get(id_, id_),
            model_text="\n".join(texts),
            is_error=result.get("isError") is True,
            content=inner if len(texts) < len(inner) else None,
        )
        self.add_message("user", [block], self.source(number, record.get("id")), _time(record))

    def _add_branch_summary(self, number: int, record: dict[str, Any], summary: object) -> None:
        text = text_of(summary)
        content = f"[Summary of a branch that this conversation came back from]\n\n{text}" if text else ""
        self._add_user(number, record, content, injected=True)

    def _add_compaction(self, number: int, record: dict[str, Any]) -> None:
        summary = text_of(record.get("summary"))
        if not summary:
            self.report.add_ignored("compaction without summary", _NO_SUMMARY)
            return
        self.add_compact(
            summary,
            self.source(number, record.get("id")),
            _time(record),
            provider=self.provider,
            model=self.model,
            keep_from_seq=self._first_kept(record),
            native={"tokensBefore": record["tokensBefore"]} if record.get("tokensBefore") else None,
        )

    def _first_kept(self, record: dict[str, Any]) -> int | None:
        id_, index = record.get("firstKeptEntryId"), record.get("firstKeptEntryIndex")
        if type(index) is int and 0 <= index < len(self._indexes):
            id_ = self._indexes[index]
        seq = self.seq_of.get(id_) if isinstance(id_, str) else None
        if seq is not None or not isinstance(id_, str) or id_ not in self._indexes:
            return seq
        # The named entry may be one that is not imported, such as a change of model: use the next imported one.
        following = self._indexes[self._indexes.index(id_) :]
        return next((self.seq_of[each] for each in following if each in self.seq_of), None)

    def _add_label(self, number: int, record: dict[str, Any]) -> None:
        target, text = text_of(record.get("targetId")), text_of(record.get("label"))
        if not text or self._labels.get(target) != number or target not in self.seq_of:
            self.report.add_ignored("label", _OLD_LABEL)
            return
        self.add_label(text, self.seq_of[target], self.source(number, record.get("id")), _time(record))


def _time(record: dict[str, Any]) -> str | None:
    message = record.get("message")
    return iso(record.get("timestamp")) or (iso(message.get("timestamp")) if isinstance(message, dict) else None)


def _command(message: dict[str, Any]) -> str:
    """Return a command that the user ran in a shell in the form that the model reads."""
    ending = "\n(cancelled)" if message.get("cancelled") else ""
    code = message.get("exitCode")
    if code and not ending:
        ending = f"\n(exit code {code})"
    output = text_of(message.get("output")) or "(no output)"
    return f"$ {text_of(message.get('command'))}\n{output}{ending}"


def _usage(usage: object) -> dict[str, Any] | None:
    """Convert the usage of an answer: pi counts cached input apart from the input, the log includes it."""
    if not isinstance(usage, dict):
        return None
    fresh, output, read, write, total = (
        value if isinstance(value := usage.get(name), int) else 0
        for name in ("input", "output", "cacheRead", "cacheWrite", "totalTokens")
    )
    return {
        "input_tokens": fresh + read + write,
        "output_tokens": output,
        "cache_read_tokens": read,
        "cache_write_tokens": write,
        "total_tokens": total or fresh + read + write + output,
    }


def _blocks(content: object, api: str = "") -> list[MessageBlock]:
    """Convert a message's content; `api` is how pi called the model and decides what a signature means."""
    if isinstance(content, str):
        return [text_block(content)] if content else []
    return [block for part in dicts_of(content) if (block := _block(part, api)) is not None]


def _split_call_id(id_: str, api: str) -> tuple[str, str]:
    """Split an id into that of the call and that of its item, which pi joins for the Responses API."""
    call, _, item = id_.partition("|") if "responses" in api else (id_, "", "")
    return call or id_, item


def _block(part: dict[str, Any], api: str) -> MessageBlock | None:
    match part.get("type"):
        case "text":
            block = text_block(text_of(part.get("text"))) if part.get("text") else None
            return block and _with_thought(block, part.get("textSignature"), api)
        case "thinking":
            return _thinking(part, api)
        case "toolCall" if part.get("id") and part.get("name"):
            arguments = part.get("arguments")
            value = arguments if isinstance(arguments, dict) else {}
            id_, item = _split_call_id(str(part["id"]), api)
            block = tool_use_block(tool_id=id_, name=str(part["name"]), input=value)
            keep_native(block, "openai_responses", {"id": item} if item else {})
            return _with_thought(block, part.get("thoughtSignature"), api)
        case "image" if isinstance(part.get("data"), str):
            return image_block(part["data"], mime_type=text_of(part.get("mimeType")))
    return native_block(KIND, part)


def _with_thought(block: MessageBlock, signature: object, api: str) -> MessageBlock:
    is_signed = isinstance(signature, str) and bool(signature) and api.startswith("google")
    return keep_native(block, "gemini", {"thoughtSignature": signature} if is_signed else {})


def _thinking(part: dict[str, Any], api: str) -> MessageBlock:
    text, signature = text_of(part.get("thinking")), text_of(part.get("thinkingSignature"))
    if not signature:
        return thinking_block(text)
    if part.get("redacted") is True and api.startswith("anthropic"):
        redacted = {"type": "redacted_thinking", "data": signature}
        return keep_native(thinking_block(""), "anthropic", {"anthropic_block": redacted})
    if "responses" in api and (item := _reasoning(signature)) is not None:
        return item
    if api.startswith("google"):
        return _with_thought(thinking_block(text), signature, api)
    if api == "openai-completions" and signature in _REASONING_FIELDS:
        return keep_native(thinking_block(text), "openai_chat", {"reasoning_field": signature})
    return thinking_block(text, meta={"signature": signature})


def _reasoning(signature: str) -> MessageBlock | None:
    """Convert a reasoning item of the Responses API, which pi stores as JSON in the signature."""
    try:
        item = orjson.loads(signature)
        [message] = from_openai_responses([item]) if item.get("type") == "reasoning" else []
    except (AttributeError, TypeError, ValueError):
        return None
    block: MessageBlock = message["content"][0]
    return block
