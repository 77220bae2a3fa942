"""A Store in this process's memory: for tests, and for sessions that nobody needs tomorrow."""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field

from carrel.errors import KeyMissing, StorageWriteError
from carrel.storage.seam import MAX_RECORD, Block, Changes, Lock, Stamp, checked_key, process_name

_BLOCK_RECORDS = 512
_PIECE = 1024 * 1024


@dataclass(eq=False)
class _Object:
    data: bytes
    stamp: Stamp


@dataclass(eq=False)
class _Log:
    stamp: Stamp
    records: list[bytes] = field(default_factory=list)


class _Bell:
    """Wakes one waiting task, from whichever thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        # RuntimeError: that loop was closed under the waiting task, so nobody is left to wake.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._rung.set)

    def hush(self) -> None:
        self._rung.clear()

    async def wait(self) -> None:
        await self._rung.wait()


class _MemoryLock:
    def __init__(self, store: "MemoryStore", key: str) -> None:
        self._store = store
        self._key = key

    async def release(self) -> None:
        self._store._let_go(self._key, self)


class MemoryStore:
    """Everything in plain dicts, gone with the process; `sync` promises nothing, as there is no disk.

    Each verb does its work in one step under a thread lock, so an append cannot be cut in two by a delete.
    Locks hold within the process, which is as far as the data go."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: dict[str, _Object | _Log] = {}
        self._version = 0
        self._changed: dict[str, int] = {}  # in the order of the versions: a key that changes moves to the end
        self._name = uuid.uuid4().hex
        self._locks: dict[str, _MemoryLock] = {}
        self._bells: dict[str, set[_Bell]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._kept)} keys)"

    async def get(self, key: str) -> bytes | None:
        found = self._kept.get(checked_key(key))
        return found.data if isinstance(found, _Object) else None

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [await self.get(key) for key in keys]

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        only_new: bool = False,
        only_existing: bool = False,
        held: Sequence[Lock] = (),  # a lock here is never lost
    ) -> bool:
        checked_key(key)
        with self._guard:
            if (only_new and key in self._kept) or (only_existing and key not in self._kept):
                return False
            self._put(key, bytes(data))
        return True

    async def put_pieces(self, key: str, pieces: AsyncIterable[bytes], *, held: Sequence[Lock] = ()) -> int:
        checked_key(key)
        data = b"".join([bytes(piece) async for piece in pieces])
        with self._guard:
            self._put(key, data)
        return len(data)

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        data = await self.get(key)
        if data is None:
            raise KeyMissing(f"there is no object {key!r}")
        for offset in range(start, len(data), _PIECE):
            yield data[offset : offset + _PIECE]
            await asyncio.sleep(0)

    def _put(self, key: str, data: bytes) -> None:
        if isinstance(self._kept.get(key), _Log):
            raise StorageWriteError(f"{key!r} is a log and cannot be replaced by an object; delete it first")
        self._kept[key] = _Object(data, self._stamped(key, len(data)))

    def _stamped(self, key: str, size: int) -> Stamp:
        self._version += 1
        self._changed.pop(key, None)
        self._changed[key] = self._version
        return Stamp(size, time.time(), self._version)

    async def delete(
        self, key: str, *, as_of: tuple[str, Stamp | None] | None = None, held: Sequence[Lock] = ()
    ) -> bool:
        checked_key(key)
        with self._guard:
            if as_of is not None:
                log = self._kept.get(as_of[0])
                if (log.stamp if log is not None else None) != as_of[1]:
                    return False
            gone = [name for name in self._kept if _within(name, key)]
            for name in gone:
                del self._kept[name]
                self._stamped(name, 0)
                self._ring(name)
        return bool(gone)

    async def folders(self, prefix: str = "") -> list[str]:
        start = f"{checked_key(prefix)}/" if prefix else ""
        with self._guard:
            below = [key[len(start) :] for key in self._kept if key.startswith(start)]
        return sorted({rest.split("/", 1)[0] for rest in below if "/" in rest})

    async def stamp(self, key: str) -> Stamp | None:
        found = self._kept.get(checked_key(key))
        return found.stamp if found else None

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        return [await self.stamp(key) for key in keys]

    async def copy(self, source: str, target: str) -> None:
        checked_key(source)
        checked_key(target)
        with self._guard:
            found = self._kept.get(source)
            if not isinstance(found, _Object):
                raise KeyMissing(f"there is no object {source!r} to copy to {target!r}")
            self._put(target, found.data)

    async def append(
        self, key: str, records: Sequence[bytes], *, sync: bool = False, create: bool = True, after: int | None = None
    ) -> int:
        checked_key(key)
        for record in records:
            if len(record) > MAX_RECORD or b"\n" in record:
                raise StorageWriteError(
                    f"a record for {key!r} has a newline or is longer than {MAX_RECORD} bytes; nothing was written"
                )
        with self._guard:
            log = self._kept.get(key)
            if isinstance(log, _Object):
                raise StorageWriteError(f"{key!r} is an object; records go to a log under a key of its own")
            if log is None and (after or not create):
                raise KeyMissing(f"there is no log {key!r}, and it was not to be made")
            if after is not None and after != (len(log.records) if log is not None else 0):
                return 0
            if log is None:
                log = self._kept[key] = _Log(self._stamped(key, 0))
            if not records:
                return len(log.records)
            log.records.extend(map(bytes, records))
            log.stamp = self._stamped(key, log.stamp.size + sum(len(record) + 1 for record in records))
            self._ring(key)
            return len(log.records)

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        log = self._kept.get(checked_key(key))
        if not isinstance(log, _Log):
            return
        first = max(from_seq, 1)
        while records := log.records[first - 1 : first - 1 + _BLOCK_RECORDS]:
            yield Block(first, records)
            first += len(records)
            await asyncio.sleep(0)  # a long log must not keep the loop from its other tasks

    async def read_back(self, key: str, before_seq: int | None = None) -> AsyncIterator[Block]:
        log = self._kept.get(checked_key(key))
        if not isinstance(log, _Log):
            return
        end = len(log.records) if before_seq is None else min(before_seq - 1, len(log.records))
        while end > 0:
            start = max(end - _BLOCK_RECORDS, 0)
            yield Block(start + 1, log.records[start:end])
            end = start
            await asyncio.sleep(0)

    async def torn(self, key: str) -> bytes:
        checked_key(key)
        return b""

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        checked_key(key)
        bell = _Bell()
        seq = max(from_seq, 1)
        watched: _Log | None = None
        self._listen(key, bell)
        try:
            while True:
                bell.hush()
                found = self._kept.get(key)
                if watched is None and isinstance(found, _Log):
                    watched = found
                records = watched.records[seq - 1 : seq - 1 + _BLOCK_RECORDS] if watched else []
                for record in records:
                    yield seq, record
                    seq += 1
                if records:
                    continue
                if watched is not None and found is not watched:
                    return
                await bell.wait()
        finally:
            self._unlisten(key, bell)

    def _listen(self, key: str, bell: _Bell) -> None:
        with self._guard:
            self._bells.setdefault(key, set()).add(bell)

    def _unlisten(self, key: str, bell: _Bell) -> None:
        with self._guard:
            self._bells[key].discard(bell)
            if not self._bells[key]:
                del self._bells[key]

    def _ring(self, key: str) -> None:
        for bell in self._bells.get(key, ()):
            bell.ring()

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        checked_key(key)
        mine = _MemoryLock(self, key)
        if self._locks.setdefault(key, mine) is mine:
            return mine
        if not wait:
            return None
        # The bells of locks hang beside those of logs, under a name that no key can have.
        bell, door = _Bell(), f"lock//{key}"
        self._listen(door, bell)
        try:
            while True:
                bell.hush()
                if self._locks.setdefault(key, mine) is mine:
                    return mine
                await bell.wait()
        finally:
            self._unlisten(door, bell)

    def _let_go(self, key: str, lock: _MemoryLock) -> None:
        with self._guard:
            if self._locks.get(key) is lock:
                del self._locks[key]
                self._ring(f"lock//{key}")

    async def holder(self, key: str) -> str | None:
        return process_name() if checked_key(key) in self._locks else None

    async def changed(self, prefix: str, cursor: object = None) -> Changes:
        start = f"{checked_key(prefix)}/" if prefix else ""
        name, _, version = cursor.rpartition("/") if isinstance(cursor, str) else ("", "", "")
        with self._guard:
            now = f"{self._name}/{self._version}"
            if name != self._name:
                return Changes(now, None)
            keys = set()
            for key, changed in reversed(self._changed.items()):
                if changed <= int(version):
                    break
                if key.startswith(start):
                    keys.add(key)
        return Changes(now, keys)

    async def close(self) -> None:
        for key, lock in list(self._locks.items()):
            self._let_go(key, lock)

    async def list(self, prefix: str = "") -> list[str]:
        if prefix:
            checked_key(prefix)
        with self._guard:
            return sorted(key for key in self._kept if not prefix or _within(key, prefix))


def _within(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")
