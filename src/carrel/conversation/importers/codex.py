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
            _take_base(path, header, draft)
        draft.take(number, kind, payload, iso(time))
    draft.close()
    thread, rollout = text_of(header.get("id") or header.get("session_id")), _id_of(path)
    # A thread that was turned back goes on in another file, which refers to the first.
    turned_back = rollout and thread != rollout and isinstance(header.get("history_base"), dict)
    report.source_id = rollout if turned_back else thread or rollout or path.stem
    imported = Imported(
        KIND,
        report.source_id,
        report,
        title=draft.name,
        provider=draft.provider,
        model=draft.model,
        cwd=text_of(header.get("cwd")) or _folder_in(draft.entries),
        created_at=iso(header.get("timestamp")),
        parent=thread if turned_back else _parent_of(header),
        forked_at=draft.inherited or None,
    )
    yield draft.finish(imported)


def _id_of(path: Path) -> str:
    found = _ID_IN_NAME.search(path.stem)
    return found[0] if found else ""


def _take_base(path: Path, header: dict[str, Any], draft: CodexDraft) -> None:
    """A fork names the rollout that it goes on from, and how far: that is read first."""
    report = draft.report
    bases: list[tuple[Path, int]] = []
    while isinstance(base := header.get("history_base"), dict):
        id_, end = text_of(base.get("thread_id")), base.get("end_ordinal_exclusive")
        file = _rollout(path, id_)
        if file is None or file == path or file in (seen for seen, _ in bases) or type(end) is not int:
            report.problems.append(
                f"it goes on from the rollout {id_}, which is not there: what was said before is missing"
            )
            break
        bases.append((file, end))
        header = next((record["payload"] for _, record in _lines(file) if record.get("type") == "session_meta"), {})
    for file, end in reversed(bases):
        draft.report = ImportReport(str(file), KIND)
        for number, record in _lines(file):
            ordinal = record.get("ordinal")
            if (ordinal if type(ordinal) is int else number - 1) >= end:
                break
            kind, payload, time = _unwrapped(record, True)
            draft.take(number, kind, payload, iso(time))
    if bases:
        draft.inherit(report)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, record in records(file, ImportReport(str(file), KIND)):
        if isinstance(record.get("payload"), dict):
            yield number, record


def _rollout(path: Path, id_: str) -> Path | None:
    """The file of a rollout: beside this one, or anywhere in the folder of sessions that this one lies in."""
    if not _ID_IN_NAME.fullmatch(id_):
        return None
    roots = [folder.parent for folder in path.parents if folder.name in ("sessions", "archived_sessions")]
    folders = [path.parent, *(root / name for root in roots[:1] for name in ("sessions", "archived_sessions"))]
    return next((file for folder in folders for file in sorted(folder.rglob(f"rollout-*-{id_}.jsonl"))), None)


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
