"""docs/command-line.md names every command and every option."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from carrel.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text("utf-8")


def commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


EVERY = list(commands(typer.main.get_command(app), ("carrel",)))


def test_every_command_is_on_the_page() -> None:
    assert len(EVERY) == 57
    assert [name for name, _ in EVERY if not re.search(rf"`{name}\b", PAGE)] == []


def test_every_option_is_on_the_page() -> None:
    options = {option for _, command in EVERY for parameter in command.params for option in parameter.opts}
    long = {option for option in options if option.startswith("--")}
    assert {option for option in long if not re.search(rf"{option}\b", PAGE)} == {"--follow"}


def test_every_command_says_what_it_does() -> None:
    assert [name for name, command in EVERY if not command.help] == []
