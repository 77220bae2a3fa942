"""SessionStore: conversations in readable files or in any other Store."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args
from uuid import uuid4

from carrel.conversation import branching
from carrel.conversation.branching import checked_place
from carrel.conversation.compaction import Summarize, compact
from carrel.conversation.export import Format, to_line
from carrel.conversation.export.html_page import to_html
from carrel.conversation.export.markdown import to_markdown
from carrel.conversation.importers import ImportReport, read_session_file
from carrel.conversation.importers.writer import ImportWriter
from carrel.conversation.log_entries import build_note, timestamp
from carrel.conversation.messages import ConversationMessage, SessionData, SessionMeta
from carrel.conversation.replay import Numbered, repair_messages
from carrel.conversation.repository import Redact, SessionRepository, not_found, redact_entry, redact_value
from carrel.conversation.search.search import SearchHit, SessionSearch
from carrel.conversation.session_list import SessionListing
from carrel.conversation.session_state import checked_fields, checked_id, new_meta, position_of
from carrel.conversation.usage import Price, Usage, UsageCount
from carrel.embedding import EmbedderOption, choose_embedder
from carrel.errors import ConfigurationError, MetadataRefused, SessionExists, SessionTooNew, StorageError
from carrel.events import Event, EventType, bus
from carrel.home import resolve_sessions_dir
from carrel.storage.base import MISSING, Expected, Store, locked
from carrel.storage.files.store import FileStore

logger = logging.getLogger(__name__)

_MOST_DRAFTS = 1000
"""How many drafts are remembered with their titles."""


class SessionStore:
    """Stores conversations as append-only logs.

    An append that has returned survives the death of the process, and with `durability="fsync"` also a power cut.
    Any number of tasks and processes may use the same folder. Entries of a log are never edited, and reading
    never writes to a session that another process is writing."""

    def __init__(
        self,
        data_dir: Path | str | None = None,
        durability: Literal["os", "fsync"] = "os",
        *,
        store: Store | None = None,
        prefix: str = "",
        redact: Redact | None = None,
        embedder: EmbedderOption = None,
        output_files: bool = True,
        now: Callable[[], str] = timestamp,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        """`output_files`: whether long outputs of tools get a file in `tool-output/`; else they stay in the log."""
        if durability not in ("os", "fsync"):
            raise ConfigurationError(f"durability is 'os' or 'fsync', not {durability!r}")
        if store is not None and data_dir is not None:
            raise ConfigurationError("give a data_dir or a store, not both")
        self.data_dir: Path | None = None
        if store is None:
            self.data_dir = Path(data_dir).expanduser() if data_dir is not None else resolve_sessions_dir()
            store = FileStore(self.data_dir)
            self.data_dir = self.data_dir / prefix
        elif isinstance(store, FileStore):
            self.data_dir = store.root / prefix if prefix else store.root
        self._now = now
        self._new_id = new_id
        self._embedder = embedder
        self._logs = SessionRepository(
            store, prefix, sync=durability == "fsync", redact=redact, output_files=output_files, now=now
        )
        self._drafts: dict[str, SessionMeta] = {}
        self._search: SessionSearch | None = None

    @cached_property
    def _list(self) -> SessionListing:
        return SessionListing(self._logs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Write pending metadata and release files and locks; the store can be used again afterwards."""
        await self._logs.close()
        if self._search is not None:
            self._search.close()
            self._search = None
        await self._logs.store.close()

    # --- where it is ------------------------------------------------------------------------------------------------

    def session_dir(self, session_id: str) -> Path:
        if self.data_dir is None:
            raise StorageError("these sessions are not in a folder: this store has no paths")
        return self.data_dir / checked_id(session_id)

    def meta_path(self, session_id: str) -> Path:
        return self.session_dir(session_id) / "meta.json"

    def messages_path(self, session_id: str) -> Path:
        return self.session_dir(session_id) / "messages.jsonl"

    # --- creating and finding ---------------------------------------------------------------------------------------

    def draft_session(
        self,
        title: str | None = None,
        *,
        provider: str | None = None,
        model: str | None = None,
        cwd: str | None = None,
        api_base: str | None = None,
    ) -> SessionData:
        """Return a new session that is stored with its first message."""
        meta = new_meta(
            self._new_id(),
            now=self._now(),
            title=title and self._logs.redacted_value(title),
            provider=provider,
            model=model,
            cwd=cwd,
            api_base=api_base,
        )
        self._drafts[meta["id"]] = meta.copy()
        while len(self._drafts) > _MOST_DRAFTS:
            del self._drafts[next(iter(self._drafts))]
        return {"session": meta, "messages": []}

    async def create_session(
        self,
        title: str | None = None,
        *,
        session_id: str | None = None,
        provider: str | None = None,
        model: str | None = None,
        cwd: str | None = None,
        api_base: str | None = None,
        **more: Any,
    ) -> SessionData:
        """Create a session; `SessionExists` if the id is taken. `more` are further fields of the metadata.

        Without a `session_id`, or with an empty one, it gets a new id."""
        given = {"title": title, "provider": provider, "model": model, "cwd": cwd, "api_base": api_base}
        data = await self._create(session_id, given, more)
        self._publish(EventType.SESSION_CREATED, data["session"]["id"])
        return data

    async def _create(self, session_id: str | None, given: dict[str, Any], more: dict[str, Any]) -> SessionData:
        """Create a session without publishing an event."""
        id_ = self._new_id() if session_id in (None, "") else checked_id(session_id)
        checked_fields({name: value for name, value in given.items() if value is not None})
        meta = new_meta(id_, now=self._now(), **self._logs.redacted_value(given | more))
        if not await self._logs.create(meta):
            raise SessionExists(f"session {id_} exists; load it, or give another session_id")
        return {"session": meta.copy(), "messages": []}

    async def list_sessions(
        self, *, cwd: str | None = None, archived: bool | None = None, counts: bool = False
    ) -> list[SessionMeta]:
        """List sessions, newest first, without reading messages.

        `archived`: only archived ones, or only others; `counts`: with exact counts of messages and tokens."""
        metas = await self._list.metas()
        if cwd is not None:
            wanted = new_meta("x", now="", cwd=cwd)["cwd"]
            metas = [meta for meta in metas if meta["cwd"] == wanted]
        if archived is not None:
            metas = [meta for meta in metas if bool(meta.get("archived_at")) is archived]
        return await self.counted(metas) if counts else metas

    async def counted(self, metas: Iterable[SessionMeta]) -> list[SessionMeta]:
        """Return these with exact counts; reads the readable logs that are ahead of their metadata."""
        return await self._logs.counted(metas)

    async def latest_session(self, *, cwd: str | None = None) -> SessionMeta | None:
        metas = await self.list_sessions(cwd=cwd)
        return metas[0] if metas else None

    async def children(self, session_id: str) -> list[SessionMeta]:
        """Return the sub-sessions and forks of a session."""
        checked_id(session_id)
        return [meta for meta in await self.list_sessions() if meta.get("parent_session_id") == session_id]

    async def traces(self) -> list[SessionMeta]:
        """Return the folders that contain only a trace, with the time of its last change."""
        return await self._list.traces()

    async def resolve_id(self, text: str, *, traces: bool = False) -> str:
        """Return the id for a full id, the beginning of exactly one, or "last"; else raise `SessionNotFound`.

        With `traces`, folders that contain only a trace are found too."""
        return await self._list.resolve(text, traces=traces)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def append_message(
        self,
        session_id: str,
        message: ConversationMessage,
        *,
        provider: str | None = None,
        model: str | None = None,
        cwd: str | None = None,
        api_base: str | None = None,
    ) -> int:
        """Append a message and return its sequence number; a missing session is created."""
        return await self.append_many(session_id, [message], provider=provider, model=model, cwd=cwd, api_base=api_base)

    async def append_many(
        self,
        session_id: str,
        messages: Sequence[ConversationMessage],
        *,
        provider: str | None = None,
        model: str | None = None,
        cwd: str | None = None,
        api_base: str | None = None,
    ) -> int:
        """Append messages, all of them or none, and return the sequence number of the last.

        Without messages, nothing is written; returns the number of the last entry, or 0."""
        checked_id(session_id)
        if not messages:
            return await self._logs.reader(session_id).last_seq()
        drafted: SessionMeta | None = None

        def draft() -> SessionMeta:
            nonlocal drafted
            given = {"provider": provider, "model": model, "cwd": cwd, "api_base": api_base}
            if session_id in self._drafts:
                drafted = self._drafts[session_id].copy()
            else:
                drafted = new_meta(session_id, now=self._now(), **self._logs.redacted_value(given))
            return drafted

        seq, writer = await self._logs.append(session_id, messages, draft)
        self._drafts.pop(session_id, None)
        if bus.subscribers:
            if writer.created_from is drafted:
                self._publish(EventType.SESSION_CREATED, session_id)
            for number, message in enumerate(messages, seq - len(messages) + 1):
                if (role := message.get("role")) not in ("compact", "rewind"):
                    self._publish(EventType.MESSAGE_CREATED, session_id, role=role, seq=number)
            self._publish(EventType.SESSION_UPDATED, session_id)
        return seq

    async def append_rewind(self, session_id: str, rewind_to: int | None = None, *, to_seq: int | None = None) -> int:
        """Go back to the first `rewind_to` visible messages, or to right after entry `to_seq`; the log keeps all.

        Returns the number of the entry written, or 0 if there is no such session. `RewindRefused` (a ValueError)
        if there are fewer messages or entries; nothing is written then."""
        if await self._logs.meta(session_id) is None:
            return 0
        seq = await branching.rewind(self._logs, session_id, rewind_to, to_seq, self._now())
        if (writer := self._logs.writers.get(session_id)) is not None:
            await writer.release_calls()
        self._publish(EventType.SESSION_REWOUND, session_id, seq=seq)
        return seq

    async def clear_session(self, session_id: str) -> None:
        """Hide all messages; the log keeps them. Does nothing if there is no such session."""
        if await self._logs.meta(session_id) is not None and (await self._logs.view(session_id)).messages:
            await self.append_rewind(session_id, 0)

    def redacted_text(self, text: str) -> str:
        """Return a text without the secrets that this store replaces in messages."""
        return str(self._logs.redacted_value(text))

    async def delete_session(self, session_id: str, *, expect: Expected = None) -> bool:
        """Delete the session with all its files; False if there is none, or `expect` is not its log's stamp."""
        title = ""
        if bus.subscribers:
            with suppress(SessionTooNew):
                meta = await self._logs.meta(session_id)
                title = meta["title"] if meta is not None else ""
        there = await self._logs.delete(session_id, expect=expect)
        if there:
            self._publish(EventType.SESSION_DELETED, session_id, title=title)
        return there

    # --- reading ----------------------------------------------------------------------------------------------------

    async def load_session(self, session_id: str, *, repair: bool = True) -> SessionData | None:
        """Return the metadata and the visible messages, or None if there is no such session.

        Tool calls without a result get an error result, so that providers accept the conversation. For the last
        message with calls it is also appended to the log, once, unless the result may still come: from another
        living process, or from another task of this process that appended the call and is not done.
        `repair=False` writes nothing, for viewers."""
        hint, reading = await self._logs.position(session_id), self._logs.reader(session_id)
        if hint is False:
            return None
        view = await (self._logs.repaired_view(session_id, hint) if repair else reading.view(hint=hint))
        messages = await reading.whole(view)
        messages = repair_messages(messages).messages
        meta = await self._logs.meta(session_id)
        if meta is None:
            return None  # deleted meanwhile
        data: SessionData = {"session": meta, "messages": messages}
        if view.problems:
            data["problems"] = view.problems
            logger.warning("session %s: %s", session_id, "; ".join(view.problems))
        return data

    def load_session_sync(self, session_id: str) -> SessionData | None:
        """Call `load_session` without await.

        Within a running loop, which is blocked meanwhile, it writes nothing (`repair=False`), because a task of that
        loop may hold the lock that a write would wait for."""
        try:
            asyncio.get_running_loop()
            repair = False
        except RuntimeError:
            repair = True
        with ThreadPoolExecutor(1, "carrel-load-session") as thread:
            return thread.submit(lambda: asyncio.run(self.load_session(session_id, repair=repair))).result()

    async def read_meta(self, session_id: str, *, counts: bool = False) -> SessionMeta:
        """Return the metadata of a session, with `counts` with exact counts; `SessionNotFound` if there is none."""
        meta = await self._logs.require_meta(session_id)
        if counts:
            stamp = await self._logs.store.stamp(self._logs.log_key(session_id))
            await self._logs.reader(session_id).count(meta, stamp)
        return meta

    async def find_meta(self, session_id: str) -> SessionMeta | None:
        """Return the metadata of a session; None if there is no such session."""
        return await self._logs.meta(session_id)

    async def last_seq(self, session_id: str) -> int:
        """Return the sequence number of the newest entry, 0 without one."""
        return await self._logs.reader(session_id).last_seq(hint=position_of(await self.read_meta(session_id)))

    async def iter_messages(self, session_id: str) -> AsyncIterator[ConversationMessage]:
        """Iterate over the visible messages as they were written; memory does not grow with the log."""
        await self.read_meta(session_id)
        async for message in self._logs.reader(session_id).messages():
            yield message

    async def iter_entries(self, session_id: str, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Iterate over all lines of the log with their sequence numbers; an invalid line has the role `unreadable`."""
        await self.read_meta(session_id)
        async for numbered in self._logs.reader(session_id).entries(from_seq):
            yield numbered

    async def tail(self, session_id: str, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Iterate like `iter_entries`, then over entries as any process appends them, until the session is deleted."""
        await self.read_meta(session_id)
        async for numbered in self._logs.reader(session_id).live(from_seq):
            yield numbered

    # --- about a session as a whole ---------------------------------------------------------------------------------

    async def update_meta(self, session_id: str, **fields: Any) -> SessionMeta:
        """Set metadata, also in the log, from which `meta.json` can be rebuilt."""
        meta = await self._set_meta(session_id, fields)
        self._publish(EventType.SESSION_UPDATED, session_id)
        return meta

    async def _set_meta(self, session_id: str, fields: dict[str, Any]) -> SessionMeta:
        await self.read_meta(session_id)
        fields = checked_fields(self._logs.redacted_value(fields))
        return await self._logs.append_note(session_id, build_note("meta", created_at=self._now(), set=fields))

    async def rename(self, session_id: str, title: str) -> SessionMeta:
        if not isinstance(title, str) or not title.strip():
            raise MetadataRefused("a session needs a title that is not empty; nothing was written")
        return await self.update_meta(session_id, title=title)

    async def set_tags(self, session_id: str, tags: Iterable[str]) -> SessionMeta:
        given = list(tags)
        if isinstance(tags, str) or not all(isinstance(tag, str) and tag.strip() for tag in given):
            raise MetadataRefused(f"tags must be several texts, not {tags!r:.60}; nothing was written")
        return await self.update_meta(session_id, tags=sorted(set(given)))

    async def archive(self, session_id: str) -> SessionMeta:
        meta = await self._set_meta(session_id, {"archived_at": self._now()})
        self._publish(EventType.SESSION_ARCHIVED, session_id)
        return meta

    async def unarchive(self, session_id: str) -> SessionMeta:
        meta = await self._set_meta(session_id, {"archived_at": None})
        self._publish(EventType.SESSION_UNARCHIVED, session_id)
        return meta

    async def label(self, session_id: str, text: str, at: int | None = None) -> int:
        """Label an entry, by default the last one, and return its sequence number."""
        if not isinstance(text, str) or not text.strip():
            raise MetadataRefused("a label needs a text that is not empty; nothing was written")
        text = self._logs.redacted_value(text)
        place = await self._mark(session_id, "label", at, text=text)
        self._publish(EventType.SESSION_LABELLED, session_id, text=text, seq=place)
        return place

    async def labels(self, session_id: str) -> list[dict[str, Any]]:
        return list((await self.read_meta(session_id)).get("labels", []))

    async def pin(self, session_id: str, at: int) -> int:
        """Pin an entry: compactions keep it unchanged."""
        return await self._mark(session_id, "pin", at)

    async def _mark(self, session_id: str, kind: str, at: int | None, **fields: Any) -> int:
        last = await self.last_seq(session_id)
        place = last if at is None else at
        checked_place("at", place, last, "is the last entry", lowest=1)
        await self._logs.append_note(session_id, build_note(kind, created_at=self._now(), at_seq=place, **fields))
        return place

    async def usage(self, session_id: str, prices: Mapping[str, Price | Mapping[str, float]] | None = None) -> Usage:
        """Return tokens (and cost, with prices per million) by model; a fork counts only its own entries."""
        count = UsageCount(session_id, prices)
        async for seq, entry in self.iter_entries(session_id):
            count.take(seq, entry)
        return count.result()

    async def compact(
        self,
        session_id: str,
        summarize: Summarize,
        *,
        keep_tokens: int = 20_000,
        keep_turns: int | None = None,
        provider: str | None = None,
        model: str | None = None,
    ) -> ConversationMessage:
        """Replace the older visible messages by a summary; returns the entry written.

        `summarize` gets the messages to replace (append `COMPACT_SUMMARY_PROMPT` as the last user message) and
        returns a text, a text and its usage, or an assistant message."""
        seq, event = await compact(
            self._logs,
            session_id,
            summarize,
            keep_tokens=keep_tokens,
            keep_turns=keep_turns,
            provider=provider,
            model=model,
            now=self._now,
        )
        self._publish(EventType.SESSION_COMPACTED, session_id, seq=seq)
        return event

    async def fork_session(
        self,
        session_id: str,
        at: int | None = None,
        *,
        title: str | None = None,
        new_id: str | None = None,
        load: bool = True,
    ) -> SessionData:
        """Create another session with the log so far (up to entry `at`); both continue independently.

        Sequence numbers, labels and pins are the same in it, and its usage starts at 0. Without `load`, the result
        has no messages, and memory does not grow with the log."""
        last = await self.last_seq(session_id)
        place = last if at is None else at
        checked_place("at", place, last, "is the last entry")
        id_ = checked_id(new_id) if new_id else self._new_id()
        meta = await branching.fork(
            self._logs, session_id, id_, place, title=title and self._logs.redacted_value(title), now=self._now()
        )
        data = await self._loaded(id_) if load else SessionData(session=meta, messages=[])
        self._publish(EventType.SESSION_FORKED, session_id, fork_id=id_, title=data["session"]["title"], at_seq=place)
        return data

    async def export(self, session_id: str, format: Format = "jsonl", *, redact: Redact | None = None) -> str:
        """Return the session as text: the whole log with its attachments, or the visible conversation as a page.

        `redact=redact_secrets` replaces secrets in the text; the session keeps them."""
        if format not in get_args(Format):
            raise ConfigurationError(f"invalid export format {format!r}: use jsonl, markdown or html")
        if format == "jsonl":
            return "".join([line async for line in self.export_lines(session_id, redact=redact)])
        data = await self._loaded(session_id, repair=False)
        data["session"] = redact_value(data["session"], redact)
        data["messages"] = [redact_entry(message, redact) for message in data["messages"]]
        if format == "markdown":
            return to_markdown(data)
        return to_html(data, [(seq, redact_entry(entry, redact)) async for seq, entry in self.iter_entries(session_id)])

    async def export_lines(self, session_id: str, *, redact: Redact | None = None) -> AsyncIterator[str]:
        """Iterate over the lines of a jsonl export; memory does not grow with the log."""
        async for _, entry in self.iter_entries(session_id):
            yield to_line(redact_entry(entry, redact))

    async def _loaded(self, session_id: str, *, repair: bool = True) -> SessionData:
        data = await self.load_session(session_id, repair=repair)
        if data is None:
            raise not_found(session_id)
        return data

    async def search(self, query: str, limit: int = 10) -> list[SearchHit]:
        """Search all sessions for messages with these words or with this meaning."""
        if self._search is None:
            path = self.data_dir / ".catalogue.sqlite3" if self.data_dir is not None else None
            self._search = SessionSearch(self._logs.store, self._logs.prefix, path, choose_embedder(self._embedder))
        return await self._search.search(query, limit)

    async def prune(
        self, older_than: timedelta, keep_labelled: bool = True, dry_run: bool = True, *, keep: Collection[str] = ()
    ) -> list[SessionMeta]:
        """Delete sessions that were not changed for that long and return them; with `dry_run`, only return them.

        The ids in `keep` are left out, and sessions of a newer format, whose labels cannot be read (logged).
        Folders that contain only a trace are included."""
        logs = await self._logs.log_stamps()
        found = await self._list.untouched_for(older_than, now=self._now(), keep_labelled=keep_labelled)
        chosen = [meta for meta in found if meta["id"] not in keep]
        if dry_run:
            return chosen
        # A session that was changed since then is not deleted.
        return [meta for meta in chosen if await self.delete_session(meta["id"], expect=logs.get(meta["id"], MISSING))]

    async def import_file(
        self, path: Path | str, *, all_branches: bool = False, again: bool = False
    ) -> list[ImportReport]:
        """Import the sessions of another agent or folder; each report lists what was imported and what was not.

        A session that was imported before is not stored twice unless `again`: the report has its id, and new entries
        of the source are appended if neither its old part nor the session was changed. With `all_branches`, branches
        that are not part of the conversation become sessions of their own."""
        # Two imports of one file at once would both create its session.
        async with locked(self._logs.store, self._logs.folder("imports/lock")):
            here = [] if again else await self.list_sessions()
            writer = ImportWriter(self._logs, self.create_session, here, self._now)
            reports = []
            for imported in read_session_file(Path(path), all_branches=all_branches):
                reports.append(report := await writer.write(imported))
                if report.session_id:
                    self._publish(EventType.SESSION_UPDATED, report.session_id)
        return reports

    def _publish(self, kind: EventType, session_id: str, **facts: Any) -> None:
        if bus.subscribers:
            writer = self._logs.writers.get(session_id)
            about = {"session_id": session_id, "title": writer.meta["title"] if writer is not None else ""}
            bus.publish(Event(kind, about | facts))
