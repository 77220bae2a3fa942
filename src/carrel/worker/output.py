"""Standard output and error: whatever code does to them, the next cell has them again."""

from __future__ import annotations

import fcntl
import io
import os
import sys

_KEPT_FROM = 200
"""Where the spare descriptors lie: out of the way of code that closes the low ones."""


class StandardStreams:
    """The pipes to the host at 1 and 2, and a spare of each."""

    def __init__(self) -> None:
        self._spares = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _KEPT_FROM) for fd in (1, 2)]
        self._pipes = [_identity(fd) for fd in self._spares]
        self.renew()

    def replace(self, stdout: int, stderr: int) -> None:
        """Take other pipes, as a fork does."""
        for spare, fd in zip(self._spares, (stdout, stderr)):
            os.dup2(fd, spare, inheritable=False)
            os.close(fd)
        self._pipes = [_identity(fd) for fd in self._spares]
        for target, spare in zip((1, 2), self._spares):
            os.dup2(spare, target)
        self.renew()

    def renew(self) -> None:
        """Fresh streams over the pipes, wherever 1 and 2 lead now."""
        for target, spare, pipe in zip((1, 2), self._spares, self._pipes):
            if _identity(target) != pipe:
                os.dup2(spare, target)
        sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]

    def settle(self) -> None:
        """After a cell: what it printed is out, and the streams are whole again."""
        damaged = False
        for name, target, pipe in (("stdout", 1, self._pipes[0]), ("stderr", 2, self._pipes[1])):
            stream = getattr(sys, name, None)
            try:
                stream.flush()  # type: ignore[union-attr]
            except Exception:  # noqa: BLE001 - closed, replaced or broken by the cell
                damaged = True
            damaged = damaged or stream is not getattr(sys, "__%s__" % name, None) or _identity(target) != pipe
        if damaged:
            self.renew()


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _stream(fd: int) -> io.TextIOWrapper:
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the process
    # Write-through, so that a child's output comes after what was printed before it.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


class NoInput(io.TextIOBase):
    """What `sys.stdin` is: there is nobody to type."""

    encoding = "utf-8"

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        raise EOFError("code here has no standard input: give it its data as a value, a file or an argument")

    def read(self, size: int | None = -1) -> str:
        return self.readline()


def no_input(prompt: object = "") -> str:
    """What `input` is here."""
    sys.stdout.write(str(prompt))
    raise EOFError("input() has nobody to ask: code here has no standard input; use a value, a file or an argument")
