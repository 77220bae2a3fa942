"""Pythons that have loaded what is wanted: each program is a fork of one, a process of its own which starts in
milliseconds. What loading takes is measured elsewhere."""

import functools
import gc
import os
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.forked import NUMBER, ask, serve

FORKED = Path(__file__).with_name("forked.py")


class Started:
    """A program, as Popen has it; what it prints is in `stdout` where a pipe was asked for."""

    def __init__(self, status: int, stdout: IO[str] | None) -> None:
        self._status = status
        self.stdout = stdout
        self.pid = _number(status)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self.returncode if self.returncode is not None else self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(["carrel"], timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        with selectors.DefaultSelector() as wait:
            wait.register(self._status, selectors.EVENT_READ)
            if not wait.select(timeout):
                return None
        self.returncode = _number(self._status)
        os.close(self._status)
        return self.returncode


class Forks:
    """A process that forks when it is asked to (forked.py), as a test sees it."""

    def __init__(self, command: Sequence[object], **how: Any) -> None:
        self.address = f"carrel-tests-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
            asked.bind(f"\0{self.address}")
            words = [*map(str, command), str(asked.fileno())]
            # It ends when its standard input does, which is with this process at the latest.
            self._process = subprocess.Popen(words, pass_fds=[asked.fileno()], stdin=subprocess.PIPE, **how)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def start(
        self,
        words: Sequence[object],
        env: Mapping[str, str],
        cwd: Path | None = None,
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] | None = None,
        session: bool = False,
        more: Sequence[int] = (),
    ) -> Started:
        """As Popen does it, with nothing to read on the standard input; `session` makes it the first of one, and
        `more` are descriptors for it."""
        with open(os.devnull, "rb") as nothing:
            ours, theirs = os.pipe() if stdout == subprocess.PIPE else (-1, _fd(stdout))
            status, told = os.pipe()
            fds = [nothing.fileno() if stdin is None else _fd(stdin), theirs, 2 if stderr is None else _fd(stderr)]
            ask(self.address, [*map(str, words)], env, str(cwd or Path.cwd()), [told, *fds, *more], session)
            os.close(told)
            if ours >= 0:
                os.close(theirs)
        return Started(status, open(ours, encoding="utf-8") if ours >= 0 else None)


class Warm(Forks):
    """One that has loaded all of carrel. Words are those that would follow `python`: `-m carrel …`."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "tests.warm"], cwd=FORKED.parents[1])

    @property
    def python(self) -> list[str]:
        """What to begin a command with in place of `python`, where somebody else starts it."""
        return [sys.executable, "-IS", str(FORKED), self.address]

    def run(
        self,
        words: Sequence[object],
        env: Mapping[str, str],
        cwd: Path | None = None,
        timeout: float = 60,
        stdin: str = "",
    ) -> "subprocess.CompletedProcess[str]":
        """As subprocess.run does it."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode())
            given.seek(0)
            process = self.start(words, env, cwd, stdin=given, stdout=out, stderr=err)
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                raise
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode("utf-8").replace("\r\n", "\n"))
        return subprocess.CompletedProcess([*map(str, words)], code, *said)


@functools.cache
def warm() -> Warm:
    """The one of this test worker; it ends when the worker does."""
    return Warm()


def _fd(file: int | IO[bytes]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _number(pipe: int) -> int:
    told = b""
    while len(told) < NUMBER:
        piece = os.read(pipe, NUMBER - len(told))
        assert piece, "the loaded Python has ended"
        told += piece
    return int.from_bytes(told, "big", signed=True)


# --- in the process ---------------------------------------------------------------------------------------------------


def load() -> None:
    import carrel  # noqa: PLC0415 -- the test process has no use for all of it
    from carrel import cli, server  # noqa: PLC0415

    assert all([getattr(carrel, name) for name in carrel.__all__] + [getattr(server, name) for name in server.__all__])
    assert cli.app
    # None of it is ever garbage: a fork that need not look through it, at its end at the latest, shares its memory too.
    gc.freeze()


def run(words: Sequence[str]) -> None:
    """As `python -m` does, with the streams that there are now."""
    sys.stdin = sys.__stdin__ = open(0)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    dash_m, module, *rest = words
    assert dash_m == "-m"
    sys.argv, sys.path[0] = ["-m", *rest], os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    load()
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    if wanted is not None:
        run(wanted[0])
