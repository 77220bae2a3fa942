"""Objects too large to hold, on a Redis server: gathered there piece by piece under a name nobody asks for."""

import contextlib
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from carrel.errors import KeyMissing, StorageError, StorageReadError, StorageWriteError
from carrel.storage.redis_connection import RedisConnections
from carrel.storage.seam import checked_key

_PIECE = 1024 * 1024
_LIFE_MS = 15 * 60 * 1000
"""How long pieces wait for the next one; after that whoever sent them is taken for dead."""


async def placed(
    connections: RedisConnections,
    key: str,
    pieces: AsyncIterable[bytes],
    longest: int,
    claims: Callable[[], list[str]],
) -> tuple[list[Any], int]:
    """What the server answered when all pieces were there and became the object, and its size."""
    name, size, what = uuid.uuid4().hex, 0, repr(key)
    coming = f"{connections.prefix}:coming:{name}"
    try:
        await connections.write(what, "SET", coming, b"", "PX", _LIFE_MS)
        async for piece in pieces:
            size += len(piece)
            if size > longest:
                raise StorageWriteError(f"{key!r} is longer than the {longest} bytes Redis takes. Nothing was written")
            for start in range(0, len(piece), _PIECE):
                await connections.write(what, "APPEND", coming, piece[start : start + _PIECE])
            await connections.write(what, "PEXPIRE", coming, _LIFE_MS)
        return await connections.run("place", what, key, name, size, *claims()), size
    except BaseException:
        # If this cannot be sent either, its short life ends by itself.
        with contextlib.suppress(StorageError):
            await connections.write(what, "UNLINK", coming)
        raise


async def read(connections: RedisConnections, key: str, start: int) -> AsyncIterator[bytes]:
    """The object's bytes from `start` on; each piece is asked for with the version that the first one had."""
    checked_key(key)
    version = b""
    while True:
        answer = await connections.run("piece", repr(key), key, start, start + _PIECE - 1, version)
        if len(answer) == 1:
            if not version:
                raise KeyMissing(f"there is no object {key!r}")
            raise StorageReadError(f"{key!r} was replaced or deleted while it was read; read it again")
        version, piece = answer
        if piece:
            yield piece
        start += len(piece)
        if len(piece) < _PIECE:
            return
