"""Reads sessions of our own format: a folder with `messages.jsonl`, ours or another program's, or the bare file."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carrel.conversation.importers.draft import first_words, iso, text_of
from carrel.conversation.importers.lines import records
from carrel.conversation.importers.report import Imported, ImportReport
from carrel.conversation.messages import ConversationMessage, MessageBlock, blocks_of, meta_of, tool_result_text
from carrel.conversation.metadata import DEFAULT_SESSION_TITLE, decode_meta
from carrel.conversation.spill import paths_of, restore

KIND = "carrel"
LOG = "messages.jsonl"

_FIELDS = ("title", "provider", "model", "cwd", "created_at")
_OF_THE_FOLDER = (
    *_FIELDS,
    "id",
    "message_format_version",
    "updated_at",
    "message_count",
    "total_tokens",
    "imported_from",
    # Said by asides in the log, which is stored too.
    "labels",
    "pins",
)
_LONGEST_GIVEN = 1024 * 1024
_PLACES = ("keep_from_seq", "to_seq", "at_seq")


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line is one of this format: a role, and content or meta; other programs' lines have more."""
    return isinstance(record.get("role"), str) and {"role"} < record.keys() <= {"role", "content", "meta"}


def may_be(record: dict[str, Any]) -> bool:
    """Whether a line of a file with our name is one, though it has more in it than ours have."""
    return isinstance(record.get("role"), str) and "type" not in record and ("content" in record or "meta" in record)


def is_certain(record: dict[str, Any]) -> bool:
    """Whether a line can be of no other format: an event, or a message with `meta` or with a call among its blocks."""
    if record.get("role") in ("compact", "rewind") or (isinstance(record.get("role"), str) and meta_of(record)):
        return True
    content = record.get("content")
    blocks = content if isinstance(content, list) else []
    return any(isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result") for block in blocks)


def read(path: Path, *, all_branches: bool = False) -> Iterator[Imported]:
    """The session of one log with all its entries; `SessionTooNew` when a newer version wrote it.

    What it went back from is in the log as it is, so `all_branches` changes nothing."""
    report = ImportReport(str(path), KIND)
    folder = path.parent
    meta, problem = _meta_of_folder(folder)
    if problem:
        report.problems.append(problem)
    source_id = report.source_id = meta.get("id") or (folder.name if path.name == LOG else path.stem)
    lines: list[int] = []
    entries: list[ConversationMessage] = []
    for number, record in records(path, report):
        if not isinstance(record.get("role"), str) or not record["role"]:
            report.not_known("no role")
            continue
        if record.get("tool_calls") or record.get("tool_call_id"):
            report.problems.append(
                f"line {number} has a tool call as OpenAI writes it; it is kept, but is no call here"
            )
        entries.append(_upgraded(_whole(record, folder, report)))
        report.imported += 1
        lines.append(number)
    if len(entries) != report.lines:
        entries = [_moved(entry, lines) for entry in entries]
    answers = [meta_of(entry) for entry in entries if entry.get("role") == "assistant"]
    yield Imported(
        KIND,
        source_id,
        report,
        title=meta.get("title") or first_words(entries),
        provider=meta.get("provider") or _newest(answers, "provider"),
        model=meta.get("model") or _newest(answers, "model"),
        cwd=meta.get("cwd") or "",
        created_at=iso(meta.get("created_at"))
        or next(filter(None, (meta_of(e).get("created_at") for e in entries)), None),
        messages=entries,
        parent=text_of(meta.get("parent_session_id")) or None,
        named_by_file=not meta.get("id") and path.name != LOG,
        meta={key: value for key, value in meta.items() if key not in _OF_THE_FOLDER},
    )


def _newest(answers: list[dict[str, Any]], name: str) -> str:
    return next(filter(None, (text_of(meta.get(name)) for meta in reversed(answers))), "")


def _meta_of_folder(folder: Path) -> tuple[dict[str, Any], str | None]:
    """What is known of the session beside its messages, and what could not be read of it.

    That is `meta.json`, or where there is none what `created.jsonl` says was given when the session was made."""
    file = folder / "meta.json"
    problem = None
    try:
        known = decode_meta(file.read_bytes(), folder.name)
        if known is not None:
            return dict(known), None
        problem = f"{file} is damaged"
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"{file} cannot be read ({error.strerror})"
    given = _given(folder)
    source = "its messages alone" if given is None else "its messages and from created.jsonl"
    return given or {}, problem and f"{problem}; the session is known from {source}"


def _given(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / "created.jsonl").open("rb") as file:
            given = decode_meta(file.readline(_LONGEST_GIVEN), folder.name)
    except OSError:
        return None
    if given is None:
        return None
    # A title that nobody gave is found in the first message.
    return {name: value for name, value in given.items() if (name, value) != ("title", DEFAULT_SESSION_TITLE)}


def _whole(entry: ConversationMessage, folder: Path, report: ImportReport) -> ConversationMessage:
    """The entry with what was too large for its line put back, each file checked against its sum."""
    paths = paths_of(entry)
    if not paths:
        return entry
    files = {path: data for path in paths if (data := _side_file(folder, path)) is not None}
    report.problems += [
        f"line {report.lines}: {path} is missing or not what was stored; the message has what its line says of it"
        for path in paths
        if path not in files
    ]
    return restore(entry, files)


def _side_file(folder: Path, path: str) -> bytes | None:
    """A file beside the log, named by the sum of its content; nothing outside the folder is ever read."""
    try:
        file = (folder / path).resolve(strict=True)
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            return None
        data = file.read_bytes()
    except (OSError, ValueError, RuntimeError):
        return None
    return data if hashlib.sha256(data).hexdigest().startswith(Path(path).stem) else None


def _upgraded(entry: ConversationMessage) -> ConversationMessage:
    """Older versions keep a tool's output as plain `content`; today it is `model_text` and `display_text`."""
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


def _moved(entry: ConversationMessage, lines: list[int]) -> ConversationMessage:
    """References to entries count lines; where a line could not be taken, those after it have moved up."""
    if entry.get("role") not in ("compact", "rewind"):
        return entry
    meta = dict(meta_of(entry))
    for name in _PLACES:
        if type(meta.get(name)) is int:
            # What is kept starts at the next entry that is there; what is gone back to ends at the one before.
            at = bisect_left(lines, meta[name]) + 1 if name == "keep_from_seq" else bisect_right(lines, meta[name])
            meta[name] = min(at, len(lines))
    return {**entry, "meta": meta}
