"""Records on a socket: four bytes of length, a JSON object, and the file descriptors that it names."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from typing import Any

from .limits import raise_open_files

LARGEST = 64 * 1024 * 1024
MOST_DESCRIPTORS = 16

Record = "dict[str, Any]"


class PeerBroken(Exception):
    """The other end sent what is no record."""


class Records:
    """One end of a line of records; blocking, for programs with one thread."""

    def __init__(self, line: socket.socket, largest: int = LARGEST) -> None:
        self.line = line
        self.largest = largest
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self.line.fileno()

    def send(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Send it whole; the descriptors ride on its first byte and stay open here."""
        if descriptors:
            record = {**record, "fds": len(descriptors)}
        body = json.dumps(record, separators=(",", ":")).encode()
        data = len(body).to_bytes(4, "big") + body
        if descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            try:
                sent = self.line.sendmsg([data], ancillary)
            except OSError as problem:
                if problem.errno != errno.ETOOMANYREFS or not raise_open_files():
                    raise
                sent = self.line.sendmsg([data], ancillary)
            data = data[sent:]
        if data:  # Nothing is also sent, and fails where the other end has read all and gone.
            self.line.sendall(data)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next record and its descriptors, or None at the end; waits for it."""
        while True:
            found = self.next()
            if found is not None:
                return found
            if not self.read():
                return None

    def receive_raw(self) -> bytes | None:
        """The first record of a line as it came, and not a byte beyond it: for another to read, as what follows is."""
        head = self.line.recv(4, socket.MSG_WAITALL)
        length = int.from_bytes(head, "big")
        if len(head) < 4 or length > self.largest:
            return None
        body = self.line.recv(length, socket.MSG_WAITALL)
        return head + body if len(body) == length else None

    def ask(self, record: dict[str, Any], descriptors: list[int] | None = None) -> tuple[dict[str, Any], list[int]]:
        """Send, and wait for the answer."""
        self.send(record, descriptors)
        found = self.receive()
        if found is None:
            raise ConnectionError("the other end is gone")
        return found

    def read(self) -> bool:
        """Take in what has arrived; False at the end of the line."""
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
        try:
            data, ancillary, _, _ = self.line.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return False
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(raw[: len(raw) - len(raw) % 4])
                self._descriptors += found
        if len(self._descriptors) > 4 * MOST_DESCRIPTORS:
            raise PeerBroken("descriptors that no record names")
        self._buffer += data
        return bool(data)

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """A record that has arrived whole, or None."""
        if len(self._buffer) < 4:
            return None
        length = int.from_bytes(self._buffer[:4], "big")
        if length > self.largest:
            raise PeerBroken(f"a record of {length:,} bytes; at most {self.largest:,} are taken")
        if len(self._buffer) < 4 + length:
            return None
        try:
            record = json.loads(bytes(self._buffer[4 : 4 + length]))
        except ValueError as error:
            raise PeerBroken(f"a record that is no JSON: {error}") from error
        del self._buffer[: 4 + length]
        count = record.get("fds", 0) if isinstance(record, dict) else -1
        if not isinstance(count, int) or not 0 <= count <= len(self._descriptors):
            raise PeerBroken("a record that is no object, or that names descriptors which did not come with it")
        mine, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return record, mine

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self.line.close()
