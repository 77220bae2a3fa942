"""Pure: the entries of one pi conversation, in order, as entries of our log."""

from typing import Any

from carrel.conversation.importers.draft import Draft, iso, text_of
from carrel.conversation.importers.pi_blocks import KIND, blocks_of_pi, call_id
from carrel.conversation.importers.report import ImportReport
from carrel.conversation.messages import assistant_message, tool_result_block

_EMPTY = "says nothing"
_NOT_FOR_THE_MODEL = "a command the user ran without showing it to the model"
_OLD_LABEL = "a label that was taken away, changed later, or is on another branch"
_NO_SUMMARY = "a compaction without a summary; the messages before it stay in view"


class PiDraft(Draft):
    """Fed the entries of one branch; results that came together become one message."""

    def __init__(self, report: ImportReport, indexes: list[str], labels: dict[str, int]) -> None:
        super().__init__(KIND, report)
        self.provider = ""
        self.model = ""
        self._ids: dict[str, str] = {}
        """The ids of calls as our blocks have them, by pi's."""
        self._indexes = indexes
        self._labels = labels

    def take(self, number: int, record: dict[str, Any]) -> None:
        before = self.report.imported + self.report.merged
        self._take(number, record)
        if not record.get("id") and self.report.imported + self.report.merged > before:
            self.seq_of[f"line {number}"] = len(self.entries)

    def _take(self, number: int, record: dict[str, Any]) -> None:
        match record.get("type"):
            case "message":
                self._take_message(number, record, record.get("message"))
            case "custom_message":
                self._take_user(number, record, record.get("content"), injected=True)
            case "branch_summary":
                self._take_branch_summary(number, record, record.get("summary"))
            case "compaction":
                self._take_compaction(number, record)
            case "label":
                self._take_label(number, record)

    def _source(self, number: int, record: dict[str, Any], *, injected: bool = False) -> dict[str, Any]:
        return self.source(number, record.get("id"), injected=injected)

    def _take_message(self, number: int, record: dict[str, Any], message: object) -> None:
        if not isinstance(message, dict):
            self.report.not_known("message without content")
            return
        match message.get("role"):
            case "user":
                self._take_user(number, record, message.get("content"))
            case "assistant":
                self._take_answer(number, record, message)
            case "toolResult":
                self._take_result(number, record, message)
            case "custom" | "hookMessage":
                self._take_user(number, record, message.get("content"), injected=True)
            case "bashExecution" if message.get("excludeFromContext"):
                self.report.ignore("bashExecution", _NOT_FOR_THE_MODEL)
            case "bashExecution":
                self._take_user(number, record, _command(message))
            case "branchSummary":
                self._take_branch_summary(number, record, message.get("summary"))
            case "compactionSummary":
                self._take_compaction(number, {**record, **message, "id": record.get("id")})
            case role:
                self.report.not_known(f"message/{role}")

    def _take_user(self, number: int, record: dict[str, Any], content: object, *, injected: bool = False) -> None:
        blocks = blocks_of_pi(content)
        if not blocks:
            self.report.ignore("empty message", _EMPTY)
            return
        self.say("user", blocks, self._source(number, record, injected=injected), _time(record))

    def _take_answer(self, number: int, record: dict[str, Any], answer: dict[str, Any]) -> None:
        api = text_of(answer.get("api"))
        blocks = blocks_of_pi(answer.get("content"), api)
        called = [str(part.get("id")) for part in _parts(answer.get("content")) if part.get("type") == "toolCall"]
        self._ids |= {id_: call_id(id_, api)[0] for id_ in called}
        failure = text_of(answer.get("errorMessage"))
        if not blocks:
            self.report.ignore("empty message", _EMPTY)
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
            native_meta={"api": answer.get("api"), "error": failure or None},
        )
        message.setdefault("meta", {}).update(
            {k: v for k, v in {"created_at": _time(record), "source": self._source(number, record)}.items() if v}
        )
        self.add(message)

    def _take_result(self, number: int, record: dict[str, Any], result: dict[str, Any]) -> None:
        id_ = text_of(result.get("toolCallId"))
        if not id_:
            self.report.not_known("toolResult without a call")
            return
        inner = blocks_of_pi(result.get("content"))
        texts = [str(block["text"]) for block in inner if block.get("type") == "text"]
        block = tool_result_block(
            tool_use_id=self._ids.get(id_, id_),
            model_text="\n".join(texts),
            is_error=result.get("isError") is True,
            content=inner if len(texts) < len(inner) else None,
        )
        self.say("user", [block], self._source(number, record), _time(record))

    def _take_branch_summary(self, number: int, record: dict[str, Any], summary: object) -> None:
        text = text_of(summary)
        content = f"[Summary of a branch that this conversation came back from]\n\n{text}" if text else ""
        self._take_user(number, record, content, injected=True)

    def _take_compaction(self, number: int, record: dict[str, Any]) -> None:
        summary = text_of(record.get("summary"))
        if not summary:
            self.report.ignore("compaction without summary", _NO_SUMMARY)
            return
        self.compact(
            summary,
            self._source(number, record),
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
        known = self.seq_of.get(id_) if isinstance(id_, str) else None
        if known is not None or not isinstance(id_, str) or id_ not in self._indexes:
            return known
        # The entry named may be one that we do not keep, a change of model say: then the next that we do.
        after = self._indexes[self._indexes.index(id_) :]
        return next((self.seq_of[each] for each in after if each in self.seq_of), None)

    def _take_label(self, number: int, record: dict[str, Any]) -> None:
        target, text = text_of(record.get("targetId")), text_of(record.get("label"))
        if not text or self._labels.get(target) != number or target not in self.seq_of:
            self.report.ignore("label", _OLD_LABEL)
            return
        self.label(text, self.seq_of[target], self._source(number, record), _time(record))


def _time(record: dict[str, Any]) -> str | None:
    message = record.get("message")
    return iso(record.get("timestamp")) or (iso(message.get("timestamp")) if isinstance(message, dict) else None)


def _parts(content: object) -> list[dict[str, Any]]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _command(message: dict[str, Any]) -> str:
    """What the user ran in a shell, as the model is told of it."""
    ending = "\n(cancelled)" if message.get("cancelled") else ""
    code = message.get("exitCode")
    if code and not ending:
        ending = f"\n(exit code {code})"
    output = text_of(message.get("output")) or "(no output)"
    return f"$ {text_of(message.get('command'))}\n{output}{ending}"


def _usage(usage: object) -> dict[str, Any] | None:
    """pi counts what the cache gave and took apart from the input; ours has it all in."""
    if not isinstance(usage, dict):
        return None
    given, output, read, write, total = (
        value if isinstance(value := usage.get(name), int) else 0
        for name in ("input", "output", "cacheRead", "cacheWrite", "totalTokens")
    )
    return {
        "input_tokens": given + read + write,
        "output_tokens": output,
        "cache_read_tokens": read,
        "cache_write_tokens": write,
        "total_tokens": total or given + read + write + output,
    }
