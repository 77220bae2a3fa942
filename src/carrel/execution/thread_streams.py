"""The standard streams of code that runs in a thread of this process, told apart by the context it runs in."""

from __future__ import annotations

import io
import sys
import threading
from contextvars import ContextVar
from typing import Any, TextIO

from carrel.execution.output import BoundedOutput
from carrel.guest.worker.std_streams import NoInput

_LONGEST = 8192
"""Bytes of a line that are kept back until it is whole."""


class Lines:
    """Hands on whole lines, as a worker's streams do: what handlers write at the same time does not come in between."""

    def __init__(self, to: BoundedOutput) -> None:
        self._to = to
        self._rest = bytearray()
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        with self._lock:
            self._rest += data
            end = self._rest.rfind(b"\n") + 1
            self._hand_on(end if len(self._rest) - end < _LONGEST else len(self._rest))

    def flush(self) -> None:
        with self._lock:
            self._hand_on(len(self._rest))

    def _hand_on(self, end: int) -> None:
        if end:
            piece = bytes(self._rest[:end])
            del self._rest[:end]
            self._to.add(piece)


Sinks = tuple[Lines, Lines]
_current: ContextVar[Sinks | None] = ContextVar("carrel_output", default=None)
_lock = threading.Lock()
_users = 0
_replaced: tuple[TextIO, TextIO] | None = None
_input: TextIO | None = None
_NO_INPUT = NoInput()


class Routed(io.TextIOBase):
    """Writes to the run that the caller belongs to, and for everybody else to the stream it stands for."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, number: int, original: TextIO) -> None:
        self._number = number
        self._original = original

    def __del__(self) -> None:
        """Not closed, and so not flushed, when it is forgotten: that may be in the middle of a write of another."""

    def write(self, text: str) -> int:
        sinks = _current.get()
        if sinks is None:
            return self._original.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        sinks[self._number].add(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        sinks = _current.get()
        if sinks is None:
            self._original.flush()
        else:
            sinks[self._number].flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return _current.get() is None and self._original.isatty()

    def fileno(self) -> int:
        return self._original.fileno()

    @property
    def buffer(self) -> RoutedBytes | io.BufferedIOBase:
        if _current.get() is None:
            return self._original.buffer  # type: ignore[return-value]
        return RoutedBytes(self)


class RoutedBytes(io.RawIOBase):
    """`sys.stdout.buffer` of such a stream."""

    def __init__(self, text: Routed) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        content = bytes(data)  # type: ignore[call-overload]
        sinks = _current.get()
        if sinks is not None:
            sinks[self._text._number].add(content)
        return len(content)


class RoutedInput(io.TextIOBase):
    """Has nothing for code that runs in a run: what is typed is for the program, which reads what it always did."""

    def __init__(self, original: TextIO) -> None:
        self._original = original

    def __del__(self) -> None:
        """Not closed when it is forgotten: the stream it stands for lives on."""

    @property
    def _stream(self) -> Any:
        return self._original if _current.get() is None else _NO_INPUT

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._original.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._original.errors

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    def readable(self) -> bool:
        return bool(self._stream.readable())

    def read(self, size: int | None = -1) -> str:
        return str(self._stream.read(-1 if size is None else size))

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return str(self._stream.readline(-1 if size is None else size))

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        if _current.get() is not None:
            raise io.UnsupportedOperation("code here has no standard input")
        return self._original.fileno()

    def close(self) -> None:
        if _current.get() is None:
            self._original.close()


def begin(sinks: Sinks) -> None:
    """In the context of a run: from here on its output goes there."""
    _current.set(sinks)


def use() -> None:
    """Put the routed streams in place; each `use` needs its `leave`."""
    global _users, _replaced
    with _lock:
        _users += 1
        if _users == 1:
            _replaced = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = Routed(0, sys.stdout), Routed(1, sys.stderr)
            _take_input()


def renew() -> None:
    """Before a run: the program may have put other streams in place since; they are the ones to go on to."""
    global _replaced
    with _lock:
        if _replaced is not None:
            out, err = sys.stdout, sys.stderr
            _replaced = (
                _replaced[0] if isinstance(out, Routed) else out,
                _replaced[1] if isinstance(err, Routed) else err,
            )
            if not isinstance(out, Routed):
                sys.stdout = Routed(0, out)
            if not isinstance(err, Routed):
                sys.stderr = Routed(1, err)
            _take_input()


def mend() -> None:
    """After a run that may have put its own streams in place of ours, or closed ours."""
    with _lock:
        if _replaced is not None:
            if not isinstance(sys.stdout, Routed) or sys.stdout.closed:
                sys.stdout = Routed(0, _replaced[0])
            if not isinstance(sys.stderr, Routed) or sys.stderr.closed:
                sys.stderr = Routed(1, _replaced[1])
            if not isinstance(sys.stdin, RoutedInput) and _input is not None:
                sys.stdin = RoutedInput(_input)


def _take_input() -> None:
    global _input
    if sys.stdin is not None and not isinstance(sys.stdin, RoutedInput):
        _input, sys.stdin = sys.stdin, RoutedInput(sys.stdin)


def leave() -> None:
    """The last one to go puts back what was there, unless something else was put there meanwhile."""
    global _users, _replaced, _input
    with _lock:
        _users -= 1
        if _users == 0 and _replaced is not None:
            if isinstance(sys.stdout, Routed):
                sys.stdout = _replaced[0]
            if isinstance(sys.stderr, Routed):
                sys.stderr = _replaced[1]
            if isinstance(sys.stdin, RoutedInput) and _input is not None:
                sys.stdin = _input
            _replaced = _input = None
