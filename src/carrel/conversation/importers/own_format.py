"""Importer for carrel's own format: a folder with `messages.jsonl`, or that file alone, written by any program."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carrel.conversation.attachments import paths_of, reattach
from carrel.conversation.importers.base import ImportedSession, ImportReport, first_title, iso, read_records, text_of
from carrel.conversation.messages import ConversationMessage, MessageBlock, blocks_of, meta_of, tool_result_text
from carrel.conversation.session_state import DEFAULT_SESSION_TITLE, decode_meta

KIND = "carrel"
LOG = "messages.jsonl"

_NOT_COPIED = (
    "title",
    "provider",
    "model",
    "cwd",
    "created_at",
    "id",
    "message_format_version",
    "updated_at",
    "message_count",
    "total_tokens",
    "imported_from",
    # Restored from the notes in the log.
    "labels",
    "pins",
)
_MAX_CREATED_LINE = 1024 * 1024
_SEQ_FIELDS = ("keep_from_seq", "to_seq", "at_seq")


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line has this format: a role, and content or meta, and no other keys."""
    return isinstance(record.get("role"), str) and {"role"} < record.keys() <= {"role", "content", "meta"}


def is_possible(record: dict[str, Any]) -> bool:
    """Whether a line may have this format although it has other keys; only for a file with the name of a log."""
    return isinstance(record.get("role"), str) and "type" not in record and ("content" in record or "meta" in record)


def is_certain(record: dict[str, Any]) -> bool:
    """Whether a line can only have this format: an event, or a message with `meta` or with a tool block."""
    if record.get("role") in ("compact", "rewind") or (isinstance(record.get("role"), str) and meta_of(record)):
        return True
    content = record.get("content")
    blocks = content if isinstance(content, list) else []
    return any(isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result") for block in blocks)


def read(path: Path, *, all_branches: bool = False) -> Iterator[ImportedSession]:
    """Yield the session of one log with all its entries; raises `SessionTooNew` when a newer version wrote it.

    Its log includes what was rewound, so `all_branches` makes no difference."""
    report = ImportReport(str(path), KIND)
    folder = path.parent
    meta, problem = _folder_meta(folder)
    if problem:
        report.problems.append(problem)
    source_id = report.source_id = meta.get("id") or (folder.name if path.name == LOG else path.stem)
    lines: list[int] = []
    entries: list[ConversationMessage] = []
    for number, record in read_records(path, report):
        if not isinstance(record.get("role"), str) or not record["role"]:
            report.add_unknown("no role")
            continue
        if record.get("tool_calls") or record.get("tool_call_id"):
            report.problems.append(
                f"line {number} has a tool call in OpenAI's format; it is kept, but does not count as a call here"
            )
        entries.append(_upgraded(_with_attachments(record, folder, report)))
        report.imported += 1
        lines.append(number)
    if len(entries) != report.lines:
        entries = [_shifted(entry, lines) for entry in entries]
    answers = [meta_of(entry) for entry in entries if entry.get("role") == "assistant"]
    yield ImportedSession(
        KIND,
        source_id,
        report,
        title=meta.get("title") or first_title(entries),
        provider=meta.get("provider") or _newest(answers, "provider"),
        model=meta.get("model") or _newest(answers, "model"),
        cwd=meta.get("cwd") or "",
        created_at=iso(meta.get("created_at"))
        or next(filter(None, (meta_of(e).get("created_at") for e in entries)), None),
        messages=entries,
        parent=text_of(meta.get("parent_session_id")) or None,
        named_by_file=not meta.get("id") and path.name != LOG,
        meta={key: value for key, value in meta.items() if key not in _NOT_COPIED},
    )


def _newest(answers: list[dict[str, Any]], name: str) -> str:
    return next(filter(None, (text_of(meta.get(name)) for meta in reversed(answers))), "")


def _folder_meta(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return the session's metadata and what could not be read: from `meta.json`, else from `created.jsonl`."""
    file = folder / "meta.json"
    problem = None
    try:
        meta = decode_meta(file.read_bytes(), folder.name)
        if meta is not None:
            return dict(meta), None
        problem = f"{file} is damaged"
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"{file} cannot be read ({error.strerror})"
    created = _created_meta(folder)
    source = "its messages" if created is None else "created.jsonl and its messages"
    return created or {}, problem and f"{problem}; its metadata is taken from {source}"


def _created_meta(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / "created.jsonl").open("rb") as file:
            created = decode_meta(file.readline(_MAX_CREATED_LINE), folder.name)
    except OSError:
        return None
    if created is None:
        return None
    # The default title is replaced by one from the first message.
    return {name: value for name, value in created.items() if (name, value) != ("title", DEFAULT_SESSION_TITLE)}


def _with_attachments(entry: ConversationMessage, folder: Path, report: ImportReport) -> ConversationMessage:
    """Return the entry with its attachments put back."""
    paths = paths_of(entry)
    if not paths:
        return entry
    files = {path: data for path in paths if (data := _attachment(folder, path)) is not None}
    report.problems += [
        f"line {report.lines}: {path} is missing or was changed; the message has only the preview in its line"
        for path in paths
        if path not in files
    ]
    return reattach(entry, files)


def _attachment(folder: Path, path: str) -> bytes | None:
    """Return an attachment if its content matches the checksum in its name; reads nothing outside the folder."""
    try:
        file = (folder / path).resolve(strict=True)
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            return None
        data = file.read_bytes()
    except (OSError, ValueError, RuntimeError):
        return None
    return data if hashlib.sha256(data).hexdigest().startswith(Path(path).stem) else None


def _upgraded(entry: ConversationMessage) -> ConversationMessage:
    """Return the entry with tool results as `model_text` and `display_text`; older versions have plain `content`."""
    if not any(_is_old_result(block) for block in blocks_of(entry)):
        return entry
    blocks = [_upgraded_result(block) if _is_old_result(block) else block for block in entry["content"]]
    return {**entry, "content": blocks}


def _is_old_result(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result" and "model_text" not in block


def _upgraded_result(block: MessageBlock) -> MessageBlock:
    text = tool_result_text(block)
    new = {"model_text": text, "display_text": text, "is_error": False, **block}
    if isinstance(new.get("content"), str):
        del new["content"]
    return new


def _shifted(entry: ConversationMessage, lines: list[int]) -> ConversationMessage:
    """Return the entry with its references shifted: they count lines, and some lines were not imported."""
    if entry.get("role") not in ("compact", "rewind"):
        return entry
    meta = dict(meta_of(entry))
    for name in _SEQ_FIELDS:
        if type(meta.get(name)) is int:
            # A kept range starts at the next imported entry; a rewind goes to the previous one.
            seq = bisect_left(lines, meta[name]) + 1 if name == "keep_from_seq" else bisect_right(lines, meta[name])
            meta[name] = min(seq, len(lines))
    return {**entry, "meta": meta}
