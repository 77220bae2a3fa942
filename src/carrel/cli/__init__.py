"""Words typed, calls made, lines printed."""

from typing import Annotated

import typer

from carrel import __version__
from carrel.cli.artifacts import app as artifacts
from carrel.cli.datasets import app as datasets
from carrel.cli.demo import demo
from carrel.cli.deps import app as deps
from carrel.cli.doctor import doctor
from carrel.cli.ending import run_to_its_end
from carrel.cli.keys import app as keys
from carrel.cli.mcp import mcp
from carrel.cli.repl import repl
from carrel.cli.run import run
from carrel.cli.search import app as search
from carrel.cli.serve import serve
from carrel.cli.sessions import app as sessions
from carrel.cli.store import app as store
from carrel.cli.task import app as task
from carrel.cli.tools import app as tools
from carrel.cli.workflows import app as workflows

app = typer.Typer(
    name="carrel",
    help="A private place for every AI agent to work: what was said, what is known, what was made.",
    # Plain help: it comes in a fraction of the time, reads the same in a pipe, and needs no colour.
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(sessions, name="sessions")
app.add_typer(search, name="search")
app.add_typer(tools, name="tools")
app.add_typer(workflows, name="workflows")
app.add_typer(artifacts, name="artifacts")
app.add_typer(deps, name="deps")
app.add_typer(store, name="store")
app.add_typer(datasets, name="datasets")
app.add_typer(task, name="task")
app.add_typer(keys, name="keys")
app.command("demo")(demo)
app.command("run")(run)
app.command("repl")(repl)
app.command("mcp")(mcp)
app.command("serve")(serve)
app.command("doctor")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carrel {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _carrel(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    return run_to_its_end(app)
