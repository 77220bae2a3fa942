"""Commands: each in a process group of its own, its output in pieces, gone with all it started when time is up."""

from __future__ import annotations

import base64
import os
import selectors
import signal
import subprocess
import time
from typing import Any, Callable

_PIECE = 256 * 1024

Send = Callable[[dict[str, Any]], None]


class Command:
    """One command under way, or one that went on in the background after its shell had ended."""

    def __init__(self, request: dict[str, Any], home: str) -> None:
        command: Any = request.get("command", "")
        arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        environment = {**os.environ, **{str(k): str(v) for k, v in (request.get("env") or {}).items()}}
        stdin: Any = request.get("stdin")
        self.id: Any = request.get("id")
        self.text = command if isinstance(command, str) else " ".join(arguments)
        self.began = time.monotonic()
        timeout: Any = request.get("timeout")
        self.deadline = None if timeout is None else self.began + float(timeout)
        self.timed_out = False
        self._stdin = memoryview(base64.b64decode(stdin)) if stdin else memoryview(b"")
        self.process = subprocess.Popen(
            arguments,
            cwd=os.path.join(home, str(request.get("cwd") or "")),
            env=environment,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            restore_signals=True,
        )
        self.watched = os.pidfd_open(self.process.pid)
        for pipe in (self.process.stdout, self.process.stderr, self.process.stdin):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def feed(self) -> bool:
        """Write some of the standard input; True when there is no more."""
        pipe = self.process.stdin
        if pipe is None:
            return True
        try:
            self._stdin = self._stdin[os.write(pipe.fileno(), self._stdin[:65536]) :]
        except BlockingIOError:
            return False
        except OSError:
            self._stdin = memoryview(b"")
        if not self._stdin:
            pipe.close()
            return True
        return False

    def kill(self) -> None:
        """End the command and everything in its process group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()


class Commands:
    """All commands of a session, driven by the worker's own loop."""

    def __init__(self, selector: selectors.BaseSelector, home: str, send: Send) -> None:
        self._selector = selector
        self._home = home
        self._send = send
        self._running: dict[int, Command] = {}
        self._background: dict[int, Command] = {}

    def start(self, request: dict[str, Any]) -> None:
        try:
            command = Command(request, self._home)
        except (OSError, ValueError) as problem:
            code = 127 if isinstance(problem, FileNotFoundError) else 126
            self._send({"op": "done", "id": request.get("id"), "exit_code": code, "error": str(problem)})
            return
        self._running[command.process.pid] = command
        for stream in ("stdout", "stderr"):
            pipe = getattr(command.process, stream)
            self._selector.register(pipe, selectors.EVENT_READ, lambda c=command, s=stream: self._output(c, s))
        self._selector.register(command.watched, selectors.EVENT_READ, lambda c=command: self._ended(c))
        if command.process.stdin is not None:
            self._selector.register(command.process.stdin, selectors.EVENT_WRITE, lambda c=command: self._feed(c))
        if request.get("background"):
            self._done(command, None)

    def next_deadline(self) -> float | None:
        deadlines = [command.deadline for command in self._running.values() if command.deadline is not None]
        return min(deadlines) if deadlines else None

    def check_deadlines(self) -> None:
        now = time.monotonic()
        for command in list(self._running.values()):
            if command.deadline is not None and now >= command.deadline:
                command.timed_out = True
                command.deadline = None
                command.kill()

    def _feed(self, command: Command) -> None:
        pipe = command.process.stdin
        if pipe is not None and pipe in self._selector.get_map() and not pipe.closed:
            fd = pipe.fileno()
            if command.feed():
                self._selector.unregister(fd)

    def _output(self, command: Command, stream: str) -> bool:
        pipe = getattr(command.process, stream)
        try:
            data = os.read(pipe.fileno(), _PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            return False
        if command.process.pid in self._running:
            piece = base64.b64encode(data).decode("ascii")
            self._send({"op": "output", "id": command.id, "stream": stream, "data": piece})
        return True

    def _ended(self, command: Command) -> None:
        self._selector.unregister(command.watched)
        os.close(command.watched)
        status = command.process.wait()
        for stream in ("stdout", "stderr"):
            # What the shell left behind may hold the pipes open: take what is there, wait for no end.
            while not getattr(command.process, stream).closed and self._output(command, stream):
                pass
        if command.process.pid in self._running:
            self._done(command, status)

    def _done(self, command: Command, status: int | None) -> None:
        del self._running[command.process.pid]
        if any(not getattr(command.process, stream).closed for stream in ("stdout", "stderr")):
            self._background[command.process.pid] = command
        code = None if status is None else 124 if command.timed_out else status if status >= 0 else 128 - status
        self._send(
            {
                "op": "done",
                "id": command.id,
                "exit_code": code,
                "timed_out": command.timed_out,
                "duration": time.monotonic() - command.began,
                "pid": command.process.pid,
            }
        )

    def listing(self) -> list[dict[str, Any]]:
        """The process groups that were started here and still have members."""
        alive = []
        for pid, command in [*self._running.items(), *self._background.items()]:
            try:
                os.killpg(pid, 0)
            except (ProcessLookupError, PermissionError):
                self._background.pop(pid, None)
                continue
            alive.append({"pid": pid, "command": command.text, "seconds": time.monotonic() - command.began})
        return alive

    def kill(self, pid: int) -> bool:
        command = self._running.get(pid) or self._background.get(pid)
        if command is None:
            return False
        command.kill()
        return True
