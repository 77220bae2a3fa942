"""Groups, commands and options that are shared by all commands, and the parsing of their values."""

import inspect
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.util import decode_source
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import typer
from typer.core import TyperGroup

import carrel
from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command

Function = TypeVar("Function", bound=Callable[..., Any])

# --- groups and commands --------------------------------------------------------------------------------------------

RUN, CONVERSATIONS, LIBRARY, TASKS, SERVER = "Run code", "Conversations", "Library", "Tasks", "Server"
"""The panels of `carrel --help`."""
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class HelpGroup(TyperGroup):
    """Lists its commands by panel. Plain text: rich would take longer to load than most commands take to run."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        width = formatter.width - 6 - max(map(len, self.commands))
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(panel, []).append((name, command.get_short_help_str(width)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def group(name: str, about: str, *, panel: str, example: str) -> typer.Typer:
    """Return a command with commands of its own; without one of them it prints its help."""
    app = typer.Typer(
        name=name,
        help=about,
        epilog=f"Example: {example}",
        cls=HelpGroup,
        rich_markup_mode=None,
        context_settings=HELP_NAMES,
    )

    @app.callback(invoke_without_command=True, rich_help_panel=panel)
    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def command(app: typer.Typer, name: str, *, example: str, panel: str | None = None) -> Callable[[Function], Function]:
    """Register a function, asynchronous or not, as a command; its help shows the example, which the tests run."""

    def register(function: Function) -> Function:
        called = async_command(function) if inspect.iscoroutinefunction(function) else function
        app.command(name, epilog=f"Example: {example}", rich_help_panel=panel)(called)
        return function

    return register


# --- options --------------------------------------------------------------------------------------------------------

Base = Annotated[
    Path | None,
    typer.Option(
        "--base",
        metavar="DIR",
        help="The base folder. Default: $CARREL_HOME, else ./.carrel if it exists, else ~/.carrel.",
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="A session: its id, the start of its id, or `last`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogRequests = Annotated[
    bool, typer.Option("--log-requests", help="Print a line with time and id for each request to standard error.")
]
Limit = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number to show.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
OlderThan = Annotated[str, typer.Option(metavar="AGE", help="An age: 12h, 30d or 8w.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time limit; 0 for none.")]
Network = Annotated[bool, typer.Option("--network/--no-network", help="Allow network access.")]
SessionName = Annotated[
    str | None,
    typer.Option("--session", metavar="NAME", help="Continue the session with this name, or begin it."),
]
Workers = Annotated[int, typer.Option(metavar="N", min=1, help="Number of samples processed at the same time.")]
DatasetsFolder = Annotated[
    Path | None,
    typer.Option("--datasets", metavar="DIR", help="The folder of datasets. Default: BASE/datasets, and the demo."),
]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="For unpacked files. Default: BASE/cache.")
]


def resolve_base(base: Path | None, *, must_exist: bool = False) -> Path:
    """Return the base folder: `--base`, else `$CARREL_HOME`, else `./.carrel` if it exists, else `~/.carrel`."""
    if base is not None:
        return existing_folder(base, "--base", must_exist=must_exist)
    here = Path(".carrel")
    if not os.environ.get("CARREL_HOME", "").strip() and here.is_dir():
        return here.absolute()
    return existing_folder(carrel.resolve_carrel_home(), "$CARREL_HOME")


def existing_folder(path: Path, option: str, *, must_exist: bool = False) -> Path:
    """Return a folder named by an option; a file, or with `must_exist` a missing folder, is wrong usage."""
    path = path.expanduser()
    if path.exists() and not path.is_dir():
        raise WrongUsage(f"{option}: {path} is a file, not a folder")
    if must_exist and not path.exists():
        raise WrongUsage(f"{option}: there is no folder {path}; check the path")
    return path


@asynccontextmanager
async def open_session(
    base: Path | None, *, must_exist: bool = True, **settings: Any
) -> "AsyncIterator[carrel.Session]":
    """Open a session on a base folder; an invalid tool file is skipped with a note.

    With `must_exist`, a missing folder given by `--base` is wrong usage, not an empty base."""
    session = carrel.Session.from_base(resolve_base(base, must_exist=must_exist), on_error="skip", **settings)
    try:
        yield session
    finally:
        await session.close()


# --- arguments of tools and workflows -------------------------------------------------------------------------------


def parse_arguments(words: list[str], accepts: Callable[[str, Any], bool] = lambda name, value: True) -> dict[str, Any]:
    """Return `name=value` words as arguments: a JSON value is data, anything else is text.

    `accepts` returns whether a parameter accepts a value; if not, the text is passed unchanged."""
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise WrongUsage(f"{word!r} is not an argument; write NAME=VALUE, where VALUE is JSON or text")
        value = _parse_value(text)
        arguments[name] = value if isinstance(value, str) or accepts(name, value) else text
    return arguments


def _parse_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def accepted_by_schema(schema: Mapping[str, Any]) -> Callable[[str, Any], bool]:
    """Return a check by the JSON Schema of a tool: a value is refused if only text is allowed."""
    properties = schema.get("properties")

    def accepts(name: str, value: Any) -> bool:
        types = _allowed_types(properties.get(name)) if isinstance(properties, Mapping) else set()
        return "string" not in types or bool(_JSON_TYPES[type(value)] & types)

    return accepts


def accepted_by_hints(parameters: list[dict[str, Any]]) -> Callable[[str, Any], bool]:
    """Return a check by the type hints of a workflow: a parameter with the hint `str` accepts only text."""
    optional = {"str": None, "str | None": type(None), "None | str": type(None), "Optional[str]": type(None)}
    hints = {str(parameter["name"]): str(parameter["type"]) for parameter in parameters}

    def accepts(name: str, value: Any) -> bool:
        return hints.get(name) not in optional or type(value) is optional[hints[name]]

    return accepts


_JSON_TYPES: dict[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}


def _allowed_types(schema: Any) -> set[str]:
    """Return the types that a schema allows; empty for any."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {name for name in named or () if isinstance(name, str)}
    for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        allowed = _allowed_types(choice)
        if not allowed:
            return set()
        types |= allowed
    return types


# --- ages, files and confirmation ----------------------------------------------------------------------------------

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks", "": "days"}


def parse_age(text: str) -> timedelta:
    """Return the duration of `90s`, `45m`, `12h`, `30d` or `8w`; a number without a unit means days."""
    match = _AGE.fullmatch(text.strip().lower())
    try:
        if match is not None:
            return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        pass
    raise WrongUsage(f"{text!r} is not an age: write a number and a unit, such as 45m, 12h, 30d or 8w")


def read_python(file: str) -> str:
    """Return the Python in a file, or in standard input for `-`: in the encoding that it declares, else UTF-8."""
    data = _read(file)
    try:
        return decode_source(data)
    except (SyntaxError, ValueError):
        raise _not_text(file) from None


def read_text(file: str) -> str:
    """Return the text in a file, or in standard input for `-`."""
    try:
        return _read(file).decode("utf-8")
    except UnicodeDecodeError:
        raise _not_text(file) from None


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (FileNotFoundError, IsADirectoryError) as problem:
        raise WrongUsage(f"{file}: {problem.strerror}") from None


def _not_text(file: str) -> WrongUsage:
    return WrongUsage(f"{'standard input' if file == '-' else file} is not text in UTF-8")


def read_json(path: Path) -> Any:
    """Return the JSON in a file."""
    try:
        return json.loads(read_text(str(path)))
    except (ValueError, RecursionError) as problem:
        raise WrongUsage(f"{path} is not valid JSON: {problem}") from None


def confirm(question: str) -> None:
    """Ask a yes/no question on the terminal; any answer but yes ends the command."""
    if not sys.stdin.isatty():
        raise WrongUsage("there is no terminal to ask for confirmation; --yes does it without asking")
    # The event loop's own handler would only cancel the task, and the question would keep waiting for an answer.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
    finally:
        signal.signal(signal.SIGINT, previous)
    if answer.strip().lower() not in ("y", "yes"):
        raise TaskFailed("nothing was changed")


def open_store(base: Path | None, *, must_exist: bool = True, redact: bool = False) -> "carrel.SessionStore":
    """Open the sessions of a base folder; a folder that contains sessions itself is accepted too."""
    folder = resolve_base(base, must_exist=must_exist)
    is_sessions_folder = not (folder / "sessions").is_dir() and any(folder.glob("*/messages.jsonl"))
    return carrel.SessionStore(
        folder if is_sessions_folder else folder / "sessions", redact=carrel.redact_secrets if redact else None
    )
