"""Reads a file of JSON lines one at a time, whatever the file is."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from carrel.conversation.entries import BLANK, UNREADABLE, decode
from carrel.conversation.importers.report import BLANK_LINE, ImportReport
from carrel.conversation.messages import ConversationMessage, meta_of
from carrel.errors import ImportRefused

MAX_LINE = 128 * 1024 * 1024
"""A longer line is reported as unreadable and passed over without being held."""

_CHUNK = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def raw_lines(path: Path, max_line: int = MAX_LINE) -> Iterator[tuple[int, bytes | None]]:
    """Each line and its number from 1; None for one that is too long. `ImportRefused` when there is no file to read."""
    check_file(path)
    try:
        with path.open("rb", buffering=_CHUNK) as file:
            number = 0
            while line := file.readline(max_line + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if len(line) <= max_line or line.endswith(b"\n"):
                    yield number, line
                    continue
                while rest := file.readline(_CHUNK):
                    if rest.endswith(b"\n"):
                        break
                yield number, None
    except OSError as problem:
        raise ImportRefused(f"{path} cannot be read: {problem.strerror or problem}") from None


def check_file(path: Path) -> None:
    """`ImportRefused` unless there is a plain file; a pipe or a device would never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ImportRefused(f"{path} cannot be read: {reason}") from None
    if not stat.S_ISREG(mode):
        raise ImportRefused(f"{path} is no plain file; give a session file or a folder of them")
    if not os.access(path, os.R_OK):
        raise ImportRefused(f"{path} cannot be read: permission denied")


def records(path: Path, report: ImportReport, max_line: int = MAX_LINE) -> Iterator[tuple[int, ConversationMessage]]:
    """Each line that is a JSON object, counting all lines and noting in the report those that are none."""
    last_problem = 0
    for number, line in raw_lines(path, max_line):
        report.lines = number
        record = None if line is None else decode(line)
        if record is None:
            report.problems.append(f"line {number} is longer than {max_line:,} bytes")
            report.unreadable.append(number)
        elif record is BLANK:
            report.ignore(BLANK_LINE)
        elif record.get("role") == UNREADABLE and "reason" in meta_of(record):
            report.unreadable.append(number)
            last_problem = number if line is not None and not line.endswith(b"\n") else 0
        else:
            yield number, record
    if last_problem and last_problem == report.lines:
        report.problems.append(f"line {last_problem}, the last, is cut off: it was being written, or the disk was full")


def wanted_records(path: Path, wanted: set[int]) -> Iterator[tuple[int, ConversationMessage]]:
    """The records of some lines, for a second reading; nothing else is parsed."""
    left = len(wanted)
    for number, line in raw_lines(path):
        if left == 0:
            return
        if number in wanted and line is not None:
            left -= 1
            yield number, decode(line)
