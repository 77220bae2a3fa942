"""A fork of a log: the same lines under the same numbers, and the files they refer to."""

import asyncio

from carrel.errors import StorageError
from carrel.storage.seam import Store

AT_ONCE = 64 * 1024 * 1024
"""A log up to this many bytes is copied in one append, so that a fork is there whole or not at all."""


async def copy_log(store: Store, source: str, target: str, through: int, asides: list[bytes]) -> None:
    """Make `target` a log with the entries of `source` up to `through`, and the asides after them.

    When it fails half way, what was made is removed."""
    try:
        await _copy_files(store, source, target)
        await _copy_lines(store, source, target, through, asides)
    except (StorageError, asyncio.CancelledError):
        await store.delete(target)
        raise


async def _copy_files(store: Store, source: str, target: str) -> None:
    for folder in ("tool-output", "blobs"):
        for key in await store.list(f"{source}/{folder}"):
            await store.copy(key, f"{target}/{key[len(source) + 1 :]}")


async def _copy_lines(store: Store, source: str, target: str, through: int, asides: list[bytes]) -> None:
    lines: list[bytes] = []
    size = 0
    if through:
        async for block in store.read(f"{source}/messages.jsonl"):
            taken = block.records[: through - block.first_seq + 1]
            lines += taken
            size += sum(map(len, taken))
            if size > AT_ONCE:
                await store.append(f"{target}/messages.jsonl", lines)
                lines, size = [], 0
            if block.first_seq + len(block.records) > through:
                break
    await store.append(f"{target}/messages.jsonl", [*lines, *asides], sync=True)
