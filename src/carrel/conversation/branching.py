"""Going back in a log, and going on from it elsewhere: rewinds, and forks with the same lines and files."""

import asyncio

from carrel.conversation.entries import build_aside, build_rewind_event, encode
from carrel.conversation.logs import SessionLogs, not_found
from carrel.conversation.messages import ConversationMessage, SessionMeta
from carrel.conversation.metadata import encode_meta
from carrel.conversation.reading import LogReading, Outline
from carrel.conversation.repair import mend
from carrel.errors import KeyMissing, RewindRefused, SessionExists, StorageError
from carrel.storage.base import Store


def checked_place(name: str, place: object, last: int, meaning: str, lowest: int = 0) -> None:
    if type(place) is not int or not lowest <= place <= last:
        raise RewindRefused(
            f"{name} is a whole number from {lowest} to {last} ({last} {meaning}), not {place!r}; nothing was written"
        )


async def rewind(logs: SessionLogs, session_id: str, rewind_to: int | None, to_seq: int | None, now: str) -> int:
    """Write the rewind to one of the two places; returns its number."""
    await logs.known_meta(session_id)
    if (rewind_to is None) == (to_seq is None):
        raise RewindRefused("say where to rewind to: rewind_to (a number of messages) or to_seq (an entry), not both")
    reading = logs.reading(session_id)
    while True:
        outline = await reading.outline()
        if to_seq is None:
            event, shown = await _cut(reading, outline, rewind_to, now)
        else:
            event, shown = await _jump(reading, outline, to_seq, now)
        if seq := await logs.append_event(session_id, event, since=outline.last_seq, shown=shown):
            return seq
        # Somebody else went back, or compacted: the same place is to be found in what is visible now.
        await logs.known_meta(session_id)


async def _cut(
    reading: LogReading, outline: Outline, rewind_to: int | None, now: str
) -> tuple[ConversationMessage, int]:
    if outline.whole:
        checked_place("rewind_to", rewind_to, len(outline.shown), "messages are visible")
        cut = rewind_to or 0
    else:
        # Whoever counted saw what was mended.
        mended = mend((await reading.view(outline.last_seq)).messages)
        checked_place("rewind_to", rewind_to, len(mended.messages), "messages are visible")
        cut = sum(1 for origin in mended.origins[:rewind_to] if origin is not None)
    return build_rewind_event(cut, created_at=now), outline.messages(cut)


async def _jump(reading: LogReading, outline: Outline, to_seq: int, now: str) -> tuple[ConversationMessage, int]:
    checked_place("to_seq", to_seq, outline.last_seq, "is the last entry")
    then = await reading.outline(to_seq)
    common = sum(1 for a, b in zip(then.shown.seqs(), outline.shown.seqs(), strict=False) if a == b)
    return build_rewind_event(common, to_seq=to_seq, created_at=now), then.messages()


async def fork(logs: SessionLogs, source_id: str, id_: str, place: int, *, title: str | None, now: str) -> SessionMeta:
    """Make session `id_` from what `source_id` was after entry `place`; returns its metadata."""
    async with logs.alone(id_):
        if await logs.meta(id_) is not None:
            raise SessionExists(f"session {id_} is there already; give the fork another id")
        try:
            return await _fork(logs, source_id, id_, place, title, now)
        except KeyMissing:
            raise not_found(source_id) from None  # deleted meanwhile


async def _fork(logs: SessionLogs, source_id: str, id_: str, place: int, title: str | None, now: str) -> SessionMeta:
    source = await logs.known_meta(source_id)
    root = source.get("root_session_id") or source_id
    told = {"title": title or f"{source['title']} (fork)", "archived_at": None, "api_base": source.get("api_base")}
    told |= {name: source[name] for name in ("provider", "model", "cwd")}
    for name in ("project_dir", "working_dir"):
        if name in source:
            told[name] = source[name]
    asides = [
        build_aside("fork", created_at=now, parent_session_id=source_id, root_session_id=root, at_seq=place),
        build_aside("meta", created_at=now, set=told),
    ]
    await _copy_session(
        logs.store, logs.folder(source_id), logs.folder(id_), place, [encode(aside) for aside in asides]
    )
    logs.make_output_folder(id_)
    meta = await logs.rebuilt_meta(id_)
    outline, stamp = await logs.reading(id_).outline(), await logs.store.stamp(logs.log_key(id_))
    meta |= {"message_count": outline.messages(), "total_tokens": 0, "log_seq": outline.last_seq}
    meta["log_bytes"] = stamp.size if stamp else 0
    await logs.store.put(logs.meta_key(id_), encode_meta(meta))
    return meta


async def _copy_session(store: Store, source: str, target: str, through: int, more: list[bytes]) -> None:
    """Copy the entries up to `through` with the files beside them, and add `more`. If it fails, nothing is left."""
    try:
        for folder in ("tool-output", "blobs"):
            for key in await store.list(f"{source}/{folder}"):
                await store.copy(key, f"{target}/{key[len(source) + 1 :]}")
        await store.copy_log(f"{source}/messages.jsonl", f"{target}/messages.jsonl", through=through, more=more)
    except (StorageError, asyncio.CancelledError):
        await store.delete(target)
        raise
