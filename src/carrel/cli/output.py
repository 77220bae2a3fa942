"""Printing: tables and text for people, JSON for programs; control characters never reach a terminal."""

import json
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import orjson

from carrel.cli.exit_codes import WrongUsage
from carrel.errors import StorageError
from carrel.text import (
    escape_control_chars_in_json,
    neutralize_control_chars,
    parse_time,
    readable_time,
    single_line,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MIN_WIDTH = 20
"""Width to which a column is shortened before other columns are left out."""


def is_terminal() -> bool:
    return console().is_terminal


@lru_cache(maxsize=1)
def console() -> "Console":
    """Return the console on standard output. Without a terminal it is very wide, so that nothing is cut."""
    from rich.console import Console  # noqa: PLC0415 -- slow to load, and `--json` and `--help` do without

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            # Called while the error is handled; rich would exit with 1, but `run_cli` sets the exit code.
            raise

    return Screen(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 100_000)


def safe_text(text: object, style: str = "") -> "Text":
    """Return untrusted text without control characters; it is never parsed as markup."""
    from rich.text import Text  # noqa: PLC0415 -- see `console`

    return Text(neutralize_control_chars(text), style=style)


def print_text(text: object = "", style: str = "") -> None:
    console().print(safe_text(text, style), soft_wrap=not is_terminal())


def print_indented(text: "Text", by: int = 2) -> None:
    """Print text with an indentation, also where it is wrapped."""
    if not is_terminal():
        _write("\n".join(" " * by + line for line in text.plain.split("\n")))
        return
    from rich.padding import Padding  # noqa: PLC0415 -- see `console`

    console().print(Padding(text, (0, 0, 0, by)))


def print_json(value: Any) -> None:
    """Print a JSON document."""
    _write(json_text(value))


def print_answer(as_json: bool, value: Any, text: object) -> None:
    """Print a value for `--json`, else a sentence about it."""
    if as_json:
        print_json(value)
    else:
        print_text(text)


def print_json_line(value: Any) -> None:
    """Print a JSON document on one line, without buffering."""
    _write(json_text(value, 0))
    sys.stdout.flush()


def json_text(value: Any, option: int = orjson.OPT_INDENT_2) -> str:
    """Return data as JSON, with control characters escaped."""
    try:
        return escape_control_chars_in_json(orjson.dumps(value, option=option).decode())
    except TypeError:
        # Big integers and lone surrogates are valid in a log and in JSON, but not for orjson.
        return json.dumps(value, indent=2 if option else None)


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    style: str = ""
    justify: Literal["left", "right"] = "left"
    gives_way: bool = False
    """At a terminal that is too narrow, this column is shortened first."""
    may_go: bool = False
    """At a terminal that is still too narrow, this column is left out."""


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print a table that fits the terminal; without a terminal nothing is cut."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 -- see `console`

    table = [[column.title for column in columns], *([single_line(cell) for cell in row] for row in rows)]
    widths = [max(cell_len(row[index]) for row in table) for index in range(len(columns))]
    shown = _fitted(columns, widths) if is_terminal() else list(range(len(columns)))
    for number, row in enumerate(table):
        line = safe_text("")
        for index in shown:
            column, text = columns[index], row[index]
            if cell_len(text) > widths[index]:
                text = set_cell_size(text, widths[index] - 1) + "…"
            padding = " " * (widths[index] - cell_len(text))
            cell = padding + text if column.justify == "right" else text + padding
            line.append(cell if index == shown[-1] else f"{cell}  ", style="bold" if number == 0 else column.style)
        line.rstrip()
        console().print(line, no_wrap=True, overflow="ignore", crop=False)


def _fitted(columns: Sequence[Column], widths: list[int]) -> list[int]:
    """Return the columns that fit; shorten the one that gives way in `widths`."""
    shown = list(range(len(columns)))
    wide = next((index for index in shown if columns[index].gives_way), None)

    def missing() -> int:
        return sum(widths[index] for index in shown) + 2 * (len(shown) - 1) - console().width

    while missing() > 0:
        if wide is not None and widths[wide] > MIN_WIDTH:
            widths[wide] = max(MIN_WIDTH, widths[wide] - missing())
            continue
        last = next((index for index in reversed(shown) if columns[index].may_go), None)
        if last is None:
            if wide is not None:
                widths[wide] = max(1, widths[wide] - missing())
            break
        # The shortened column can use the space of the one that was left out.
        shown.remove(last)
        if wide is not None and missing() < 0:
            widths[wide] -= missing()
    return shown


def when(value: object) -> str:
    """Return how long ago a time was; without a terminal, the time itself."""
    moment = parse_time(value)
    if moment is None or not is_terminal():
        return str(value or "")
    seconds = (datetime.now(UTC) - moment).total_seconds()
    if seconds < -60:  # written by a clock that is ahead
        return readable_time(value)
    for unit, length in (("year", 31_536_000), ("month", 2_592_000), ("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count != 1 else ''} ago"
    return "just now"


def write_raw(text: str) -> None:
    """Write text unchanged, for a file or another program."""
    sys.stdout.write(text)


async def write_file(path: Path, pieces: AsyncIterator[str]) -> int:
    """Write a complete file or leave the existing one unchanged; devices and pipes are written to directly."""
    if not path.parent.is_dir():
        raise WrongUsage(f"there is no folder {path.parent}")
    if path.is_dir():
        raise WrongUsage(f"{path} is a folder, not a file")
    if path.exists() and not path.is_file():
        return await _write_pieces(path, pieces)
    path = path.resolve()
    temporary = path.with_name(f".{path.name[:40]}.{os.urandom(4).hex()}.part")
    try:
        size = await _write_pieces(temporary, pieces)
        temporary.replace(path)
    except StorageError:
        raise
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    return size


async def _write_pieces(path: Path, pieces: AsyncIterator[str]) -> int:
    size = 0
    with path.open("wb") as file:
        async for piece in pieces:
            size += file.write(piece.encode())
    return size


def flush() -> None:
    sys.stdout.flush()


def plain_data(thing: Any) -> Any:
    """Return a pydantic model, a dataclass or a named tuple as plain data."""
    if hasattr(thing, "model_dump"):
        return thing.model_dump()
    if is_dataclass(thing) and not isinstance(thing, type):
        return asdict(thing)
    return thing._asdict() if hasattr(thing, "_asdict") else thing


class Advance(Protocol):
    """Advances a progress bar by one; with `total`, sets its length instead."""

    def __call__(self, text: str, total: int | None = None) -> None: ...


@contextmanager
def progress(total: int | None, what: str, *, among_lines: bool = False) -> Iterator[Advance]:
    """Show a progress bar on standard error; with `among_lines`, below printed lines. `done(text)` advances it."""
    from rich.console import Console  # noqa: PLC0415 -- slow to load
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    screen = console() if among_lines else Console(stderr=True)
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def done(text: str, total: int | None = None) -> None:
            description = f"{what}: {safe_text(text).plain[:60]}" if text else what
            bar.update(task, advance=0 if total else 1, description=description, total=total)

        yield done
