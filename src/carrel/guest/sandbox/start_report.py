"""The report of how a start went: sent once, through a pipe, by whichever process the start has come to."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from typing import Any

_MAX_MESSAGE = 4_000
NO_REPORT = {"step": "start", "errno": None, "message": "the process ended without a report"}


class StartReport:
    """Keeps the name of the current step; reports success, or the step that failed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.current = "start"

    def step(self, name: str) -> None:
        self.current = name

    def failed(self, error: BaseException) -> None:
        number = error.errno if isinstance(error, OSError) else None
        text = (
            str(error)
            if isinstance(error, OSError)
            else "".join(traceback.format_exception(None, error, error.__traceback__))
        )
        # When the reader is gone there is nothing to report, and this process is about to exit.
        with contextlib.suppress(OSError):
            self._send({"step": self.current, "errno": number, "message": _shortened(text)})

    def succeeded(self) -> None:
        self._send({"ok": True})

    def _send(self, record: dict[str, Any]) -> None:
        if self.descriptor >= 0:
            os.write(self.descriptor, json.dumps(record).encode() + b"\n")
            self.close()

    def close(self) -> None:
        """Leave it to the other process that has it: from here on its number may be that of something else."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _shortened(text: str) -> str:
    """Short enough for a report to fit into a pipe that no process reads yet, however many characters are escaped."""
    if len(text) <= _MAX_MESSAGE:
        return text
    return (
        f"{text[: _MAX_MESSAGE // 2]}\n… {len(text) - _MAX_MESSAGE} characters left out …\n{text[-_MAX_MESSAGE // 2 :]}"
    )


def parse_report(line: bytes) -> dict[str, Any]:
    """The first line that was reported; no report is a failure too."""
    first, end, _ = line.partition(b"\n")
    if not end:
        return dict(NO_REPORT)
    try:
        report = json.loads(first)
    except ValueError:
        report = None
    return report if isinstance(report, dict) else {**NO_REPORT, "message": "the process sent an unreadable report"}


def read_report(descriptor: int) -> dict[str, Any]:
    """Wait for the report of another process."""
    received = b""
    while not received.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            break
        received += piece
    return parse_report(received)
