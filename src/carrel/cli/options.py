"""Options and arguments that several commands share, and what their texts mean."""

import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.util import decode_source
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

import carrel
from carrel.cli.exit_codes import TaskFailed, WrongUsage


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


# --- ages, files and questions

_AGE = re.compile(r"(\d+)\s*([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(text: str) -> timedelta:
    """`45m`, `12h`, `30d`, `8w`."""
    found = _AGE.fullmatch(text.strip().lower())
    try:
        if found is not None:
            return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        pass
    raise WrongUsage(f"{text!r} is no age: write a whole number and a unit, as in 45m, 12h, 30d or 8w")


def store_of(store: str | None, data: Path | None) -> str | Path | None:
    """Return the store of a server from `--store`, or from `--data`, which is short for a folder."""
    if store is not None and data is not None:
        raise WrongUsage("--data is the same as --store with a folder; give one of them")
    return store if store is not None else data


def python_in(file: str) -> str:
    """Python in a file, or from standard input for `-`: in the encoding that it names, else UTF-8."""
    raw = _content(file)
    try:
        return decode_source(raw)
    except (SyntaxError, ValueError):
        raise _no_text(file) from None


def text_in(file: str) -> str:
    """Text in a file, or from standard input for `-`."""
    try:
        return _content(file).decode("utf-8")
    except UnicodeDecodeError:
        raise _no_text(file) from None


def _content(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (FileNotFoundError, IsADirectoryError) as problem:
        raise WrongUsage(f"{file}: {problem.strerror}") from None


def _no_text(file: str) -> WrongUsage:
    return WrongUsage(f"{'standard input' if file == '-' else file} is not text in UTF-8")


def prices_in(path: Path) -> dict[str, dict[str, float]]:
    """A price table; each fault is named."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise WrongUsage(f"there is no price file {path}") from None
    except (ValueError, RecursionError) as problem:
        raise WrongUsage(f"{path} is no JSON: {problem}") from None
    if not isinstance(table, dict):
        raise WrongUsage(f"{path}: a price table is an object with a model's name for each key")
    for model, price in table.items():
        if not isinstance(price, dict):
            raise WrongUsage(f"{path}: the price of {model!r} is an object like {{'input': 3, 'output': 15}}")
        for name, amount in price.items():
            if name not in ("input", "output", "cache_read", "cache_write"):
                raise WrongUsage(f"{path}: {model!r} has {name!r}; known are input, output, cache_read, cache_write")
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
                raise WrongUsage(f"{path}: the {name} price of {model!r} is a number from 0, not {amount!r}")
    return table


def confirmed(question: str) -> None:
    """Ask a person; ends the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise WrongUsage("nobody can be asked here (no terminal); --yes does it without asking")
    # A running loop only notes Ctrl-C and goes on waiting for the answer: ours is there before the question.
    noted = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
    finally:
        signal.signal(signal.SIGINT, noted)
    if answer.strip().lower() not in ("y", "yes"):
        raise TaskFailed("nothing was changed")
