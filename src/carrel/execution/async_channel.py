"""A channel of records for the event loop. Whatever the other end sends harms only that session."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from carrel.guest.channel import MAX_FDS, MAX_RECORD, ChannelError, RecordTooLong, decode_body, encode_record

Record = dict[str, Any]
_FIRST = 1 << 13
"""Bytes to read where a record begins: nearly all are shorter, and a larger buffer takes longer to make."""
_CHUNK = 1 << 18
_MAX_UNREAD_RECORDS = 10_000
"""Records that wait to be read by the other end; a worker that reads never has so many."""
_RETRY_AFTER = 0.01
"""Seconds until descriptors are sent again that the kernel had no room for."""
_SPACE = socket.CMSG_SPACE(MAX_FDS * 4)
_CLOSED_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)


class AsyncChannel:
    """Reads as records arrive, sends without waiting."""

    def __init__(
        self,
        end: socket.socket,
        on_record: Callable[[Record, list[int]], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end` is called once, with the reason."""
        self._socket = end
        self._on_record = on_record
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._fds: list[int] = []
        self._outgoing: list[tuple[memoryview, tuple[int, ...]]] = []
        self._waits_for_room = False
        self.unread = 0
        """Bytes that wait to be read by the other end."""
        self.closed = False
        self.length = 0
        """Bytes of the record that `on_record` gets."""
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self.read_now)

    def send(self, record: Record, fds: Sequence[int] = (), *, max_unread: int | None = None) -> None:
        """Send it, or keep it until there is room. The descriptors must stay open until `sent_all`.

        ChannelError for what is too long, or would be more than `max_unread` bytes with those that wait; then nothing
        was sent, and the channel stays open."""
        if self.closed:
            return
        if fds:
            record = {**record, "fds": len(fds)}
        data = memoryview(_framed(record))
        if max_unread is not None and self.unread and self.unread + len(data) > max_unread:
            raise ChannelError(f"{self.unread:,} bytes wait to be read already; {len(data):,} more are too many")
        self._outgoing.append((data, tuple(fds)))
        self.unread += len(data)
        if len(self._outgoing) == 1:
            self._write()
        elif len(self._outgoing) > _MAX_UNREAD_RECORDS:
            self._end(f"more than {_MAX_UNREAD_RECORDS:,} records were not read")

    @property
    def sent_all(self) -> bool:
        return not self._outgoing

    def _write(self) -> None:
        try:
            while self._outgoing:
                data, fds = self._outgoing[0]
                if fds:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    sent = self._socket.sendmsg([data], ancillary)
                else:
                    sent = self._socket.send(data)
                self.unread -= sent
                if sent < len(data):
                    self._outgoing[0] = (data[sent:], ())
                else:
                    self._outgoing.pop(0)
        except BlockingIOError:
            self._waits_for_room = True
            self._loop.add_writer(self._socket.fileno(), self._write)
            return
        except OSError as problem:
            if problem.errno == errno.ETOOMANYREFS:
                # More descriptors are on their way than this process may have open: some are received in a moment.
                self._loop.call_later(_RETRY_AFTER, self._write)
            else:
                self._end(f"the channel is broken: {problem.strerror}")
            return
        if self._waits_for_room:
            self._waits_for_room = False
            self._loop.remove_writer(self._socket.fileno())

    def read_now(self) -> bool:
        """Take in some of what has arrived; True when there was something."""
        if self.closed:
            return False
        wanted = _CHUNK if self._data else _FIRST
        if len(self._data) >= 4:
            wanted = max(wanted, min(4 + int.from_bytes(self._data[:4], "big") - len(self._data), 1 << 22))
        try:
            data, ancillary, _, _ = self._socket.recvmsg(wanted, _SPACE, _CLOSED_ON_EXEC)
        except BlockingIOError:
            return False
        except OSError as problem:
            self._end(f"the channel is broken: {problem.strerror}")
            return False
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(body[: len(body) - len(body) % found.itemsize])
                self._fds += found
        if not data:
            self._end("the channel was closed")
            return False
        try:
            if not self._data and len(data) - 4 == int.from_bytes(data[:4], "big"):
                self._take_body(data[4:])
            else:
                self._data += data
                self._take_records()
            if len(self._fds) > MAX_FDS:
                raise ChannelError("descriptors were received that no record names")
        except ChannelError as problem:
            self._end(str(problem))
        return True

    def _take_records(self) -> None:
        while len(self._data) >= 4 and not self.closed:
            length = int.from_bytes(self._data[:4], "big")
            if length > MAX_RECORD:
                raise ChannelError(f"a record of {length:,} bytes was announced; at most {MAX_RECORD:,} are accepted")
            if len(self._data) < 4 + length:
                break
            body = bytes(self._data[4 : 4 + length])
            del self._data[: 4 + length]
            self._take_body(body)

    def _take_body(self, body: bytes) -> None:
        record = read_body(body)
        count = record.get("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._fds):
            raise ChannelError(f"a record names {count!r} descriptors, but {len(self._fds)} were received")
        mine, self._fds = self._fds[:count], self._fds[count:]
        self.length = len(body)
        self._on_record(record, mine)

    def read_rest(self) -> None:
        """When the other end is dead: everything it had sent before."""
        while self.read_now():
            pass

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_end(reason)

    def close(self) -> None:
        """Close it; `on_end` is not called any more."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._outgoing.clear()
        self.unread = 0
        for descriptor in self._fds:
            os.close(descriptor)
        self._fds.clear()


def framed_body(record: Record) -> bytes:
    """A record as JSON; ChannelError when it is too long."""
    try:
        body = orjson.dumps(record)
    except TypeError:  # Lone surrogates in code: the other encoder escapes them.
        try:
            return encode_record(record)[4:]
        except RecordTooLong as problem:
            raise ChannelError(str(problem)) from None
    if len(body) > MAX_RECORD:
        raise ChannelError(f"a record of {len(body):,} bytes is too long; at most {MAX_RECORD:,} can be sent")
    return body


def read_body(body: bytes) -> Record:
    """The record of a body; ChannelError when it is not one."""
    try:
        record = orjson.loads(body)
    except ValueError:
        return decode_body(body)
    if not isinstance(record, dict):
        raise ChannelError("what was received is not a record")
    return record


def _framed(record: Record) -> bytes:
    body = framed_body(record)
    return len(body).to_bytes(4, "big") + body
