"""Words typed, calls made, lines printed."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carrel import __version__
from carrel.cli.exit_codes import run_cli

if TYPE_CHECKING:
    app: typer.Typer

_WORDS = {
    "demo": "demo.demo",
    "run": "run.run",
    "repl": "repl.repl",
    "sessions": "sessions.app",
    "tools": "tools.app",
    "workflows": "workflows.app",
    "artifacts": "artifacts.app",
    "deps": "deps.app",
    "store": "store.app",
    "datasets": "datasets.app",
    "task": "task.app",
    "serve": "serve.serve",
    "keys": "keys.app",
    "mcp": "mcp.mcp",
    "doctor": "doctor.doctor",
}
"""Each first word, and the file of this room with what it does."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carrel {__version__}")
        raise typer.Exit


def _carrel(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def app_with(words: Sequence[str]) -> typer.Typer:
    """The command line with these first words."""
    made = typer.Typer(
        name="carrel",
        help="A private place for every AI agent to work: what was said, what is known, what was made.",
        # Plain help: it comes in a fraction of the time, reads the same in a pipe, and needs no colour.
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(invoke_without_command=True)(_carrel)
    for word in words:
        file, _, name = _WORDS[word].partition(".")
        found = getattr(import_module(f"carrel.cli.{file}"), name)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=word)
        else:
            made.command(word)(found)
    return made


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'carrel.cli' has no attribute {name!r}")
    return app_with(list(_WORDS))


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    # Loading a command makes many objects and no garbage: looked through as often as usual, it takes a fifth longer.
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    # Who types a command async_command for that one to load, and not for all the others.
    typed = sys.argv[1:2]
    return run_cli(lambda: app_with(typed if typed and typed[0] in _WORDS else list(_WORDS)))
