"""Takes in what an importer read: as a new session, as more of one that is here, or not at all."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from carrel.conversation.entries import aside_of, encode
from carrel.conversation.importers import Imported, ImportReport
from carrel.conversation.importing import (
    added_entries,
    brought_before,
    import_record,
    nearest,
    stored_entries,
    stored_meta,
)
from carrel.conversation.logs import SessionLogs
from carrel.conversation.messages import ConversationMessage, SessionData, SessionMeta, meta_of
from carrel.conversation.metadata import is_id

_NOT_AGAIN = "changed since; nothing was stored (`again` imports it as another session)"


class Intake:
    """One import. It knows the ids of what it has taken in, by their names where they came from."""

    def __init__(
        self,
        logs: SessionLogs,
        create: Callable[..., Awaitable[SessionData]],
        here: Iterable[SessionMeta],
        now: Callable[[], str],
    ) -> None:
        """`here`: the sessions that are not to be stored again."""
        self._logs = logs
        self._create = create
        self._before = brought_before(here)
        self._now = now
        self._ids: dict[str, str] = {}

    async def take(self, imported: Imported) -> ImportReport:
        """Write one session; its report has the id under `session_id` when anything was written."""
        if not imported.messages:
            return imported.report
        here = self._before.get((imported.kind, imported.source_id))
        if not here or not await self._is_here(imported, here):
            await self._store(imported)
        return imported.report

    async def _store(self, imported: Imported) -> None:
        own = imported.source_id if imported.kind == "carrel" else None
        if own is not None and (not is_id(own) or await self._logs.meta(own) is not None):
            own = None
        data = await self._create(
            imported.title.encode("utf-8", "replace").decode("utf-8"),
            session_id=own,
            provider=imported.provider,
            model=imported.model,
            cwd=imported.cwd,
            **stored_meta(imported, self._ids),
        )
        self._ids[imported.source_id] = data["session"]["id"]
        await self._fill(imported, data["session"])

    async def _fill(self, imported: Imported, meta: SessionMeta) -> None:
        """Append all of it to a session in which there is nothing yet."""
        report, id_ = imported.report, meta["id"]
        entries = stored_entries(imported, meta.get("parent_session_id"), self._now())
        written, writer = await self._logs.append(id_, entries, after=0)
        if not written:
            report.problems.append(f"session {id_} was begun for it, and was {_NOT_AGAIN}")
            return
        writer.set("updated_at", meta["updated_at"])
        writer.set("imported_from", import_record(imported, len(entries)))
        await writer.flush()
        report.session_id = id_

    async def _is_here(self, imported: Imported, here: Sequence[SessionMeta]) -> bool:
        """Whether an earlier import brought this session; what its source has got since is appended."""
        meta, standing = nearest(imported, here)
        if standing == "other" and imported.named_by_file:
            return False
        report, id_ = imported.report, meta["id"]
        self._ids[imported.source_id] = id_
        if standing != "other" and not await self._logs.reading(id_).last_seq():
            await self._fill(imported, meta)  # that import was cut off before anything was in it
            return True
        report.already_here = id_
        if standing == "other":
            report.problems.append(f"session {id_} was imported from it, and what that was made of is {_NOT_AGAIN}")
        elif standing != "same" and not await self._go_on(imported, meta):
            report.problems.append(f"it has grown since it was imported, and session {id_} was {_NOT_AGAIN}")
        return True

    async def _go_on(self, imported: Imported, meta: SessionMeta) -> bool:
        """Append what the source has got since, unless somebody has written to the session here."""
        id_, seq = meta["id"], meta["imported_from"]["seq"]
        entries, places = added_entries(imported, meta, self._now())
        if not entries:
            return True
        written, writer = await self._logs.append(id_, entries, after=seq)
        if not written and not await self._has_them(id_, seq, entries):
            return False
        dates = stored_meta(imported, self._ids)
        writer.set("updated_at", dates.get("updated_at", writer.meta["updated_at"]))
        writer.set("imported_from", import_record(imported, seq + len(entries), places))
        await writer.flush()
        imported.report.appended, imported.report.session_id = len(entries), id_
        return True

    async def _has_them(self, session_id: str, seq: int, entries: Sequence[ConversationMessage]) -> bool:
        """Whether these entries, and no others, stand after `seq`: an import was cut off before it had noted them."""
        there = [entry async for _, entry in self._logs.reading(session_id).entries(seq + 1)]
        return [_undated(entry) for entry in there] == [_undated(self._logs.redacted(entry)) for entry in entries]


def _undated(entry: ConversationMessage) -> bytes:
    """A line without the date of its import."""
    told = {name: value for name, value in meta_of(entry).items() if name != "created_at"}
    return encode({**entry, "meta": told} if aside_of(entry) is not None else entry)
