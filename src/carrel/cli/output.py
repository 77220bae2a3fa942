"""What is printed: tables and messages for people, JSON for programs; nothing printed can act on a terminal."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import orjson

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

LEAST_WIDTH = 20
"""What is left of a shortened column before another has to go."""


def is_terminal() -> bool:
    return console().is_terminal


@lru_cache(maxsize=1)
def console() -> "Console":
    """Where people read. Without a terminal there is no width, so nothing is cut and no id is broken."""
    from rich.console import Console  # noqa: PLC0415 -- slow to load, and `--json` and `--help` do without

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            # Called while the error is being handled; rich would exit with 1, and that is told in `ending`.
            raise

    return Screen(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 100_000)


def safe_text(text: object, style: str = "") -> "Text":
    """Text from anywhere, made harmless; never read as markup."""
    from rich.text import Text  # noqa: PLC0415 -- see `console`

    return Text(neutralize_control_chars(text), style=style)


def print_text(text: object = "", style: str = "") -> None:
    console().print(safe_text(text, style), soft_wrap=not is_terminal())


def print_indented(text: "Text", by: int = 2) -> None:
    """Text set in a little from the left, also where it is wrapped."""
    if not is_terminal():
        _write("\n".join(" " * by + line for line in text.plain.split("\n")))
        return
    from rich.padding import Padding  # noqa: PLC0415 -- see `console`

    console().print(Padding(text, (0, 0, 0, by)))


def print_json(value: Any) -> None:
    """One JSON document."""
    _write(json_text(value))


def print_json_line(value: Any) -> None:
    """One JSON document on one line, handed on at once."""
    _write(json_text(value, 0))
    sys.stdout.flush()


def json_text(value: Any, option: int = orjson.OPT_INDENT_2) -> str:
    """Data as JSON; nothing in it can act on a terminal."""
    try:
        return escape_control_chars_in_json(orjson.dumps(value, option=option).decode())
    except TypeError:
        # Integers of any size, lone surrogates: legal in a log, and JSON can say them.
        return json.dumps(value, indent=2 if option else None)


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@dataclass(frozen=True)
class Column:
    title: str
    style: str = ""
    justify: Literal["left", "right"] = "left"
    gives_way: bool = False
    """Takes what room the others leave; at a terminal it is shortened first."""
    may_go: bool = False
    """Left out where a terminal is too narrow for all."""


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """At a terminal as wide as that is; in a pipe as wide as it takes, so that nothing is cut."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 -- see `console`

    table = [[column.title for column in columns], *([single_line(cell) for cell in row] for row in rows)]
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(columns))]
    shown = _fitted(columns, widths) if is_terminal() else list(range(len(columns)))
    for number, row in enumerate(table):
        line = safe_text("")
        for place in shown:
            column, text = columns[place], row[place]
            if cell_len(text) > widths[place]:
                text = set_cell_size(text, widths[place] - 1) + "…"
            padding = " " * (widths[place] - cell_len(text))
            cell = padding + text if column.justify == "right" else text + padding
            line.append(cell if place == shown[-1] else f"{cell}  ", style="bold" if number == 0 else column.style)
        line.rstrip()
        console().print(line, no_wrap=True, overflow="ignore", crop=False)


def _fitted(columns: Sequence[Column], widths: list[int]) -> list[int]:
    """The columns for which there is room; shortens the one that gives way in `widths`."""
    shown = list(range(len(columns)))
    wide = next((place for place in shown if columns[place].gives_way), None)

    def missing() -> int:
        return sum(widths[place] for place in shown) + 2 * (len(shown) - 1) - console().width

    while missing() > 0:
        if wide is not None and widths[wide] > LEAST_WIDTH:
            widths[wide] = max(LEAST_WIDTH, widths[wide] - missing())
            continue
        last = next((place for place in reversed(shown) if columns[place].may_go), None)
        if last is None:
            if wide is not None:
                widths[wide] = max(1, widths[wide] - missing())
            break
        # There is room again, which the shortened one may take.
        shown.remove(last)
        if wide is not None and missing() < 0:
            widths[wide] -= missing()
    return shown


def when(given: object) -> str:
    """How long ago, for a person at a terminal; the time itself for everyone else."""
    moment = parse_time(given)
    if moment is None or not is_terminal():
        return str(given or "")
    seconds = (datetime.now(UTC) - moment).total_seconds()
    if seconds < -60:  # by a clock that was ahead
        return readable_time(given)
    for unit, length in (("year", 31_536_000), ("month", 2_592_000), ("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count != 1 else ''} ago"
    return "just now"


def write_raw(text: str) -> None:
    """Text as it is: for a file or another program."""
    sys.stdout.write(text)


def flush() -> None:
    sys.stdout.flush()


def plain_data(thing: Any) -> Any:
    """A pydantic model, a dataclass or a named tuple as what JSON can say."""
    if hasattr(thing, "model_dump"):
        return thing.model_dump()
    if is_dataclass(thing) and not isinstance(thing, type):
        return asdict(thing)
    return thing._asdict() if hasattr(thing, "_asdict") else thing


class Step(Protocol):
    """Moves a bar on by one; `total` sets its length where that is known only later, and moves nothing."""

    def __call__(self, text: str, total: int | None = None) -> None: ...


@contextmanager
def progress(total: int | None, what: str, *, among_lines: bool = False) -> Iterator[Step]:
    """On standard error; with `among_lines` where they are printed, below them. `done(text)` moves it on by one."""
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
