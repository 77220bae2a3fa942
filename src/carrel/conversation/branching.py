"""A fork of a log: the same lines under the same numbers, and the files they refer to."""

import asyncio

from carrel.conversation.entries import build_aside, encode
from carrel.conversation.logs import SessionLogs
from carrel.conversation.messages import SessionMeta
from carrel.conversation.metadata import encode_meta
from carrel.errors import StorageError
from carrel.storage.seam import Store

AT_ONCE = 64 * 1024 * 1024
"""A log up to this many bytes is copied in one append, so that a fork is there whole or not at all."""


async def fork(logs: SessionLogs, source_id: str, id_: str, place: int, *, title: str | None, now: str) -> SessionMeta:
    """Make session `id_` from what `source_id` was after entry `place`; returns its metadata."""
    source = await logs.known_meta(source_id)
    root = source.get("root_session_id") or source_id
    told = {"title": title or f"{source['title']} (fork)", "archived_at": None, "api_base": source.get("api_base")}
    told |= {name: source[name] for name in ("provider", "model", "cwd")}
    if "project_dir" in source:
        told["project_dir"] = source["project_dir"]
    asides = [
        build_aside("fork", created_at=now, parent_session_id=source_id, root_session_id=root, at_seq=place),
        build_aside("meta", created_at=now, set=told),
    ]
    await _copy_log(logs.store, logs.folder(source_id), logs.folder(id_), place, [encode(aside) for aside in asides])
    meta = await logs.rebuilt_meta(id_)
    view, stamp = await logs.reading(id_).view(), await logs.store.stamp(logs.log_key(id_))
    meta |= {"message_count": len(view.numbered), "total_tokens": 0, "log_seq": view.last_seq}
    meta["log_bytes"] = stamp.size if stamp else 0
    await logs.store.put(logs.meta_key(id_), encode_meta(meta))
    return meta


async def _copy_log(store: Store, source: str, target: str, through: int, asides: list[bytes]) -> None:
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
