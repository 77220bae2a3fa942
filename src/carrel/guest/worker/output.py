"""Standard output and error: whatever code does to them, the next cell has them again."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import resource
import sys
from typing import Any

_MAKES_CHILDREN = frozenset(("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"))


def out_of_the_way(fd: int) -> int:
    """A copy of a descriptor with a high number: code that closes the low ones, or counts on them, does not meet it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = 200 if limit == resource.RLIM_INFINITY or limit > 300 else max(3, limit // 2)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)


class _Stream:
    """One of the two: its number, a spare of its pipe, and the pipe's identity."""

    def __init__(self, name: str, fd: int) -> None:
        self.name, self.fd = name, fd
        self.spare = out_of_the_way(fd)
        self.pipe = _identity(self.spare)
        self._own: Any = None

    def take(self, fd: int) -> None:
        os.dup2(fd, self.spare, inheritable=False)
        os.dup2(fd, self.fd)
        os.close(fd)
        self.pipe = _identity(self.spare)

    def flushed(self) -> bool:
        """Write out what is waiting; whether that could be done, and nothing stands in the stream's place."""
        now = getattr(sys, self.name, None)
        # Also what was printed before it was replaced; the new one may be written out into the old one.
        written = [_flushed(stream) for stream in ([now] if now is self._own else [now, self._own])]
        return all(written) and now is self._own is getattr(sys, f"__{self.name}__", None)

    def leads_here(self) -> bool:
        """Whether its number is still that of its pipe."""
        return _identity(self.fd) == self.pipe

    def renew(self) -> None:
        if not self.leads_here():
            os.dup2(self.spare, self.fd)
        raw: Any = open(self.fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the process
        # A line at a time: it streams, and lines of several threads or processes stay whole.
        fresh = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._own = fresh
        setattr(sys, self.name, fresh)
        setattr(sys, f"__{self.name}__", fresh)


class StandardStreams:
    """The pipes to the host at 1 and 2, and a spare of each."""

    def __init__(self) -> None:
        self._streams = [_Stream("stdout", 1), _Stream("stderr", 2)]
        self.children_made = False
        """Whether a process was made since this was last set back: it may write long after."""
        self._c_library = ctypes.CDLL(None)
        self._line_by_line()
        self.renew()
        sys.addaudithook(self._before_children)

    def _line_by_line(self) -> None:
        """What C code prints is sent line by line too, though a pipe is no terminal."""
        try:
            stdout = ctypes.c_void_p.in_dll(self._c_library, "stdout")
            self._c_library.setvbuf(stdout, None, 1, 0)
        except (ValueError, AttributeError):
            return  # a C library without these names: it is sent at the end of the cell

    def _before_children(self, event: str, details: object) -> None:
        """A child's output comes after what was printed before it, also when that was no whole line."""
        if event in _MAKES_CHILDREN:
            self.children_made = True
            for stream in self._streams:
                stream.flushed()

    def descriptors(self) -> set[int]:
        return {stream.spare for stream in self._streams}

    def replace(self, stdout: int, stderr: int) -> None:
        """Take other pipes, as a fork does."""
        self._streams[0].take(stdout)
        self._streams[1].take(stderr)
        self.renew()

    def renew(self) -> None:
        """Fresh streams over the pipes, wherever 1 and 2 lead now."""
        for stream in self._streams:
            stream.renew()

    def begin(self, pipes: list[int]) -> None:
        """Before a cell, which may bring its own pipes: they are only reached by what it starts itself."""
        if len(pipes) == 2:
            self.replace(pipes[0], pipes[1])

    def shared(self) -> bool:
        """Whether processes that the code has started may still write."""
        return self.children_made

    def settle(self) -> None:
        """After a cell: what it printed is out, also what only the end of a stream that it has put there lets out."""
        self._c_library.fflush(None)
        if not all([stream.flushed() for stream in self._streams]):  # noqa: C419 - both, also when the first is broken
            self.renew()

    def mend(self) -> None:
        """Before the next one: 1 and 2 lead to the pipes again. Nobody need wait for this."""
        if not all(stream.leads_here() for stream in self._streams):
            self.renew()


def _flushed(stream: Any) -> bool:
    try:
        stream.flush()
    except BaseException:  # noqa: BLE001 - closed, replaced or broken by the cell, whose own code this may be
        return False
    return True


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class NoInput(io.TextIOBase):
    """What `sys.stdin` is: there is nobody to type."""

    encoding = "utf-8"

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        raise EOFError("code here has no standard input: give it its data as a value, a file or an argument")

    def read(self, size: int | None = -1) -> str:
        return self.readline()

    def close(self) -> None:
        """`quit()` closes it; the next cell may still ask."""


def no_input(prompt: object = "") -> str:
    """What `input` is here."""
    sys.stdout.write(str(prompt))
    raise EOFError("input() has nobody to ask: code here has no standard input; use a value, a file or an argument")
