"""Which base a command works on, and the session it makes there."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

import carrel
from carrel.cli.ending import WrongUsage


def group(about: str) -> typer.Typer:
    """A word of the command line with commands of its own; alone, it says which."""
    app = typer.Typer(help=about, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

    @app.callback(invoke_without_command=True)
    def _group(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


Base = Annotated[
    Path | None,
    typer.Option(
        "--base",
        metavar="DIR",
        help="The folder with tools, workflows and artifacts (default: ./.carrel or $CARREL_HOME).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option(min=1, help="At most so many.")]


def chosen(base: Path | None) -> Path:
    """The folder that was named; else `.carrel` here when it is there, else carrel's own."""
    if base is None:
        here = Path(".carrel")
        base = here if here.is_dir() else carrel.resolve_carrel_home()
    if base.exists() and not base.is_dir():
        raise WrongUsage(f"{base} is a file; --base wants a folder")
    return base


@asynccontextmanager
async def opened(base: Path | None, **settings: Any) -> "AsyncIterator[carrel.Session]":
    """A session on that base; its Python is started when something needs it."""
    session = carrel.Session.from_base(chosen(base), **settings)
    try:
        yield session
    finally:
        await session.close()


def arguments_in(words: list[str]) -> dict[str, Any]:
    """`name=value` as a call's arguments; a value that is JSON is data, anything else is text."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise WrongUsage(f"{word!r} is no argument; write name=value, with a JSON value or plain text")
        found[name] = as_value(text)
    return found


def as_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def signature(parameters: Any) -> str:
    """A workflow's parameters, as a person would call it."""
    shown = []
    for parameter in parameters:
        if not isinstance(parameter, Mapping):
            continue
        text = str(parameter["name"])
        if parameter.get("type"):
            text += f": {parameter['type']}"
        if not parameter.get("required", True):
            text += f" = {parameter.get('default')!r}"
        shown.append(text)
    return f"({', '.join(shown)})"
