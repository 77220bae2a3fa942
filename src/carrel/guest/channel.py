"""Length-prefixed JSON records over a socket, with file descriptors attached to them."""

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

MAX_RECORD = 64 * 1024 * 1024
"""Bytes of the longest record."""
MAX_FDS = 16
"""File descriptors that one record can carry."""
_MAX_UNCLAIMED_FDS = 4 * MAX_FDS
_FIRST = 1 << 13
"""Bytes to read where a record begins: nearly all are shorter, and code may have left little memory in one piece."""

_LENGTH = struct.Struct(">I")
# Numbers, made once: an operation on the enum members of `socket` takes longer than the system call.
_ANCILLARY_SIZE = socket.CMSG_LEN(MAX_FDS * 4)
_WAIT = int(socket.MSG_CMSG_CLOEXEC)
_DO_NOT_WAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_decode = JSONDecoder().decode

Record = dict[str, Any]


class ChannelError(Exception):
    """The channel cannot be used any more: it is closed, or something that is not a record was received."""


class ChannelClosed(ChannelError):
    """The other end has closed the channel, or its process is gone."""


class TooManyDescriptors(OSError):
    """The kernel accepts no more descriptors for now: too many of this user's are in transit, perhaps another
    session's. Nothing was sent."""


class RecordTooLong(ValueError):
    """A record is longer than `MAX_RECORD`; nothing of it was sent."""


def _make_encoder() -> Callable[[Record], str]:
    """The encoder that JSONEncoder would make anew for each record: an idle session then has 0.1 MB more memory of its
    own, since running the Python code of `json` writes to its pages."""
    encoder = JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
    if c_make_encoder is None:  # A Python without the C part of json.
        return encoder.encode
    iterate = c_make_encoder(None, encoder.default, encode_basestring, None, ":", ",", False, False, True)
    return lambda record: "".join(iterate(record, 0))


_encode = _make_encoder()


def encode_record(record: Record) -> bytes:
    """A record as bytes, with its length before it."""
    # A lone surrogate (a file name may have one) becomes its JSON escape, so that every record is UTF-8.
    body = _encode(record).encode("utf-8", "backslashreplace")
    if len(body) > MAX_RECORD:
        raise RecordTooLong(f"a record of {len(body):,} bytes is too long; at most {MAX_RECORD:,} can be sent")
    return _LENGTH.pack(len(body)) + body


def decode_body(body: bytes) -> Record:
    """The record that a body (without its length) encodes; `ChannelError` when it is not a JSON object."""
    try:
        record = _decode(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as problem:
        raise ChannelError(f"a record that is not JSON was received: {problem}") from None
    if not isinstance(record, dict):
        raise ChannelError("a record that is not a JSON object was received")
    return record


class Channel:
    """One end of a blocking channel. Sending is safe from several threads; reading belongs to one at a time."""

    def __init__(self, end: socket.socket, max_record: int = MAX_RECORD) -> None:
        self.socket = end
        self.received = 0
        """Bytes so far."""
        self._max_record = max_record
        self._sending = threading.Lock()
        self._data = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket, and the descriptors that were received with records that were not read."""
        self.socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def send(self, record: Record, fds: tuple[int, ...] = ()) -> None:
        """Send a record whole; the descriptors stay open here."""
        if fds:
            record = {**record, "fds": len(fds)}
        data = encode_record(record)
        with self._sending:
            try:
                if fds:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    data = data[self.socket.sendmsg([data], ancillary) :]
                if data:  # Sending nothing would fail where the other end has read everything and closed.
                    self.socket.sendall(data)
            except OSError as problem:
                if problem.errno == errno.ETOOMANYREFS:
                    raise TooManyDescriptors(problem.errno, problem.strerror) from None
                raise ChannelClosed(f"the channel is broken: {problem}") from None

    def request(self, record: Record, fds: tuple[int, ...] = ()) -> tuple[Record, list[int]]:
        """Send a record and wait for the next one, the answer."""
        self.send(record, fds)
        return self.read()

    def has_record(self) -> bool:
        """Whether a whole record has been received and not yet returned."""
        if len(self._data) < 4:
            return False
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self._max_record:
            raise ChannelError(f"a record of {length:,} bytes was announced; at most {self._max_record:,} are accepted")
        return len(self._data) >= 4 + int(length)

    def read(self) -> tuple[Record, list[int]]:
        """Wait for the next record; returns it and its file descriptors."""
        while not self.has_record():
            self._receive(_WAIT)
        return self._take_record()

    def receive(self, wait: bool = True) -> list[tuple[Record, list[int]]]:
        """Read from the socket once, and return every record that is whole by now."""
        self._receive(_WAIT if wait else _DO_NOT_WAIT)
        records = []
        while self.has_record():
            records.append(self._take_record())
        return records

    def receive_bodies(self, fd_count: re.Pattern[bytes]) -> list[tuple[bytes, list[int]]]:
        """Like `receive` without waiting, but the records undecoded; `fd_count` finds the number of descriptors."""
        self._receive(_DO_NOT_WAIT)
        bodies = []
        while self.has_record():
            body = self._take_body()
            found = fd_count.search(body, max(0, len(body) - 16))
            count = int(found[1]) if found else 0
            if count > len(self._fds):
                raise ChannelError(f"a record names {count} file descriptors, but {len(self._fds)} were received")
            bodies.append((body, self._fds[:count]))
            del self._fds[:count]
        return bodies

    def read_undecoded(self) -> bytes:
        """The first record with its length, and not a byte beyond it: another process reads what follows."""
        head = self.socket.recv(4, socket.MSG_WAITALL)
        length = int.from_bytes(head, "big")
        if len(head) < 4:
            raise ChannelClosed("the channel was closed before its first record")
        if length > self._max_record:
            raise ChannelError(f"a record of {length:,} bytes was announced; at most {self._max_record:,} are accepted")
        body = self.socket.recv(length, socket.MSG_WAITALL)
        if len(body) < length:
            raise ChannelClosed("the channel was closed in the middle of its first record")
        return head + body

    def _take_body(self) -> bytes:
        (length,) = _LENGTH.unpack_from(self._data)
        body = bytes(self._data[4 : 4 + length])
        del self._data[: 4 + length]
        return body

    def _take_record(self) -> tuple[Record, list[int]]:
        record = decode_body(self._take_body())
        count: Any = record.get("fds", 0)
        if not isinstance(count, int) or not 0 <= count <= len(self._fds):
            raise ChannelError(f"a record names {count!r} file descriptors, but {len(self._fds)} were received")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return record, fds

    def _receive(self, flags: int) -> None:
        size = _FIRST
        if len(self._data) >= 4:
            size = max(size, 4 + _LENGTH.unpack_from(self._data)[0] - len(self._data))
        try:
            data, ancillary, _, _ = self.socket.recvmsg(size, _ANCILLARY_SIZE, flags)
        except BlockingIOError:
            return
        except OSError as problem:
            raise ChannelClosed(f"the channel is broken: {problem}") from None
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                self._fds += fds
        if len(self._fds) > _MAX_UNCLAIMED_FDS:
            raise ChannelError("file descriptors were received that no record names")
        if not data:
            raise ChannelClosed("the other end closed the channel")
        self._data += data
        self.received += len(data)
