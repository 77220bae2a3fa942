"""Pure: what an importer read, as the entries and the metadata that are stored."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from carrel.conversation.entries import build_aside, encode
from carrel.conversation.importers import Imported
from carrel.conversation.messages import ConversationMessage, SessionMeta, meta_of

Source = tuple[str, str]
"""The kind of a session and its id where it came from."""
Standing = Literal["same", "longer", "other"]
"""How what is imported stands to what was imported before: it goes on where that ended, or it is something else."""
_STANDINGS: tuple[Standing, ...] = ("same", "longer", "other")


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
    has_mark = imported.forked_at is not None and "parent_session_id" in more
    more["imported_from"] = {
        "kind": imported.kind,
        "source_id": imported.source_id,
        "entries": len(imported.messages),
        "digest": digest_of(imported, len(imported.messages)),
        "seq": len(imported.messages) + has_mark,
    }
    return more


def digest_of(imported: Imported, entries: int) -> str:
    """The sum of the first entries: the same as long as what they were made from is."""
    total = hashlib.sha256(f"{imported.forked_at}\n".encode())
    for entry in imported.messages[:entries]:
        total.update(encode(entry) + b"\n")
    return total.hexdigest()


def brought_before(metas: Iterable[SessionMeta]) -> dict[Source, list[SessionMeta]]:
    """The sessions here that an import brought, by what they were made from."""
    found: dict[Source, list[SessionMeta]] = {}
    for meta in metas:
        made_from = meta.get("imported_from")
        if isinstance(made_from, dict) and _is_record(made_from):
            found.setdefault((made_from["kind"], made_from["source_id"]), []).append(meta)
    return found


def _is_record(made_from: Mapping[str, Any]) -> bool:
    texts, counts = ("kind", "source_id", "digest"), ("entries", "seq")
    return all(isinstance(made_from.get(name), str) for name in texts) and all(
        type(made_from.get(name)) is int for name in counts
    )


def nearest(imported: Imported, here: Sequence[SessionMeta]) -> tuple[SessionMeta, Standing]:
    """Of the sessions made from this source, the one that is most like it now."""
    return min(((meta, _standing(imported, meta)) for meta in here), key=lambda each: _STANDINGS.index(each[1]))


def _standing(imported: Imported, meta: SessionMeta) -> Standing:
    made_from = meta["imported_from"]
    entries = made_from["entries"]
    if len(imported.messages) < entries or digest_of(imported, entries) != made_from["digest"]:
        return "other"
    return "same" if len(imported.messages) == entries else "longer"
