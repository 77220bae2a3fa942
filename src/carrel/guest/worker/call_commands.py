"""Commands that the host wants to have run before it answers a call: in a thread each, so that nothing else waits."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
from typing import Any

from ..channel import Channel, ChannelError, Record
from .commands import STDOUT, Command

_PATIENCE = 3.0
"""Seconds to wait for one that was killed."""


class CallCommand:
    """One of them; `end` leaves nothing of it."""

    def __init__(self, call: int, request: dict[str, Any], home: str, line: Channel) -> None:
        self._call = call
        self._line = line
        command, stdin, timeout = request.get("command", ""), request.get("stdin"), request.get("timeout")
        self._stdin = None if stdin is None else base64.b64decode(stdin)
        self._command = Command(
            command if isinstance(command, str) else [str(word) for word in command],
            self._send_output,
            cwd=os.path.join(home, os.path.expanduser(str(request.get("cwd") or ""))),
            env={**os.environ, **{str(name): str(value) for name, value in (request.get("env") or {}).items()}},
            timeout=None if timeout is None else float(timeout),
            stdin=self._stdin is not None,
            keep_background=False,
        )
        self._thread = threading.Thread(target=self._run, name="carrel-command", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as problem:  # as many threads as there may be
            self._send({"op": "ran", "timed_out": False, "exit_code": 126, "error": str(problem)})

    def end(self) -> None:
        """Kill what still runs, and wait until its thread is gone: with a thread no frozen fork could be kept."""
        self._command.cancel()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(ChannelError):  # the main thread sees it too
            try:
                self._command.start()
            except (OSError, ValueError) as problem:
                code = 127 if isinstance(problem, FileNotFoundError) else 126
                self._send({"op": "ran", "timed_out": False, "exit_code": code, "error": str(problem)})
                return
            try:
                if self._stdin is not None:
                    for data in (self._stdin, b""):
                        self._command.feed(data)
                end = self._command.run()
            finally:
                self._command.close()
            self._send({"op": "ran", "exit_code": end.exit_code, "timed_out": end.timed_out})

    def _send_output(self, stream: int, data: bytes) -> None:
        name = "stdout" if stream == STDOUT else "stderr"
        self._send({"op": "output", "stream": name, "data": base64.b64encode(data).decode("ascii")})

    def _send(self, record: Record) -> None:
        self._line.send({**record, "call": self._call})
