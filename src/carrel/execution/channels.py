"""The host's ends of the channels to the processes of a session. Whatever these send harms only that session.

The protocol of command servers is in docs/worker-protocol.md, "The command server"."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import json
import os
import resource
import socket
import stat
import struct
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import mmap
from typing import Any, Protocol

import orjson

from carrel.guest.channel import MAX_FDS, MAX_RECORD, ChannelError, RecordTooLong, decode_body, encode_record
from carrel.guest.worker.command_server import INPUT, PIECE, WINDOW

Record = dict[str, Any]
OnPiece = Callable[[int, bytes], None]
"""Called with the stream's number and the bytes; must not wait."""
OnRecord = Callable[[Record], None]
Sink = Callable[[bytes], None]
_HEAD = struct.Struct(">IBI")
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
        """When the other end is dead: read everything it had sent before, and close the channel."""
        while self.read_now():
            pass
        self.close()

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


# --- command servers ------------------------------------------------------------------------------------------------


class CommandServerGone(Exception):
    """The command server ended, or the host closed the channel to it, before it answered."""


class ByteStream(Protocol):
    """What the client writes to: an asyncio transport, or a channel of a container's stream."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class CommandRequest:
    """A request under way. `answer` has its last record, or `CommandServerGone`."""

    def __init__(self, client: CommandClient, number: int, on_piece: OnPiece | None, on_record: OnRecord | None):
        self._client = client
        self._number = number
        self._on_piece, self._on_record = on_piece, on_record
        self._window = WINDOW
        self._may_send = asyncio.Event()
        self._taken = 0
        self.deadline: float | None = None
        """The loop's time from which the request must end at any price; None without a limit."""
        self.answer: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(self._end)

    async def send_input(self, data: bytes | mmap, *, last: bool = True) -> None:
        """Send all of it, as fast as it is taken, and the end of the input after the `last`; stops when the request is
        answered."""
        left = memoryview(data)
        while left and not self.answer.done():
            if not self._window:
                self._may_send.clear()
                await self._may_send.wait()
                continue
            size = min(len(left), self._window, PIECE)
            self._window -= size
            self._client.send_piece(self._number, left[:size])
            left = left[size:]
        if last and not self.answer.done():
            self._client.send_piece(self._number, b"")

    def cancel(self) -> None:
        """Have it ended; the answer comes all the same."""
        if not self.answer.done():
            self.deadline = asyncio.get_running_loop().time()
            self._client.send_record({"op": "cancel", "id": self._number})

    def take_piece(self, stream: int, data: bytes) -> None:
        if self._on_piece is not None:
            self._on_piece(stream, data)
        self._taken += len(data)
        if self._taken >= WINDOW // 2:
            taken, self._taken = self._taken, 0
            self._client.send_record({"op": "more", "id": self._number, "bytes": taken})

    def take_record(self, record: Record) -> None:
        if record["op"] == "done":
            if not self.answer.done():
                self.answer.set_result(record)
        elif record["op"] == "more":
            self._window += int(record["bytes"])
            self._may_send.set()
        elif self._on_record is not None:
            self._on_record(record)

    def _end(self, answer: asyncio.Future[Record]) -> None:
        self._may_send.set()
        if not answer.cancelled():
            answer.exception()  # Mark it as retrieved: the caller may be gone.


class CommandClient(asyncio.Protocol):
    """Sends requests to one command server and reads its answers; made with `connect` or over another stream."""

    def __init__(self, on_broken: Callable[[], None] = lambda: None) -> None:
        """`on_broken` is called when the server sends what no command server sends."""
        self._stream: ByteStream | None = None
        self._data = bytearray()
        self._number = 0
        self._requests: dict[int, CommandRequest] = {}
        self._on_broken = on_broken
        self.closed = False
        self.owner: Any = None
        """The connection to the session that the server belongs to."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def begin(
        self, record: Record, *, on_piece: OnPiece | None = None, on_record: OnRecord | None = None
    ) -> CommandRequest:
        """Send a request; `on_piece` and `on_record` get what comes before its answer."""
        self._number = self._number % 0xFFFF_FFFF + 1
        while self._number in self._requests:
            self._number += 1
        request = CommandRequest(self, self._number, on_piece, on_record)
        if self.closed:
            request.answer.set_exception(CommandServerGone())
            return request
        self._requests[self._number] = request
        try:
            self.send_record({**record, "id": self._number})
        except ValueError:
            del self._requests[self._number]
            raise
        return request

    def deadlines(self) -> list[float]:
        """Of the requests under way; infinity for one that may take as long as it likes."""
        return [float("inf") if request.deadline is None else request.deadline for request in self._requests.values()]

    def send_record(self, record: Record) -> None:
        """ValueError for a record that is longer than the channel accepts."""
        self._send(encode_record(record))

    def send_piece(self, number: int, data: bytes | memoryview) -> None:
        self._send(_HEAD.pack(len(data) + 5, INPUT, number) + data)

    def _send(self, frame: bytes) -> None:
        if self._stream is not None and not self.closed:
            self._stream.write(frame)

    def close(self) -> None:
        """End the server and what it runs; requests under way fail."""
        self.closed = True
        if self._stream is not None:
            self._stream.close()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if not request.answer.done():
                request.answer.set_exception(CommandServerGone())

    # --- what comes -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use(transport)  # type: ignore[arg-type]

    def use(self, stream: ByteStream) -> None:
        self._stream = stream

    def connection_lost(self, problem: Exception | None) -> None:
        self.close()

    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= 4 and not self.closed:
                length = int.from_bytes(self._data[start : start + 4], "big")
                if not 0 < length <= MAX_RECORD:
                    raise ValueError(f"a frame of {length:,} bytes")
                if len(self._data) - start < 4 + length:
                    break
                self._take_frame(bytes(self._data[start + 4 : start + 4 + length]))
                start += 4 + length
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.close()
            self._on_broken()
        del self._data[:start]

    def _take_frame(self, body: bytes) -> None:
        if body[0] == ord("{"):
            record = json.loads(body)
            request = self._requests.get(record.get("id", 0))
            if record["op"] == "done":
                self._requests.pop(record["id"], None)
            if request is not None:
                request.take_record(record)
            return
        request = self._requests.get(int.from_bytes(body[1:5], "big"))
        if request is not None and len(body) > 5:
            request.take_piece(body[0], body[5:])


def error_of(record: Record) -> Exception | None:
    """The exception that an answer carries: the builtin that `open`, `os` or `subprocess` raised inside."""
    if record.get("error") is None:
        return None
    text, number = str(record["error"]), record.get("errno")
    if type(number) is not int or number not in errno.errorcode:
        return ValueError(text)
    names = [name if isinstance(name, str) else None for name in (record.get("filename"), record.get("filename2"))]
    return OSError(number, text, names[0], None, names[1]) if names[0] is not None else OSError(number, text)


# --- output pipes -----------------------------------------------------------------------------------------------------

CAPACITY = 1 << 18
_MOST_AT_ONCE = 1 << 20
_MOST_DISCARDED = 64
_KEPT_FREE = 64


def refuse_the_last(descriptor: int) -> None:
    """Raise OSError where hardly any descriptors are left: a session that got only some would die in a run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and descriptor > limit - min(_KEPT_FREE, limit // 4):
        raise OSError(
            errno.EMFILE,
            f"this process has too many files open for another session, which takes eight; its limit is {limit}:"
            " raise the limit (ulimit -n), or close sessions",
        )


class OutputPipe:
    """One stream of a session; the write end goes to the session."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        # Refused when the user's share of pipe memory is used up; a pipe of the usual size does, slower.
        with suppress(PermissionError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, CAPACITY)
        self.sink: Sink | None = None
        self._watching = False
        self._closed = False
        self._waiting = array.array("i", [0])
        self.watch(True)

    def watch(self, on: bool) -> None:
        """Whether to take what comes; when not, the writer waits as soon as the pipe is full."""
        if on and not self._watching and not self._closed:
            self._loop.add_reader(self._read, self._readable)
        elif not on and self._watching:
            self._loop.remove_reader(self._read)
        self._watching = on and not self._closed

    def _readable(self) -> None:
        try:
            data = os.read(self._read, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        if not data:
            self.watch(False)
        elif self.sink is not None:
            self.sink(data)

    def drain(self) -> None:
        """Take what is in the pipe now, and no more: a program left in the background may write for ever."""
        if self._closed:
            return
        fcntl.ioctl(self._read, termios.FIONREAD, self._waiting)
        left = self._waiting[0]
        while left > 0:
            try:
                data = os.read(self._read, min(left, _MOST_AT_ONCE))
            except BlockingIOError:  # Code may open its own end for reading, and have taken it.
                return
            left -= len(data)
            if not data:
                return
            if self.sink is not None:
                self.sink(data)

    def handed_over(self) -> None:
        """The session has its write end now."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def give_up(self) -> int:
        """Give away the read end; this pipe is not used any more."""
        self.watch(False)
        self._closed = True
        self.handed_over()
        return self._read

    def close(self) -> None:
        if not self._closed:
            self.watch(False)
            self._closed = True
            self.handed_over()
            os.close(self._read)


class Discard:
    """Descriptors whose output is not wanted, read all the same so that no writer has to wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: list[int] = []

    def take(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            # Nothing but pipes: a device or a counter has something to read for ever, at no cost to who sent it.
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._readable, descriptor)
            self._open.append(descriptor)
        while len(self._open) > _MOST_DISCARDED:
            self._drop(self._open[0])

    def _readable(self, descriptor: int) -> None:
        try:
            ended = not os.read(descriptor, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in list(self._open):
            self._drop(descriptor)
