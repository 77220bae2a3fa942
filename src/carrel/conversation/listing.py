"""The list of sessions, kept up to date from what changed instead of read again each time."""

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime

from carrel.conversation.messages import SessionMeta
from carrel.conversation.metadata import decode_meta, is_id, new_meta
from carrel.errors import SessionTooNew
from carrel.storage.seam import Changes, Stamp, Store


class Listing:
    """Every session's metadata, newest first; one that cannot be read is there too, with what is known of it."""

    def __init__(self, store: Store, prefix: str, rebuild: Callable[[str], Awaitable[SessionMeta]]) -> None:
        self._store = store
        self._prefix = prefix
        self._rebuild = rebuild
        self._cursor: object = None
        self._asked = False
        self._metas: dict[str, SessionMeta] = {}
        self.log_sizes: dict[str, int] = {}
        """How long each log was when its session was last looked at."""
        self._sorted: list[SessionMeta] | None = None

    async def metas(self) -> list[SessionMeta]:
        """Fresh copies, so that a caller may keep and change them."""
        if not self._asked:
            # To be told of changes costs something for each session; whoever lists but once is spared it.
            self._asked = True
            changes = Changes(None, None)
        else:
            changes = await self._store.changed(self._prefix, self._cursor)
        self._cursor = changes.cursor
        if changes.keys is None:
            self._metas = {}
            self._sorted = None
            await self._refresh(await self._store.folders(self._prefix))
        elif changes.keys:
            start = len(self._prefix) + 1 if self._prefix else 0
            await self._refresh({key[start:].split("/", 1)[0] for key in changes.keys})
        if self._sorted is None:
            self._sorted = sorted(self._metas.values(), key=lambda meta: meta["updated_at"], reverse=True)
        return [meta.copy() for meta in self._sorted]

    async def _refresh(self, names: Iterable[str]) -> None:
        ids = [name for name in names if is_id(name)]
        folders = [f"{self._prefix}/{id_}" if self._prefix else id_ for id_ in ids]
        raws = await self._store.get_many([f"{folder}/meta.json" for folder in folders])
        stamps = await self._store.stamps([f"{folder}/messages.jsonl" for folder in folders])
        for id_, raw, stamp in zip(ids, raws, stamps, strict=True):
            self._metas.pop(id_, None)
            self.log_sizes[id_] = stamp.size if stamp else 0
            if raw is not None or stamp is not None:
                self._metas[id_] = listed_meta(id_, raw, stamp) or await self._rebuild(id_)
        self._sorted = None

    async def traces(self, names: Iterable[str] | None = None) -> list[SessionMeta]:
        """Folders (of these) in which nothing was said and only a trace lies, with when that was last written."""
        ids = [name for name in (await self._store.folders(self._prefix) if names is None else names) if is_id(name)]
        folders = [f"{self._prefix}/{id_}" if self._prefix else id_ for id_ in ids]
        files = [await self._store.stamps([f"{folder}/{name}" for folder in folders]) for name in _FILES]
        return [
            new_meta(id_, now=when_written(trace), title="(only a trace of what was done)")
            for id_, meta, log, trace in zip(ids, *files, strict=True)
            if trace is not None and meta is None and log is None
        ]


_FILES = ("meta.json", "messages.jsonl", "trace.jsonl")


def listed_meta(session_id: str, raw: bytes | None, stamp: Stamp | None) -> SessionMeta | None:
    """The metadata to show in a list, read without any message; None when only the log can tell."""
    try:
        meta = decode_meta(raw, session_id)
    except SessionTooNew as problem:
        meta = new_meta(session_id, now=when_written(stamp), title=f"({problem})")
        meta["message_format_version"] = problem.version
        return meta
    # The log says when it was last written; the metadata follows a moment later, or never when the writer was killed.
    if meta is not None and stamp is not None and meta.get("log_bytes", stamp.size) != stamp.size:
        meta["updated_at"] = max(when_written(stamp), meta["updated_at"])
    return meta


def when_written(stamp: Stamp | None) -> str:
    """When a log was last written to, as the metadata says it; empty when there is none."""
    return datetime.fromtimestamp(stamp.modified, UTC).isoformat() if stamp else ""
