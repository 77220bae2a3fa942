"""Pure: what an importer read, as the entries and the metadata that are stored."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from carrel.conversation.entries import build_aside, encode
from carrel.conversation.importers import Imported
from carrel.conversation.messages import ConversationMessage, SessionMeta, meta_of

Source = tuple[str, str]
"""The kind of a session and its id where it came from."""
Standing = Literal["same", "longer", "fuller", "other"]
"""How what is imported stands to what was imported before: it goes on where that ended, or in the midst of its last
message, which was still being written; or it is something else."""
_STANDINGS: tuple[Standing, ...] = ("same", "longer", "fuller", "other")


def stored_entries(imported: Imported, parent_id: str | None, now: str) -> list[ConversationMessage]:
    """The entries to write; a branch gets its fork mark after what it shares with its parent."""
    entries = imported.messages
    place = imported.forked_at
    if place is None or parent_id is None:
        return entries
    mark = build_aside("fork", created_at=now, parent_session_id=parent_id, root_session_id=parent_id, at_seq=place)
    return [*entries[:place], mark, *(_moved(entry, place) for entry in entries[place:])]


def _moved(entry: ConversationMessage, place: int, *, ends: bool = False) -> ConversationMessage:
    """The entry with its references to others moved by the one line put in after `place`.

    With `ends` that line is the rest of entry `place`: what ends with the entry ends with the line."""
    meta = meta_of(entry)
    moved = {
        name: meta[name] + 1
        for name in ("keep_from_seq", "to_seq", "at_seq")
        if type(meta.get(name)) is int and meta[name] > place - (ends and name != "keep_from_seq")
    }
    return {**entry, "meta": meta | moved} if moved else entry


def added_entries(imported: Imported, meta: SessionMeta, now: str) -> tuple[list[ConversationMessage], list[int]]:
    """What the source has got since it was imported, and after which of its entries the log has lines of its own.

    Those are the rest of a message that was still being written then, and what was told later of what answers cost."""
    record = meta["imported_from"]
    known, places = record["entries"], list(record.get("places") or [])
    entries = stored_entries(imported, meta.get("parent_session_id"), now)
    mark = len(entries) - len(imported.messages)
    added = entries[known + mark :]
    if _standing(imported, meta) == "fuller":
        late = _late(imported, entries[known + mark - 1], record, now)
        places += [known] * len(late)
        added = [*late, *added]
    for number, place in enumerate(sorted(places)):
        added = [_moved(entry, place + mark + number, ends=True) for entry in added]
    return added, places


def _late(
    imported: Imported, entry: ConversationMessage, record: Mapping[str, Any], now: str
) -> list[ConversationMessage]:
    late: list[ConversationMessage] = []
    if rest := entry["content"][record["last"]["blocks"] :]:
        said = {name: value for name, value in meta_of(entry).items() if name != "usage"}
        late.append({**entry, "content": rest, "meta": said})
    told, before = _spent(imported, record["entries"]), record.get("spent") or {}
    usage = {name: count - before.get(name, 0) for name, count in told.items()}
    if any(count > 0 for count in usage.values()):
        whose = {"provider": imported.provider, "model": imported.model}
        late.append(build_aside("usage", created_at=now, usage={k: max(0, v) for k, v in usage.items()}, **whose))
    return late


def _spent(imported: Imported, entries: int) -> dict[str, int]:
    """What the first entries say was spent, all in all."""
    sums: dict[str, int] = {}
    for entry in imported.messages[:entries]:
        usage = meta_of(entry).get("usage")
        for name, count in (usage if isinstance(usage, dict) else {}).items():
            if type(count) is int:
                sums[name] = sums.get(name, 0) + count
    return sums


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
    more["imported_from"] = import_record(imported, len(imported.messages) + has_mark)
    return more


def import_record(imported: Imported, seq: int, places: Sequence[int] = ()) -> dict[str, Any]:
    """What an import leaves in the metadata; `seq` is the last line of the log then."""
    count, last = len(imported.messages), imported.messages[-1]
    record = {
        "kind": imported.kind,
        "source_id": imported.source_id,
        "entries": count,
        "digest": digest_of(imported, count),
        "seq": seq,
    }
    if isinstance(last.get("content"), list):
        blocks = len(last["content"])
        record["last"] = {"blocks": blocks, "digest": _words_of(imported, count, blocks)}
        record["spent"] = _spent(imported, count)
    return record | ({"places": list(places)} if places else {})


def _words_of(imported: Imported, entries: int, blocks: int) -> str:
    """The sum of what is said in the first entries, up to some block of the last: not of what it cost."""
    total = hashlib.sha256(f"{imported.forked_at}\n".encode())
    for entry in imported.messages[: entries - 1]:
        said = entry.get("role") in ("user", "assistant")
        total.update(encode({"role": entry["role"], "content": entry.get("content")} if said else entry) + b"\n")
    last = imported.messages[entries - 1]
    total.update(encode({"role": last.get("role"), "content": last["content"][:blocks]}))
    return total.hexdigest()


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
    record = meta["imported_from"]
    entries, last = record["entries"], record.get("last")
    if not 0 < entries <= len(imported.messages):
        return "other"
    if digest_of(imported, entries) == record["digest"]:
        return "same" if len(imported.messages) == entries else "longer"
    if not isinstance(last, dict) or not isinstance(imported.messages[entries - 1].get("content"), list):
        return "other"
    return "fuller" if _words_of(imported, entries, last["blocks"]) == last["digest"] else "other"
