"""Run commands: output in the order written, input in pieces, and an end that takes the whole process tree along.

`Command.run` works in the calling thread; most other methods may be called from any thread. Used by the command server,
and on the host by `carrel.processes`.
"""

from __future__ import annotations

import fcntl
import os
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, NamedTuple

from ..processes import MARK, Marks, ProcessTable, ProcessTree

STDOUT, STDERR = 1, 2
ORDERED_BYTES, ORDERED_WRITES = 64 * 1024, 1000
"""How much output of one command has an exact order across the two streams; see `_OutputPipe`."""
_READ_SIZE = 64 * 1024
_LARGE_PIPE = 1024 * 1024
_SET_PIPE_SIZE = 1031
"""F_SETPIPE_SZ, which Python's fcntl has since 3.10."""
_EXIT_CHECK = 0.02
"""Seconds between two looks at a process for which the kernel has no pidfd (gVisor)."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class CommandEnd(NamedTuple):
    exit_code: int
    """As in a shell: 124 after a timeout, 128 and the number for a signal."""
    timed_out: bool
    cancelled: bool
    duration: float


class _OutputPipe:
    """One of the two output pipes of a command.

    Two pipes say nothing about the order of what was written to both. So at first each has room for one write only (a
    packet of at most a page): a program that writes twice waits for the reader in between, and the reader is notified
    of the writes in their order. That costs a switch of processes for each write, so after the first ones the pipes
    are made large.
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.ordered = True
        try:
            self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
            self.ordered = fcntl.fcntl(self.read_end, _SET_PIPE_SIZE, 1) == _PAGE
        except OSError:  # a kernel without packets in pipes
            self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
            self.ordered = False
        os.set_blocking(self.read_end, False)

    def started(self) -> None:
        """The command has the write end. Here it stays open as long as its mode is to be changed later."""
        if not self.ordered:
            self.enlarge()

    def enlarge(self) -> None:
        if self.write_end >= 0:
            with suppress(OSError):  # the user's pipes are as large as they may be; it works with a small one
                fcntl.fcntl(self.read_end, _SET_PIPE_SIZE, _LARGE_PIPE)
            flags = fcntl.fcntl(self.write_end, fcntl.F_GETFL)
            fcntl.fcntl(self.write_end, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            os.close(self.write_end)
        self.ordered = False
        self.write_end = -1

    def unread(self) -> int:
        """Bytes that are in the pipe now."""
        return int.from_bytes(fcntl.ioctl(self.read_end, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)

    def close(self) -> None:
        for end in (self.read_end, self.write_end):
            if end >= 0:
                os.close(end)
        self.read_end = self.write_end = -1


class Command:
    """One command: `start` it, then `run` it to its end."""

    def __init__(
        self,
        command: str | list[str],
        on_output: Callable[[int, bytes], None],
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout: float | None = None,
        stdin: bool = False,
        on_input_taken: Callable[[int], None] = lambda count: None,
        output_window: int | None = None,
        keep_background: bool = True,
    ) -> None:
        """`command` is a line for /bin/sh, or a list of words. `stdin`: input comes by `feed`. With an
        `output_window`, so many bytes of output are handed to `on_output` until `grant` allows more."""
        self._arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self.text = command if isinstance(command, str) else shlex.join(self._arguments)
        self._mark = uuid.uuid4().hex
        self._cwd, self._env = cwd, {**env, MARK: self._mark}
        self._timeout = timeout
        self._on_output, self._on_input_taken = on_output, on_input_taken
        self._keep_background = keep_background
        self._lock = threading.Lock()
        self._window = output_window
        self._input: deque[bytes] = deque()
        self._input_open = stdin
        self._input_watched = False
        self._cancelled = False
        self._wake_read, self._wake_write = -1, -1
        self._pipes: dict[int, _OutputPipe] = {}
        self._ready: list[_OutputPipe] = []
        """Pipes that may have something to read, in the order in which it was written."""
        self._ordered_bytes, self._ordered_writes = ORDERED_BYTES, ORDERED_WRITES
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._tree: ProcessTree | None = None
        self.started = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it; raises what `subprocess.Popen` raises."""
        self.started = time.monotonic()
        pipes = [_OutputPipe(STDOUT), _OutputPipe(STDERR)]
        self._pipes = {pipe.read_end: pipe for pipe in pipes}
        try:
            self._process = subprocess.Popen(
                self._arguments,
                cwd=self._cwd,
                env=self._env,
                stdin=subprocess.PIPE if self._input_open else subprocess.DEVNULL,
                stdout=pipes[0].write_end,
                stderr=pipes[1].write_end,
                bufsize=0,
                start_new_session=True,
            )
            for pipe in pipes:
                pipe.started()
            self._tree = ProcessTree(self._process.pid, self._mark)
            self._pidfd = _open_pidfd(self._process.pid)
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)
            with self._lock:
                self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except BaseException:
            self.close()
            raise

    # --- from any thread --------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Input for the command; an empty piece is its end."""
        with self._lock:
            self._input.append(data)
            self._wake()

    def grant(self, count: int) -> None:
        """So many more bytes of output may be handed out."""
        with self._lock:
            if self._window is not None:
                self._window += count
            self._wake()

    def terminate(self) -> None:
        """Ask it to end: SIGTERM to its process group."""
        if self._tree is not None and not self._tree.reaped:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)

    def cancel(self) -> None:
        """End it with all its processes; `run` returns soon."""
        with self._lock:
            self._cancelled = True
            self._wake()

    def members(self, seen: tuple[ProcessTable, Marks] | None = None) -> list[int]:
        """The processes that came of it and live now."""
        return [] if self._tree is None else self._tree.members(seen)

    def kill(self) -> None:
        """End all of them now; `run` returns when it notices."""
        if self._tree is not None:
            self._tree.kill()

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"!")

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> CommandEnd:
        """Hand out its output and give it its input until its first process has ended."""
        process, tree = self._process, self._tree
        if process is None or tree is None:
            raise RuntimeError("the command was not started")
        deadline = None if self._timeout is None else self.started + self._timeout
        timed_out = cancelled = False
        with select.epoll() as poll:
            for fd in (self._wake_read, self._pidfd):
                if fd >= 0:
                    poll.register(fd, select.EPOLLIN)
            for fd in self._pipes:
                poll.register(fd, select.EPOLLIN | select.EPOLLET)
            while True:
                if not timed_out and not cancelled:
                    cancelled = self._cancelled
                    timed_out = not cancelled and deadline is not None and time.monotonic() >= deadline
                    if timed_out or cancelled:
                        tree.kill()
                self._write_input(poll, process.stdin)
                self._read_output()
                events = self._wait(poll, None if timed_out or cancelled else deadline)
                if self._pidfd in events or (self._pidfd < 0 and _has_ended(process.pid)):
                    break
            if not self._keep_background:
                # Before it is waited for, its number cannot be another process's.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            tree.reaped = True
            if status == -signal.SIGKILL and deadline is not None and time.monotonic() >= deadline and not cancelled:
                # Perhaps init has killed it, because it had stopped the process that runs this.
                timed_out = True
                tree.kill()
            self._read_rest(poll, wait=not timed_out and not cancelled)
        if process.stdin is not None:
            process.stdin.close()
        exit_code = 124 if timed_out else status if status >= 0 else 128 - status
        return CommandEnd(exit_code, timed_out, cancelled, time.monotonic() - self.started)

    def drain(self) -> None:
        """After its end: read and drop what background processes go on writing, so that they need not wait."""
        with suppress(ValueError):  # raised where nothing is registered
            poll = select.poll()
            for fd, pipe in self._pipes.items():
                pipe.enlarge()
                poll.register(fd, select.POLLIN)
            while self._pipes:
                for fd, _ in poll.poll():
                    with suppress(BlockingIOError):
                        if not os.read(fd, _READ_SIZE):
                            poll.unregister(fd)
                            self._pipes.pop(fd).close()

    def close(self) -> None:
        """Close what is open for it here; it is killed where it was not run to its end."""
        if self._process is not None and self._tree is not None and not self._tree.reaped:
            self._tree.kill()
            self._process.wait()
            self._tree.reaped = True
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}
        with self._lock:
            for fd in (self._wake_read, self._wake_write, self._pidfd):
                if fd >= 0:
                    os.close(fd)
            self._wake_read = self._wake_write = self._pidfd = -1
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _wait(self, poll: select.epoll, deadline: float | None) -> set[int]:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._pidfd < 0:
            timeout = _EXIT_CHECK if timeout is None else min(timeout, _EXIT_CHECK)
        if self._ready and self._may_read():
            timeout = 0
        events = poll.poll(timeout)
        for fd, _ in events:
            if fd == self._wake_read:
                with suppress(BlockingIOError):
                    os.read(fd, 4096)
            elif fd in self._pipes and self._pipes[fd] not in self._ready:
                self._ready.append(self._pipes[fd])
        return {fd for fd, _ in events}

    def _write_input(self, poll: select.epoll, pipe: IO[bytes] | None) -> None:
        """Write what the command takes now. Input that it does not want to read counts as taken."""
        taken = 0
        while self._input:
            data = self._input[0]
            written = len(data)
            if pipe is not None and not pipe.closed:
                try:
                    if data:
                        written = os.write(pipe.fileno(), data)
                    else:
                        self._close_input(poll, pipe)
                except BlockingIOError:
                    written = 0
                except OSError:
                    self._close_input(poll, pipe)
            taken += written
            if written < len(data):
                self._input[0] = data[written:]
                break
            self._input.popleft()
        wanted = bool(self._input) and pipe is not None and not pipe.closed
        if pipe is not None and wanted != self._input_watched:
            self._input_watched = wanted
            if wanted:
                poll.register(pipe, select.EPOLLOUT)
            else:
                poll.unregister(pipe)
        if taken:
            self._on_input_taken(taken)

    def _close_input(self, poll: select.epoll, pipe: IO[bytes]) -> None:
        if self._input_watched:
            self._input_watched = False
            poll.unregister(pipe)
        pipe.close()

    def _may_read(self) -> bool:
        return self._window is None or self._window >= _READ_SIZE

    def _read_output(self) -> None:
        """Hand out one piece of each pipe that is ready, in their order."""
        for pipe in list(self._ready):
            if not self._may_read():
                return
            data = self._read(pipe)
            if data is None:
                self._ready.remove(pipe)
            elif not data:
                self._ready.remove(pipe)
                del self._pipes[pipe.read_end]
                pipe.close()
            elif pipe.ordered:
                # It held one write; the next is notified of in its order.
                self._ready.remove(pipe)
                if self._ordered_bytes <= 0 or self._ordered_writes <= 0:
                    for other in self._pipes.values():
                        other.enlarge()
                    self._ready = list(self._pipes.values())

    def _read_rest(self, poll: select.epoll, *, wait: bool) -> None:
        """What was in the pipes when it ended, and no more: what it left in the background may write for ever.

        `wait` for more to be allowed; of a command that was killed, only what is allowed now is handed out."""
        self._wait(poll, time.monotonic())
        rest = {pipe: pipe.unread() for pipe in self._ready}
        while any(left > 0 for left in rest.values()):
            if not self._may_read():
                if not wait or self._cancelled:
                    return
                self._wait(poll, None)
                continue
            for pipe in rest:
                if rest[pipe] > 0 and self._may_read():
                    rest[pipe] -= len(self._read(pipe) or b"") or rest[pipe]

    def _read(self, pipe: _OutputPipe) -> bytes | None:
        """Read one piece and hand it out; empty at the pipe's end, None when there is nothing now."""
        pieces: list[bytes] = []
        size = 0
        # A read gives one write at most, and would drop what it has no room for.
        while size <= _READ_SIZE - _PAGE:
            try:
                piece = os.read(pipe.read_end, _READ_SIZE - size)
            except BlockingIOError:
                break
            if not piece and not pieces:
                return b""
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if pipe.ordered:
                break
        if not pieces:
            return None
        self._ordered_bytes -= size
        self._ordered_writes -= 1
        with self._lock:
            if self._window is not None:
                self._window -= size
        data = b"".join(pieces)
        self._on_output(pipe.stream, data)
        return data


def _open_pidfd(pid: int) -> int:
    """A descriptor that can be read from when the process has ended; -1 where the kernel has none (gVisor)."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        # Code has set SIGCHLD to be ignored, so that the kernel reaps children itself; this one has ended already.
        ended, other = os.pipe()
        os.close(other)
        return ended
    except OSError:
        return -1


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
