"""Pure: the lines of one Claude Code conversation, in order, as entries of our log."""

from typing import Any

from carrel.conversation.formats.anthropic import NAME as PROVIDER
from carrel.conversation.formats.anthropic import usage_of
from carrel.conversation.formats.turns import rest
from carrel.conversation.importers.anthropic_blocks import blocks_from
from carrel.conversation.importers.claude_lines import is_injected, kept_in_view, line_of
from carrel.conversation.importers.draft import Draft, iso, text_of
from carrel.conversation.importers.report import ImportReport
from carrel.conversation.messages import ConversationMessage, MessageBlock, assistant_message, flatten_message_text

KIND = "claude-code"

_EMPTY = "says nothing"
_NO_SUMMARY = "a compaction whose summary is not in the file; the messages before it stay in view"


class ClaudeDraft(Draft):
    """Fed the lines of one chain; pieces of an answer become one message, a compaction one entry."""

    def __init__(self, report: ImportReport) -> None:
        super().__init__(KIND, report)
        self.model = ""
        self._answers: dict[str, ConversationMessage] = {}
        self._boundary: tuple[int, dict[str, Any]] | None = None

    def take(self, number: int, record: dict[str, Any]) -> None:
        if record.get("isCompactSummary"):
            self._take_summary(number, record)
            return
        self._drop_boundary()
        match line_of(record).kind:
            case "assistant":
                self._take_answer(number, record)
            case "compact":
                self._boundary = (number, record)
            case "command":
                self._take_user(number, record, record.get("content"), injected=True)
            case "queued":
                attachment = record["attachment"]
                injected = attachment.get("commandMode") == "task-notification" or is_injected(attachment, "")
                self._take_user(number, record, attachment.get("prompt"), injected=injected)
            case "user":
                self._take_user(number, record, record["message"].get("content"))

    def close(self) -> None:
        self._drop_boundary()

    def _take_user(self, number: int, record: dict[str, Any], content: object, *, injected: bool = False) -> None:
        blocks = blocks_from(content)
        if not blocks:
            self.report.ignore("empty message", _EMPTY)
            return
        injected = injected or is_injected(record, flatten_message_text({"content": blocks}))
        source = self.source(number, record.get("uuid"), injected=injected)
        self.say("user", blocks, source, iso(record.get("timestamp")))

    def _take_answer(self, number: int, record: dict[str, Any]) -> None:
        answer = record["message"]
        blocks = blocks_from(answer.get("content"))
        source = self.source(number, record.get("uuid"))
        id_ = text_of(answer.get("id"))
        said = self._answers.get(id_) if id_ else None
        if said is not None:
            _add_piece(said, blocks)
            self.note_merged(said, source)
        elif blocks:
            said = self.add(_answer(answer, blocks, source, iso(record.get("timestamp"))))
            self._answers[id_] = said
            self.model = text_of(answer.get("model")) or self.model
        else:
            self.report.ignore("empty message", _EMPTY)
            return
        # Each piece repeats the usage as it was known then, so the last one says it all.
        if isinstance(answer.get("usage"), dict):
            said["meta"]["usage"] = usage_of(answer["usage"])
            said["meta"]["native"] = {**said["meta"].get("native", {}), "usage": answer["usage"]}
        if answer.get("stop_reason"):
            said["meta"]["stop_reason"] = answer["stop_reason"]

    def _take_summary(self, number: int, record: dict[str, Any]) -> None:
        line, boundary = self._boundary or (number, {})
        self._boundary = None
        content = record["message"].get("content") if isinstance(record.get("message"), dict) else None
        summary = flatten_message_text({"content": blocks_from(content)}, include_thinking=False)
        if not summary:
            self.report.ignore("empty message", _EMPTY, lines=2 if boundary else 1)
            return
        kept = [self.seq_of[id_] for id_ in kept_in_view(boundary) if id_ in self.seq_of]
        self.compact(
            summary,
            self.source(line, boundary.get("uuid") or record.get("uuid")),
            iso(boundary.get("timestamp") or record.get("timestamp")),
            provider=PROVIDER,
            model=self.model,
            keep_from_seq=min(kept, default=None),
            native=_figures(boundary.get("compactMetadata")),
        )
        if boundary:
            self.note_merged(self.entries[-1], self.source(number, record.get("uuid")))
        self._answers.clear()

    def _drop_boundary(self) -> None:
        if self._boundary is not None:
            self._boundary = None
            self.report.ignore("compaction without summary", _NO_SUMMARY)


def _figures(metadata: object) -> dict[str, Any] | None:
    if not isinstance(metadata, dict):
        return None
    return {name: metadata[name] for name in ("trigger", "preTokens", "postTokens") if name in metadata}


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
    """One more piece of an answer: usually the next block, sometimes all blocks so far."""
    known = message["content"]
    if blocks[: len(known)] == known:
        message["content"] = blocks
        return
    calls = {block.get("id") for block in known if block.get("type") == "tool_use"}
    known.extend(block for block in blocks if block.get("type") != "tool_use" or block.get("id") not in calls)
