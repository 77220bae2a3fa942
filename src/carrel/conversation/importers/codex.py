"""Importer for Codex rollouts: `~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`, current and flat form."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carrel.conversation.formats.openai_responses import from_openai_responses
from carrel.conversation.formats.turns import native_block, rest
from carrel.conversation.importers.base import (
    EMPTY_MESSAGE,
    ImportedSession,
    ImportReport,
    LogBuilder,
    dicts_of,
    iso,
    kind_set,
    read_records,
    reasons_by_kind,
    text_of,
)
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    build_message,
    flatten_message_text,
    image_block,
    text_block,
    tool_use_block,
)

KIND = "codex"
PROVIDER = "openai"

_REPEATED = "repeated from a response item"
_SETTINGS = "settings or internal state of the program"
_PROGRESS = "progress, figures or a notice of the program"
_AGENTS = "what other agents did; each has its own file"
_ENCRYPTED = "encrypted; only the provider can read it"

_IGNORED_EVENTS = reasons_by_kind(
    {
        _REPEATED: """
            user_message injected_message agent_message agent_reasoning agent_reasoning_raw_content
            agent_reasoning_section_break item_completed item_started raw_response_item raw_response_completed
            agent_message_content_delta plan_delta reasoning_content_delta reasoning_raw_content_delta
            exec_command_begin exec_command_end exec_command_output_delta patch_apply_begin patch_apply_updated
            patch_apply_end terminal_interaction mcp_tool_call_begin mcp_tool_call_end web_search_begin web_search_end
            view_image_tool_call image_generation_begin image_generation_end dynamic_tool_call_request
            dynamic_tool_call_response exec_approval_request apply_patch_approval_request request_permissions
            request_user_input elicitation_request elicitation_abandoned turn_diff plan_update context_compacted
        """,
        _SETTINGS: "thread_name_updated thread_settings_applied session_configured",
        _PROGRESS: """
            task_started turn_started task_complete turn_complete turn_aborted entered_review_mode exited_review_mode
            turn_moderation_metadata thread_goal_updated thread_queue_changed hook_started hook_completed undo_started
            undo_completed error warning stream_error background_event deprecation_notice guardian_assessment
            model_reroute model_verification auth_recovery_started auth_recovery_completed environment_connected
            environment_disconnected mcp_startup_update mcp_startup_complete shutdown_complete
            realtime_conversation_started realtime_conversation_realtime realtime_conversation_closed
            realtime_conversation_sdp realtime_conversation_list_voices_response
        """,
        _AGENTS: """
            sub_agent_activity collab_agent_spawn_begin collab_agent_spawn_end collab_agent_interaction_begin
            collab_agent_interaction_end collab_waiting_begin collab_waiting_end collab_close_begin collab_close_end
            collab_resume_begin collab_resume_end
        """,
    }
)
_IGNORED_ITEMS = reasons_by_kind(
    {
        "a snapshot of the files, for undoing edits": "ghost_snapshot",
        _ENCRYPTED: "compaction compaction_summary context_compaction",
        _SETTINGS: "compaction_trigger configuration_update additional_tools",
    }
)
_IGNORED_LINES = reasons_by_kind(
    {
        "the header, whose fields describe the session": "session_meta",
        _SETTINGS: "turn_context world_state retained_context dynamic_tools_updated state",
        _PROGRESS: "token_usage_record security_risk_score realtime_item",
        _AGENTS: "inter_agent_communication_metadata",
    }
)
_EMPTY = "a message without text"
_INSTRUCTIONS = "instructions that the program gave the model"
_REPEATED_USAGE = "usage that was counted before, or that belongs to no answer"
_UNKNOWN_TURN = "rolls back a turn that is not in the file"

_ENVELOPES = kind_set("response_item event_msg compacted inter_agent_communication") | (
    _IGNORED_LINES.keys() - {"state"}
)
"""The types of line that have a `payload`; `state` exists in the flat form only."""
_EVENT_ROLES = {"user_message": "user", "agent_message": "assistant"}

_INJECTED_STARTS = (
    "<environment_context",
    "<user_instructions",
    "<permissions",
    "<turn_aborted",
    "<skill",
    "<subagent_notification",
    "<INSTRUCTIONS",
    "# AGENTS.md instructions",
)
_SUMMARY_IS_ENCRYPTED = "(The provider keeps this summary encrypted. These messages stayed in view beside it.)"
_KEPT_MESSAGES = "(These messages of the user stayed in view beside the summary.)"
_ID_IN_NAME = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
_FOLDER_IN_TEXT = re.compile(r"<cwd>([^<]{1,4096})</cwd>")


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line was written by Codex, in the current form with a payload or in the older flat form."""
    if isinstance(record.get("payload"), dict):
        return text_of(record.get("type")) in _ENVELOPES
    if "type" not in record:
        header = (
            isinstance(record.get("id"), str)
            and "timestamp" in record
            and ("instructions" in record or "git" in record)
        )
        return header or record.get("record_type") == "state"
    return record.get("type") == "message" and "role" in record and "message" not in record


def read(path: Path, *, all_branches: bool = False) -> Iterator[ImportedSession]:
    """Yield one session; turns that were rolled back are in its log, so `all_branches` makes no difference."""
    report = ImportReport(str(path), KIND)
    builder = _CodexLogBuilder(report)
    header: dict[str, Any] = {}
    for number, record in read_records(path, report):
        kind, payload, time = _unwrap(record, bool(header))
        if kind == "session_meta" and not header:
            header = payload
            builder.provider = text_of(payload.get("model_provider")) or PROVIDER
            _add_base(path, header, builder)
        builder.add_line(number, kind, payload, iso(time))
    builder.close()
    thread, rollout = text_of(header.get("id") or header.get("session_id")), _id_in_name(path)
    # A thread that was rolled back continues in another file, which refers to the first one.
    is_continued = rollout and thread != rollout and isinstance(header.get("history_base"), dict)
    report.source_id = rollout if is_continued else thread or rollout or path.stem
    session = ImportedSession(
        KIND,
        report.source_id,
        report,
        title=builder.name,
        provider=builder.provider,
        model=builder.model,
        cwd=text_of(header.get("cwd")) or _folder_in_text(builder.entries),
        created_at=iso(header.get("timestamp")),
        parent=thread if is_continued else _parent_of(header),
        forked_at=builder.inherited or None,
    )
    yield builder.finish(session)


def _unwrap(record: dict[str, Any], has_header: bool) -> tuple[str, dict[str, Any], object]:
    """Return a line's type, payload and time; in the flat form the line itself is the payload."""
    kind, payload = text_of(record.get("type")), record.get("payload")
    if isinstance(payload, dict):
        return kind, payload, record.get("timestamp")
    if record.get("record_type") == "state":
        return "state", record, None
    if not kind and not has_header and isinstance(record.get("id"), str):
        return "session_meta", record, record.get("timestamp")
    if not kind or kind in _ENVELOPES:
        return f"{kind} without payload" if kind else "", record, None
    return "response_item", record, record.get("timestamp")


def _id_in_name(path: Path) -> str:
    found = _ID_IN_NAME.search(path.stem)
    return found[0] if found else ""


def _parent_of(header: dict[str, Any]) -> str | None:
    """Return the id of the session that started this one or that it was forked from."""
    source = header.get("source")
    spawn = source.get("subagent") if isinstance(source, dict) else None
    spawn = spawn.get("thread_spawn") if isinstance(spawn, dict) else None
    started_by = spawn.get("parent_thread_id") if isinstance(spawn, dict) else None
    return text_of(started_by or header.get("parent_thread_id") or header.get("forked_from_id")) or None


def _folder_in_text(entries: list[ConversationMessage]) -> str:
    """Return the working folder from the text of the first messages, the only place where the flat form has it."""
    for entry in entries[:10]:
        found = _FOLDER_IN_TEXT.search(flatten_message_text(entry))
        if found:
            return found[1]
    return ""


def _add_base(path: Path, header: dict[str, Any], builder: "_CodexLogBuilder") -> None:
    """Add the lines of the rollouts that a fork continues; its header names the rollout and the number of lines."""
    report = builder.report
    bases: list[tuple[Path, int]] = []
    while isinstance(base := header.get("history_base"), dict):
        id_, end = text_of(base.get("thread_id")), base.get("end_ordinal_exclusive")
        file = _rollout(path, id_)
        if file is None or file == path or file in (known for known, _ in bases) or type(end) is not int:
            report.problems.append(
                f"the rollout {id_} that this one continues was not found; the messages before the fork are missing"
            )
            break
        bases.append((file, end))
        header = next((record["payload"] for _, record in _wrapped(file) if record.get("type") == "session_meta"), {})
    for file, end in reversed(bases):
        builder.report = ImportReport(str(file), KIND)
        for number, record in _wrapped(file):
            ordinal = record.get("ordinal")
            if (ordinal if type(ordinal) is int else number - 1) >= end:
                break
            kind, payload, time = _unwrap(record, True)
            builder.add_line(number, kind, payload, iso(time))
    if bases:
        builder.end_inherited(report)


def _wrapped(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of another rollout that have a payload."""
    for number, record in read_records(file, ImportReport(str(file), KIND)):
        if isinstance(record.get("payload"), dict):
            yield number, record


def _rollout(path: Path, id_: str) -> Path | None:
    """Return the file of a rollout, beside `path` or anywhere in the same folder of sessions."""
    if not _ID_IN_NAME.fullmatch(id_):
        return None
    roots = [folder.parent for folder in path.parents if folder.name in ("sessions", "archived_sessions")]
    folders = [path.parent, *(root / name for root in roots[:1] for name in ("sessions", "archived_sessions"))]
    return next((file for folder in folders for file in sorted(folder.rglob(f"rollout-*-{id_}.jsonl"))), None)


class _CodexLogBuilder(LogBuilder):
    """Builds the log from every line: the items of one answer become one message, a rollback becomes a rewind."""

    def __init__(self, report: ImportReport) -> None:
        super().__init__(KIND, report)
        self.provider = PROVIDER
        self.model = ""
        self.name = ""
        self._turns: list[int] = []
        """How many entries were there before each visible turn of the user."""
        self._without_usage: ConversationMessage | None = None
        self._counted_total: object = None
        self._event_messages: list[tuple[ConversationMessage, str]] | None = []
        """Messages that only events contain so far, with their event types; None after a response item with text."""

    def add_line(self, number: int, kind: str, payload: dict[str, Any], created_at: str | None) -> None:
        match kind:
            case "response_item":
                self._add_item(number, payload, created_at)
            case "event_msg":
                self._add_event(number, payload, created_at)
            case "compacted":
                summary = _summary(text_of(payload.get("message")), payload.get("replacement_history"))
                self.add_compact(summary, self.source(number), created_at, provider=self.provider, model=self.model)
                self._without_usage = None
            case "inter_agent_communication":
                self._add_agent_message(number, payload, created_at)
            case _ if kind in _IGNORED_LINES:
                if kind == "turn_context":
                    self.model = text_of(payload.get("model")) or self.model
                self.report.add_ignored(kind, _IGNORED_LINES[kind])
            case _:
                self.report.add_unknown(kind or "no type")

    def end_inherited(self, report: ImportReport) -> None:
        """Mark the entries so far as another rollout's; the lines that follow are counted in `report`."""
        self.close()
        self.inherited, self.report = len(self.entries), report
        self._without_usage, self._event_messages = None, []

    def close(self) -> None:
        """Add the messages of the events when the response items had none."""
        from_events, self._event_messages = self._event_messages or [], None
        has_only_messages = all(entry["role"] in ("user", "assistant") for entry in self.entries[self.inherited :])
        for message, event in from_events:
            if has_only_messages and message["content"]:
                self.append(message)
            else:
                self.report.add_ignored(f"event_msg/{event}", _REPEATED)
        if from_events and has_only_messages:
            own = self.entries[self.inherited :]
            self.entries[self.inherited :] = sorted(own, key=lambda entry: int(entry["meta"]["source"]["line"]))

    def _drop_event_messages(self) -> None:
        for _, event in self._event_messages or ():
            self.report.add_ignored(f"event_msg/{event}", _REPEATED)
        self._event_messages = None

    def _add_item(self, number: int, item: dict[str, Any], created_at: str | None) -> None:
        kind = text_of(item.get("type"))
        source = self.source(number, item.get("id"))
        item = rest(item, "internal_chat_message_metadata_passthrough")
        match kind:
            case "message":
                self._add_message_item(number, item, created_at)
            case "reasoning":
                self._add_answer(_converted(item), source, created_at)
            case "function_call" | "custom_tool_call" if _has(item, "call_id", "name"):
                self._add_answer(_converted(item), source, created_at)
            case "local_shell_call":
                id_ = text_of(item.get("call_id")) or text_of(item.get("id")) or f"line-{number}"
                action = item.get("action")
                call = tool_use_block(tool_id=id_, name="local_shell", input=action if isinstance(action, dict) else {})
                self._add_answer([call], source, created_at)
            case "image_generation_call" if _has(item, "result"):
                self._add_answer([image_block(item["result"], mime_type="image/png")], source, created_at)
            case "web_search_call" | "tool_search_call" | "image_generation_call":
                self._add_answer([native_block("openai_responses", item)], source, created_at)
            case "function_call_output" | "custom_tool_call_output" if _has(item, "call_id"):
                self.add_message("user", _result(item), source, created_at)
            case "agent_message":
                self._add_agent_message(number, item, created_at)
            case "tool_search_output":
                self.add_message("user", [native_block("openai_responses", item)], source, created_at)
            case _ if kind in _IGNORED_ITEMS:
                self.report.add_ignored(f"response_item/{kind}", _IGNORED_ITEMS[kind])
            case _:
                self.report.add_unknown(f"response_item/{kind or 'no type'}")

    def _add_message_item(self, number: int, item: dict[str, Any], created_at: str | None) -> None:
        role = text_of(item.get("role"))
        if role in ("developer", "system"):
            self.report.add_ignored(f"message/{role}", _INSTRUCTIONS)
            return
        if role not in ("user", "assistant"):
            self.report.add_unknown(f"message/{role or 'no role'}")
            return
        blocks = _blocks(item.get("content"))
        injected = flatten_message_text({"content": blocks}).startswith(_INJECTED_STARTS)
        if not injected:
            self._drop_event_messages()
        if role == "assistant":
            self._add_answer(blocks, self.source(number, item.get("id")), created_at)
        elif blocks:
            source = self.source(number, item.get("id"), injected=injected)
            if not injected:
                self._turns.append(len(self.entries))
            self.append(build_message("user", blocks, meta=_meta(created_at, source)))
        else:
            self.report.add_ignored(EMPTY_MESSAGE)

    def _add_agent_message(self, number: int, message: dict[str, Any], created_at: str | None) -> None:
        """Add what one agent wrote to another; the model reads it like a user message."""
        text = flatten_message_text({"content": _blocks(message.get("content"))})
        if not text:
            self.report.add_ignored("message between agents", _ENCRYPTED if message.get("content") else _EMPTY)
            return
        author = text_of(message.get("author")) or "an agent"
        recipient = text_of(message.get("recipient")) or "an agent"
        source = self.source(number, message.get("id"), injected=True)
        self.add_message("user", [text_block(f"[from {author} to {recipient}]\n\n{text}")], source, created_at)

    def _add_answer(self, blocks: list[MessageBlock], source: dict[str, Any], created_at: str | None) -> None:
        """Add output of the model; consecutive outputs become one message."""
        last = self.last()
        if not blocks:
            self.report.add_ignored(EMPTY_MESSAGE)
        elif last is not None and last["role"] == "assistant" and not last["meta"].get("usage"):
            self.extend(last, blocks, source)
        else:
            self._without_usage = self.append(self._assistant_message(blocks, source, created_at))

    def _assistant_message(
        self, blocks: list[MessageBlock], source: dict[str, Any], created_at: str | None
    ) -> ConversationMessage:
        message = assistant_message(blocks, provider=self.provider, model=self.model)
        message.setdefault("meta", {}).update(_meta(created_at, source))
        return message

    def _add_event(self, number: int, event: dict[str, Any], created_at: str | None) -> None:
        kind = text_of(event.get("type"))
        if kind == "token_count":
            self._add_usage(event.get("info"))
        elif kind == "thread_rolled_back":
            self._add_rollback(number, event.get("num_turns"), created_at)
        elif kind in _EVENT_ROLES and self._event_messages is not None:
            self._event_messages.append((self._event_message(number, event, kind, created_at), kind))
        elif kind in _IGNORED_EVENTS:
            if kind == "thread_name_updated":
                self.name = text_of(event.get("thread_name"))
            self.report.add_ignored(f"event_msg/{kind}", _IGNORED_EVENTS[kind])
        else:
            self.report.add_unknown(f"event_msg/{kind or 'no type'}")

    def _event_message(
        self, number: int, event: dict[str, Any], kind: str, created_at: str | None
    ) -> ConversationMessage:
        text = text_of(event.get("message"))
        source = {**self.source(number, injected=text.startswith(_INJECTED_STARTS)), "event": True}
        blocks = [text_block(text)] if text else []
        if kind == "user_message":
            return build_message("user", blocks, meta=_meta(created_at, source))
        return self._assistant_message(blocks, source, created_at)

    def _add_usage(self, info: object) -> None:
        """Add the usage of an answer to its message; it follows the answer and may be repeated."""
        total = info.get("total_token_usage") if isinstance(info, dict) else None
        last = info.get("last_token_usage") if isinstance(info, dict) else None
        if not isinstance(last, dict) or total == self._counted_total or self._without_usage is None:
            self._counted_total = total or self._counted_total
            self.report.add_ignored("event_msg/token_count", _REPEATED_USAGE)
            return
        self._counted_total = total
        self._without_usage["meta"]["usage"] = _usage(last)
        self._without_usage = None
        self.report.merged += 1

    def _add_rollback(self, number: int, turns: object, created_at: str | None) -> None:
        if type(turns) is not int or turns < 1 or not self._turns:
            self.report.add_ignored("event_msg/thread_rolled_back", _UNKNOWN_TURN)
            return
        first = max(0, len(self._turns) - turns)
        to_seq = self._turns[first]
        del self._turns[first:]
        self.add_rewind(to_seq, self.source(number), created_at)


def _meta(created_at: str | None, source: dict[str, Any]) -> dict[str, Any]:
    return {"created_at": created_at, "source": source} if created_at else {"source": source}


def _has(item: dict[str, Any], *names: str) -> bool:
    return all(isinstance(item.get(name), str) and item[name] for name in names)


def _converted(item: dict[str, Any]) -> list[MessageBlock]:
    parts = [*dicts_of(item.get("summary")), *dicts_of(item.get("content"))]
    item = {**item, **{name: dicts_of(item.get(name)) for name in ("summary", "content") if name in item}}
    if item["type"] == "reasoning" and not parts and not item.get("encrypted_content"):
        return []
    blocks: list[MessageBlock] = from_openai_responses([item])[0]["content"]
    return blocks


def _blocks(content: object) -> list[MessageBlock]:
    """Convert a message's content; output texts have no ids here, so they are plain text blocks."""
    if isinstance(content, str):
        return [text_block(content)] if content else []
    blocks: list[MessageBlock] = []
    for part in dicts_of(content):
        if part.get("type") in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            blocks += [text_block(part["text"])] if part["text"] else []
        else:
            blocks += from_openai_responses([{"type": "message", "role": "user", "content": [part]}])[0]["content"]
    return blocks


def _result(item: dict[str, Any]) -> list[MessageBlock]:
    """Convert a tool's output: a text, a list of parts, or an object that also says whether the call failed."""
    output, failed = item.get("output"), False
    if isinstance(output, dict):
        failed = output.get("success") is False
        output = output.get("content_items") or output.get("content")
    if isinstance(output, list):
        output = dicts_of(output)
    blocks: list[MessageBlock] = from_openai_responses([{**item, "output": output}])[0]["content"]
    if failed:
        blocks[0]["is_error"] = True
    return blocks


def _summary(message: str, history: object) -> str:
    """Return the summary, if it is readable, and the user messages that stayed visible beside it."""
    kept = []
    for item in dicts_of(history):
        text = flatten_message_text({"content": _blocks(item.get("content"))})
        repeats = bool(message) and message.strip() in text
        if item.get("role") == "user" and text and not text.startswith(_INJECTED_STARTS) and not repeats:
            kept.append(text)
    if message and kept:
        kept.insert(0, _KEPT_MESSAGES)
    return "\n\n".join([message or _SUMMARY_IS_ENCRYPTED, *kept])


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    def count(name: str) -> int:
        value = usage.get(name)
        return value if isinstance(value, int) else 0

    read, output = count("input_tokens"), count("output_tokens")
    return {
        "input_tokens": read,
        "output_tokens": output,
        "cache_read_tokens": count("cached_input_tokens"),
        "cache_write_tokens": count("cache_write_input_tokens"),
        "reasoning_tokens": count("reasoning_output_tokens"),
        "total_tokens": count("total_tokens") or read + output,
    }
