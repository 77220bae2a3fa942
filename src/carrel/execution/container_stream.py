"""The two directions of an attached container: the engine's frames, and in them those of its first process."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from typing import Any

from carrel.guest.channel import MAX_RECORD
from carrel.guest.worker.container_init import CONTROL, HEAD

_ENGINE_HEAD = struct.Struct(">BxxxI")
_STDERR = 2
_MOST_SAID = 4000


class ContainerStream(asyncio.Protocol):
    """`heard` is called with each frame's channel and content, `ended` once, with the reason."""

    def __init__(self, heard: Callable[[bytes, bytes], None], ended: Callable[[str], None]) -> None:
        self._heard = heard
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._from_engine = bytearray()
        self._frames = bytearray()
        self.said = b""
        """The end of what its first process wrote as a program, which is nothing while all is well."""
        self.closed = False
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._from_engine += data
        while len(self._from_engine) >= _ENGINE_HEAD.size and not self.closed:
            kind, length = _ENGINE_HEAD.unpack_from(self._from_engine)
            if len(self._from_engine) < _ENGINE_HEAD.size + length:
                return
            piece = self._from_engine[_ENGINE_HEAD.size : _ENGINE_HEAD.size + length]
            del self._from_engine[: _ENGINE_HEAD.size + length]
            if kind == _STDERR:
                self.said = (self.said + bytes(piece))[-_MOST_SAID:]
            else:
                self._frames += piece
                self._take_frames()

    def _take_frames(self) -> None:
        while len(self._frames) >= HEAD.size and not self.closed:
            channel, length = HEAD.unpack_from(self._frames)
            if length > MAX_RECORD:
                self._end(f"a frame of {length:,} bytes was announced; at most {MAX_RECORD:,} are taken")
                return
            if len(self._frames) < HEAD.size + length:
                return
            content = bytes(self._frames[HEAD.size : HEAD.size + length])
            del self._frames[: HEAD.size + length]
            self._heard(channel, content)

    def eof_received(self) -> None:
        # Left to itself the line would first want to get rid of what nobody reads any more.
        self._end("the container ended")

    def connection_lost(self, problem: Exception | None) -> None:
        self._end("the container ended" if problem is None else f"the line to the container is gone: {problem}")

    def send(self, channel: bytes, content: bytes) -> None:
        """Without waiting; kept until there is room."""
        if self._transport is not None and not self.closed:
            self._transport.write(HEAD.pack(channel, len(content)) + content)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def room(self) -> None:
        """Wait until what was sent so far has mostly gone; nothing to wait for when the line is gone."""
        await self._room.wait()

    def tell(self, record: dict[str, Any]) -> None:
        self.send(CONTROL, json.dumps(record).encode("ascii"))

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            said = self.said.decode("utf-8", "replace").strip()
            self._ended(f"{reason}: {said.splitlines()[-1]}" if said else reason)

    def close(self) -> None:
        """Let go of it; `ended` is not called any more."""
        self.closed = True
        self._room.set()
        if self._transport is not None:
            self._transport.abort()
