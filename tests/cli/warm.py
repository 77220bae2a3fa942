"""The command line in a process that has loaded all of it: each command is a fork of that, a process of its own which
starts in milliseconds. What loading takes is measured elsewhere."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class Warm:
    """The process, as a test sees it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def run(
        self, words: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """As subprocess.run does it, with nothing to read on the standard input."""
        with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            asked = json.dumps([list(words), dict(env), str(cwd)]).encode()
            fds = [nothing.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._line, [len(asked).to_bytes(4, "big")], fds)
            self._line.sendall(asked)
            self._line.settimeout(timeout)
            code = int.from_bytes(self._line.recv(4, socket.MSG_WAITALL), "big", signed=True)
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode("utf-8").replace("\r\n", "\n"))
        return subprocess.CompletedProcess(["carrel", *words], code, *said)

    def close(self) -> None:
        self._line.close()
        self._process.wait(60)


def serve(line: socket.socket) -> int:
    """In the process: a fork for each command, until nobody asks any more. In a fork: its exit code."""
    import carrel  # noqa: PLC0415 -- the test process has no use for all of it
    from carrel import cli  # noqa: PLC0415

    loaded = [getattr(carrel, name) for name in carrel.__all__] + [cli.app]
    assert all(loaded)
    while True:
        head, fds, _, _ = socket.recv_fds(line, 4, 3, socket.MSG_WAITALL)
        if not head:
            return 0
        words, env, cwd = json.loads(line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            line.close()
            for place, fd in enumerate(fds):
                os.dup2(fd, place)
                os.close(fd)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
            os.environ.clear()
            os.environ.update(env)
            os.chdir(cwd)
            sys.argv = ["carrel", *words]
            return cli.main()
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
