"""How a start went: told once, through a pipe, by whichever process the start has come to."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from typing import Any


class Report:
    """Keeps the name of the step in hand; says nothing but `ok`, or the step that failed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.now = "start"

    def step(self, name: str) -> None:
        self.now = name

    def failed(self, error: BaseException) -> None:
        number = error.errno if isinstance(error, OSError) else None
        text = (
            str(error)
            if isinstance(error, OSError)
            else "".join(traceback.format_exception(None, error, error.__traceback__))
        )
        # Where nobody listens any more there is nothing to say; who calls this has only to end.
        with contextlib.suppress(OSError):
            self._tell({"step": self.now, "errno": number, "message": text})

    def succeeded(self) -> None:
        self._tell({"ok": True})

    def _tell(self, what: dict[str, Any]) -> None:
        if self.descriptor >= 0:
            os.write(self.descriptor, json.dumps(what)[:60_000].encode() + b"\n")
            self.close()

    def close(self) -> None:
        """Leave it to the other process that has it: from here on its number may be that of something else."""
        os.close(self.descriptor)
        self.descriptor = -1


def heard(descriptor: int) -> dict[str, Any]:
    """Wait for the other end's word; silence is a failure too."""
    said = b""
    while not said.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            return SILENCE
        said += piece
    found: dict[str, Any] = json.loads(said)
    return found


SILENCE = {"step": "start", "errno": None, "message": "the process ended without a word"}
