"""Commands: each in a process group of its own, its output in pieces, gone with all it started when time is up."""

from __future__ import annotations

import base64
import fcntl
import os
import selectors
import shlex
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable
from typing import Any

from ..channel import TooManyDescriptors
from ..processes import MARK, ProcessTree, scan_with_marks

PIECE = 256 * 1024
_PIPE = 1024 * 1024
_SET_PIPE_SIZE = 1031

_MOST_REMEMBERED = 200
"""Commands that have ended and may have left something: a daemon is known by its mark alone, and is looked for."""

LOOK = 0.02
"""Seconds between two looks at a process whose end the kernel does not tell of."""

Send = Callable[[dict[str, Any], "tuple[int, ...]"], None]


class Command:
    """One command under way, or one that went on in the background."""

    def __init__(self, request: dict[str, Any], home: str) -> None:
        command: Any = request.get("command", "")
        arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        stdin: Any = request.get("stdin")
        timeout: Any = request.get("timeout")
        mark = uuid.uuid4().hex
        given = {str(name): str(value) for name, value in (request.get("env") or {}).items()}
        self.id: Any = request.get("id")
        self.text = command if isinstance(command, str) else shlex.join(arguments)
        self.began = time.monotonic()
        self.deadline = None if timeout is None else self.began + float(timeout)
        self.timed_out = False
        self._input = memoryview(base64.b64decode(stdin)) if stdin else memoryview(b"")
        self.cwd = os.path.join(home, os.path.expanduser(str(request.get("cwd") or "")))
        self.process = subprocess.Popen(
            arguments,
            cwd=self.cwd,
            env={**os.environ, **given, MARK: mark},
            stdin=subprocess.PIPE if self._input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.tree = ProcessTree(self.process.pid, mark)
        self.watched = _watched(self.process.pid)
        self.streams: dict[str, Any] = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        for pipe in (*self.streams.values(), self.process.stdin):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                _widen(pipe.fileno())

    def feed(self) -> bool:
        """Write some of the standard input; True when there is no more to write."""
        pipe: Any = self.process.stdin
        try:
            self._input = self._input[os.write(pipe.fileno(), self._input[:PIECE]) :]
        except BlockingIOError:
            return False
        except OSError:
            # It does not want to read more.
            self._input = memoryview(b"")
        return not self._input

    def has_ended(self) -> bool:
        """Asked where there is nothing to watch; whoever waits for it still can."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def let_go(self) -> None:
        """Close what is open for it here."""
        for pipe in (*self.streams.values(), self.process.stdin):
            if pipe is not None:
                pipe.close()
        self.streams = {}
        if self.watched >= 0:
            os.close(self.watched)
            self.watched = -1
        # Somebody else waits for it, or it has been waited for.
        self.process.returncode = self.process.returncode or 0


class Commands:
    """All commands of a session, driven by the worker's own loop."""

    def __init__(self, selector: selectors.BaseSelector, home: str, send: Send) -> None:
        self._selector = selector
        self._home = home
        self._send = send
        self._running: dict[int, Command] = {}
        self._background: dict[int, Command] = {}
        self.left_something = False
        """Whether a command has gone into the background since this was last looked at."""

    def start(self, request: dict[str, Any]) -> None:
        """Begin; the answer comes when it ends, or at once for one in the background."""
        try:
            command = Command(request, self._home)
        except (OSError, ValueError, TypeError, IndexError) as problem:
            told = not_started(request, self._home, problem)
            self._send({"op": "done", "id": request.get("id"), "timed_out": False, "duration": 0.0, **told}, ())
            return
        self._running[command.process.pid] = command
        if request.get("background"):
            if command.process.stdin is not None:
                self._selector.register(command.process.stdin, selectors.EVENT_WRITE, lambda: self._feed(command))
            self._watch(command)
            self._done(command, None)
            return
        for stream, pipe in command.streams.items():
            self._selector.register(pipe, selectors.EVENT_READ, lambda stream=stream: self._output(command, stream))
        self._watch(command)
        if command.process.stdin is not None:
            self._selector.register(command.process.stdin, selectors.EVENT_WRITE, lambda: self._feed(command))

    def _watch(self, command: Command) -> None:
        if command.watched >= 0:
            self._selector.register(command.watched, selectors.EVENT_READ, lambda: self._ended(command))

    def next_deadline(self) -> float | None:
        deadlines = [command.deadline for command in self._running.values() if command.deadline is not None]
        if any(command.watched < 0 for command in self._running.values()):
            deadlines.append(time.monotonic() + LOOK)
        return min(deadlines) if deadlines else None

    def check_deadlines(self) -> None:
        now = time.monotonic()
        for command in list(self._running.values()):
            if command.deadline is not None and now >= command.deadline:
                command.timed_out = True
                command.deadline = None
                command.tree.kill()
            if command.watched < 0 and command.has_ended():
                self._ended(command)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _feed(self, command: Command) -> None:
        pipe: Any = command.process.stdin
        if command.feed():
            self._selector.unregister(pipe)
            pipe.close()

    def _output(self, command: Command, stream: str) -> int:
        """One piece; its length, and 0 when there is none now."""
        pipe = command.streams.get(stream)
        if pipe is None:
            return 0
        try:
            data = os.read(pipe.fileno(), PIECE)
        except BlockingIOError:
            return 0
        if data:
            piece = base64.b64encode(data).decode("ascii")
            self._send({"op": "output", "id": command.id, "stream": stream, "data": piece}, ())
            return len(data)
        self._selector.unregister(pipe)
        pipe.close()
        del command.streams[stream]
        return 0

    def _ended(self, command: Command) -> None:
        if command.watched >= 0:
            self._selector.unregister(command.watched)
            os.close(command.watched)
            command.watched = -1
        status = command.process.wait()
        if status == -signal.SIGKILL and command.deadline is not None and time.monotonic() >= command.deadline:
            # Init has killed it, because it stopped this process again and again.
            command.timed_out = True
            command.tree.kill()
        command.tree.reaped = True
        if command.process.pid not in self._running:
            return
        for stream in ("stdout", "stderr"):
            # What the shell left may hold the pipes open, and write for ever: take what is there now, or its end.
            left = _waiting(command.streams.get(stream))
            while left >= 0 and (taken := self._output(command, stream)):
                left -= taken
        self._done(command, status)

    def _done(self, command: Command, status: int | None) -> None:
        del self._running[command.process.pid]
        answer = {
            "op": "done",
            "id": command.id,
            "exit_code": exit_code(command, status),
            "timed_out": command.timed_out,
            "duration": time.monotonic() - command.began,
            "pid": command.process.pid,
        }
        # The host reads on: nobody here would while a cell runs, and with the pipes' end its writers would die.
        pipes = tuple(pipe.fileno() for pipe in command.streams.values())
        self._background[command.process.pid] = command
        self.left_something = self.left_something or bool(pipes) or command.tree.has_group_members()
        if len(self._background) > _MOST_REMEMBERED:
            self._forget_ended()
        try:
            self._send(answer, pipes)
        except TooManyDescriptors:
            self._send(answer, ())
        for pipe in command.streams.values():
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()
        command.streams = {}
        if status is not None and command.process.stdin is not None and not command.process.stdin.closed:
            self._selector.unregister(command.process.stdin)
            command.process.stdin.close()

    # --- what is left -----------------------------------------------------------------------------------------------

    def listing(self) -> list[dict[str, Any]]:
        """The commands that still have processes."""
        alive = []
        seen = scan_with_marks() if self._running or self._background else None
        for pid, command in [*self._running.items(), *self._background.items()]:
            members = command.tree.members(seen)
            if members:
                seconds = time.monotonic() - command.began
                alive.append({"pid": pid, "command": command.text, "seconds": seconds, "members": members})
            elif command.watched < 0:
                self._background.pop(pid, None)
        return alive

    def _forget_ended(self) -> None:
        """Those of which nothing is left, and then the oldest."""
        self.listing()
        for pid in list(self._background)[: max(0, len(self._background) - _MOST_REMEMBERED)]:
            del self._background[pid]

    def kill(self, pid: int | None, of: object = None) -> bool:
        """End a command with all that came of it, by its process or by the request that started it."""
        for number, command in [*self._running.items(), *self._background.items()]:
            if number == pid or (of is not None and command.id == of):
                alive = bool(command.tree.members())
                command.tree.kill()
                self._background.pop(number, None)
                return alive
        return False

    def descriptors(self) -> set[int]:
        """What is open here for commands that run."""
        found = set()
        for command in (*self._running.values(), *self._background.values()):
            pipes = [pipe for pipe in (*command.streams.values(), command.process.stdin) if pipe is not None]
            found |= {command.watched, *(pipe.fileno() for pipe in pipes if not pipe.closed)}
        return found

    def in_fork(self, selector: selectors.BaseSelector, keep: bool) -> None:
        """In a fork: nothing of what runs is its own to wait for; what is in the background it may `keep` to list."""
        for command in (*self._running.values(), *self._background.values()):
            command.let_go()
        self._selector = selector
        self._background = {**self._background, **self._running} if keep else {}
        self._running = {}


def _waiting(pipe: Any) -> int:
    """How many bytes are in a pipe now."""
    if pipe is None:
        return 0
    return int.from_bytes(fcntl.ioctl(pipe.fileno(), termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)


def _watched(pid: int) -> int:
    """What can be read from when the process has ended; -1 where the kernel has no such thing, as gVisor's."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        # Code has set SIGCHLD to be ignored, so that the kernel buries who ends; this one has ended already.
        ended, other = os.pipe()
        os.close(other)
        return ended
    except OSError:
        return -1


def not_started(request: dict[str, Any], home: str, problem: Exception) -> dict[str, Any]:
    """What is said of a command that could not be started."""
    folder = os.path.join(home, os.path.expanduser(str(request.get("cwd") or "")))
    missing = isinstance(problem, FileNotFoundError) and os.path.isdir(folder)
    return {"exit_code": 127 if missing else 126, "error": str(problem), "error_type": type(problem).__name__}


def exit_code(command: Command, status: int | None) -> int | None:
    """As a shell says it: 124 for a timeout, 128 and the signal for what a signal ended."""
    if status is None:
        return None
    if command.timed_out:
        return 124
    return status if status >= 0 else 128 - status


def _widen(fd: int) -> None:
    try:
        fcntl.fcntl(fd, _SET_PIPE_SIZE, _PIPE)
    except OSError:
        return  # the user's pipes are as many as they may be; it works with a small one
