"""The host's end of a command server, as small as it can be."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.worker.driver import PATIENCE, forks

Record = dict[str, Any]
STREAMS = {1: "stdout", 2: "stderr"}


class Answer:
    """All that has come for one request."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.pieces: list[tuple[int, bytes]] = []
        self.allowed = 1 << 20
        """How much input may still be sent."""

    @property
    def done(self) -> Record | None:
        return self.records[-1] if self.records and self.records[-1]["op"] == "done" else None

    def data(self, *streams: int) -> bytes:
        return b"".join(data for stream, data in self.pieces if stream in streams)

    @property
    def entries(self) -> list[Record]:
        return [entry for record in self.records if record["op"] == "entries" for entry in record["entries"]]


class CommandClient:
    """Sends requests to a command server, and reads its answers."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.settimeout(PATIENCE)
        self._data = b""
        self._number = 0
        self.answers: dict[int, Answer] = {}
        self.grants = True
        """Whether output is allowed to go on as it comes."""
        self.ready = json.loads(self._frame())

    # --- frames -----------------------------------------------------------------------------------------------------

    def _read(self, size: int) -> bytes:
        while len(self._data) < size:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError("the command server has ended")
            self._data += data
        data, self._data = self._data[:size], self._data[size:]
        return data

    def _frame(self) -> bytes:
        return self._read(int.from_bytes(self._read(4), "big"))

    def send(self, **record: Any) -> None:
        body = json.dumps(record).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def send_piece(self, number: int, data: bytes) -> None:
        self.answers[number].allowed -= len(data)
        self.socket.sendall(struct.pack(">IBI", len(data) + 5, 0, number) + data)

    def take(self) -> int:
        """Read one frame; the request that it belongs to."""
        body = self._frame()
        if body[:1] != b"{":
            stream, number = struct.unpack_from(">BI", body)
            self.answers[number].pieces.append((stream, body[5:]))
            if self.grants:
                self.send(op="more", id=number, bytes=len(body) - 5)
            return int(number)
        record = json.loads(body)
        answer = self.answers[record["id"]]
        if record["op"] == "more":
            answer.allowed += record["bytes"]
        else:
            answer.records.append(record)
        return int(record["id"])

    # --- requests ---------------------------------------------------------------------------------------------------

    def begin(self, op: str, **request: Any) -> int:
        self._number += 1
        self.answers[self._number] = Answer()
        self.send(op=op, id=self._number, **request)
        return self._number

    def end(self, number: int) -> Answer:
        """Read on until the request is done."""
        while self.answers[number].done is None:
            self.take()
        return self.answers[number]

    def until(self, number: int, op: str) -> Record:
        while True:
            found = [record for record in self.answers[number].records if record["op"] == op]
            if found:
                return found[-1]
            self.take()

    def request(self, op: str, **request: Any) -> Record:
        """A request that needs no input; its answer."""
        done = self.end(self.begin(op, **request)).done
        assert done is not None
        return done

    def feed(self, number: int, data: bytes) -> None:
        """Send input as the server allows it."""
        answer = self.answers[number]
        left = memoryview(data)
        while left and answer.done is None:
            size = min(len(left), answer.allowed, 1 << 18)
            if size:
                self.send_piece(number, bytes(left[:size]))
                left = left[size:]
            else:
                self.take()
        if answer.done is None:
            self.send_piece(number, b"")

    def command(self, command: str | list[str], stdin: bytes | None = None, **options: Any) -> Answer:
        number = self.begin("command", command=command, stdin=stdin is not None, **options)
        if stdin is not None:
            self.feed(number, stdin)
        return self.end(number)

    def write(self, path: str, data: bytes) -> Record:
        number = self.begin("write", path=path)
        self.feed(number, data)
        done = self.end(number).done
        assert done is not None
        return done


class CommandHost(CommandClient):
    """Starts a real command server without a sandbox."""

    def __init__(self, python: str = sys.executable, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.home = Path(self._folder.name)
        ours, theirs = socket.socketpair()
        self.process = forks(python).start(
            ["command_server", json.dumps({"home": str(self.home)})],
            {"PATH": os.environ["PATH"], "HOME": str(self.home), **env},
            self.home,
            session=True,
            more=[theirs.fileno()],
        )
        theirs.close()
        super().__init__(ours)

    def close(self) -> None:
        self.socket.close()
        self.process.wait(PATIENCE)
        self._folder.cleanup()

    def __enter__(self) -> CommandHost:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
