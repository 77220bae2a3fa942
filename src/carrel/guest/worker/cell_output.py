"""What a cell shows: standard output and error, there again whatever code does to them, and rich forms of values."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import io
import json
import os
import resource
import sys
from typing import Any

_CHILD_EVENTS = frozenset(("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"))


def move_to_high_number(fd: int) -> int:
    """Copy a descriptor to a high number, out of the way of code that closes or expects low numbers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = 200 if limit == resource.RLIM_INFINITY or limit > 300 else max(3, limit // 2)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)


class _Stream:
    """One of the two: its descriptor, a spare descriptor of its pipe, and the pipe's identity."""

    def __init__(self, name: str, fd: int) -> None:
        self.name, self.fd = name, fd
        self.spare = move_to_high_number(fd)
        self.pipe = _identity(self.spare)
        self._own: Any = None

    def take(self, fd: int) -> None:
        os.dup2(fd, self.spare, inheritable=False)
        os.dup2(fd, self.fd)
        os.close(fd)
        self.pipe = _identity(self.spare)

    def flush(self) -> bool:
        """Write out what is buffered; whether that worked, and the stream has not been replaced."""
        now = getattr(sys, self.name, None)
        # Also what was printed before it was replaced; the new one may write into the old one.
        written = [_flush(stream) for stream in ([now] if now is self._own else [now, self._own])]
        return all(written) and now is self._own is getattr(sys, f"__{self.name}__", None)

    def is_intact(self) -> bool:
        """Whether its descriptor still leads to its pipe."""
        return _identity(self.fd) == self.pipe

    def renew(self) -> None:
        if not self.is_intact():
            os.dup2(self.spare, self.fd)
        raw: Any = open(self.fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the process
        # A line at a time: it streams, and lines of several threads or processes stay whole.
        fresh = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._own = fresh
        setattr(sys, self.name, fresh)
        setattr(sys, f"__{self.name}__", fresh)


class StandardStreams:
    """The pipes to the host at 1 and 2, and a spare descriptor of each."""

    def __init__(self) -> None:
        self._streams = [_Stream("stdout", 1), _Stream("stderr", 2)]
        self.children_made = False
        """Whether a process was started since this was last reset: it may write long after."""
        self._c_library = ctypes.CDLL(None)
        self._buffer_c_output_by_line()
        self.renew()
        sys.addaudithook(self._audit)

    def _buffer_c_output_by_line(self) -> None:
        """What C code prints is sent line by line too, though a pipe is not a terminal."""
        try:
            stdout = ctypes.c_void_p.in_dll(self._c_library, "stdout")
            self._c_library.setvbuf(stdout, None, 1, 0)
        except (ValueError, AttributeError):
            return  # a C library without these names: it is sent at the end of the cell

    def _audit(self, event: str, details: object) -> None:
        """Before a child starts, write out what was printed, also half a line: its output comes after."""
        if event in _CHILD_EVENTS:
            self.children_made = True
            for stream in self._streams:
                stream.flush()

    def descriptors(self) -> set[int]:
        return {stream.spare for stream in self._streams}

    def replace(self, stdout: int, stderr: int) -> None:
        """Use other pipes, as a fork does."""
        self._streams[0].take(stdout)
        self._streams[1].take(stderr)
        self.renew()

    def renew(self) -> None:
        """Fresh streams over the pipes, wherever 1 and 2 lead now."""
        for stream in self._streams:
            stream.renew()

    def begin(self, pipes: list[int]) -> None:
        """Before a cell, which may have pipes of its own: only what it starts itself can write to them."""
        if len(pipes) == 2:
            self.replace(pipes[0], pipes[1])

    def settle(self) -> None:
        """After a cell: write out what it printed, also into a stream that it has put in the place of one."""
        self._c_library.fflush(None)
        if not all([stream.flush() for stream in self._streams]):  # noqa: C419 - both, even when the first is broken
            self.renew()

    def repair(self) -> None:
        """Before the next cell, and after the result was sent: let 1 and 2 lead to the pipes again."""
        if not all(stream.is_intact() for stream in self._streams):
            self.renew()


def _flush(stream: Any) -> bool:
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
    """What `sys.stdin` is: it raises EOFError."""

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
        """`quit()` closes it; the next cell has it all the same."""


def no_input(prompt: object = "") -> str:
    """The builtin `input` of a session."""
    sys.stdout.write(str(prompt))
    raise EOFError("input() cannot be used: code here has no standard input; use a value, a file or an argument")


# --- rich forms of a value: what a notebook would display, by MIME type ----------------------------------------------

MAX_BUNDLE = 8 * 1024 * 1024
MAX_TOTAL = 16 * 1024 * 1024
_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
}
_PLAIN = (str, int, float, complex, bytes, list, tuple, dict, set, frozenset, type)

Bundle = dict[str, Any]


class DisplayedBundles:
    """What one cell displays, in order, up to a size that fits into its result."""

    def __init__(self) -> None:
        self.bundles: list[Bundle] = []
        self._left = MAX_TOTAL

    def add(self, value: Any) -> bool:
        """Display a value; False when it has no rich form."""
        found = bundle(value)
        if found is not None:
            self._keep(found)
        return found is not None

    def add_open_figures(self) -> None:
        """The figures that pyplot holds open, drawn and closed, as a notebook does after each cell."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            picture = _draw(pyplot.figure(number))
            if picture is not None:
                self._keep({"image/png": _sendable(picture)})
        pyplot.close("all")

    def _keep(self, found: Bundle) -> None:
        size = len(json.dumps(found))
        self._left -= size
        if self._left < 0:
            found = {"text/plain": f"not shown: {size} bytes are more than a result can carry"}
        self.bundles.append(found)


def bundle(value: Any) -> Bundle | None:
    """The value's rich forms, or None when it has none."""
    if value is None or isinstance(value, _PLAIN):
        return None
    found: Bundle = {}
    mimebundle = _call_method(value, "_repr_mimebundle_")
    if isinstance(mimebundle, tuple) and mimebundle:
        mimebundle = mimebundle[0]
    if isinstance(mimebundle, dict):
        found.update({kind: data for kind, data in mimebundle.items() if type(kind) is str})
    for method, kind in _METHODS.items():
        # One picture is enough: an image would draw itself as PNG and as JPEG.
        if kind not in found and not (kind == "image/jpeg" and found.get("image/png")):
            found[kind] = _call_method(value, method)
    if type(value).__module__.startswith("matplotlib.") and hasattr(value, "savefig"):
        found["image/png"] = _draw(value)
        _close(value)
    sendable = {kind: _sendable(data) for kind, data in found.items()}
    return {kind: data for kind, data in sendable.items() if data is not None} or None


def _call_method(value: Any, method: str) -> Any:
    try:
        function = getattr(type(value), method, None)
        return function(value) if callable(function) else None
    except Exception:  # noqa: BLE001 - the object's own code; it then has no such form
        return None


def _sendable(data: Any) -> Any:
    """Text as it is, bytes as base64, JSON data as it is; None for what cannot be sent."""
    if isinstance(data, (bytes, bytearray)):
        return base64.b64encode(data).decode("ascii") if len(data) <= MAX_BUNDLE else None
    if isinstance(data, str):
        return str.__str__(data) if len(data) <= MAX_BUNDLE else None
    if not isinstance(data, (dict, list)):
        return None
    try:
        text = json.dumps(data)
        return json.loads(text) if len(text) <= MAX_BUNDLE else None
    except (TypeError, ValueError, RecursionError):
        return None


def _draw(figure: Any) -> bytes | None:
    try:
        out = io.BytesIO()
        figure.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()
    except Exception:  # noqa: BLE001 - a figure that cannot be drawn has no picture
        return None


def _close(figure: Any) -> None:
    """It has been displayed: pyplot does not need to keep it open."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
