"""Pure: the lines of a Codex rollout, in order, as entries of our log."""

from typing import Any

from carrel.conversation.formats.openai_responses import from_openai_responses
from carrel.conversation.formats.turns import native_block, rest
from carrel.conversation.importers.codex_lines import (
    EVENTS,
    INJECTED_STARTS,
    INSTRUCTIONS,
    ITEMS,
    LINES,
    REPEATED_COUNT,
    SEALED_LETTER,
    TURNED_BACK,
)
from carrel.conversation.importers.draft import Draft, text_of
from carrel.conversation.importers.report import ImportReport
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    build_message,
    flatten_message_text,
    image_block,
    meta_of,
    text_block,
    tool_use_block,
)

KIND = "codex"
PROVIDER = "openai"

_EMPTY = "says nothing"
_ENCRYPTED = "(The provider keeps this summary encrypted. These messages stayed in view beside it.)"
_BESIDE = "(These messages of the user stayed in view beside the summary.)"
_ECHOES = {"user_message": "user", "agent_message": "assistant"}


class CodexDraft(Draft):
    """Fed every line; the items of one answer become one message, a rollback becomes a rewind."""

    def __init__(self, report: ImportReport) -> None:
        super().__init__(KIND, report)
        self.provider = PROVIDER
        self.model = ""
        self.name = ""
        self._turns: list[int] = []
        """How many entries stood before each of the user's turns that are in view."""
        self._uncounted: ConversationMessage | None = None
        self._counted: object = None
        self._echoes: list[tuple[ConversationMessage, str]] | None = []
        """Messages known from events alone; None once a response item has spoken."""

    def take(self, number: int, kind: str, payload: dict[str, Any], created_at: str | None) -> None:
        match kind:
            case "response_item":
                self._take_item(number, payload, created_at)
            case "event_msg":
                self._take_event(number, payload, created_at)
            case "compacted":
                self._take_compaction(number, payload, created_at)
            case "inter_agent_communication":
                self._take_letter(number, payload, created_at)
            case _ if kind in LINES:
                if kind == "turn_context":
                    self.model = text_of(payload.get("model")) or self.model
                self.report.ignore(kind, LINES[kind])
            case _:
                self.report.not_known(kind or "no type")

    def inherit(self, report: ImportReport) -> None:
        """What was taken so far is another rollout's; what comes is counted in `report`."""
        self.close()
        self.inherited, self.report = len(self.entries), report
        self._uncounted, self._echoes = None, []

    def close(self) -> None:
        """A file without messages among its response items is known from its events."""
        echoes, self._echoes = self._echoes or [], None
        own = self.entries[self.inherited :]
        plain = all(entry["role"] in ("user", "assistant") for entry in own)
        for message, event in echoes:
            if plain and message["content"]:
                self.add(message)
            else:
                self.report.ignore(f"event_msg/{event}", EVENTS[event])
        if echoes and plain:
            own = self.entries[self.inherited :]
            self.entries[self.inherited :] = sorted(own, key=lambda entry: int(entry["meta"]["source"]["line"]))

    def _drop_echoes(self) -> None:
        for _, event in self._echoes or ():
            self.report.ignore(f"event_msg/{event}", EVENTS[event])
        self._echoes = None

    def _take_item(self, number: int, item: dict[str, Any], created_at: str | None) -> None:
        kind = text_of(item.get("type"))
        source = self.source(number, item.get("id"))
        item = rest(item, "internal_chat_message_metadata_passthrough")
        match kind:
            case "message":
                self._take_message(number, item, created_at)
            case "reasoning":
                self._answer(self._converted(item), source, created_at)
            case "function_call" | "custom_tool_call" if _has(item, "call_id", "name"):
                self._answer(self._converted(item), source, created_at)
            case "local_shell_call":
                id_ = text_of(item.get("call_id")) or text_of(item.get("id")) or f"line-{number}"
                action = item.get("action")
                call = tool_use_block(tool_id=id_, name="local_shell", input=action if isinstance(action, dict) else {})
                self._answer([call], source, created_at)
            case "image_generation_call" if _has(item, "result"):
                picture = image_block(item["result"], mime_type="image/png")
                self._answer([picture], source, created_at)
            case "web_search_call" | "tool_search_call" | "image_generation_call":
                self._answer([native_block("openai_responses", item)], source, created_at)
            case "function_call_output" | "custom_tool_call_output" if _has(item, "call_id"):
                self.say("user", _result(item), self.source(number, item.get("id")), created_at)
            case "agent_message":
                self._take_letter(number, item, created_at)
            case "tool_search_output":
                self.say("user", [native_block("openai_responses", item)], source, created_at)
            case _ if kind in ITEMS:
                self.report.ignore(f"response_item/{kind}", ITEMS[kind])
            case _:
                self.report.not_known(f"response_item/{kind or 'no type'}")

    def _converted(self, item: dict[str, Any]) -> list[MessageBlock]:
        parts = [*_dicts(item.get("summary")), *_dicts(item.get("content"))]
        item = {**item, **{name: _dicts(item.get(name)) for name in ("summary", "content") if name in item}}
        if item["type"] == "reasoning" and not parts and not item.get("encrypted_content"):
            return []
        blocks: list[MessageBlock] = from_openai_responses([item])[0]["content"]
        return blocks

    def _take_message(self, number: int, item: dict[str, Any], created_at: str | None) -> None:
        role = text_of(item.get("role"))
        if role in ("developer", "system"):
            self.report.ignore(f"message/{role}", INSTRUCTIONS)
            return
        if role not in ("user", "assistant"):
            self.report.not_known(f"message/{role or 'no role'}")
            return
        blocks = _parts(item.get("content"))
        injected = flatten_message_text({"content": blocks}).startswith(INJECTED_STARTS)
        if not injected:
            self._drop_echoes()
        if role == "assistant":
            self._answer(blocks, self.source(number, item.get("id")), created_at)
        elif blocks:
            source = self.source(number, item.get("id"), injected=injected)
            message = build_message("user", blocks, meta=_meta(created_at, source))
            self._note_turn(message)
            self.add(message)
        else:
            self.report.ignore("empty message", _EMPTY)

    def _take_letter(self, number: int, letter: dict[str, Any], created_at: str | None) -> None:
        """What one agent wrote to another, which the model reads like something that a user says."""
        text = flatten_message_text({"content": _parts(letter.get("content"))})
        if not text:
            self.report.ignore("message between agents", SEALED_LETTER if letter.get("content") else _EMPTY)
            return
        head = (
            f"[from {text_of(letter.get('author')) or 'an agent'} to {text_of(letter.get('recipient')) or 'an agent'}]"
        )
        source = self.source(number, letter.get("id"), injected=True)
        self.say("user", [text_block(f"{head}\n\n{text}")], source, created_at)

    def _note_turn(self, message: ConversationMessage) -> None:
        if message["role"] == "user" and not meta_of(message)["source"].get("injected"):
            self._turns.append(len(self.entries))

    def _answer(self, blocks: list[MessageBlock], source: dict[str, Any], created_at: str | None) -> None:
        """Something the model put out; what it puts out in one go is one message."""
        last = self.last()
        if not blocks:
            self.report.ignore("empty message", _EMPTY)
        elif last is not None and last["role"] == "assistant" and not last["meta"].get("usage"):
            self.join(last, blocks, source)
        else:
            message = assistant_message(blocks, provider=self.provider, model=self.model)
            message.setdefault("meta", {}).update(_meta(created_at, source))
            self._uncounted = self.add(message)

    def _take_event(self, number: int, event: dict[str, Any], created_at: str | None) -> None:
        kind = text_of(event.get("type"))
        if kind == "token_count":
            self._take_count(event.get("info"))
        elif kind == "thread_rolled_back":
            self._take_rollback(number, event.get("num_turns"), created_at)
        elif kind in _ECHOES and self._echoes is not None:
            self._echoes.append((self._echo(number, event, kind, created_at), kind))
        elif kind in EVENTS:
            if kind == "thread_name_updated":
                self.name = text_of(event.get("thread_name"))
            self.report.ignore(f"event_msg/{kind}", EVENTS[kind])
        else:
            self.report.not_known(f"event_msg/{kind or 'no type'}")

    def _echo(self, number: int, event: dict[str, Any], kind: str, created_at: str | None) -> ConversationMessage:
        text = text_of(event.get("message"))
        source = {**self.source(number, injected=text.startswith(INJECTED_STARTS)), "event": True}
        blocks = [text_block(text)] if text else []
        if kind == "user_message":
            return build_message("user", blocks, meta=_meta(created_at, source))
        message = assistant_message(blocks, provider=self.provider, model=self.model)
        message.setdefault("meta", {}).update(_meta(created_at, source))
        return message

    def _take_count(self, info: object) -> None:
        """What an answer cost is told after it, and sometimes told again."""
        total = info.get("total_token_usage") if isinstance(info, dict) else None
        last = info.get("last_token_usage") if isinstance(info, dict) else None
        if not isinstance(last, dict) or total == self._counted or self._uncounted is None:
            self._counted = total or self._counted
            self.report.ignore("event_msg/token_count", REPEATED_COUNT)
            return
        self._counted = total
        self._uncounted["meta"]["usage"] = _usage(last)
        self._uncounted = None
        self.report.merged += 1

    def _take_rollback(self, number: int, turns: object, created_at: str | None) -> None:
        if type(turns) is not int or turns < 1 or not self._turns:
            self.report.ignore("event_msg/thread_rolled_back", TURNED_BACK)
            return
        back = max(0, len(self._turns) - turns)
        to_seq = self._turns[back]
        del self._turns[back:]
        self.rewind(to_seq, self.source(number), created_at)

    def _take_compaction(self, number: int, payload: dict[str, Any], created_at: str | None) -> None:
        summary = _summary(text_of(payload.get("message")), payload.get("replacement_history"))
        self.compact(summary, self.source(number), created_at, provider=self.provider, model=self.model)
        self._uncounted = None


def _meta(created_at: str | None, source: dict[str, Any]) -> dict[str, Any]:
    return {"created_at": created_at, "source": source} if created_at else {"source": source}


def _has(item: dict[str, Any], *names: str) -> bool:
    return all(isinstance(item.get(name), str) and item[name] for name in names)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def _parts(content: object) -> list[MessageBlock]:
    """A message's content; what the assistant says has no ids here, so its words are plain text blocks."""
    if isinstance(content, str):
        return [text_block(content)] if content else []
    blocks: list[MessageBlock] = []
    for part in _dicts(content):
        if part.get("type") in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            blocks += [text_block(part["text"])] if part["text"] else []
        else:
            blocks += from_openai_responses([{"type": "message", "role": "user", "content": [part]}])[0]["content"]
    return blocks


def _result(item: dict[str, Any]) -> list[MessageBlock]:
    """A tool's output: text, parts, or (when it failed) an object that says so."""
    output, failed = item.get("output"), False
    if isinstance(output, dict):
        failed = output.get("success") is False
        output = output.get("content_items") or output.get("content")
    if isinstance(output, list):
        output = _dicts(output)
    blocks: list[MessageBlock] = from_openai_responses([{**item, "output": output}])[0]["content"]
    if failed:
        blocks[0]["is_error"] = True
    return blocks


def _summary(message: str, history: object) -> str:
    """The summary, where it can be read, and what the user said that stayed in view beside it."""
    said = []
    for item in _dicts(history):
        text = flatten_message_text({"content": _parts(item.get("content"))})
        repeats = bool(message) and message.strip() in text
        if item.get("role") == "user" and text and not text.startswith(INJECTED_STARTS) and not repeats:
            said.append(text)
    if message and said:
        said.insert(0, _BESIDE)
    return "\n\n".join([message or _ENCRYPTED, *said])


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    def count(name: str) -> int:
        value = usage.get(name)
        return value if isinstance(value, int) else 0

    given, output = count("input_tokens"), count("output_tokens")
    return {
        "input_tokens": given,
        "output_tokens": output,
        "cache_read_tokens": count("cached_input_tokens"),
        "cache_write_tokens": count("cache_write_input_tokens"),
        "reasoning_tokens": count("reasoning_output_tokens"),
        "total_tokens": count("total_tokens") or given + output,
    }
