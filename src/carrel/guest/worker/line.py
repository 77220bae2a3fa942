"""The line to the host: length-prefixed JSON records over a socket, file descriptors riding along."""

from __future__ import annotations

import array
import errno
import os
import re
import socket
import struct
import threading
from collections.abc import Callable
from json import JSONDecoder, JSONEncoder  # by name: what code sets on the module json does not matter here
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from typing import Any

LARGEST = 64 * 1024 * 1024
"""The longest record; whoever sends a longer one is broken."""
MOST_FDS = 16

_HEAD = struct.Struct(">I")
# Numbers, made once: an operation on the enum members of `socket` takes longer than the system call.
_SPACE = socket.CMSG_LEN(MOST_FDS * 4)
_CLOSED_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_NOT_WAITING = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_decoded = JSONDecoder().decode

Record = dict[str, Any]


class LineBroken(Exception):
    """The other side is gone, or sent what is no record."""


class TooManySent(OSError):
    """The kernel takes no more descriptors for now: too many of this user's are under way already, perhaps another
    session's. Nothing was sent."""


class TooLong(ValueError):
    """A record that is longer than the line takes; nothing of it was sent."""


def _encoder() -> Callable[[Record], str]:
    """The encoder that JSONEncoder would make anew for each record, which takes longer than to encode a short one."""
    plain = JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
    if c_make_encoder is None:  # A Python without the C part of json.
        return plain.encode
    made = c_make_encoder(None, plain.default, encode_basestring, None, ":", ",", False, False, True)
    return lambda record: "".join(made(record, 0))


_encoded = _encoder()


def packed(record: Record) -> bytes:
    """A record as it goes over the line."""
    # A lone surrogate (a file name may have one) becomes its JSON escape, so that every record is UTF-8.
    body = _encoded(record).encode("utf-8", "backslashreplace")
    if len(body) > LARGEST:
        raise TooLong(f"a record of {len(body)} bytes is longer than the line takes")
    return _HEAD.pack(len(body)) + body


def unpacked(body: bytes) -> Record:
    """The record of a body; `LineBroken` when it is none."""
    try:
        record = _decoded(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as problem:
        raise LineBroken(f"what came over the line is no JSON: {problem}") from None
    if not isinstance(record, dict):
        raise LineBroken("what came over the line is no record")
    return record


class Line:
    """A blocking line; sending is safe from several threads, reading belongs to one at a time."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()
        self._data = bytearray()
        self._fds: list[int] = []
        self.received = 0
        """Bytes so far."""

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Also what came along with records that nobody has read."""
        self.socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def send(self, record: Record, fds: tuple[int, ...] = ()) -> None:
        if fds:
            record = {**record, "fds": len(fds)}
        data = packed(record)
        with self._sending:
            try:
                if fds:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    data = data[self.socket.sendmsg([data], ancillary) :]
                if data:  # Nothing is also sent, and fails where the other end has read all and gone.
                    self.socket.sendall(data)
            except OSError as problem:
                if problem.errno == errno.ETOOMANYREFS:
                    raise TooManySent(problem.errno, problem.strerror) from None
                raise LineBroken(f"the line to the host is gone: {problem}") from None

    def waiting(self) -> bool:
        """Whether a whole record has been read already."""
        if len(self._data) < 4:
            return False
        (length,) = _HEAD.unpack_from(self._data)
        if length > LARGEST:
            raise LineBroken("a record longer than the line takes was announced")
        return len(self._data) >= 4 + int(length)

    def read(self) -> tuple[Record, list[int]]:
        """The next record and its file descriptors; waits for it."""
        while not self.waiting():
            self._receive(_CLOSED_ON_EXEC)
        return self._cut()

    def receive(self, wait: bool = True) -> list[tuple[Record, list[int]]]:
        """Read once, and give every record that is whole by now; none of them stays behind."""
        self._receive(_CLOSED_ON_EXEC if wait else _NOT_WAITING)
        records = []
        while self.waiting():
            records.append(self._cut())
        return records

    def receive_bodies(self, names_fds: re.Pattern[bytes]) -> list[tuple[bytes, list[int]]]:
        """The same without waiting, and the records as they came; `names_fds` finds how many descriptors one has."""
        self._receive(socket.MSG_DONTWAIT)
        bodies = []
        while self.waiting():
            body = self._cut_body()
            found = names_fds.search(body, max(0, len(body) - 16))
            count = int(found[1]) if found else 0
            if count > len(self._fds):
                raise LineBroken(f"a record promised {count} file descriptors and brought {len(self._fds)}")
            bodies.append((body, self._fds[:count]))
            del self._fds[:count]
        return bodies

    def unnamed(self) -> int:
        """How many descriptors have come that no record has named yet."""
        return len(self._fds)

    def _cut_body(self) -> bytes:
        (length,) = _HEAD.unpack_from(self._data)
        body = bytes(self._data[4 : 4 + length])
        del self._data[: 4 + length]
        return body

    def _cut(self) -> tuple[Record, list[int]]:
        record = unpacked(self._cut_body())
        wanted: Any = record.get("fds", 0)
        if not isinstance(wanted, int) or not 0 <= wanted <= len(self._fds):
            raise LineBroken(f"a record promised {wanted!r} file descriptors and brought {len(self._fds)}")
        fds, self._fds = self._fds[:wanted], self._fds[wanted:]
        return record, fds

    def _receive(self, flags: int) -> None:
        size = 65536
        if len(self._data) >= 4:
            size = max(size, 4 + _HEAD.unpack_from(self._data)[0] - len(self._data))
        try:
            data, ancillary, _, _ = self.socket.recvmsg(size, _SPACE, flags)
        except BlockingIOError:
            return
        except OSError as problem:
            raise LineBroken(f"the line to the host is gone: {problem}") from None
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                self._fds += fds
        if not data:
            raise LineBroken("the host closed the line")
        self._data += data
        self.received += len(data)
