"""Saved variables on their way between the host and the worker of a container, in a file without a name.

The worker gets descriptors of the file, as it does outside of containers; its content goes through the stream."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

_PIECE = 1 << 16
_MAX_REPORT = 4 << 20

Send = Callable[[Any], None]
"""Takes a piece of the content, or a record."""


class StateTransfer:
    """The file that is being transferred; another takes its place with each save or load."""

    def __init__(
        self, send: Send, watch: Callable[[int, Callable[[int], None]], None], unwatch: Callable[[int], None]
    ) -> None:
        self._send, self._watch, self._unwatch = send, watch, unwatch
        self._file: BinaryIO | None = None
        self._for_run = ""
        """`load` or `save`, if the next run is to use the file."""
        self._saved_by_run = False

    def begin(self, folder: str, run: str | None) -> None:
        """Begin an empty file in this folder; where none can be made, the worker gets one that is always full."""
        if self._file is not None:
            self._file.close()
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 -- closed with the next one
        except OSError:
            self._file = None
        self._for_run = run or ""

    def write(self, data: bytes) -> None:
        """Add content that comes from the host; what has no room is missing, and the worker reports a damaged file."""
        try:
            if self._file is not None:
                self._file.write(data)
        except OSError:
            self._file = None

    def of_run(self) -> tuple[int, ...]:
        """The descriptor that a run gets, if it loads or saves variables."""
        if not self._for_run:
            return ()
        self._saved_by_run = self._for_run == "save"
        self._for_run = ""
        return (self._descriptor(),)

    def of_save(self, number: int) -> tuple[int, int]:
        """The descriptors of a request to save: of the file, and of a pipe for the report, after which it is sent."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write, True)
        report, file = bytearray(), self._file

        def take(mask: int) -> None:
            try:
                data = os.read(read, _PIECE)
            except BlockingIOError:
                return
            report.extend(data)
            if not data or len(report) > _MAX_REPORT:
                self._unwatch(read)
                os.close(read)
                self._send_back(file, number, bytes(report))

        self._watch(read, take)
        return self._descriptor(), write

    def end_run(self) -> None:
        """Send what a run has saved, before its answer."""
        if self._saved_by_run:
            self._saved_by_run = False
            self._send_back(self._file, 0, b"")

    def _descriptor(self) -> int:
        return os.open("/dev/full", os.O_RDWR) if self._file is None else os.dup(self._file.fileno())

    def _send_back(self, file: BinaryIO | None, number: int, report: bytes) -> None:
        self._send({"op": "state", "number": number})
        try:
            if file is not None and not file.closed and os.fstat(file.fileno()).st_size:
                place = 0
                while piece := os.pread(file.fileno(), _PIECE, place):
                    self._send(piece)
                    place += len(piece)
        except OSError:
            report = b""
        self._send({"op": "state_end", "number": number, "report": report.decode("utf-8", "replace")})
