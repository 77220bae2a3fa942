"""The command line: parses arguments, calls the library, prints the result."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carrel import __version__
from carrel.cli.exit_codes import run_cli
from carrel.cli.options import HELP_NAMES, HelpGroup

if TYPE_CHECKING:
    app: typer.Typer

_COMMANDS = {
    "demo": "demo.app",
    "run": "run.app",
    "repl": "repl.app",
    "doctor": "doctor.app",
    "sessions": "sessions.app",
    "tools": "library.tools",
    "workflows": "library.workflows",
    "artifacts": "library.artifacts",
    "deps": "library.deps",
    "store": "store.app",
    "datasets": "datasets.app",
    "task": "task.app",
    "serve": "server.app",
    "gateway": "cluster.app",
    "cluster": "cluster.cluster",
    "web": "server.app",
    "mcp": "server.app",
    "keys": "server.keys",
}
"""The module of each command; only that of the typed one is loaded."""

_EXAMPLES = """\
\b
Examples:
  carrel demo
  carrel run "sum(range(10))"
  carrel sessions show last
  carrel tools list
  carrel task verify demo calc-1 --gold
  carrel serve --port 8765
"""

_RENAMED_OPTIONS = {
    "sessions": {"--data": "--base"},
    "artifacts": {"--out": "--output"},
    "demo": {"--keep": "--output"},
    "task": {"--keep": "--logs"},
    "serve": {"--keep": "--retention", "--warm": "--prewarmed"},
}
"""Names that options had in 0.1; accepted until 0.3."""


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


def make_app(commands: Sequence[str]) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        name="carrel",
        help="A session for every AI agent: a conversation, a sandboxed Python and a workspace.",
        epilog=_EXAMPLES,
        cls=HelpGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=HELP_NAMES,
    )
    app.callback(invoke_without_command=True)(_carrel)
    for target in dict.fromkeys(_COMMANDS[name] for name in commands):
        module, _, name = target.partition(".")
        app.add_typer(getattr(import_module(f"carrel.cli.{module}"), name))
    return app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'carrel.cli' has no attribute {name!r}")
    return make_app(list(_COMMANDS))


def main() -> int:
    """Run the command line of this process; return its exit code."""
    # Loading creates many objects and no garbage; collecting at the default rate would take a fifth longer.
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    typed = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.argv[2:] = _with_new_names(sys.argv[2:], _RENAMED_OPTIONS.get(typed, {}))
    return run_cli(lambda: make_app([typed] if typed in _COMMANDS else list(_COMMANDS)))


def _with_new_names(words: list[str], renamed: dict[str, str]) -> list[str]:
    """Replace the former names of options."""
    result = []
    for word in words:
        name, equals, value = word.partition("=")
        result.append(renamed.get(name, name) + equals + value)
    return result
