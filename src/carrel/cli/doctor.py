"""`carrel doctor`: what this machine can do for a sandbox and for containers, what not, why, and how to get it."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer

from carrel.cli.exit_codes import MACHINE_LACKS
from carrel.cli.output import console, print_json, print_text, safe_text
from carrel.embedding import choose_embedder
from carrel.execution.capabilities import Part, can_confine, engine_parts, probe


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what of the sandbox is in force here, and what the machine's owner can do about the rest."""
    parts, containers = probe(), engine_parts()
    possible = can_confine(parts)
    if as_json:
        told = {"parts": [asdict(part) for part in parts], "containers": [asdict(part) for part in containers]}
        print_json({"sandbox": possible, **told, "embedder": _embedder()})
    else:
        _print_table((*parts, *containers))
        print_text()
        print_text(_verdict(parts, possible), "bold" if possible else "bold red")
        speed = "with numpy" if find_spec("numpy") else "without numpy, which would make it faster"
        print_text(f"Search by meaning uses the embedder {_embedder()}, {speed}; `embedder=` chooses another.")
    if not possible:
        raise typer.Exit(MACHINE_LACKS)


def _embedder() -> str:
    """Return the name of the embedder that sessions and storages use if they are given none."""
    embedder = choose_embedder(None)
    return embedder.name if embedder is not None else "none"


def _verdict(parts: tuple[Part, ...], possible: bool) -> str:
    missing = [part for part in parts if not part.in_force]
    if not possible:
        return "No sandbox is possible here: code runs in a process of its own, and sees what you see."
    if missing:
        return f"Code is sandboxed here; {len(missing)} of {len(parts)} parts are missing."
    return "Code is sandboxed here, with every part in force."


def _print_table(parts: tuple[Part, ...]) -> None:
    from rich.table import Table  # noqa: PLC0415 -- slow to load, and `--json` does without

    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "what", "why not", "how to get it"):
        table.add_column(name, overflow="fold")
    for part in parts:
        mark = safe_text("yes", "green") if part.in_force else safe_text("no", "red")
        table.add_row(mark, safe_text(part.what), safe_text(part.why), safe_text(part.how_to_get_it))
    console().print(table)
