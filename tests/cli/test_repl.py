"""`carrel repl` at a real terminal, and with lines from a pipe."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import DEADLINE, Terminal
from tests.execution.processes import descendants, wait_gone
from tests.session.conftest import DOUBLE, ECHO
from tests.support.preloaded_python import preloaded_python

CTRL_C, CTRL_D, TAB, UP = "\x03", "\x04", "\t", "\x1b[A"


@pytest.fixture
def base(home: Path) -> Path:
    for name, text in {"tools/echo.yaml": ECHO, "workflows/double.py": DOUBLE}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return home


class Prompt:
    """What is typed, and what is shown after it."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._seen = 0
        self.until(">>> ")

    def until(self, text: str) -> str:
        """What came since the last time, up to this text."""
        deadline = time.monotonic() + DEADLINE
        while (at := self.terminal.shown.find(text, self._seen)) < 0:
            assert self.terminal._read(deadline), f"never showed {text!r}, only:\n{self.terminal.shown[self._seen :]}"
        came, self._seen = self.terminal.shown[self._seen : at], at + len(text)
        return came

    def type(self, line: str, then: str = ">>> ") -> str:
        self.terminal.press(line + "\n")
        return self.until(then)

    def give_up(self) -> None:
        """Press Ctrl-C at a prompt, once readline reads keys: it shows the prompt a moment earlier."""
        until = time.monotonic() + DEADLINE
        while not self.terminal.listens():
            assert time.monotonic() < until, "the prompt does not read keys"
            time.sleep(0.01)
        time.sleep(0.3)
        self.terminal.press(CTRL_C)
        self.until(">>> ")


@pytest.fixture
def prompt(at_terminal: Any, base: Path) -> Prompt:
    return Prompt(at_terminal("repl", columns=200))


def test_results_output_tools_and_commands(prompt: Prompt) -> None:
    assert "42" in prompt.type("6 * 7")
    prompt.type("x = [1, 2]")
    assert "[1, 2]" in prompt.type("x")
    assert "'said\\n'" in prompt.type("tools.echo.say(words='sa' + 'id')")
    assert "8" in prompt.type("workflows.double(4)")
    assert "printed" in prompt.type("print('prin' + 'ted')")
    error = prompt.type("1/0")
    assert "ZeroDivisionError" in error
    assert "carrel/cli" not in error
    assert "SyntaxError" in prompt.type("1 +* 2")
    assert "there" in prompt.type("!echo the''re")
    assert "exit code 3" in prompt.type("!exit 3")
    prompt.type("import asyncio")
    assert "'awaited'" in prompt.type("await asyncio.sleep(0, 'awai' + 'ted')")


def test_several_lines_are_one_input(prompt: Prompt) -> None:
    prompt.type("def f(n):", then="... ")
    prompt.type("    return n * 3", then="... ")
    prompt.type("")
    assert "21" in prompt.type("f(7)")


def test_a_pasted_text_is_one_input(prompt: Prompt) -> None:
    pasted = "def f(n):\n    n = n * 3\n\n    return n\n\nprint('pas' + 'ted', f(7))"
    prompt.terminal.press(f"\x1b[200~{pasted}\x1b[201~")
    assert "pasted 21" in prompt.type("")


def test_exit_leaves(prompt: Prompt) -> None:
    prompt.terminal.press("exit()\n")
    assert prompt.terminal.end() == 0
    assert "SystemExit" not in prompt.terminal.shown


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""  # it has ended meanwhile


def test_ctrl_c_stops_the_code_only(prompt: Prompt) -> None:
    prompt.type("kept = 'still' + ' here'")
    prompt.terminal.press("print('run' + 'ning')\n")
    prompt.until("running")
    prompt.until(">>> ")
    prompt.terminal.press("for i in range(10**9): i or print('in the', 'loop')\n\n")
    prompt.until("in the loop")
    prompt.terminal.press(CTRL_C)
    assert "KeyboardInterrupt" in prompt.until(">>> ")
    assert "still here" in prompt.type("kept")
    prompt.terminal.press("!sleep 3600\n")
    until = time.monotonic() + DEADLINE
    while not any(command_of(pid) == "sleep 3600" for pid in descendants(prompt.terminal.process.pid)):
        assert time.monotonic() < until, "the command was not begun"
        time.sleep(0.01)
    prompt.terminal.press(CTRL_C)
    prompt.until(">>> ")
    assert "still here" in prompt.type("kept")


def test_ctrl_c_at_the_prompt_discards_the_line(prompt: Prompt) -> None:
    prompt.give_up()
    prompt.terminal.press("nonsense that is never run")
    prompt.give_up()
    prompt.type("def f():", then="... ")
    prompt.give_up()
    assert "2" in prompt.type("1 + 1")


def test_ctrl_d_ends_the_session_and_its_processes(prompt: Prompt) -> None:
    process = prompt.terminal.process
    prompt.type("import subprocess; p = subprocess.Popen(['sleep', '3600'])")
    everything = descendants(process.pid)
    assert everything
    prompt.terminal.press(CTRL_D)
    assert prompt.terminal.end() == 0
    assert wait_gone(everything, 20) == []


def test_tab_completes(prompt: Prompt) -> None:
    prompt.type("long_name_of_mine = 'found' + ' it'")
    prompt.terminal.press("long_na" + TAB)
    prompt.until("long_name_of_mine")
    assert "found it" in prompt.type("")
    prompt.terminal.press("tools.ec" + TAB)
    prompt.until("tools.echo")
    prompt.terminal.press(".s" + TAB)
    prompt.until(".say")
    assert "completed" in prompt.type("(words='comp' + 'leted')")
    prompt.terminal.press("workflows.dou" + TAB)
    prompt.until("workflows.double")
    assert "14" in prompt.type("(7)")
    prompt.terminal.press("artifacts.lo" + TAB)
    prompt.until("artifacts.load")
    prompt.give_up()
    # Python's own names, and the beginning of a line; a variable that no letters can name is none.
    prompt.type("globals()['enume\\x1b]0;x\\x07'] = 1")
    prompt.terminal.press("enumer" + TAB)
    prompt.until("enumerate")
    assert "class 'enumerate'" in prompt.type("")
    prompt.type("if True:", "... ")
    prompt.terminal.press(TAB)
    prompt.type("print('set' + ' in')", "... ")
    assert "set in" in prompt.type("")


def test_the_history_is_kept(at_terminal: Any, base: Path) -> None:
    first = Prompt(at_terminal("repl"))
    first.type("'remem' + 'bered'")
    first.terminal.press(CTRL_D)
    assert first.terminal.end() == 0
    kept = base / "repl-history"
    assert "'remem' + 'bered'" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    second = Prompt(at_terminal("repl"))
    second.terminal.press(UP)
    second.until("'remem' + 'bered'")
    assert "'remembered'" in second.type("")


def test_control_characters_in_output_are_made_harmless(prompt: Prompt) -> None:
    shown = prompt.type(r"print('\x1b[2J' + '\x1b]0;owned\x07' + 'safe')")
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "safe" in shown


def piped(lines: str, environment: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return preloaded_python().run(["-m", "carrel", "repl"], environment, folder, DEADLINE, stdin=lines)


def test_lines_from_a_pipe(environment: dict[str, str], base: Path, tmp_path: Path) -> None:
    done = piped("x = 20\nx + 1\ndef f(n):\n    return n * 2\n\nf(x)\n1/0\n!echo there\n'last'", environment, tmp_path)
    assert done.returncode == 0
    assert done.stdout == "21\n40\nthere\n'last'\n"
    assert "ZeroDivisionError" in done.stderr
    assert ">>>" not in done.stdout
    assert not (base / "repl-history").exists()


@pytest.mark.parametrize("lines", ["", "\n\n", "   \n", "def f():\n"])
def test_short_input_from_a_pipe(environment: dict[str, str], base: Path, tmp_path: Path, lines: str) -> None:
    done = piped(lines, environment, tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    assert "carrel/cli" not in done.stderr


def test_an_invalid_definition_is_skipped_with_a_note(environment: dict[str, str], base: Path, tmp_path: Path) -> None:
    (base / "tools" / "wrong.yaml").write_text("name: wrong\nkommand: x\n")
    done = piped("1\n", environment, tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("note: ")
    assert "wrong.yaml" in done.stderr
    assert done.stderr.count("\n") == 1
