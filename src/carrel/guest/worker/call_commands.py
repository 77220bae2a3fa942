"""Commands that the host wants run before it answers a call: in a thread each, so that everybody goes on waiting."""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import threading
import time
from typing import Any

from ..channel import Channel, ChannelError, Record
from .exec_requests import LOOK, PIECE, Command, exit_code, not_started

_PATIENCE = 3.0
"""Seconds to wait for one that was killed."""
_LAST_PIECES = 8
"""As many as fill a pipe, and more: one that became a daemon might write for ever."""


class CallCommand:
    """One of them; `end` leaves nothing of it."""

    def __init__(self, call: int, request: dict[str, Any], home: str, line: Channel) -> None:
        self._call = call
        self._request = request
        self._home = home
        self._line = line
        self._lock = threading.Lock()
        self._command: Command | None = None
        self._over = False
        self._thread = threading.Thread(target=self._live, name="carrel-command", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as problem:  # as many threads as there may be
            self._over = True
            self._send({"op": "ran", "timed_out": False, **not_started(request, home, problem)})

    def end(self) -> None:
        """Kill what still runs, and wait until its thread is gone: with a thread no frozen fork could be kept."""
        with self._lock:
            self._over = True
            if self._command is not None:
                self._command.tree.kill()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        with contextlib.suppress(ChannelError):  # whoever reads the line sees it too
            try:
                command = Command(self._request, self._home)
            except (OSError, ValueError, TypeError, IndexError) as problem:
                self._send({"op": "ran", "timed_out": False, **not_started(self._request, self._home, problem)})
                return
            try:
                self._send(self._ran(command))
            finally:
                command.let_go()

    def _send(self, record: Record) -> None:
        self._line.send({**record, "call": self._call})

    def _ran(self, command: Command) -> Record:
        with self._lock:
            self._command = command
            if self._over:
                command.tree.kill()
        status: int | None = None
        try:
            self._until_it_ends(command)
        finally:
            with self._lock:
                # Before it is waited for, its number cannot be another's: what it left in its group goes with it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(command.process.pid, signal.SIGKILL)
                status = command.process.wait()
                self._command = None
        for stream in ("stdout", "stderr"):
            for _ in range(_LAST_PIECES):
                if not self._output(command, stream):
                    break
        return {"op": "ran", "exit_code": exit_code(command, status), "timed_out": command.timed_out}

    def _until_it_ends(self, command: Command) -> None:
        with selectors.DefaultSelector() as selector:
            if command.watched >= 0:
                selector.register(command.watched, selectors.EVENT_READ, "ended")
            for stream, pipe in command.streams.items():
                selector.register(pipe, selectors.EVENT_READ, stream)
            if command.process.stdin is not None:
                selector.register(command.process.stdin, selectors.EVENT_WRITE, "stdin")
            while True:
                wait = None if command.deadline is None else command.deadline - time.monotonic()
                if wait is not None and wait <= 0:
                    command.timed_out, command.deadline = True, None
                    command.tree.kill()
                    continue
                if command.watched < 0:
                    wait = LOOK if wait is None else min(wait, LOOK)
                happened = {key.data: key.fileobj for key, _ in selector.select(wait)}
                for what, pipe in happened.items():
                    if what == "stdin":
                        if command.feed():
                            selector.unregister(pipe)
                            command.process.stdin.close()  # type: ignore[union-attr]
                    elif what != "ended" and not self._output(command, what) and what not in command.streams:
                        selector.unregister(pipe)
                if "ended" in happened or (command.watched < 0 and command.has_ended()):
                    return

    def _output(self, command: Command, stream: str) -> bool:
        """One piece; False when there is none now."""
        pipe = command.streams.get(stream)
        if pipe is None:
            return False
        try:
            data = os.read(pipe.fileno(), PIECE)
        except BlockingIOError:
            return False
        if data:
            self._send({"op": "output", "stream": stream, "data": base64.b64encode(data).decode("ascii")})
            return True
        pipe.close()
        del command.streams[stream]
        return False
