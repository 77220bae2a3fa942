"""Artifacts: data that sessions save under a name, as files that people can open, with a record about each."""

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
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
from carrel.library.artifact_format import (
    KINDS,
    Kind,
    Record,
    decode,
    encode,
    guess,
    guess_kind,
    is_artifact_name,
    key_to_name,
    lock_key,
    may_describe,
    name_to_key,
    new_record,
    parse_record,
    record_for_digest,
    record_for_stamp,
    record_key,
    validate_artifact_name,
)
from carrel.library.names import check_call_signature
from carrel.library.search import LibrarySearch, SearchEntry
from carrel.storage.base import MISSING, Stamp, Store, locked
from carrel.text import did_you_mean

INLINE = 4 * 1024 * 1024
"""Bytes that are sent to running code at once; larger artifacts are sent in pieces."""
UPLOAD_IDLE = 60.0
"""Seconds that the next piece of an upload may take; then the code that sent it is considered gone."""
_MOST_UPLOADS = 100
_LONGEST_QUERY = 2000
_PIECE = 1024 * 1024
_ENTRY_METHODS = ("list", "search", "get", "save", "keep", "end_upload")
"""Methods that return entries of artifacts."""


def _now() -> datetime:
    return datetime.now(UTC)


class ArtifactStore:
    """The artifacts of a store: the data are at `artifacts/NAME`, the records at `library/artifacts`.

    A file that is put there by hand is an artifact too, and one that is edited by hand keeps its description.
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
        """`folder`: where the store keeps its keys as files; the `path` of an artifact is then that of its file."""
        self._folder = folder.absolute() if folder is not None else None
        self._store = store
        self._prefix = prefix
        self._records = f"library/{prefix}"
        self._now = now
        self._search = index if index is not None else LibrarySearch(store, f"search/{prefix}")
        self._uploads = ChunkedUploads(self._save_pieces)

    # --- saving -----------------------------------------------------------------------------------------------------

    async def save(
        self, name: str, data: Any, description: str = "", metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Save str, bytes or JSON data; a Path or an async iterable of bytes is read in pieces and saved as bytes.

        Saves all or nothing, also when several save at once. `ArtifactWriteError` for other data,
        `ArtifactNameRefused` (a ValueError too) for a name that is not a relative path."""
        if isinstance(data, Path):
            return await self._save_pieces(name, _file_pieces(name, data), "bytes", description, metadata)
        if isinstance(data, AsyncIterable):
            return await self._save_pieces(name, data, "bytes", description, metadata)
        kind, content = encode(validate_artifact_name(name), data)
        return await self._save_bytes(name, content, kind, description, metadata)

    async def _save_bytes(
        self,
        name: str,
        data: bytes,
        kind: Kind,
        description: str = "",
        metadata: dict[str, Any] | None = None,
        form: str = "",
    ) -> dict[str, Any]:
        key = self._key(name)
        record = new_record(name, kind, form, description, metadata)
        with _write_errors(name):
            async with self._locked(name):
                record = await self._put_record(name, record, len(data), hashlib.sha256(data).hexdigest())
                await self._store.put(key, data)
                return self._entry(name, record, None)

    async def _save_pieces(
        self,
        name: str,
        pieces: AsyncIterable[bytes],
        kind: Kind,
        description: str = "",
        metadata: dict[str, Any] | None = None,
        form: str = "",
    ) -> dict[str, Any]:
        key = self._key(name)
        record = new_record(name, kind, form, description, metadata)
        held = AsyncExitStack()

        async def with_record() -> AsyncIterator[bytes]:
            nonlocal record
            size, digest = 0, hashlib.sha256()
            async for piece in pieces:
                size += len(piece)
                digest.update(piece)
                yield bytes(piece)
            # Only after the last piece, so that slow pieces do not keep others waiting.
            await held.enter_async_context(self._locked(name))
            record = await self._put_record(name, record, size, digest.hexdigest())

        with _write_errors(name):
            async with held:
                await self._store.put_pieces(key, with_record())
                return self._entry(name, record, None)

    @asynccontextmanager
    async def _locked(self, name: str, *, to_save: bool = True) -> AsyncIterator[None]:
        """Lock a name among all processes; `ArtifactWriteError` if it is to be saved, and is a folder or below an
        artifact."""
        async with locked(self._store, f"{self._records}/{lock_key(name)}"):
            if to_save:
                await self._check_folders(name)
            yield

    async def _check_folders(self, name: str) -> None:
        parts = name.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        stamps = await self._store.stamps([self._key(folder) for folder in above])
        for folder, stamp in zip(above, stamps, strict=True):
            if stamp is not None:
                raise ArtifactWriteError(f"{name} was not saved: {folder} is an artifact, not a folder")
        key = self._key(name)
        if any(other != key for other in await self._store.list(key)):
            raise ArtifactWriteError(f"{name} was not saved: there are artifacts below {name}/")

    async def _put_record(self, name: str, record: Record, size: int, digest: str) -> Record:
        """Write the record of data that will follow, with that of the data that are there now as `before`."""
        at = self._now().isoformat(timespec="milliseconds")
        record = {"created_at": None, "updated_at": at, "size": size, "sha256": digest, **record}
        key = self._record_key(name)
        record_stamp = await self._store.stamp(key)
        ((known, stamp),) = await self._read_records([name])
        if stamp is not None:
            before = record_for_stamp(known, stamp)
            record["created_at"] = record["created_at"] or before.get("created_at")
            record["before"] = {**before, "before": None, "stamp": list(stamp)}
        record["created_at"] = record["created_at"] or at
        if not await self._store.put(key, json.dumps(record, indent=1).encode(), expect=record_stamp or MISSING):
            # The lock was lost, because this process or the server was suspended.
            raise StorageWriteError("another process saved it at the same time; load it, then save it again")
        return record

    async def copy_from(self, name: str, source: "ArtifactStore") -> None:
        """Save the artifact of another store with its record. The caller holds the lock of the name in this store."""

        async def with_record() -> AsyncIterator[bytes]:
            size, digest = 0, hashlib.sha256()
            async for piece in source.pieces(name):
                size += len(piece)
                digest.update(piece)
                yield piece
            record = await source.record(name, digest.hexdigest())
            if record is not None:
                await self._put_record(name, record, size, digest.hexdigest())

        with _write_errors(name):
            await self._check_folders(name)
            await self._store.put_pieces(self._key(name), with_record())

    async def record(self, name: str, digest: str = "") -> Record | None:
        """Return the record of its data, or of those with this digest; None for a file that was put there by hand."""
        ((record, stamp),) = await self._read_records([name])
        found = record_for_digest(record, stamp, digest) or record_for_stamp(record, stamp)
        return {key: value for key, value in found.items() if key not in ("before", "stamp")} or None

    async def delete(self, name: str) -> None:
        """Delete an artifact, if there is one."""
        key = self._key(name)
        if await self._store.stamp(key) is None and await self._store.stamp(self._record_key(name)) is None:
            return
        with _write_errors(name, "deleted"):
            async with self._locked(name, to_save=False):
                # A folder of artifacts has no stamp and stays.
                for each in (key, self._record_key(name)):
                    if await self._store.stamp(each) is not None:
                        await self._store.delete(each)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def load(self, name: str) -> Any:
        """Return the data as they were saved; `ArtifactNotFoundError` with similar names."""
        _, _, value = await self._load(name)
        return value

    async def _load(self, name: str) -> tuple[Record, bytes, Any]:
        key = self._key(name)
        with _read_errors(name):
            record = await self._read_record(name)
            while True:
                # The stamp is read before the data, as the record was.
                stamp = await self._store.stamp(key) if record is not None and record.get("before") else None
                data = await self._store.get(key)
                if data is None:
                    raise await self._not_found(name)
                found = record_for_digest(record, stamp, hashlib.sha256(data).hexdigest())
                if found is not None:
                    break
                last, record = record, await self._read_record(name)
                if record == last:
                    # It is not being saved, so it was written or edited by hand.
                    found = record_for_stamp(record, stamp)
                    kind, value = guess(name, data, found.get("kind"))
                    return {**found, "kind": kind, "form": ""}, data, value
        try:
            return found, data, decode(found["kind"], data)
        except (ValueError, RecursionError) as error:
            raise ArtifactReadError(
                f"{name} was saved as {found['kind']} and cannot be decoded ({error}); save it again, or read its bytes"
                " with pieces()"
            ) from error

    def pieces(self, name: str, start: int = 0) -> AsyncIterator[bytes]:
        """Yield its bytes piece by piece, for one that is too large for memory."""
        return self._pieces(name, start)

    async def _pieces(self, name: str, start: int) -> AsyncIterator[bytes]:
        key = self._key(name)
        try:
            with _read_errors(name):
                async for piece in self._store.pieces(key, start):
                    yield piece
        except KeyMissing:
            raise await self._not_found(name) from None

    async def get(self, name: str) -> dict[str, Any] | None:
        """Return its entry in `list`, or None."""
        self._key(name)
        ((record, stamp),) = await self._read_records([name])
        return self._entry(name, record, stamp) if stamp is not None else None

    async def exists(self, name: str) -> bool:
        """Whether there is an artifact of this name."""
        return await self._store.stamp(self._key(name)) is not None

    async def search(self, query: str, limit: int = 10) -> list[dict[str, Any]]:
        """Return the artifacts whose name or description match best, the best first."""
        entries = {entry["name"]: entry for entry in await self.list()}
        self._search.set_entries([SearchEntry(name, name, entry["description"]) for name, entry in entries.items()])
        matches = await self._search.search(str(query)[:_LONGEST_QUERY], int(limit))
        # A concurrent search may have set newer entries.
        return [entries[match.key] for match in matches if match.key in entries]

    def _entry(self, name: str, record: Record | None, stamp: Stamp | None) -> dict[str, Any]:
        record = record_for_stamp(record, stamp)
        at = datetime.fromtimestamp(stamp.modified, UTC).isoformat(timespec="milliseconds") if stamp is not None else ""
        return {
            "name": name,
            "path": self._key(name) if self._folder is None else str(self._folder / self._key(name)),
            "description": record.get("description", ""),
            "metadata": record.get("metadata", {}),
            "created_at": record.get("created_at") or at,
            "updated_at": record.get("updated_at") or at,
            "size": stamp.size if stamp is not None else record.get("size", 0),
            "kind": record.get("kind") or guess_kind(name),
        }

    # --- calls of code ----------------------------------------------------------------------------------------------

    async def handle(self, name: str, args: list[Any], kwargs: dict[str, Any], *, sees_files: bool = False) -> Any:
        """Answer a call of code: `artifacts.list()`. The worker makes `save` and `load` of the methods below `load`.

        `sees_files`: whether the code can open paths of this machine. If not, `path` is the key, and the worker copies
        the artifact to a file of its own."""
        verb = name.partition(".")[2]
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "list": self.list,
            "delete": self.delete,
            "exists": self.exists,
            "get": self.get,
            "search": self.search,
            "save": self.save,
            "load": self.load,
            "keep": self._save_encoded,
            "fetch": self._fetch,
            "piece": self._read_piece,
            "begin_upload": self._begin_upload,
            "upload": self._uploads.add,
            "end_upload": self._uploads.end,
            "drop_upload": self._uploads.cancel,
        }
        if verb not in methods:
            raise ArtifactNotFoundError(f"artifacts has no method {verb!r}{did_you_mean(verb, list(methods)[:7])}")
        check_call_signature(name, methods[verb], args, kwargs)
        answer = await methods[verb](*args, **kwargs)
        if sees_files or verb not in _ENTRY_METHODS or answer is None:
            return answer
        if isinstance(answer, dict):
            return {**answer, "path": self._key(answer["name"])}
        return [{**entry, "path": self._key(entry["name"])} for entry in answer]

    async def _save_encoded(self, name: str, data: bytes, kind: Kind, **details: Any) -> dict[str, Any]:
        if kind not in KINDS or not isinstance(data, bytes):
            raise ArtifactWriteError(f"{name} was not saved: the session sent no bytes, or an unknown kind of data")
        return await self._save_bytes(name, data, kind, **details)

    async def _begin_upload(self, name: str, kind: Kind, **details: Any) -> str:
        self._key(name)
        if kind not in KINDS:
            raise ArtifactWriteError(f"{name} was not saved: the session sent an unknown kind of data")
        return self._uploads.begin(name=name, kind=kind, **details)

    async def _fetch(self, name: str) -> dict[str, Any]:
        """Return its kind, and its bytes if they can be sent at once."""
        self._key(name)
        ((record, stamp),) = await self._read_records([name])
        if stamp is None:
            raise await self._not_found(name)
        if stamp.size <= INLINE:
            found, data, _ = await self._load(name)
            return {"kind": found["kind"], "form": found.get("form", ""), "size": len(data), "data": data}
        found = record_for_stamp(record, stamp)
        kind = found["kind"] if found.get("size") == stamp.size else guess_kind(name)
        return {"kind": kind, "form": found.get("form", ""), "size": stamp.size, "stamp": list(stamp)}

    async def _read_piece(self, name: str, start: int, stamp: list[Any]) -> bytes:
        """Return some bytes of the version with this stamp, which `fetch` returned."""
        parts, size = [], 0
        async for piece in self._pieces(name, start):
            parts.append(piece)
            size += len(piece)
            if size >= INLINE:
                break
        now = await self._store.stamp(self._key(name))
        if now is None or list(now) != stamp:
            raise ArtifactReadError(f"{name} was saved again while it was loaded; load it again")
        return b"".join(parts)

    async def close(self) -> None:
        """Cancel uploads; the store can still be used afterwards."""
        await self._uploads.close()
        await self._search.close()

    # --- keys and records -------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name_to_key(validate_artifact_name(name))}"

    def _record_key(self, name: str) -> str:
        return f"{self._records}/{record_key(name)}"

    async def _read_record(self, name: str) -> Record | None:
        return parse_record(name, await self._store.get(self._record_key(name)))

    async def _read_records(self, names: Sequence[str]) -> list[tuple[Record | None, Stamp | None]]:
        """Return the record and the stamp of each, as they were at one moment."""
        found: dict[str, tuple[Record | None, Stamp | None]] = {}
        doubtful = list(names)
        while doubtful:
            contents = await self._store.get_many([self._record_key(name) for name in doubtful])
            records = dict(zip(doubtful, map(parse_record, doubtful, contents), strict=True))
            # If the record is still the same, nothing is being saved: the data were written by hand.
            doubtful = [name for name in doubtful if name not in found or found[name][0] != records[name]]
            stamps = await self._store.stamps([self._key(name) for name in doubtful]) if doubtful else []
            found |= {name: (records[name], stamp) for name, stamp in zip(doubtful, stamps, strict=True)}
            doubtful = [name for name in doubtful if not may_describe(*found[name])]
        return [found[name] for name in names]

    async def _not_found(self, name: str) -> ArtifactNotFoundError:
        names = [entry["name"] for entry in await self.list()]
        return ArtifactNotFoundError(f"there is no artifact {name!r}{did_you_mean(name, names)}")

    # The last method, because its name hides the builtin type in annotations after it.
    async def list(self) -> list[dict[str, Any]]:
        """Return an entry for each artifact, by name: name, path, description, metadata, times, size and kind."""
        found = {key_to_name(key[len(self._prefix) + 1 :]) for key in await self._store.list(self._prefix)}
        names = sorted(filter(is_artifact_name, found))
        records = zip(names, await self._read_records(names), strict=True)
        return [self._entry(name, record, stamp) for name, (record, stamp) in records if stamp is not None]


class ChunkedUploads:
    """Artifacts that code sends piece by piece; each is saved when its last piece has arrived."""

    def __init__(self, save: Callable[..., Coroutine[Any, Any, dict[str, Any]]], idle: float = UPLOAD_IDLE) -> None:
        self._save = save
        self._idle = idle
        self._open: dict[str, _Upload] = {}

    def begin(self, **details: Any) -> str:
        """Start an upload and return its id; `details` are arguments of `save` besides the pieces."""
        if len(self._open) >= _MOST_UPLOADS:
            raise ArtifactWriteError(f"{_MOST_UPLOADS} artifacts are being saved in pieces; wait until one is saved")
        upload_id = uuid.uuid4().hex
        upload = self._open[upload_id] = _Upload(self._save, details, self._idle)
        upload.task.add_done_callback(lambda task: self._on_done(upload_id, task))
        return upload_id

    async def add(self, upload_id: str, piece: bytes) -> None:
        """Add a piece; waits until it is taken, and raises the error of the upload if there was one."""
        if not isinstance(piece, bytes):
            raise ArtifactWriteError(f"a piece of an artifact must be bytes, not {type(piece).__name__}")
        await self._find(upload_id).put(piece)

    async def end(self, upload_id: str) -> dict[str, Any]:
        """Save the artifact and return its entry."""
        upload = self._find(upload_id)
        await upload.put(None)
        await asyncio.wait([upload.task])
        return upload.result()

    async def cancel(self, upload_id: str) -> None:
        """Cancel an upload; nothing is saved."""
        upload = self._open.get(upload_id)
        while upload is not None and not upload.task.done():
            # Repeated, because a storage client that is receiving an answer may ignore the first cancellation.
            upload.task.cancel()
            await asyncio.wait([upload.task], timeout=0.1)

    async def close(self) -> None:
        """Cancel all uploads."""
        for upload_id in list(self._open):
            await self.cancel(upload_id)

    def _find(self, upload_id: str) -> "_Upload":
        upload = self._open.get(upload_id)
        if upload is None:
            raise ArtifactWriteError("this artifact was not saved: its next piece took too long; save it again")
        return upload

    def _on_done(self, upload_id: str, task: asyncio.Task[Any]) -> None:
        self._open.pop(upload_id, None)
        if not task.cancelled():
            task.exception()  # mark it as retrieved, so that asyncio does not log it


class _Upload:
    def __init__(
        self, save: Callable[..., Coroutine[Any, Any, dict[str, Any]]], details: dict[str, Any], idle: float
    ) -> None:
        self._idle = idle
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self.task = asyncio.get_running_loop().create_task(save(pieces=self._pieces(), **details))

    async def put(self, piece: bytes | None) -> None:
        """Wait until there is space for a piece; None is the end."""
        putting = asyncio.ensure_future(self._queue.put(piece))
        try:
            await asyncio.wait([putting, self.task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
        if self.task.done():
            self.result()

    def result(self) -> dict[str, Any]:
        """Return the saved artifact. A cancelled upload must not look like a cancelled caller."""
        if self.task.cancelled():
            raise ArtifactWriteError("this artifact was not saved: its upload was cancelled, or the store was closed")
        return self.task.result()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(self._idle):
                    piece = await self._queue.get()
            except TimeoutError:
                raise ArtifactWriteError(f"no piece arrived for {self._idle:g} s; nothing was saved") from None
            if piece is None:
                return
            yield piece


@contextmanager
def _read_errors(name: str) -> Iterator[None]:
    """Turn errors of the storage into those of artifacts."""
    try:
        yield
    except KeyRefused as error:
        raise ArtifactReadError(f"{name} cannot be read: {error}") from error
    except StorageReadError as error:
        raise ArtifactReadError(f"{name} cannot be read completely: {error}") from error


@contextmanager
def _write_errors(name: str, action: str = "saved") -> Iterator[None]:
    """Turn errors of the storage into those of artifacts."""
    try:
        yield
    except KeyRefused as error:
        raise ArtifactNameRefused(f"{name} was not {action}: {error}") from error
    except StorageWriteError as error:
        raise ArtifactWriteError(f"{name} was not {action}: {error}") from error


async def _file_pieces(name: str, path: Path) -> AsyncIterator[bytes]:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as error:
        raise ArtifactWriteError(f"{name} was not saved: {path} cannot be read: {error.strerror}") from error
    try:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece
    finally:
        file.close()
