"""Other agents' session files, and this format's other writers, as sessions of ours."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from carrel.conversation.entries import UNREADABLE, decode
from carrel.conversation.importers import claude_code, codex, openai_chat, own_format, pi
from carrel.conversation.importers.lines import check_file, raw_lines
from carrel.conversation.importers.report import Imported, ImportReport
from carrel.errors import ImportRefused, SessionTooNew

__all__ = ["ImportReport", "Imported", "detect", "read_session_file"]

_KINDS: dict[str, ModuleType] = {
    "pi": pi,
    "codex": codex,
    "claude-code": claude_code,
    "openai-chat": openai_chat,
    "carrel": own_format,
}
_LINES_LOOKED_AT = 200
_LINE_LOOKED_AT = 4 * 1024 * 1024
_AGENT_FILES = "agent-*.jsonl"
_DASHES = 4
"""In a name that is a UUID."""


def detect(path: Path | str) -> str | None:
    """What kind of session a file or folder holds: `claude-code`, `codex`, `pi`, `openai-chat`, `carrel`, or None."""
    path = Path(path)
    try:
        if path.is_dir():
            return _kind_of(path / own_format.LOG) if _log_in(path) else None
        return _kind_of(path)
    except (ImportRefused, OSError):
        return None


def read_session_file(path: Path | str, *, all_branches: bool = False) -> Iterator[Imported]:
    """Every session in a file, or in all files below a folder; a session comes before those that belong to it.

    `ImportRefused` (or `SessionTooNew`) when a file is no session we can read. In a folder such a file stops nobody:
    it comes as an `Imported` without messages whose report says why it was refused."""
    path = Path(path).expanduser()
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as problem:
        raise ImportRefused(f"{path} cannot be read: {problem}") from None
    if not is_folder:
        yield from _read_file(path, all_branches)
    elif _log_in(path):
        yield from _read_file(path / own_format.LOG, all_branches)
    else:
        yield from _read_folder(path, all_branches)


def _log_in(folder: Path) -> bool:
    return (folder / own_format.LOG).is_file()


def _kind_of(path: Path) -> str | None:
    """The kind of the first line that any of the importers knows; `ImportRefused` when the file cannot be read."""
    if path.name == own_format.LOG and path.is_file() and path.stat().st_size == 0:
        return "carrel"
    for number, line in raw_lines(path, _LINE_LOOKED_AT):
        if number > _LINES_LOOKED_AT or (number == 1 and line is not None and line.lstrip().startswith(b"[")):
            # A list over several lines has lines that look like messages.
            return None
        record = decode(line) if line is not None else {}
        if record.get("role") == UNREADABLE:
            continue
        for kind, importer in _KINDS.items():
            if importer.recognizes(record):
                return kind if kind != "carrel" else _own_or_chat(path)
        if path.name == own_format.LOG and own_format.may_be(record):
            return _own_or_chat(path)
    return None


def _own_or_chat(path: Path) -> str:
    """Of our format or of OpenAI's: decided by the first line that can be of one of them only."""
    for _, line in raw_lines(path, _LINE_LOOKED_AT):
        record = decode(line) if line is not None else {}
        if record.get("role") == UNREADABLE:
            continue
        if own_format.is_certain(record):
            return "carrel"
        if openai_chat.recognizes(record):
            return "openai-chat"
    return "carrel"


def _read_file(path: Path, all_branches: bool) -> Iterator[Imported]:
    check_file(path)
    if path.name.endswith(".zst"):
        raise ImportRefused(f"{path} is compressed; unpack it first (zstd -d {path.name}) and import what comes out")
    kind = _kind_of(path)
    if kind is None:
        size = path.stat().st_size
        what = "has no line of a session of Claude Code, Codex, pi or carrel, and no OpenAI Chat messages"
        what = "is empty" if size == 0 else what
        raise ImportRefused(f"{path} {what}; give a .jsonl file of one of these, or the folder of a session")
    yield from _KINDS[kind].read(path, all_branches=all_branches)
    if kind == "claude-code" and not path.match(_AGENT_FILES):
        for file in claude_code.agent_files(path):
            yield from _read_or_report(file, all_branches)


def _read_or_report(path: Path, all_branches: bool) -> Iterator[Imported]:
    try:
        yield from _read_file(path, all_branches)
    except (ImportRefused, SessionTooNew) as refused:
        yield Imported("", path.stem, ImportReport(str(path), "", refused=str(refused)))


def _read_folder(folder: Path, all_branches: bool) -> Iterator[Imported]:
    """Every session below; an agent's file comes with its session, or on its own when that is not there."""
    files = list(_session_files(folder))
    if not files:
        raise ImportRefused(f"{folder} has no .jsonl file in it or below; give a session file or a folder of them")
    taken: set[str] = set()
    agents = [file for file in files if file.match(_AGENT_FILES)]
    for file in [*_parents_first([file for file in files if file not in set(agents)]), *agents]:
        if str(file) in taken:
            continue
        for imported in _read_or_report(file, all_branches):
            taken.add(imported.report.path)
            yield imported


def _parents_first(files: list[Path]) -> list[Path]:
    """The files in their order, but a session before those forked from it: Claude Code's names have no date."""
    named = {file.stem: file for file in files if file.stem.count("-") == _DASHES}
    ordered: dict[Path, None] = {}
    for file in files:
        line: list[Path] = []
        at: Path | None = file
        while at is not None and at not in line:
            line.append(at)
            at = named.get(claude_code.forked_from(at)) if at.stem in named else None
        ordered |= dict.fromkeys(reversed(line))
    return list(ordered)


def _session_files(folder: Path) -> Iterator[Path]:
    """Links to folders are not followed, so that a loop ends."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        if own_format.LOG in names:
            folders.clear()
            yield Path(place, own_format.LOG)
            continue
        yield from (Path(place, name) for name in sorted(names) if name.endswith((".jsonl", ".jsonl.zst")))
