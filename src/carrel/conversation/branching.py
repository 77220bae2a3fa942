"""Rewind a session, or fork it into another session with the same lines and files."""

import asyncio

from carrel.conversation.log_entries import build_note, build_rewind_event, encode
from carrel.conversation.log_reader import SessionLogReader, VisibleMessages, VisibleRange
from carrel.conversation.messages import ConversationMessage, SessionMeta
from carrel.conversation.replay import repair_messages
from carrel.conversation.repository import SessionRepository, not_found
from carrel.conversation.session_state import encode_meta
from carrel.errors import KeyMissing, RewindRefused, SessionExists, StorageError
from carrel.storage.base import Store


def checked_place(name: str, place: object, last: int, meaning: str, lowest: int = 0) -> None:
    if type(place) is not int or not lowest <= place <= last:
        raise RewindRefused(
            f"{name} is a whole number from {lowest} to {last} ({last} {meaning}), not {place!r}; nothing was written"
        )


async def rewind(logs: SessionRepository, session_id: str, rewind_to: int | None, to_seq: int | None, now: str) -> int:
    """Write a rewind to `rewind_to` or `to_seq` and return its number."""
    await logs.require_meta(session_id)
    if (rewind_to is None) == (to_seq is None):
        raise RewindRefused("say where to rewind to: rewind_to (a number of messages) or to_seq (an entry), not both")
    reading = logs.reader(session_id)
    while True:
        if to_seq is None:
            view = await reading.view(texts=False)
            event, since = _cut(view, rewind_to, now), view.last_seq
        else:
            outline = await reading.visible_range()
            event, since = await _jump(reading, outline, to_seq, now), outline.last_seq
        if seq := await logs.append_if_unchanged(session_id, event, since=since):
            return seq
        # Another writer rewound or compacted: look again at what is visible now.
        await logs.require_meta(session_id)


def _cut(view: VisibleMessages, rewind_to: int | None, now: str) -> ConversationMessage:
    # The caller counts messages as `load_session` returns them, with missing tool results added.
    repaired = repair_messages(view.messages)
    checked_place("rewind_to", rewind_to, len(repaired.messages), "messages are visible")
    return build_rewind_event(sum(1 for origin in repaired.origins[:rewind_to] if origin is not None), created_at=now)


async def _jump(reading: SessionLogReader, outline: VisibleRange, to_seq: int, now: str) -> ConversationMessage:
    checked_place("to_seq", to_seq, outline.last_seq, "is the last entry")
    then = await reading.visible_range(to_seq)
    common = sum(1 for a, b in zip(then.shown.seqs(), outline.shown.seqs(), strict=False) if a == b)
    return build_rewind_event(common, to_seq=to_seq, created_at=now)


async def fork(
    logs: SessionRepository, source_id: str, id_: str, place: int, *, title: str | None, now: str
) -> SessionMeta:
    """Create session `id_` from what `source_id` was after entry `place`; returns its metadata."""
    async with logs.session_lock(id_):
        if await logs.meta(id_) is not None:
            raise SessionExists(f"session {id_} exists; give the fork another id")
        try:
            return await _fork(logs, source_id, id_, place, title, now)
        except KeyMissing:
            raise not_found(source_id) from None  # deleted meanwhile


async def _fork(
    logs: SessionRepository, source_id: str, id_: str, place: int, title: str | None, now: str
) -> SessionMeta:
    source = await logs.require_meta(source_id)
    root = source.get("root_session_id") or source_id
    fields = {"title": title or f"{source['title']} (fork)", "archived_at": None, "api_base": source.get("api_base")}
    fields |= {name: source[name] for name in ("provider", "model", "cwd")}
    for name in ("project_dir", "working_dir"):
        if name in source:
            fields[name] = source[name]
    notes = [
        build_note("fork", created_at=now, parent_session_id=source_id, root_session_id=root, at_seq=place),
        build_note("meta", created_at=now, set=fields),
    ]
    await _copy_session(logs.store, logs.folder(source_id), logs.folder(id_), place, [encode(note) for note in notes])
    logs.make_output_folder(id_)
    meta = (await logs.rebuilt(id_)).meta
    await logs.store.put(logs.meta_key(id_), encode_meta(meta))
    return meta


async def _copy_session(store: Store, source: str, target: str, through: int, more: list[bytes]) -> None:
    """Copy the entries up to `through` with their attachments, and add `more`; a failure leaves nothing."""
    try:
        for folder in ("tool-output", "blobs"):
            for key in await store.list(f"{source}/{folder}"):
                await store.copy(key, f"{target}/{key[len(source) + 1 :]}")
        await store.copy_log(f"{source}/messages.jsonl", f"{target}/messages.jsonl", through=through, more=more)
    except (StorageError, asyncio.CancelledError):
        await store.delete(target)
        raise
