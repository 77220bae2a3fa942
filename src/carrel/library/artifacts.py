"""Artifacts: what sessions keep under a name, as files a person can open, with a note about each."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carrel.errors import (
    ArtifactNameRefused,
    ArtifactNotFoundError,
    ArtifactReadError,
    ArtifactWriteError,
    KeyMissing,
    KeyRefused,
    StorageReadError,
    StorageWriteError,
)
from carrel.library.artifact_data import KINDS, Kind, decoded, encoded, guessed, guessed_kind
from carrel.library.artifact_names import checked_name, is_name, key_of, lock_of, name_of, note_of
from carrel.library.artifact_notes import Note, fitting, new_note, read_note, speaks_of, standing
from carrel.library.artifact_uploads import Uploads
from carrel.library.names import check_call_signature
from carrel.library.search import LibrarySearch, SearchEntry
from carrel.storage.base import MISSING, Lock, Stamp, Store
from carrel.text import did_you_mean

INLINE = 4 * 1024 * 1024
"""What crosses to the inside at once; more goes in pieces."""
_LONGEST_QUERY = 2000
_PIECE = 1024 * 1024
_RECORDS = ("list", "search", "get", "save", "keep", "end_upload")
"""Verbs that answer with what is known of artifacts."""


def _now() -> datetime:
    return datetime.now(UTC)


class ArtifactStore:
    """The artifacts of a store: the bytes lie at `artifacts/NAME`, what is known about them beside.

    A file that a person puts there is an artifact too, and one that was edited by hand keeps its description.
    """

    def __init__(
        self,
        store: Store,
        *,
        prefix: str = "artifacts",
        folder: Path | None = None,
        index: LibrarySearch | None = None,
        now: Callable[[], datetime] = _now,
    ) -> None:
        """`folder`: where the store keeps its keys as files; the `path` of an artifact is then its file's."""
        self._folder = folder.absolute() if folder is not None else None
        self._store = store
        self._prefix = prefix
        self._notes = f"library/{prefix}"
        self._now = now
        self._index = index if index is not None else LibrarySearch(store, f"search/{prefix}")
        self._uploads = Uploads(self._keep_pieces)

    # --- keeping ----------------------------------------------------------------------------------------------------

    async def save(
        self, name: str, data: Any, description: str = "", metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Keep text, bytes or JSON data; a Path or an async iterable of bytes is read in pieces and kept as bytes.

        Whole or not at all, also when several save at once. `ArtifactWriteError` for what is none of these,
        `ArtifactNameRefused` (a ValueError too) for a name that is no plain relative path."""
        if isinstance(data, Path):
            return await self._keep_pieces(name, _of_file(name, data), "bytes", description, metadata)
        if isinstance(data, AsyncIterable):
            return await self._keep_pieces(name, data, "bytes", description, metadata)
        kind, content = encoded(checked_name(name), data)
        return await self._keep(name, content, kind, description, metadata)

    async def _keep(
        self,
        name: str,
        data: bytes,
        kind: Kind,
        description: str = "",
        metadata: dict[str, Any] | None = None,
        form: str = "",
    ) -> dict[str, Any]:
        key = self._key(name)
        note = new_note(name, kind, form, description, metadata)
        with _saying(name):
            lock = await self._alone(name)
            try:
                note = await self._announce(name, note, len(data), hashlib.sha256(data).hexdigest())
                await self._store.put(key, data)
                return self._shown(name, note, None)
            finally:
                await lock.release()

    async def _keep_pieces(
        self,
        name: str,
        pieces: AsyncIterable[bytes],
        kind: Kind,
        description: str = "",
        metadata: dict[str, Any] | None = None,
        form: str = "",
    ) -> dict[str, Any]:
        key = self._key(name)
        note = new_note(name, kind, form, description, metadata)
        locks: list[Lock] = []

        async def counted() -> AsyncIterator[bytes]:
            nonlocal note
            size, digest = 0, hashlib.sha256()
            async for piece in pieces:
                size += len(piece)
                digest.update(piece)
                yield bytes(piece)
            # Only now, when the last one is there: one that comes slowly holds up nobody.
            locks.append(await self._alone(name))
            note = await self._announce(name, note, size, digest.hexdigest())

        with _saying(name):
            try:
                await self._store.put_pieces(key, counted())
                return self._shown(name, note, None)
            finally:
                for lock in locks:
                    await lock.release()

    async def _alone(self, name: str) -> Lock:
        """Hold this name among all processes, and see that it is no folder and lies in no file."""
        lock = await self._store.lock(f"{self._notes}/{lock_of(name)}")
        assert lock is not None
        try:
            await self._refuse_folder(name)
        except BaseException:
            await lock.release()
            raise
        return lock

    async def _refuse_folder(self, name: str) -> None:
        words = name.split("/")
        above = ["/".join(words[:count]) for count in range(1, len(words))]
        stamps = await self._store.stamps([self._key(folder) for folder in above])
        for folder, stamp in zip(above, stamps, strict=True):
            if stamp is not None:
                raise ArtifactWriteError(f"{name} was not saved: {folder} is an artifact and no folder")
        key = self._key(name)
        if any(other != key for other in await self._store.list(key)):
            raise ArtifactWriteError(f"{name} was not saved: there are artifacts below {name}/")

    async def _announce(self, name: str, note: Note, size: int, digest: str) -> Note:
        """Say what the data will be before they are there, and what they are until then; what the note says counts.

        A reader goes by the one of the two that fits, so what is saved comes whole or not at all."""
        at = self._now().isoformat(timespec="milliseconds")
        note = {"created_at": None, "updated_at": at, "size": size, "sha256": digest, **note}
        key = self._note_key(name)
        noted_at = await self._store.stamp(key)
        ((noted, stamp),) = await self._seen([name])
        if stamp is not None:
            before = standing(noted, stamp)
            note["created_at"] = note["created_at"] or before.get("created_at")
            note["before"] = {**before, "before": None, "stamp": list(stamp)}
        note["created_at"] = note["created_at"] or at
        if not await self._store.put(key, json.dumps(note, indent=1).encode(), expect=noted_at or MISSING):
            # Its lock was lost: this process or the server stood still for too long.
            raise StorageWriteError("another process saved it at the same time; look at it, and save again")
        return note

    async def take(self, name: str, source: "ArtifactStore") -> None:
        """Keep what another store has under this name, with what is noted of it; for whoever holds its lock here."""

        async def counted() -> AsyncIterator[bytes]:
            size, digest = 0, hashlib.sha256()
            async for piece in source.pieces(name):
                size += len(piece)
                digest.update(piece)
                yield piece
            note = await source.noted(name, digest.hexdigest())
            if note is not None:
                await self._announce(name, note, size, digest.hexdigest())

        with _saying(name):
            await self._refuse_folder(name)
            await self._store.put_pieces(self._key(name), counted())

    async def noted(self, name: str, digest: str = "") -> Note | None:
        """What is noted of its data, of those with this digest where that is given; None for a person's file."""
        ((note, stamp),) = await self._seen([name])
        known = fitting(note, stamp, digest) or standing(note, stamp)
        return {key: value for key, value in known.items() if key not in ("before", "stamp")} or None

    async def delete(self, name: str) -> None:
        """Gone, also when there was none."""
        key = self._key(name)
        if await self._store.stamp(key) is None and await self._store.stamp(self._note_key(name)) is None:
            return
        with _saying(name, "deleted"):
            lock = await self._store.lock(f"{self._notes}/{lock_of(name)}")
            try:
                # A folder of artifacts is none, and stays.
                if await self._store.stamp(key) is not None:
                    await self._store.delete(key)
                if await self._store.stamp(self._note_key(name)) is not None:
                    await self._store.delete(self._note_key(name))
            finally:
                if lock is not None:
                    await lock.release()

    # --- looking ----------------------------------------------------------------------------------------------------

    async def load(self, name: str) -> Any:
        """The data as it was saved; `ArtifactNotFoundError` names near ones."""
        _, _, value = await self._loaded(name)
        return value

    async def _loaded(self, name: str) -> tuple[Note, bytes, Any]:
        key = self._key(name)
        with _reading(name):
            note = await self._noted(name)
            while True:
                # Before the data, as are those that it is of.
                stamp = await self._store.stamp(key) if note is not None and note.get("before") else None
                data = await self._store.get(key)
                if data is None:
                    raise await self._unknown(name)
                told = fitting(note, stamp, hashlib.sha256(data).hexdigest())
                if told is not None:
                    break
                seen, note = note, await self._noted(name)
                if note == seen:
                    # Nobody is saving it: a person put it there, or edited it.
                    told = standing(note, stamp)
                    kind, value = guessed(name, data, told.get("kind"))
                    return {**told, "kind": kind, "form": ""}, data, value
        try:
            return told, data, decoded(told["kind"], data)
        except (ValueError, RecursionError) as problem:
            raise ArtifactReadError(
                f"{name} was saved as {told['kind']} and is none ({problem}); save it anew, or read its bytes"
                " with pieces"
            ) from problem

    def pieces(self, name: str, start: int = 0) -> AsyncIterator[bytes]:
        """Its bytes piece by piece, for one that is too large to hold."""
        return self._pieces(name, start)

    async def _pieces(self, name: str, start: int) -> AsyncIterator[bytes]:
        key = self._key(name)
        try:
            with _reading(name):
                async for piece in self._store.pieces(key, start):
                    yield piece
        except KeyMissing:
            raise await self._unknown(name) from None

    async def get(self, name: str) -> dict[str, Any] | None:
        """What is known about it, without its data, or None."""
        self._key(name)
        ((note, stamp),) = await self._seen([name])
        return self._shown(name, note, stamp) if stamp is not None else None

    async def exists(self, name: str) -> bool:
        return await self._store.stamp(self._key(name)) is not None

    async def search(self, query: str, limit: int = 10) -> list[dict[str, Any]]:
        """Those whose name or description fits best, the best first."""
        found = {artifact["name"]: artifact for artifact in await self.list()}
        self._index.set_entries([SearchEntry(name, name, one["description"]) for name, one in found.items()])
        hits = await self._index.search(str(query)[:_LONGEST_QUERY], int(limit))
        # Another search may have told the index of later ones meanwhile.
        return [found[hit.key] for hit in hits if hit.key in found]

    def _shown(self, name: str, note: Note | None, stamp: Stamp | None) -> dict[str, Any]:
        note = standing(note, stamp)
        at = datetime.fromtimestamp(stamp.modified, UTC).isoformat(timespec="milliseconds") if stamp is not None else ""
        return {
            "name": name,
            "path": self._key(name) if self._folder is None else str(self._folder / self._key(name)),
            "description": note.get("description", ""),
            "metadata": note.get("metadata", {}),
            "created_at": note.get("created_at") or at,
            "updated_at": note.get("updated_at") or at,
            "size": stamp.size if stamp is not None else note.get("size", 0),
            "kind": note.get("kind") or guessed_kind(name),
        }

    # --- what code inside asks --------------------------------------------------------------------------------------

    async def handle(self, name: str, args: list[Any], kwargs: dict[str, Any], *, sees_files: bool = False) -> Any:
        """Answer it; `artifacts.save` and `artifacts.load` are made of the verbs of the second half.

        `sees_files`: whether a path of this machine opens there. Where it does not, `path` is the key, and the worker
        makes a file of its own."""
        verb = name.partition(".")[2]
        answers: dict[str, Callable[..., Awaitable[Any]]] = {
            "list": self.list,
            "delete": self.delete,
            "exists": self.exists,
            "get": self.get,
            "search": self.search,
            "save": self.save,
            "load": self.load,
            "keep": self._keep_sent,
            "fetch": self._fetch,
            "piece": self._piece,
            "begin_upload": self._begin_upload,
            "upload": self._uploads.add,
            "end_upload": self._uploads.end,
            "drop_upload": self._uploads.drop,
        }
        if verb not in answers:
            raise ArtifactNotFoundError(f"artifacts can do no {verb!r}{did_you_mean(verb, list(answers)[:7])}")
        check_call_signature(name, answers[verb], args, kwargs)
        answer = await answers[verb](*args, **kwargs)
        if sees_files or verb not in _RECORDS or answer is None:
            return answer
        if isinstance(answer, dict):
            return {**answer, "path": self._key(answer["name"])}
        return [{**record, "path": self._key(record["name"])} for record in answer]

    async def _keep_sent(self, name: str, data: bytes, kind: Kind, **about: Any) -> dict[str, Any]:
        if kind not in KINDS or not isinstance(data, bytes):
            raise ArtifactWriteError(f"{name} was not saved: what came is no data of a kind that is known")
        return await self._keep(name, data, kind, **about)

    async def _begin_upload(self, name: str, kind: Kind, **about: Any) -> str:
        self._key(name)
        if kind not in KINDS:
            raise ArtifactWriteError(f"{name} was not saved: what came is no data of a kind that is known")
        return self._uploads.begin(name=name, kind=kind, **about)

    async def _fetch(self, name: str) -> dict[str, Any]:
        """What it is, and its bytes where they are not too many to cross at once."""
        self._key(name)
        ((known, stamp),) = await self._seen([name])
        if stamp is None:
            raise await self._unknown(name)
        if stamp.size <= INLINE:
            note, data, _ = await self._loaded(name)
            return {"kind": note["kind"], "form": note.get("form", ""), "size": len(data), "data": data}
        note = standing(known, stamp)
        kind = note["kind"] if note.get("size") == stamp.size else guessed_kind(name)
        return {"kind": kind, "form": note.get("form", ""), "size": stamp.size, "stamp": list(stamp)}

    async def _piece(self, name: str, start: int, stamp: list[Any]) -> bytes:
        """Some bytes of the very version that `fetch` told of."""
        parts, size = [], 0
        async for piece in self._pieces(name, start):
            parts.append(piece)
            size += len(piece)
            if size >= INLINE:
                break
        now = await self._store.stamp(self._key(name))
        if now is None or list(now) != stamp:
            raise ArtifactReadError(f"{name} was saved anew while it was loaded; load it again")
        return b"".join(parts)

    async def close(self) -> None:
        """End what is under way; usable again afterwards."""
        await self._uploads.close()
        await self._index.close()

    # --- keys and notes ---------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{key_of(checked_name(name))}"

    def _note_key(self, name: str) -> str:
        return f"{self._notes}/{note_of(name)}"

    async def _noted(self, name: str) -> Note | None:
        return read_note(name, await self._store.get(self._note_key(name)))

    async def _seen(self, names: Sequence[str]) -> list[tuple[Note | None, Stamp | None]]:
        """What is noted of each, and which data are there: such as were there together."""
        found: dict[str, tuple[Note | None, Stamp | None]] = {}
        doubtful = list(names)
        while doubtful:
            datas = await self._store.get_many([self._note_key(name) for name in doubtful])
            notes = dict(zip(doubtful, map(read_note, doubtful, datas), strict=True))
            # One that says the same as before has nobody who is saving: a person wrote these data.
            doubtful = [name for name in doubtful if name not in found or found[name][0] != notes[name]]
            stamps = await self._store.stamps([self._key(name) for name in doubtful]) if doubtful else []
            found |= {name: (notes[name], stamp) for name, stamp in zip(doubtful, stamps, strict=True)}
            doubtful = [name for name in doubtful if not speaks_of(*found[name])]
        return [found[name] for name in names]

    async def _unknown(self, name: str) -> ArtifactNotFoundError:
        names = [artifact["name"] for artifact in await self.list()]
        return ArtifactNotFoundError(f"there is no artifact {name!r}{did_you_mean(name, names)}")

    # Last, because after it the name is no longer that of the type.
    async def list(self) -> list[dict[str, Any]]:
        """What is known about each, by name; no data is read."""
        # A file whose name could not be given to load is none.
        found = {name_of(key[len(self._prefix) + 1 :]) for key in await self._store.list(self._prefix)}
        names = sorted(filter(is_name, found))
        seen = zip(names, await self._seen(names), strict=True)
        return [self._shown(name, note, stamp) for name, (note, stamp) in seen if stamp is not None]


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except KeyRefused as problem:
        raise ArtifactReadError(f"{name} was not read: {problem}") from problem
    except StorageReadError as problem:
        raise ArtifactReadError(f"{name} could not be read whole: {problem}") from problem


@contextmanager
def _saying(name: str, what: str = "saved") -> Iterator[None]:
    try:
        yield
    except KeyRefused as problem:
        raise ArtifactNameRefused(f"{name} was not {what}: {problem}") from problem
    except StorageWriteError as problem:
        raise ArtifactWriteError(f"{name} was not {what}: {problem}") from problem


async def _of_file(name: str, path: Path) -> AsyncIterator[bytes]:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as problem:
        raise ArtifactWriteError(f"{name} was not saved: {path} cannot be read: {problem.strerror}") from problem
    try:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece
    finally:
        file.close()
