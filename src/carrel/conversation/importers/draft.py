"""Pure: a log in the making: what an importer has understood so far, entry by entry."""

from datetime import UTC, datetime
from typing import Any

from carrel.conversation.entries import build_aside, build_compact_event, build_rewind_event
from carrel.conversation.importers.report import Imported, ImportReport
from carrel.conversation.messages import ConversationMessage, MessageBlock, blocks_of, build_message, meta_of
from carrel.conversation.metadata import title_from
from carrel.conversation.replay import visible_after

_NO_TIME = "unknown"


class Draft:
    """Collects entries and counts the lines they were made from."""

    def __init__(self, kind: str, report: ImportReport) -> None:
        self.kind = kind
        self.report = report
        self.entries: list[ConversationMessage] = []
        self.seq_of: dict[str, int] = {}
        """The entry that each source id went into."""
        self.inherited = 0
        """How many entries at the start are another session's; nothing is joined to them."""

    def source(self, line: int, id_: object = None, *, injected: bool = False) -> dict[str, Any]:
        """Where an entry comes from; `injected` text was put in by the program and typed by nobody."""
        source: dict[str, Any] = {"kind": self.kind, "line": line}
        if isinstance(id_, str) and id_:
            source["id"] = id_
        if injected:
            source["injected"] = True
        return source

    def say(
        self,
        role: str,
        blocks: list[MessageBlock],
        source: dict[str, Any],
        created_at: str | None,
        meta: dict[str, Any] | None = None,
    ) -> ConversationMessage:
        """A message of its own; results of tools that came together stay together."""
        last = self.last()
        if last is not None and role == "user" and _only_results(blocks) and _is_results(last):
            self.join(last, blocks, source)
            return last
        known = {"created_at": created_at, "source": source, **(meta or {})}
        return self.add(build_message(role, blocks, meta={k: v for k, v in known.items() if v not in (None, "")}))

    def last(self) -> ConversationMessage | None:
        """The entry that what comes next may belong to."""
        return self.entries[-1] if len(self.entries) > self.inherited else None

    def add(self, entry: ConversationMessage) -> ConversationMessage:
        self.entries.append(entry)
        self.report.imported += 1
        id_ = (meta_of(entry).get("source") or {}).get("id")
        if id_:
            self.seq_of[id_] = len(self.entries)
        return entry

    def join(self, message: ConversationMessage, blocks: list[MessageBlock], source: dict[str, Any]) -> None:
        """More blocks for a message that is there already."""
        message["content"].extend(blocks)
        self.note_merged(message, source)

    def note_merged(self, message: ConversationMessage, source: dict[str, Any]) -> None:
        self.report.merged += 1
        id_ = source.get("id")
        if id_:
            first = meta_of(message).get("source") or {}
            first.setdefault("also", []).append(id_)
            if first.get("id") in self.seq_of:
                self.seq_of[id_] = self.seq_of[first["id"]]

    def compact(
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
        """The summary that stands for all before it; the messages it covers stay in the log."""
        count = len(visible_after(list(enumerate(self.entries, 1))))
        event = build_compact_event(summary, provider=provider, model=model, compacted_count=count)
        more = {"created_at": created_at, "source": source, "keep_from_seq": keep_from_seq, "native": native}
        event["meta"].update({key: value for key, value in more.items() if value})
        return self.add(event)

    def rewind(self, to_seq: int, source: dict[str, Any], created_at: str | None) -> None:
        """Go back to what was visible right after entry `to_seq`."""
        numbered = list(enumerate(self.entries, 1))
        # Readers that do not know `to_seq` cut their own list, which cannot grow by that.
        cut = min(len(visible_after(numbered, to_seq)), len(visible_after(numbered)))
        self._add_event(build_rewind_event(cut, to_seq=to_seq, created_at=created_at or _NO_TIME), source)

    def label(self, text: str, at_seq: int, source: dict[str, Any], created_at: str | None) -> None:
        self._add_event(build_aside("label", text=text, at_seq=at_seq, created_at=created_at or _NO_TIME), source)

    def _add_event(self, event: ConversationMessage, source: dict[str, Any]) -> None:
        if event["meta"]["created_at"] == _NO_TIME:
            del event["meta"]["created_at"]
        event["meta"]["source"] = source
        self.add(event)

    def finish(self, imported: Imported) -> Imported:
        """Hand over what was collected, with what the entries themselves say about the session."""
        imported.messages = self.entries
        own = self.entries[imported.forked_at or 0 :]
        imported.title = imported.title or first_words(own) or first_words(self.entries)
        imported.created_at = imported.created_at or next(
            (meta_of(entry)["created_at"] for entry in self.entries if meta_of(entry).get("created_at")), None
        )
        return imported


def first_words(entries: list[ConversationMessage]) -> str:
    """A title from the first thing that a person said."""
    said = (entry for entry in entries if not (meta_of(entry).get("source") or {}).get("injected"))
    return next(filter(None, map(title_from, said)), "")


def _only_results(blocks: list[MessageBlock]) -> bool:
    return bool(blocks) and all(block.get("type") == "tool_result" for block in blocks)


def _is_results(message: ConversationMessage) -> bool:
    return message.get("role") == "user" and _only_results(blocks_of(message))


def iso(value: object) -> str | None:
    """A time as the log writes it, from ISO text or milliseconds since 1970; None when it is neither."""
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


def text_of(value: object) -> str:
    """A text field as it should be; anything else is no text."""
    return value if isinstance(value, str) else ""
