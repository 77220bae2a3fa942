"""The command server: a process beside the worker that runs commands and file operations for the host.

The protocol is in docs/worker-protocol.md, "The command server". The main thread reads the channel; each request
has a thread of its own.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from ..channel import MAX_RECORD, encode_record
from ..processes import scan_with_marks
from . import files
from .commands import Command

PROTOCOL = 1
WINDOW = 1024 * 1024
"""Bytes that each side may have sent for a request before the other has taken them."""
PIECE = 256 * 1024
INPUT = 0
_ENTRIES = 1000
_MOST_REMEMBERED = 200
"""Commands that have ended and may have left something: a daemon is known by its mark alone, and is looked for."""
_STACK = 1024 * 1024
_LENGTH = struct.Struct(">I")
_PIECE_HEAD = struct.Struct(">IBI")

Record = dict[str, Any]


class ProtocolError(Exception):
    """The host sent what the protocol does not allow."""


class ActiveRequest(Protocol):
    """A request under way that takes input, hands out output, or can be cancelled."""

    def feed(self, data: bytes) -> None: ...

    def grant(self, count: int) -> None: ...

    def cancel(self) -> None: ...


class Transfer:
    """Content of a file on its way to the host or from it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._window = WINDOW
        self.cancelled = False

    def feed(self, data: bytes) -> None:
        with self._changed:
            self._pieces.append(data)
            self._changed.notify()

    def grant(self, count: int) -> None:
        with self._changed:
            self._window += count
            self._changed.notify()

    def cancel(self) -> None:
        with self._changed:
            self.cancelled = True
            self._changed.notify()

    def next_piece(self) -> bytes:
        """Wait for it; nothing at the end or when the transfer was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self.cancelled)
            return b"" if self.cancelled else self._pieces.popleft()

    def reserve(self, count: int) -> int:
        """Wait until something may be sent; how much of it, 0 when the transfer was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._window or self.cancelled)
            reserved = 0 if self.cancelled else min(count, self._window)
            self._window -= reserved
            return reserved


class InputWindow:
    """Flow control of the input of one request: how much may still come, and when the host is asked for more."""

    def __init__(self, send_more: Callable[[int], None]) -> None:
        self._send_more = send_more
        self._left = WINDOW
        self._taken = 0

    def received(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ProtocolError("the host sent more input than the server has allowed")

    def taken(self, count: int) -> None:
        self._taken += count
        if self._taken >= WINDOW // 2:
            count, self._taken = self._taken, 0
            self._left += count
            self._send_more(count)


class CommandServer:
    """Serves one channel until the host closes it."""

    def __init__(self, end: socket.socket, home: str) -> None:
        self._socket = end
        self._home = home
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._active: dict[int, tuple[ActiveRequest, InputWindow]] = {}
        self._commands: dict[int, Command] = {}
        """By process number, also those that have ended and may have left processes."""
        self._requests: dict[str, Callable[[int, Record], None]] = {
            "command": self._command,
            "processes": self._processes,
            "kill": self._kill,
            "read": self._read,
            "write": self._write,
            "unpack": self._unpack,
            "list": self._list,
        }
        self._file_operations: dict[str, Callable[[str, Record], Record | None]] = {
            "str_replace": lambda path, record: files.replace_text(path, str(record["old"]), str(record["new"])),
            "stat": lambda path, record: files.stat_file(path),
            "exists": lambda path, record: {"exists": os.path.exists(path)},
            "make_dir": lambda path, record: files.make_folder(path),
            "remove": lambda path, record: files.remove(path, recursive=record.get("recursive") is True),
            "move": lambda path, record: files.move(path, self._path(record["to"])),
            "realpath": lambda path, record: {"path": files.real_path(path, strict=record.get("strict") is not False)},
        }

    # --- the channel ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the host closes the channel; then end the commands that run."""
        self._send_record({"op": "ready", "protocol": PROTOCOL, "pid": os.getpid()})
        try:
            with self._socket.makefile("rb", buffering=1 << 18) as stream:
                while body := _read_frame(stream):
                    if body.startswith(b"{"):
                        self._take_record(json.loads(body))
                    else:
                        self._take_piece(body)
        except OSError:
            pass  # the host is gone
        finally:
            for request, _ in list(self._active.values()):
                request.cancel()
                if isinstance(request, Command):
                    request.kill()

    def kill_all(self) -> None:
        """Kill what runs, and what commands have left in the background."""
        with self._lock:
            commands = list(self._commands.values())
        for command in commands:
            command.kill()

    def _take_record(self, record: Record) -> None:
        operation, number = record.get("op"), record.get("id")
        if type(number) is not int or not 0 < number < 1 << 32:
            raise ProtocolError(f"a request needs an id from 1 to 2**32 - 1, not {number!r}")
        with self._lock:
            request, _ = self._active.get(number, (None, None))
        if operation == "more":
            if request is not None:
                request.grant(int(record["bytes"]))
        elif operation == "cancel":
            if request is not None:
                request.cancel()
        elif request is not None:
            raise ProtocolError(f"request {number} is still under way")
        else:
            self._begin(number, record)

    def _take_piece(self, body: bytes) -> None:
        number = int.from_bytes(body[1:5], "big")
        with self._lock:
            request, window = self._active.get(number, (None, None))
        if body[:1] != b"\0" or len(body) < 5:
            raise ProtocolError("only input (stream 0) can be sent to the command server")
        if request is not None and window is not None:
            window.received(len(body) - 5)
            request.feed(body[5:])

    def _begin(self, number: int, record: Record) -> None:
        """Serve the request in a thread of its own."""
        operation = str(record.get("op"))
        active: ActiveRequest | None = None
        window = InputWindow(lambda count: self._send_record({"op": "more", "id": number, "bytes": count}))
        try:
            if operation == "command":
                active = self._new_command(number, record, window)
            elif operation in ("read", "write", "unpack"):
                active = Transfer()
        except (ValueError, TypeError) as problem:
            self._done(number, **self._error(problem, record))
            return
        if active is not None:
            with self._lock:
                self._active[number] = active, window
        try:
            threading.Thread(target=self._serve_request, args=(number, record), daemon=True).start()
        except RuntimeError:
            if operation in ("processes", "kill"):  # by which a full session can be emptied
                self._serve_request(number, record)
                return
            text = "no thread could be started for this; the session has as many processes and threads as it may have"
            self._done(number, **self._error(OSError(errno.EAGAIN, text), record))

    def _serve_request(self, number: int, record: Record) -> None:
        operation = str(record.get("op"))
        try:
            if operation in self._requests:
                self._requests[operation](number, record)
            elif operation in self._file_operations:
                answer = self._file_operations[operation](self._path(record["path"]), record)
                self._done(number, **(answer or {}))
            else:
                raise ValueError(f"there is no request {operation!r}")
        except ConnectionError:
            return
        except Exception as problem:  # noqa: BLE001 - sent to the host, which raises it
            if not isinstance(problem, (OSError, ValueError, MemoryError)):
                traceback.print_exc()
            answer = self._error(problem, record)
            with suppress(ConnectionError):
                self._done(number, **answer)

    def _done(self, number: int, **answer: Any) -> None:
        with self._lock:  # first: the host may use the number again as soon as it has the answer
            self._active.pop(number, None)
        self._send_record({"op": "done", "id": number, **answer})

    def _send_record(self, record: Record) -> None:
        self._send(encode_record(record))

    def _send_piece(self, stream: int, number: int, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            self._send(_PIECE_HEAD.pack(len(piece) + 5, stream, number) + piece)

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._socket.sendall(frame)

    def _error(self, problem: Exception, record: Record) -> Record:
        if not isinstance(problem, OSError) or problem.errno is None:
            return {"error": str(problem), "error_type": "ValueError"}
        error: Record = {
            "error": problem.strerror or os.strerror(problem.errno),
            "error_type": type(problem).__name__,
            "errno": problem.errno,
        }
        for name, value in (("filename", problem.filename), ("filename2", problem.filename2)):
            if value is not None:
                error[name] = self._as_requested(os.fsdecode(value), record)
        return error

    def _as_requested(self, path: str, record: Record) -> str:
        """The path that the host gave, where the error is about that one."""
        for name in ("path", "to", "cwd"):
            if isinstance(record.get(name), str) and self._path(record[name]) == path:
                return str(record[name])
        return path

    def _path(self, path: object) -> str:
        if not isinstance(path, str):
            raise ValueError(f"a path must be a text, not {path!r}")
        if path == "~" or path.startswith("~/"):
            path = self._home + path[1:]
        return os.path.join(self._home, path)

    # --- commands ---------------------------------------------------------------------------------------------------

    def _new_command(self, number: int, record: Record, window: InputWindow) -> Command:
        command, timeout = record.get("command"), record.get("timeout")
        if not isinstance(command, str) and not (isinstance(command, list) and command):
            raise ValueError("a command must be a text, or a list of words with at least one")
        return Command(
            command if isinstance(command, str) else [str(word) for word in command],
            lambda stream, data: self._send_piece(stream, number, data),
            cwd=self._path(record.get("cwd") or "."),
            env={**os.environ, **{str(name): str(value) for name, value in (record.get("env") or {}).items()}},
            timeout=None if timeout is None else float(timeout),
            stdin=record.get("stdin") is True,
            on_input_taken=window.taken,
            output_window=WINDOW,
            keep_background=record.get("keep_background") is not False,
        )

    def _command(self, number: int, record: Record) -> None:
        command = self._active[number][0]
        assert isinstance(command, Command)
        command.start()
        try:
            with self._lock:
                self._commands[command.pid] = command
            self._send_record({"op": "started", "id": number, "pid": command.pid})
            end = command.run()
            self._done(number, **end._asdict())
            self._forget_ended()
            command.drain()
        finally:
            command.close()

    def _forget_ended(self) -> None:
        if len(self._commands) > _MOST_REMEMBERED:
            alive = {process["pid"] for process in self._listed()}
            with self._lock:
                for pid in list(self._commands):
                    if pid not in alive:
                        del self._commands[pid]
                for pid in list(self._commands)[:-_MOST_REMEMBERED]:
                    del self._commands[pid]

    def _listed(self) -> list[Record]:
        """The commands that still have processes."""
        with self._lock:
            commands = dict(self._commands)
        seen = scan_with_marks() if commands else None
        found = []
        for pid, command in commands.items():
            members = command.members(seen)
            if members:
                seconds = time.monotonic() - command.started
                found.append({"pid": pid, "command": command.text, "seconds": seconds, "members": members})
        return found

    def _processes(self, number: int, record: Record) -> None:
        self._done(number, processes=self._listed())

    def _kill(self, number: int, record: Record) -> None:
        with self._lock:
            command = self._commands.get(record.get("pid", 0))
        killed = command is not None and bool(command.members())
        if command is not None and killed:
            command.kill()
        self._done(number, killed=killed)

    # --- files ------------------------------------------------------------------------------------------------------

    def _read(self, number: int, record: Record) -> None:
        transfer = self._active[number][0]
        assert isinstance(transfer, Transfer)
        size = 0
        with files.open_to_read(self._path(record["path"])) as file:
            while True:
                reserved = transfer.reserve(PIECE)
                data = file.read(reserved) if reserved else b""
                transfer.grant(reserved - len(data))
                if not data:
                    break
                self._send_piece(INPUT, number, data)
                size += len(data)
        self._done(number, size=size, cancelled=transfer.cancelled)

    def _write(self, number: int, record: Record) -> None:
        transfer, window = self._active[number]
        assert isinstance(transfer, Transfer)
        size = 0
        writer = files.FileWriter(self._path(record["path"]))
        try:
            while data := transfer.next_piece():
                writer.write(data)
                size += len(data)
                window.taken(len(data))
            if not transfer.cancelled:
                writer.commit()
        finally:
            writer.abort()
        self._done(number, size=size, cancelled=transfer.cancelled)

    def _unpack(self, number: int, record: Record) -> None:
        transfer, window = self._active[number]
        assert isinstance(transfer, Transfer)
        remove = [str(name) for name in record.get("remove") or ()]
        files.unpack(_Content(transfer, window), self._path(record["path"]), remove)
        self._done(number, cancelled=transfer.cancelled)

    def _list(self, number: int, record: Record) -> None:
        entries: list[Record] = []
        for entry in files.list_folder(self._path(record["path"]), recursive=record.get("recursive") is True):
            entries.append(entry)
            if len(entries) == _ENTRIES:
                self._send_record({"op": "entries", "id": number, "entries": entries})
                entries = []
        self._send_record({"op": "entries", "id": number, "entries": entries})
        self._done(number)


class _Content:
    """What the host sends, as a file to read from."""

    def __init__(self, transfer: Transfer, window: InputWindow) -> None:
        self._transfer, self._window = transfer, window
        self._piece, self._at = b"", 0

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            if self._at == len(self._piece):
                self._piece, self._at = self._transfer.next_piece(), 0
                if not self._piece:
                    break
                self._window.taken(len(self._piece))
            part = self._piece[self._at : self._at + size]
            parts.append(part)
            self._at += len(part)
            size -= len(part)
        return b"".join(parts)


def _read_frame(stream: Any) -> bytes:
    """The body of the next frame; nothing at the end of the channel."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= MAX_RECORD:
        raise ProtocolError(f"a frame of {length:,} bytes was announced; at most {MAX_RECORD:,} are accepted")
    body: bytes = stream.read(length)
    return body if len(body) == length else b""


def _ignore(number: int, frame: object) -> None:
    """A handler, so that commands do not inherit that the signal is ignored."""


def run(channel_fd: int, init_fd: int, settings: dict[str, Any]) -> None:
    """Be the command server of a session until the host is gone; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, _ignore)
        threading.stack_size(_STACK)
        home = str(settings.get("home") or os.getcwd())
        os.chdir(home)
        CommandServer(socket.socket(fileno=channel_fd), home).serve()
        code = 0
    except BaseException:  # noqa: BLE001 - a defect of the server, or a host that breaks the protocol
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)
