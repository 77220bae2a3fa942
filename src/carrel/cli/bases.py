"""Which base a command works on, and the session it makes there."""

from collections.abc import AsyncIterator, Callable, Mapping
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
        # The one in a person's own folder is carrel's, and $CARREL_HOME says where that is.
        own = here.absolute() == Path("~/.carrel").expanduser()
        base = here if here.is_dir() and not own else carrel.resolve_carrel_home()
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


def arguments_in(words: list[str], takes: Callable[[str, Any], bool] = lambda name, value: True) -> dict[str, Any]:
    """`name=value` as a call's arguments; a value that is JSON is data, anything else is text.

    `takes`: whether a parameter can be given such data; where it cannot, the text stays a text."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise WrongUsage(f"{word!r} is no argument; write name=value, with a JSON value or plain text")
        value = as_value(text)
        found[name] = value if isinstance(value, str) or takes(name, value) else text
    return found


def as_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def takes_by_schema(schema: Mapping[str, Any]) -> Callable[[str, Any], bool]:
    """By the JSON Schema of a tool's arguments: where a text will do and such data will not, it is a text."""
    properties = schema.get("properties")

    def takes(name: str, value: Any) -> bool:
        kinds = _kinds(properties.get(name)) if isinstance(properties, Mapping) else set()
        return "string" not in kinds or bool(_KINDS[type(value)] & kinds)

    return takes


def takes_by_hints(parameters: list[dict[str, Any]]) -> Callable[[str, Any], bool]:
    """By a workflow's parameters: what is to be a `str` is a text."""
    texts = {"str": None, "str | None": type(None), "None | str": type(None), "Optional[str]": type(None)}
    hints = {str(parameter["name"]): str(parameter["type"]) for parameter in parameters}

    def takes(name: str, value: Any) -> bool:
        return hints.get(name) not in texts or type(value) is texts[hints[name]]

    return takes


_KINDS: dict[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {kind for kind in named or () if isinstance(kind, str)}
    for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        kinds = _kinds(choice)
        if not kinds:
            return set()
        found |= kinds
    return found
