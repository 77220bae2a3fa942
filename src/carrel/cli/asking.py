"""Reading what was typed: ages, price tables, files of text, and a yes or no."""

import json
import re
import signal
import sys
from datetime import timedelta
from importlib.util import decode_source
from pathlib import Path

from carrel.cli.ending import TaskFailed, WrongUsage

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
    return WrongUsage(f"{'standard input' if file == '-' else file} is no text in UTF-8")


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
