"""Importers for session files of other agents and of other programs that write carrel's format."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from carrel.conversation.importers import claude_code, codex, openai_chat, own_format, pi
from carrel.conversation.importers.base import ImportedSession, ImportReport, check_readable, read_lines
from carrel.conversation.log_entries import UNREADABLE, decode
from carrel.errors import ImportRefused, SessionTooNew

__all__ = ["ImportReport", "ImportedSession", "detect", "read_session_file"]

_IMPORTERS: dict[str, ModuleType] = {
    "pi": pi,
    "codex": codex,
    "claude-code": claude_code,
    "openai-chat": openai_chat,
    "carrel": own_format,
}
_LINES_EXAMINED = 200
_BYTES_EXAMINED = 4 * 1024 * 1024
"""Of each line."""
_AGENT_FILES = "agent-*.jsonl"
_DASHES_IN_UUID = 4


def detect(path: Path | str) -> str | None:
    """Return the kind of a session file or folder: `claude-code`, `codex`, `pi`, `openai-chat`, `carrel`, or None."""
    path = Path(path)
    try:
        if path.is_dir():
            return _kind_of(path / own_format.LOG) if _log_in(path) else None
        return _kind_of(path)
    except (ImportRefused, OSError):
        return None


def read_session_file(path: Path | str, *, all_branches: bool = False) -> Iterator[ImportedSession]:
    """Yield every session in a file, or in all files below a folder; a parent comes before its sub-sessions and forks.

    Raises `ImportRefused` (or `SessionTooNew`) for a file that is not a readable session. In a folder such a file is
    yielded as an `ImportedSession` without messages, and its report has the reason in `refused`."""
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
    """Return the kind of the first line that an importer recognizes. Raises `ImportRefused` for an unreadable file."""
    if path.name == own_format.LOG and path.is_file() and path.stat().st_size == 0:
        return "carrel"
    for number, line in read_lines(path, _BYTES_EXAMINED):
        if number > _LINES_EXAMINED or (number == 1 and line is not None and line.lstrip().startswith(b"[")):
            # The lines of a JSON list that spans several lines may look like messages.
            return None
        record = decode(line) if line is not None else {}
        if record.get("role") == UNREADABLE:
            continue
        for kind, importer in _IMPORTERS.items():
            if importer.recognizes(record):
                return kind if kind != "carrel" else _own_or_chat(path)
        if path.name == own_format.LOG and own_format.is_possible(record):
            return _own_or_chat(path)
    return None


def _own_or_chat(path: Path) -> str:
    """Return `carrel` or `openai-chat`, decided by the first line that only one of the two formats can have."""
    for _, line in read_lines(path, _BYTES_EXAMINED):
        record = decode(line) if line is not None else {}
        if record.get("role") == UNREADABLE:
            continue
        if own_format.is_certain(record):
            return "carrel"
        if openai_chat.recognizes(record):
            return "openai-chat"
    return "carrel"


def _read_file(path: Path, all_branches: bool) -> Iterator[ImportedSession]:
    check_readable(path)
    if path.name.endswith(".zst"):
        raise ImportRefused(f"{path} is compressed; unpack it first (zstd -d {path.name}) and import the unpacked file")
    kind = _kind_of(path)
    if kind is None:
        is_empty = path.stat().st_size == 0
        problem = (
            "is empty" if is_empty else "is not a session of Claude Code, Codex, pi, carrel or OpenAI Chat messages"
        )
        raise ImportRefused(f"{path} {problem}; give a .jsonl session file, or the folder of a session")
    yield from _IMPORTERS[kind].read(path, all_branches=all_branches)
    if kind == "claude-code" and not path.match(_AGENT_FILES):
        for file in claude_code.agent_files(path):
            yield from _read_or_report(file, all_branches)


def _read_or_report(path: Path, all_branches: bool) -> Iterator[ImportedSession]:
    try:
        yield from _read_file(path, all_branches)
    except (ImportRefused, SessionTooNew) as refused:
        yield ImportedSession("", path.stem, ImportReport(str(path), "", refused=str(refused)))


def _read_folder(folder: Path, all_branches: bool) -> Iterator[ImportedSession]:
    """Yield every session below a folder; an agent's file without its session is yielded on its own."""
    files = list(_session_files(folder))
    if not files:
        raise ImportRefused(
            f"{folder} has no .jsonl file in it or in folders below; give a session file or a folder of them"
        )
    read: set[str] = set()
    agents = [file for file in files if file.match(_AGENT_FILES)]
    for file in [*_parents_first([file for file in files if file not in set(agents)]), *agents]:
        if str(file) in read:
            continue
        for imported in _read_or_report(file, all_branches):
            read.add(imported.report.path)
            yield imported


def _parents_first(files: list[Path]) -> list[Path]:
    """Sort a session before its forks, because Claude Code's file names have no date; keep the order otherwise."""
    named = {file.stem: file for file in files if file.stem.count("-") == _DASHES_IN_UUID}
    ordered: dict[Path, None] = {}
    for file in files:
        ancestors: list[Path] = []
        current: Path | None = file
        while current is not None and current not in ancestors:
            ancestors.append(current)
            current = named.get(claude_code.forked_from(current)) if current.stem in named else None
        ordered |= dict.fromkeys(reversed(ancestors))
    return list(ordered)


def _session_files(folder: Path) -> Iterator[Path]:
    """Yield the session files below a folder; links to folders are not followed, because they may form a loop."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        if own_format.LOG in names:
            folders.clear()
            yield Path(parent, own_format.LOG)
            continue
        yield from (Path(parent, name) for name in sorted(names) if name.endswith((".jsonl", ".jsonl.zst")))
