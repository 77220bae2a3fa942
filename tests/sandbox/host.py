"""The host's side of the sandbox, as small as it can be: starts a real zygote and talks to real sessions."""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from carrel.guest.channel import Channel, ChannelError

OTHER_USER = 65534


def readable(name: str) -> Path:
    """The copy of `guest` or `program` that every user can read; tests/conftest.py makes it."""
    return Path(os.environ["CARREL_TESTS_READABLE"]) / name


class Refused(Exception):
    """The zygote could not start a session; holds its answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(str(answer))
        self.answer = answer


FORK = """
import os, socket
connection.sendall(b'{}\\n')
_, ends, _, _ = socket.recv_fds(connection, 1, 3)
child = settings["enter_fork"]()
if child == 0:
    for number in (1, 2):
        os.dup2(ends[number], number)
    os.close(connection.detach())
    os.close(ends[1]); os.close(ends[2])
    settings["enter_fork"].reseed()
    serve(socket.socket(fileno=ends[0]), names)
for end in ends:
    os.close(end)
answer = child
"""


class InitGone(AssertionError):
    """Nothing more comes from init."""


class Session:
    """One session, seen from outside."""

    def __init__(self, host: Zygote, settings: dict[str, Any]) -> None:
        self.line, line = socket.socketpair()
        control, theirs = socket.socketpair()
        self.control = Channel(control)
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.control.send({"op": "begin", "settings": settings})
        settings = {name: value for name, value in settings.items() if name != "env"}
        self.answer = host.spawn(settings, [line.fileno(), theirs.fileno(), out, err])
        for end in (line, theirs):
            end.close()
        os.close(out)
        os.close(err)
        if self.answer["op"] != "spawned":
            self.close()
            raise Refused(self.answer)
        self.pid: int = self.answer["pid"]
        self.greet()

    def greet(self) -> None:
        self.stream = self.line.makefile("rb")
        self.line.settimeout(60)
        self.ready = json.loads(self.stream.readline())
        self.hello, (self.worker,) = self.hear()

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """The next record of init."""
        self.control.socket.settimeout(60)
        try:
            return self.control.read()
        except ChannelError as problem:
            raise InitGone from problem

    def again(self) -> None:
        """Another worker in the same place."""
        self.line.close()
        self.stream.close()
        for descriptor in (self.stdout, self.stderr, self.worker):
            os.close(descriptor)
        self.line, line = socket.socketpair()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.control.send({"op": "restart", "id": 9}, (line.fileno(), out, err))
        line.close()
        os.close(out)
        os.close(err)
        self.greet()

    def serve_commands(self, user: str = "agent") -> CommandServer:
        """Start the second process of the session, which runs commands for the host."""
        line, theirs = socket.socketpair()
        stdout, out = os.pipe()
        self.control.send({"op": "serve_commands", "id": 11, "user": user}, (theirs.fileno(), out, out))
        theirs.close()
        os.close(out)
        record, descriptors = self.hear()
        if record["op"] != "serving":
            line.close()
            os.close(stdout)
            raise Refused(record)
        (pidfd,) = descriptors
        return CommandServer(line, stdout, pidfd, record["pid"])

    def fork(self) -> Session:
        """A live fork: the same variables and files, in a place of its own."""
        fork = Session.__new__(Session)
        fork.line, line = socket.socketpair()
        control, theirs = socket.socketpair()
        fork.control = Channel(control)
        self.control.send({"op": "fork", "id": 7}, (theirs.fileno(),))
        theirs.close()
        answer, _ = self.hear()
        if answer["op"] != "fork_ready":
            fork.line.close()
            line.close()
            fork.control.close()
            raise Refused(answer)
        fork.stdout, out = os.pipe()
        fork.stderr, err = os.pipe()
        self.line.sendall(json.dumps({"code": FORK}).encode() + b"\n")
        if self.stream.readline() != b"{}\n":
            raise InitGone("the worker ended before it was forked")
        socket.send_fds(self.line, [b"x"], [line.fileno(), out, err])
        answer = json.loads(self.stream.readline())
        line.close()
        os.close(out)
        os.close(err)
        if "value" not in answer:
            fork.close()
            raise Refused(answer)
        fork.greet()
        return fork

    def run(self, code: str) -> dict[str, Any]:
        """What came of the code inside; {"error": "Gone"} when the worker died of it."""
        try:
            self.line.sendall(json.dumps({"code": code}).encode() + b"\n")
            text = self.stream.readline()
        except (ConnectionResetError, BrokenPipeError):
            text = b""
        return json.loads(text) if text else {"error": "Gone", "errno": None, "message": self.errors()}

    def value(self, code: str) -> Any:
        reply = self.run(code)
        assert "value" in reply, reply
        return reply["value"]

    def errors(self) -> str:
        ready, _, _ = select.select([self.stderr], [], [], 0.2)
        return os.read(self.stderr, 65536).decode(errors="replace") if ready else ""

    def close(self) -> None:
        """Let go of everything; the session ends by that."""
        self.line.close()
        if hasattr(self, "stream"):
            self.stream.close()
        self.control.close()
        for name in ("stdout", "stderr", "worker"):
            descriptor = self.__dict__.pop(name, None)
            if descriptor is not None:
                os.close(descriptor)
        if hasattr(self, "pid"):
            wait_gone(self.pid)


class CommandServer:
    """The host's end of the process that was started by `serve_commands`."""

    def __init__(self, line: socket.socket, stdout: int, pidfd: int, pid: int) -> None:
        self.line, self.stdout, self.pidfd, self.pid = line, stdout, pidfd, pid
        self.stream = line.makefile("rb")
        line.settimeout(60)
        self.ready = json.loads(self.stream.readline())

    def value(self, code: str) -> Any:
        self.line.sendall(json.dumps({"code": code}).encode() + b"\n")
        reply = json.loads(self.stream.readline())
        assert "value" in reply, reply
        return reply["value"]

    def close(self) -> None:
        self.stream.close()
        self.line.close()
        os.close(self.stdout)
        os.close(self.pidfd)


@functools.cache
def apart() -> list[str]:
    """How to start a zygote with mounts of its own, where that can be: it discards what it has built ahead whenever
    anybody on this machine mounts something."""
    command = ["unshare", "--mount"]
    return command if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0 else []


class Zygote:
    """A zygote started as the host would, as root or as another user."""

    def __init__(
        self, *, user: int | None = None, preload: list[str] | None = None, python: str = sys.executable, **setup: Any
    ) -> None:
        ours, theirs = socket.socketpair()
        self.control = Channel(ours)
        self.number = 0
        drop = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command = [*apart(), *drop, python, "-I", str(readable("guest") / "sandbox" / "__main__.py")]
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        self.pid = os.posix_spawnp(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=actions)
        theirs.close()
        setup = {
            "path_extra": [str(readable("program"))],
            "entry": "tests_inside.main:run",
            "command_entry": "tests_inside.main:run",
            **setup,
        }
        self.control.send({"op": "setup", "preload": preload or [], **setup})
        self.ready, _ = self.control.read()

    def spawn(self, settings: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self.number += 1
        self.control.send({"op": "spawn", "id": self.number, "settings": settings}, tuple(descriptors))
        answer, _ = self.control.read()
        assert answer["id"] == self.number
        return answer

    def session(self, **settings: Any) -> Session:
        readonly = [sys.prefix, sys.base_prefix]
        return Session(self, {"readonly": readonly, **settings})

    def close(self) -> None:
        """Its end of the line is closed; that alone must end it and all sessions."""
        self.control.close()
        os.waitpid(self.pid, 0)


def wait_gone(pid: int, seconds: float = 60.0) -> None:
    """Until no such process is there any more."""
    end = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.002)
