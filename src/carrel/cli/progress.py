"""A bar for a person at a terminal; nothing for anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from carrel.cli import show


class Step(Protocol):
    """Moves a bar on by one; `total` sets its length where that is known only later, and moves nothing."""

    def __call__(self, text: str, total: int | None = None) -> None: ...


@contextmanager
def progress(total: int | None, what: str, *, among_lines: bool = False) -> Iterator[Step]:
    """On standard error; with `among_lines` where they are printed, below them. `done(text)` moves it on by one."""
    from rich.console import Console  # noqa: PLC0415 -- slow to load
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = show.console() if among_lines else Console(stderr=True)
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def done(text: str, total: int | None = None) -> None:
            told = f"{what}: {show.words(text).plain[:60]}" if text else what
            bar.update(task, advance=0 if total else 1, description=told, total=total)

        yield done
