"""The host's end of a command server: requests side by side, each with its own input, output and answer.

The protocol is in docs/worker-protocol.md, "The command server".
"""

from __future__ import annotations

import asyncio
import errno
import json
import struct
from collections.abc import Callable
from mmap import mmap
from typing import Any, Protocol

from carrel.guest.channel import MAX_RECORD, encode_record
from carrel.guest.worker.command_server import INPUT, PIECE, WINDOW

Record = dict[str, Any]
OnPiece = Callable[[int, bytes], None]
"""Called with the stream's number and the bytes; must not wait."""
OnRecord = Callable[[Record], None]
_HEAD = struct.Struct(">IBI")


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
