"""Write imported sessions to the store: as new sessions, or as entries added to earlier imports."""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from carrel.conversation.importers.base import ImportedSession, ImportReport
from carrel.conversation.log_entries import build_note, encode
from carrel.conversation.messages import ConversationMessage, SessionData, SessionMeta, meta_of
from carrel.conversation.repository import SessionRepository
from carrel.conversation.session_state import is_id
from carrel.errors import MessageRefused

SourceChange = Literal["unchanged", "appended", "changed"]
"""What happened to a source since it was imported: nothing, entries were added at its end, or anything else."""
_CHANGES: tuple[SourceChange, ...] = ("unchanged", "appended", "changed")
_NOT_STORED = "nothing was stored (again=True or --again imports it as another session)"


class ImportWriter:
    """Writes the sessions of one import and maps their source ids to session ids."""

    def __init__(
        self,
        logs: SessionRepository,
        create: Callable[..., Awaitable[SessionData]],
        existing: Iterable[SessionMeta],
        now: Callable[[], str],
    ) -> None:
        """`existing` are the sessions that earlier imports may have stored; sources are not stored a second time."""
        self._logs = logs
        self._create = create
        self._existing = _by_source(existing)
        self._now = now
        self._ids: dict[str, str] = {}

    async def write(self, imported: ImportedSession) -> ImportReport:
        """Write one session; the report's `session_id` is set when anything was written."""
        if not imported.messages:
            return imported.report
        existing = self._existing.get((imported.kind, imported.source_id))
        if not existing or not await self._update_existing(imported, existing):
            await self._write_new(imported)
        return imported.report

    async def _write_new(self, imported: ImportedSession) -> None:
        own = imported.source_id if imported.kind == "carrel" else None
        if own is not None and (not is_id(own) or await self._logs.meta(own) is not None):
            own = None
        data = await self._create(
            imported.title.encode("utf-8", "replace").decode("utf-8"),
            session_id=own,
            provider=imported.provider,
            model=imported.model,
            cwd=imported.cwd,
            **_stored_meta(imported, self._ids),
        )
        self._ids[imported.source_id] = data["session"]["id"]
        await self._fill(imported, data["session"])

    async def _fill(self, imported: ImportedSession, meta: SessionMeta) -> None:
        """Append all entries to a session that has none."""
        report, id_ = imported.report, meta["id"]
        entries = _stored_entries(imported, meta.get("parent_session_id"), self._now())
        written, writer = await self._logs.append(id_, entries, after=0)
        if not written:
            report.problems.append(f"session {id_} was created for this import and then changed; {_NOT_STORED}")
            return
        writer.set("updated_at", meta["updated_at"])
        writer.set("imported_from", _import_record(imported, len(entries)))
        await writer.flush()
        report.session_id, report.with_secrets = id_, _count_with_secrets(entries)

    async def _update_existing(self, imported: ImportedSession, existing: Sequence[SessionMeta]) -> bool:
        """Whether an earlier import stored this session; entries added to the source since then are appended."""
        meta, change = _closest(imported, existing)
        if change == "changed" and imported.named_by_file:
            return False
        report, id_ = imported.report, meta["id"]
        self._ids[imported.source_id] = id_
        if change != "changed" and not await self._logs.reader(id_).last_seq():
            await self._fill(imported, meta)  # the earlier import was interrupted before it had written any entry
            return True
        report.already_here = id_
        if change == "changed":
            report.problems.append(f"the source has changed since it was imported as session {id_}; {_NOT_STORED}")
        elif change == "appended" and not await self._append_new(imported, meta):
            report.problems.append(
                f"the source has grown, but session {id_} was changed here since it was imported; {_NOT_STORED}"
            )
        return True

    async def _append_new(self, imported: ImportedSession, meta: SessionMeta) -> bool:
        """Append the entries added to the source; False when the session was changed since the last import."""
        id_, seq, known = meta["id"], meta["imported_from"]["seq"], meta["imported_from"]["entries"]
        entries = _stored_entries(imported, meta.get("parent_session_id"), self._now())
        known += len(entries) - len(imported.messages)
        if seq != known:
            return False  # earlier versions could write extra lines between the entries, which shifts all references
        written, writer = await self._logs.append(id_, entries[known:], after=seq)
        if not written and not await self._has_entries(id_, seq, entries[known:]):
            return False
        dates = _stored_meta(imported, self._ids)
        writer.set("updated_at", dates.get("updated_at", writer.meta["updated_at"]))
        writer.set("imported_from", _import_record(imported, len(entries)))
        await writer.flush()
        imported.report.appended, imported.report.session_id = len(entries) - known, id_
        imported.report.with_secrets = _count_with_secrets(entries[known:])
        return True

    async def _has_entries(self, session_id: str, seq: int, entries: Sequence[ConversationMessage]) -> bool:
        """Whether exactly these entries follow `seq`: an earlier import was interrupted before it had recorded them."""
        found = [encode(entry) async for _, entry in self._logs.reader(session_id).entries(seq + 1)]
        return found == [encode(self._logs.redacted(entry)) for entry in entries]


def _stored_entries(imported: ImportedSession, parent_id: str | None, now: str) -> list[ConversationMessage]:
    """Return the entries to write; a branch gets a fork note after the part it shares with its parent."""
    entries, shared = imported.messages, imported.forked_at
    if shared is None or parent_id is None:
        return entries
    note = build_note("fork", created_at=now, parent_session_id=parent_id, root_session_id=parent_id, at_seq=shared)
    return [*entries[:shared], note, *(_shifted(entry, shared) for entry in entries[shared:])]


def _count_with_secrets(entries: Iterable[ConversationMessage]) -> int:
    from carrel.conversation.redaction import redact_secrets  # noqa: PLC0415 -- compiling its patterns takes 9 ms

    count = 0
    for entry in entries:
        with suppress(MessageRefused):  # nested too deeply to be searched
            count += redact_secrets(entry) is not entry
    return count


def _shifted(entry: ConversationMessage, after: int) -> ConversationMessage:
    """Return the entry with references to entries past `after` increased by one."""
    meta = meta_of(entry)
    shifted = {
        name: meta[name] + 1
        for name in ("keep_from_seq", "to_seq", "at_seq")
        if type(meta.get(name)) is int and meta[name] > after
    }
    return {**entry, "meta": meta | shifted} if shifted else entry


def _stored_meta(imported: ImportedSession, ids: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `meta.json` that an import adds: original dates, parent, and what was imported."""
    dates = [date for entry in imported.messages if isinstance(date := meta_of(entry).get("created_at"), str)]
    created = imported.created_at or (dates[0] if dates else None)
    fields: dict[str, Any] = dict(imported.meta)
    if created:
        fields |= {"created_at": created, "updated_at": max([created, *dates])}
    if imported.parent is not None and imported.parent in ids:
        fields["parent_session_id"] = ids[imported.parent]
    has_note = imported.forked_at is not None and "parent_session_id" in fields
    fields["imported_from"] = _import_record(imported, len(imported.messages) + has_note)
    return fields


def _import_record(imported: ImportedSession, seq: int) -> dict[str, Any]:
    """Return what `meta.json` remembers of an import; `seq` is the number of the last imported line."""
    count = len(imported.messages)
    return {
        "kind": imported.kind,
        "source_id": imported.source_id,
        "entries": count,
        "digest": _digest(imported, count),
        "seq": seq,
    }


def _digest(imported: ImportedSession, count: int) -> str:
    """Return the SHA-256 sum of the first `count` entries."""
    total = hashlib.sha256(f"{imported.forked_at}\n".encode())
    for entry in imported.messages[:count]:
        total.update(encode(entry) + b"\n")
    return total.hexdigest()


def _by_source(metas: Iterable[SessionMeta]) -> dict[tuple[str, str], list[SessionMeta]]:
    """Group the sessions that an import wrote by their kind and source id."""
    found: dict[tuple[str, str], list[SessionMeta]] = {}
    for meta in metas:
        record = meta.get("imported_from")
        if isinstance(record, dict) and _is_import_record(record):
            found.setdefault((record["kind"], record["source_id"]), []).append(meta)
    return found


def _is_import_record(record: Mapping[str, Any]) -> bool:
    texts, counts = ("kind", "source_id", "digest"), ("entries", "seq")
    return all(isinstance(record.get(name), str) for name in texts) and all(
        type(record.get(name)) is int for name in counts
    )


def _closest(imported: ImportedSession, existing: Sequence[SessionMeta]) -> tuple[SessionMeta, SourceChange]:
    """Return the session that differs least from the source now, and how the source has changed."""
    return min(((meta, _change(imported, meta)) for meta in existing), key=lambda each: _CHANGES.index(each[1]))


def _change(imported: ImportedSession, meta: SessionMeta) -> SourceChange:
    record = meta["imported_from"]
    count = record["entries"]
    if not 0 < count <= len(imported.messages) or _digest(imported, count) != record["digest"]:
        return "changed"
    return "unchanged" if count == len(imported.messages) else "appended"
