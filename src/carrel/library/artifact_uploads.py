"""Artifacts on their way out of a session, piece by piece."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from carrel.errors import ArtifactWriteError

IDLE_SECONDS = 60.0
"""How long the next piece may take; after that the code that sent them is taken for gone."""
_MOST = 100

Keep = Callable[..., Coroutine[Any, Any, dict[str, Any]]]


class Uploads:
    """Those under way; each is fed by calls and keeps its artifact when the last piece is there."""

    def __init__(self, keep: Keep, idle: float = IDLE_SECONDS) -> None:
        self._keep = keep
        self._idle = idle
        self._open: dict[str, _Upload] = {}

    def begin(self, **about: Any) -> str:
        """Which one it is from now on; `about` is what `keep` wants to know besides the pieces."""
        if len(self._open) >= _MOST:
            raise ArtifactWriteError(f"{_MOST} artifacts are being saved in pieces already; wait for one of them")
        number = uuid.uuid4().hex
        upload = self._open[number] = _Upload(self._keep, about, self._idle)
        upload.task.add_done_callback(lambda task: self._ended(number, task))
        return number

    async def add(self, number: str, piece: bytes) -> None:
        if not isinstance(piece, bytes):
            raise ArtifactWriteError(f"a piece of an artifact is bytes, not {type(piece).__name__}")
        await self._of(number).give(piece)

    async def end(self, number: str) -> dict[str, Any]:
        """That was the last piece; the artifact as it is kept."""
        upload = self._of(number)
        await upload.give(None)
        await asyncio.wait([upload.task])
        return upload.result()

    async def drop(self, number: str) -> None:
        """Nothing of it is wanted any more."""
        upload = self._open.get(number)
        while upload is not None and not upload.task.done():
            # More than once: a client that is just being answered may take no notice of the first.
            upload.task.cancel()
            await asyncio.wait([upload.task], timeout=0.1)

    async def close(self) -> None:
        for number in list(self._open):
            await self.drop(number)

    def _of(self, number: str) -> "_Upload":
        upload = self._open.get(number)
        if upload is None:
            raise ArtifactWriteError("this artifact is not being saved any more: it took too long between two pieces")
        return upload

    def _ended(self, number: str, task: asyncio.Task[Any]) -> None:
        self._open.pop(number, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it too; when nobody does, it is no news


class _Upload:
    """One of them."""

    def __init__(self, keep: Keep, about: dict[str, Any], idle: float) -> None:
        self._idle = idle
        self._coming: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self.task = asyncio.get_running_loop().create_task(keep(pieces=self._pieces(), **about))

    async def give(self, piece: bytes | None) -> None:
        """Wait until there is room for it; raises what went wrong meanwhile."""
        putting = asyncio.ensure_future(self._coming.put(piece))
        try:
            await asyncio.wait([putting, self.task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
        if self.task.done():
            self.result()

    def result(self) -> dict[str, Any]:
        """The artifact as it is kept. Dropped is no cancel of whoever asks, who would get no answer then."""
        if self.task.cancelled():
            raise ArtifactWriteError("this artifact was not saved: it was dropped, or its store closed, before its end")
        return self.task.result()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(self._idle):
                    piece = await self._coming.get()
            except TimeoutError:
                raise ArtifactWriteError(f"no further piece came for {self._idle:g} s; nothing was kept") from None
            if piece is None:
                return
            yield piece
