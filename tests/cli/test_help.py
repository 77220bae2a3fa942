"""Help, version and completion."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_help_and_version(carrel: Any) -> None:
    assert carrel("--version").stdout.startswith("carrel 0.")
    assert carrel("--help").stdout == carrel().stdout
    assert "sessions" in carrel("-h").stdout
    assert carrel("sessions", "--help").stdout == carrel("sessions").stdout
    assert "--entries" in carrel("sessions", "show", "--help").stdout


def test_help_loads_neither_tables_nor_the_store() -> None:
    script = (
        "import sys\nsys.argv = ['carrel', 'sessions', '--help']\nfrom carrel.cli import main\nassert main() == 0\n"
        "print({'rich', 'jinja2', 'numpy', 'sqlite3', 'carrel.conversation.store'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("start", [["-m", "carrel"], ["-m", "carrel.cli"]])
def test_it_can_be_started_as_a_module(start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("carrel ")


def test_the_installed_command_is_the_same() -> None:
    program = Path(sys.executable).parent / "carrel"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("carrel ")


def test_help_lists_the_commands_by_panel_with_examples(carrel: Any) -> None:
    shown = carrel("--help").stdout
    panels = ("Run code:", "Conversations:", "Library:", "Tasks:", "Server:", "Examples:")
    assert [shown.index(panel) for panel in panels] == sorted(shown.index(panel) for panel in panels)
    assert "Example: carrel sessions list" in carrel("sessions", "list", "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "completions"), [("carrel do", ["doctor"]), ("carrel sessions tr", ["tree", "trace"])]
)
def test_bash_completion(carrel: Any, words: str, completions: list[str]) -> None:
    env = {"_CARREL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert carrel(env=env).stdout.split() == completions


def test_completion_can_be_shown_for_a_shell() -> None:
    script = f"{shlex.quote(sys.executable)} -m carrel --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "_CARREL_COMPLETE" in done.stdout
