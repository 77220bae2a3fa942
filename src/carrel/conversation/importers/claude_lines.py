"""Pure: what a line of a Claude Code transcript is, and why most kinds carry no conversation."""

from typing import Any, NamedTuple

from carrel.conversation.importers.draft import text_of
from carrel.conversation.importers.tree import Node

_TITLE = "a title; the newest is the session's"
_SETTING = "a setting of the program"
_STATE = "a state the program keeps for itself"
_REQUEST = "how a request to the model went; the answer has lines of its own"

_NO_CONVERSATION = {
    "summary": _TITLE,
    "custom-title": _TITLE,
    "ai-title": _TITLE,
    "agent-name": _TITLE,
    "tag": _SETTING,
    "mode": _SETTING,
    "permission-mode": _SETTING,
    "agent-setting": _SETTING,
    "agent-color": _SETTING,
    "isolation-latch": _SETTING,
    "atis-latch": _SETTING,
    "history-suppression": _SETTING,
    "file-history-snapshot": "backups of files, for undoing edits",
    "file-history-delta": "backups of files, for undoing edits",
    "attribution-snapshot": _STATE,
    "content-replacement": _STATE,
    "fork-context-ref": _STATE,
    "frame-link": _STATE,
    "bridge-session": _STATE,
    "observer-ref": _STATE,
    "relocated": _STATE,
    "ended-by-model": _STATE,
    "speculation-accept": _STATE,
    "worktree-state": _STATE,
    "cost-state": "what the session has cost so far; each answer says itself what it used",
    "tools-used": "which tools were used; each call has a line of its own",
    "pr-link": "a link to a pull request",
    "last-prompt": "repeats the last prompt; where it names the end of the conversation, that is followed",
    "queue-operation": "the queue of prompts; one that was sent has a line of its own",
    "progress": "shown while a tool or hook was running",
    "started": "the ledger of a workflow",
    "result": "the figures of a finished run",
    "stream_event": "a piece of an answer that has a line of its own",
    "rate_limit_event": _STATE,
    "tool_progress": "shown while a tool or hook was running",
}
_NO_CONVERSATION_SYSTEM = {
    "": "a notice of the program",
    "init": "the tools and settings at the start",
    "informational": "a notice of the program",
    "turn_duration": "how long a turn took",
    "api_error": "a failed request that was tried again",
    "api_metrics": "how long a request took",
    "stop_hook_summary": "what hooks did",
    "hook_started": "what hooks did",
    "hook_progress": "what hooks did",
    "hook_response": "what hooks did",
    "away_summary": "a recap shown to the user on return",
    "microcompact_boundary": "old tool results were shortened for the model; they are whole here",
    "memory_saved": "a notice of the program",
    "bridge_status": "a notice of the program",
    "permission_retry": "a notice of the program",
    "scheduled_task_fire": "a notice of the program",
    "agents_killed": "a notice of the program",
    "cost_state": "what the session has cost so far; each answer says itself what it used",
    "tools_used": "which tools were used; each call has a line of its own",
    "atis_latch": _SETTING,
    "file_snapshot": "backups of files, for undoing edits",
    "task_notification": "a notice of the program",
    "task_started": "a notice of the program",
    "task_progress": "a notice of the program",
    "status": "a notice of the program",
    **dict.fromkeys(
        (
            "model_fallback",
            "model_refusal_fallback",
            "model_refusal_no_fallback",
            "model_consent_fallback",
            "api_retry",
        ),
        "tells that another model answered, or that a request was tried again; each answer says itself which gave it",
    ),
    **dict.fromkeys(
        ("notification", "permission_denied", "plugin_install", "memory_recall", "post_turn_summary", "task_summary"),
        "a notice of the program",
    ),
    **dict.fromkeys(
        ("task_updated", "thinking_tokens", "turn_starting", "session_state_changed", "background_tasks"),
        "shown while something was under way",
    ),
}
ADDED_CONTEXT = "context that the program put around a turn"
SYNTHETIC = "written by the program in the model's place: an error, or a stand-in for no answer"
HIDDEN = "shown in the transcript only, never sent"
DUPLICATE = "the same line stands earlier in the file"

_INJECTED_STARTS = ("<command-", "<local-command-", "Caveat: ", "<task-notification", "<system-reminder", "<bash-std")


class Line(NamedTuple):
    """How a line counts: it speaks, it is ignored for a reason, or (neither) it is of a kind we do not know."""

    kind: str
    speaks: bool = False
    ignored: str | None = None


def line_of(record: dict[str, Any]) -> Line:
    kind = text_of(record.get("type"))
    message = record.get("message")
    if kind in ("user", "assistant"):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str | list):
            return Line(f"{kind} without content")
        if kind == "assistant" and (record.get("isApiErrorMessage") or message.get("model") == "<synthetic>"):  # type: ignore[union-attr]
            return Line("synthetic answer", ignored=SYNTHETIC)
        if record.get("isVisibleInTranscriptOnly") and not record.get("isCompactSummary"):
            return Line("transcript only", ignored=HIDDEN)
        return Line(kind, speaks=True)
    if kind == "system":
        return _system_line(record)
    if kind == "attachment":
        return _attachment_line(record)
    if kind in _NO_CONVERSATION:
        return Line(kind, ignored=_NO_CONVERSATION[kind])
    if kind.startswith("marble-origami-"):
        return Line(kind, ignored=_STATE)
    if kind.startswith("api-request"):
        return Line(kind, ignored=_REQUEST)
    return Line(kind or "no type")


def _system_line(record: dict[str, Any]) -> Line:
    subtype = text_of(record.get("subtype"))
    if subtype == "compact_boundary":
        return Line("compact", speaks=True)
    if subtype == "local_command" and isinstance(record.get("content"), str):
        return Line("command", speaks=True)
    kind = f"system/{subtype}" if subtype else "system"
    plain = subtype.replace("-", "_")
    if plain.startswith("api_request"):
        return Line(kind, ignored=_REQUEST)
    return Line(kind, ignored=_NO_CONVERSATION_SYSTEM.get(plain))


def _attachment_line(record: dict[str, Any]) -> Line:
    attachment = record.get("attachment")
    if not isinstance(attachment, dict):
        return Line("attachment without content")
    kind = text_of(attachment.get("type"))
    if kind == "queued_command" and isinstance(attachment.get("prompt"), str | list):
        return Line("queued", speaks=True)
    return Line(f"attachment/{kind}", ignored=ADDED_CONTEXT)


def node_of(number: int, record: dict[str, Any], speaks: bool, before: str | None) -> Node | None:
    """The line's place in the tree; None for one that has none. A line without ids follows the one before it."""
    id_ = record.get("uuid")
    if not isinstance(id_, str) or not id_:
        return Node(number, f"line {number}", before, speaks) if speaks else None
    parent = record.get("parentUuid")
    # A first line says that its parent is null; one that does not speak of a parent follows the line before it.
    goes_on = "parentUuid" not in record
    node = Node(number, id_, parent if isinstance(parent, str) else None, speaks, goes_on=goes_on)
    if record.get("subtype") == "compact_boundary":
        logical = record.get("logicalParentUuid")
        node.parent = node.parent or (logical if isinstance(logical, str) else None)
        node.goes_on = True
        node.keeps = kept_in_view(record)
    elif record.get("isCompactSummary"):
        node.goes_on = True
    elif speaks:
        _note_tools(node, record.get("message"))
    return node


def _note_tools(node: Node, message: object) -> None:
    if not isinstance(message, dict):
        return
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if message.get("role") == "assistant":
        node.message_id = text_of(message.get("id"))
        node.calls = tuple(str(part.get("id")) for part in parts if part.get("type") == "tool_use")
    else:
        node.answers = tuple(str(part.get("tool_use_id")) for part in parts if part.get("type") == "tool_result")


def kept_in_view(record: dict[str, Any]) -> tuple[str, ...]:
    """The lines that a compaction left as they were, the first one first."""
    metadata = record.get("compactMetadata")
    if not isinstance(metadata, dict):
        return ()
    segment, messages = metadata.get("preservedSegment"), metadata.get("preservedMessages")
    if isinstance(messages, dict) and isinstance(messages.get("uuids"), list):
        return tuple(id_ for id_ in messages["uuids"] if isinstance(id_, str))
    if isinstance(segment, dict):
        return tuple(id_ for id_ in (segment.get("headUuid"), segment.get("tailUuid")) if isinstance(id_, str))
    return ()


def is_injected(record: dict[str, Any], text: str) -> bool:
    """Whether a user's line was written by the program: a caveat, a command's output, a notice."""
    origin = record.get("origin")
    typed = not isinstance(origin, dict) or origin.get("kind") in (None, "human")
    return bool(record.get("isMeta")) or not typed or text.startswith(_INJECTED_STARTS)
