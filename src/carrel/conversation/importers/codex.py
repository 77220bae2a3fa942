"""Reads Codex rollouts: `~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`, and their older flat form."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carrel.conversation.importers.codex_draft import KIND, PROVIDER, CodexDraft
from carrel.conversation.importers.codex_lines import ENVELOPES
from carrel.conversation.importers.draft import iso, text_of
from carrel.conversation.importers.lines import records
from carrel.conversation.importers.report import Imported, ImportReport
from carrel.conversation.messages import ConversationMessage, flatten_message_text

_ID_IN_NAME = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
_FOLDER_IN_TEXT = re.compile(r"<cwd>([^<]{1,4096})</cwd>")


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line is one of a rollout, wrapped as today or flat as it was."""
    if isinstance(record.get("payload"), dict):
        return text_of(record.get("type")) in ENVELOPES
    if "type" not in record:
        header = (
            isinstance(record.get("id"), str)
            and "timestamp" in record
            and ("instructions" in record or "git" in record)
        )
        return header or record.get("record_type") == "state"
    return record.get("type") == "message" and "role" in record and "message" not in record


def read(path: Path, *, all_branches: bool = False) -> Iterator[Imported]:
    """One session; what was rolled back is in its log, out of view, so `all_branches` changes nothing."""
    report = ImportReport(str(path), KIND)
    draft = CodexDraft(report)
    header: dict[str, Any] = {}
    for number, record in records(path, report):
        kind, payload, time = _unwrapped(record, bool(header))
        if kind == "session_meta" and not header:
            header = payload
            draft.provider = text_of(payload.get("model_provider")) or PROVIDER
        draft.take(number, kind, payload, iso(time))
    draft.close()
    name_id = _ID_IN_NAME.search(path.stem)
    report.source_id = text_of(header.get("id") or header.get("session_id")) or (name_id[0] if name_id else path.stem)
    imported = Imported(
        KIND,
        report.source_id,
        report,
        title=draft.name,
        provider=draft.provider,
        model=draft.model,
        cwd=text_of(header.get("cwd")) or _folder_in(draft.entries),
        created_at=iso(header.get("timestamp")),
        parent=_parent_of(header),
    )
    yield draft.finish(imported)


def _unwrapped(record: dict[str, Any], headed: bool) -> tuple[str, dict[str, Any], object]:
    """What a line is, what it says, and when; the flat form has the items themselves as lines."""
    kind, payload = text_of(record.get("type")), record.get("payload")
    if isinstance(payload, dict):
        return kind, payload, record.get("timestamp")
    if record.get("record_type") == "state":
        return "state", record, None
    if not kind and not headed and isinstance(record.get("id"), str):
        return "session_meta", record, record.get("timestamp")
    if not kind or kind in ENVELOPES:
        return f"{kind} without payload" if kind else "", record, None
    return "response_item", record, record.get("timestamp")


def _parent_of(header: dict[str, Any]) -> str | None:
    """The session that started this one, or that it was forked from."""
    source = header.get("source")
    spawn = source.get("subagent") if isinstance(source, dict) else None
    spawn = spawn.get("thread_spawn") if isinstance(spawn, dict) else None
    started_by = spawn.get("parent_thread_id") if isinstance(spawn, dict) else None
    return text_of(started_by or header.get("parent_thread_id") or header.get("forked_from_id")) or None


def _folder_in(entries: list[ConversationMessage]) -> str:
    """The flat form has the working folder only in what it told the model."""
    for entry in entries[:10]:
        found = _FOLDER_IN_TEXT.search(flatten_message_text(entry))
        if found:
            return found[1]
    return ""
