"""Python processes that have imported carrel already: a program of a test is a fork of one and starts in milliseconds.

What the imports cost is measured in bench/."""

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

from tests.support.fork_server import NUMBER, request_fork, serve

FORK_SERVER = Path(__file__).with_name("fork_server.py")


class ForkedProcess:
    """A running program with the methods of Popen; `stdout` is set when a pipe was requested."""

    def __init__(self, status: int, stdout: IO[str] | None) -> None:
        self._status = status
        self.stdout = stdout
        self.pid = _number(status)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self.returncode if self.returncode is not None else self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(["carrel"], timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        with selectors.DefaultSelector() as wait:
            wait.register(self._status, selectors.EVENT_READ)
            if not wait.select(timeout):
                return None
        self.returncode = _number(self._status)
        os.close(self._status)
        return self.returncode


class ForkServer:
    """A process that forks on request (fork_server.py)."""

    def __init__(self, command: Sequence[object], **how: Any) -> None:
        self.address = f"carrel-tests-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.bind(f"\0{self.address}")
            arguments = [*map(str, command), str(requests.fileno())]
            # It exits when its standard input ends, which is when this process exits at the latest.
            self._process = subprocess.Popen(arguments, pass_fds=[requests.fileno()], stdin=subprocess.PIPE, **how)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def start(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str],
        cwd: Path | None = None,
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] | None = None,
        session: bool = False,
        more: Sequence[int] = (),
    ) -> ForkedProcess:
        """Start a fork as Popen starts a program, by default with an empty standard input. `session` makes it a session
        leader; `more` are further descriptors for it."""
        with open(os.devnull, "rb") as nothing:
            ours, theirs = os.pipe() if stdout == subprocess.PIPE else (-1, _fd(stdout))
            status, theirs_status = os.pipe()
            fds = [nothing.fileno() if stdin is None else _fd(stdin), theirs, 2 if stderr is None else _fd(stderr)]
            everything = [theirs_status, *fds, *more]
            request_fork(self.address, [*map(str, arguments)], env, str(cwd or Path.cwd()), everything, session)
            os.close(theirs_status)
            if ours >= 0:
                os.close(theirs)
        return ForkedProcess(status, open(ours, encoding="utf-8") if ours >= 0 else None)


class PreloadedPython(ForkServer):
    """One that has imported all of carrel. Arguments are those that follow `python`: `-m carrel …`."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "tests.support.preloaded_python"], cwd=FORK_SERVER.parents[2])

    @property
    def python(self) -> list[str]:
        """The start of a command instead of `python`, for code that starts the program itself."""
        return [sys.executable, "-IS", str(FORK_SERVER), self.address]

    def run(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str],
        cwd: Path | None = None,
        timeout: float = 60,
        stdin: str = "",
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program to its end, as `subprocess.run` does."""
        with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            input_file.write(stdin.encode())
            input_file.seek(0)
            process = self.start(arguments, env, cwd, stdin=input_file, stdout=out, stderr=err)
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                raise
            output = []
            for file in (out, err):
                file.seek(0)
                output.append(file.read().decode("utf-8").replace("\r\n", "\n"))
        return subprocess.CompletedProcess([*map(str, arguments)], code, *output)


@functools.cache
def preloaded_python() -> PreloadedPython:
    """The one of this test worker; it exits when the worker does."""
    return PreloadedPython()


def _fd(file: int | IO[bytes]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _number(pipe: int) -> int:
    data = b""
    while len(data) < NUMBER:
        piece = os.read(pipe, NUMBER - len(data))
        assert piece, "the fork server has exited"
        data += piece
    return int.from_bytes(data, "big", signed=True)


# --- in the process ---------------------------------------------------------------------------------------------------


def load() -> None:
    import carrel  # noqa: PLC0415 -- the test process has no use for all of it
    from carrel import cli, server  # noqa: PLC0415

    assert all([getattr(carrel, name) for name in carrel.__all__] + [getattr(server, name) for name in server.__all__])
    assert cli.app
    # Modules are never garbage. Frozen, they are not visited by the collector, so forks share their memory.
    gc.freeze()


def run_module(arguments: Sequence[str]) -> None:
    """Run a module as `python -m` does, with the current standard streams."""
    sys.stdin = sys.__stdin__ = open(0)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w")  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace")  # type: ignore[misc]  # noqa: SIM115
    dash_m, module, *rest = arguments
    assert dash_m == "-m"
    sys.argv, sys.path[0] = ["-m", *rest], os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    load()
    fork = serve(socket.socket(fileno=int(sys.argv[1])))
    if fork is not None:
        run_module(fork[0])
