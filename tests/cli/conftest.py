"""The installed command, run for real in a home of its own."""

import asyncio
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from carrel import SessionStore, assistant_message, text_block, user_text_message
from tests.support.preloaded_python import ForkedProcess, preloaded_python

Result = TypeVar("Result")
Carrel = Callable[..., "subprocess.CompletedProcess[str]"]
DEADLINE = 60


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")} | {
        "CARREL_HOME": str(home),
        "TERM": "xterm-256color",
    }


@pytest.fixture
def carrel(environment: dict[str, str], tmp_path: Path) -> Carrel:
    """`carrel("sessions", "list")`: what it printed, and its exit code."""

    def run(*words: object, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
        typed, given = [str(word) for word in words], more.pop("env", {})
        env = environment | given
        if more or any(name.startswith("PYTHON") for name in given):
            done = subprocess.run(
                [*more.pop("through", []), sys.executable, "-m", "carrel", *typed],
                env=env,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                encoding="utf-8",
                timeout=DEADLINE,
                **{"stdin": subprocess.DEVNULL} | more,
            )
        else:
            done = preloaded_python().run(["-m", "carrel", *typed], env, tmp_path, DEADLINE)
        assert done.returncode == code, f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        if code in (1, 2, 3):
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1, "an error is one line"
        return done

    return run


class Terminal:
    """The command at a terminal of a given width: what it shows, and what is typed."""

    def __init__(self, words: list[str], environment: dict[str, str], folder: Path, columns: int) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process: ForkedProcess = preloaded_python().start(
            ["-m", "carrel", *words], environment, folder, **streams, session=True
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + DEADLINE
        while text not in self.shown:
            assert self._read(deadline), f"never showed {text!r}, only:\n{self.shown}"
        return self.shown

    def listens(self) -> bool:
        """Whether the program takes each key as it comes, and waits for one."""
        by_line = termios.tcgetattr(self._ours)[3] & termios.ICANON
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return not by_line and stat.rpartition(")")[2].split()[0] == "S"

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        return self.process.wait(DEADLINE)

    def _read(self, deadline: float) -> bool:
        if not select.select([self._ours], [], [], max(0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"nothing more came after:\n{self.shown}")
        try:
            piece = os.read(self._ours, 65536)
        except OSError:
            return False
        self.shown += piece.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(piece)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@pytest.fixture
def at_terminal(environment: dict[str, str], tmp_path: Path) -> Any:
    """`at_terminal("sessions", "list", columns=80)`."""
    opened: list[Terminal] = []

    def start(*words: object, columns: int = 80, env: dict[str, str] | None = None) -> Terminal:
        opened.append(Terminal([*map(str, words)], environment | (env or {}), tmp_path, columns))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.fixture
def keep(home: Path) -> Callable[[Callable[[SessionStore], Coroutine[Any, Any, Result]]], Result]:
    """Do something with the sessions of this home, as an agent would."""

    def with_store(work: Callable[[SessionStore], Coroutine[Any, Any, Result]]) -> Result:
        async def run() -> Result:
            async with SessionStore(home / "sessions") as store:
                return await work(store)

        return asyncio.run(run())

    return with_store


@pytest.fixture
def stars(keep: Any) -> str:
    """A session of three messages; returns its id."""

    async def write(store: SessionStore) -> None:
        await store.create_session("Stars", session_id="stars", model="m-1", cwd="/home/ada")
        await store.append_message("stars", user_text_message("Why do stars twinkle?"))
        answer = [text_block("Because moving air bends their light.")]
        usage = {"input_tokens": 12, "output_tokens": 9}
        await store.append_message("stars", assistant_message(answer, model="m-1", provider="p", usage=usage))
        await store.append_message("stars", user_text_message("And planets?"))

    keep(write)
    return "stars"
