"""Pure: what an importer read, as the entries and the metadata that are stored."""

from collections.abc import Mapping
from typing import Any

from carrel.conversation.entries import build_aside
from carrel.conversation.importers import Imported
from carrel.conversation.messages import ConversationMessage, meta_of


def stored_entries(imported: Imported, parent_id: str | None, now: str) -> list[ConversationMessage]:
    """The entries to write; a branch gets its fork mark after what it shares with its parent."""
    entries = imported.messages
    place = imported.forked_at
    if place is None or parent_id is None:
        return entries
    mark = build_aside("fork", created_at=now, parent_session_id=parent_id, root_session_id=parent_id, at_seq=place)
    return [*entries[:place], mark, *(_moved(entry, place) for entry in entries[place:])]


def _moved(entry: ConversationMessage, place: int) -> ConversationMessage:
    """The entry with its references to others moved by the one line put in after `place`."""
    meta = meta_of(entry)
    moved = {
        name: meta[name] + 1
        for name in ("keep_from_seq", "to_seq", "at_seq")
        if type(meta.get(name)) is int and meta[name] > place
    }
    return {**entry, "meta": meta | moved} if moved else entry


def stored_meta(imported: Imported, ids: Mapping[str, str]) -> dict[str, Any]:
    """What `meta.json` gets beyond the usual: dates and descent as they were."""
    dates = [date for entry in imported.messages if isinstance(date := meta_of(entry).get("created_at"), str)]
    created = imported.created_at or (dates[0] if dates else None)
    more: dict[str, Any] = dict(imported.meta)
    if created:
        more |= {"created_at": created, "updated_at": max([created, *dates])}
    if imported.parent is not None and imported.parent in ids:
        more["parent_session_id"] = ids[imported.parent]
    return more
