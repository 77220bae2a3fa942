"""A Python that has loaded all of carrel: each program is a fork of that, a process of its own which starts in
milliseconds. What loading takes is measured elsewhere."""

import fcntl
import functools
import gc
import json
import os
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.forked import LONGEST, NUMBER, ask

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


class Warm:
    """The process, as a test sees it. Words are those that would follow `python`: `-m carrel …`, `-c …`, or a file."""

    def __init__(self) -> None:
        self.address = f"carrel-tests-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
            asked.bind(f"\0{self.address}")
            # It ends when its standard input does, which is with this process.
            command = [sys.executable, "-m", "tests.warm", str(asked.fileno())]
            self._process = subprocess.Popen(
                command, cwd=FORKED.parents[1], pass_fds=[asked.fileno()], stdin=subprocess.PIPE
            )

    @property
    def python(self) -> list[str]:
        """What to begin a command with in place of `python`, where somebody else starts it."""
        return [sys.executable, "-IS", str(FORKED), self.address]

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
    ) -> Started:
        """As Popen does it, with nothing to read on the standard input; `session` makes it the first of one."""
        with open(os.devnull, "rb") as nothing:
            ours, theirs = os.pipe() if stdout == subprocess.PIPE else (-1, _fd(stdout))
            status, told = os.pipe()
            fds = [nothing.fileno() if stdin is None else _fd(stdin), theirs, 2 if stderr is None else _fd(stderr)]
            ask(self.address, [*map(str, words)], env, str(cwd or Path.cwd()), [*fds, told], session)
            os.close(told)
            if ours >= 0:
                os.close(theirs)
        return Started(status, open(ours, encoding="utf-8") if ours >= 0 else None)

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


def serve(asked: socket.socket) -> list[str] | None:
    """A fork for each program, until nobody is there to ask. In a fork: its words."""
    started: dict[int, tuple[int, int]] = {}
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    ready.register(asked, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fd == 0:
                return None
            if key.fd in started:
                pid, told = started.pop(key.fd)
                ready.unregister(key.fd)
                os.close(key.fd)
                _tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(told)
                continue
            request, (*streams, told), _, _ = socket.recv_fds(asked, LONGEST, 4)
            words, env, cwd, session = json.loads(request)
            pid = os.fork()
            if pid == 0:
                ready.close()
                asked.close()
                for fd in [told, *started, *(told for _, told in started.values())]:
                    os.close(fd)
                become(streams, env, cwd, session)
                return [str(word) for word in words]
            for fd in streams:
                os.close(fd)
            _tell(told, pid)
            watched = os.pidfd_open(pid)
            started[watched] = pid, told
            ready.register(watched, selectors.EVENT_READ)


def _tell(pipe: int, number: int) -> None:
    try:
        os.write(pipe, number.to_bytes(NUMBER, "big", signed=True))
    except BrokenPipeError:
        return  # The test did not wait for its end.


def become(streams: Sequence[int], env: Mapping[str, str], cwd: str, session: bool) -> None:
    """What Python and the kernel do for a program that begins."""
    if session:
        os.setsid()
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
        os.close(fd)
    if session and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = sys.__stdin__ = open(0)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def run(words: list[str]) -> None:
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    load()
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    if wanted is not None:
        run(wanted)
