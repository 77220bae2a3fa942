"""What a caller gives for a command or a file, as a request carries it; a TypeError says what was expected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from carrel.execution.config import is_seconds
from carrel.guest.worker.values import safe_repr


def path_text(path: object, name: str = "path") -> str:
    if isinstance(path, str):
        return path
    if isinstance(path, bytes | os.PathLike):
        return os.fsdecode(path)
    raise TypeError(f"{name} is a text (str) or a path, and this is {_shown(path)}")


def content_bytes(data: object, name: str = "data") -> bytes:
    if isinstance(data, str):
        return data.encode("utf-8")
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"{name} is a text (str) or bytes, and this is {_shown(data)}")


def text(given: object, name: str) -> str:
    if isinstance(given, str):
        return given
    raise TypeError(f"{name} is a text (str), and this is {_shown(given)}")


def whole_number(given: object, name: str) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise TypeError(f"{name} is a whole number, and this is {_shown(given)}")


def command_words(command: object) -> str | list[str]:
    """A text is for a shell; a list is a program and its arguments."""
    if isinstance(command, str):
        return command
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise TypeError(f"command is a text for a shell (str) or a list of words, and this is {_shown(command)}")
    if not command:
        raise ValueError("command is an empty list; its first word is the program")
    return [_word(word, "a word of the command") for word in command]


def seconds(timeout: object) -> float | None:
    """None for no limit."""
    if timeout is None:
        return None
    if not is_seconds(timeout):
        raise TypeError(f"timeout is a number of seconds, or None for no limit, and this is {_shown(timeout)}")
    number = float(timeout)  # type: ignore[arg-type]
    return None if number == float("inf") else max(number, 0.0)


def variables(env: object) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a dict of texts by name, and this is {_shown(env)}")
    return {text(name, "a name in env"): _word(value, f"env[{name!r}]") for name, value in env.items()}


def _word(word: Any, name: str) -> str:
    """Numbers are written as Python does."""
    return str(word) if isinstance(word, int | float) else path_text(word, name)


def _shown(given: object) -> str:
    return f"{safe_repr(given, 60)}, {type(given).__name__}" if given is not None else "None"
