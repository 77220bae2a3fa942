"""A Store in the memory of this process: for tests, and for sessions that need not be kept."""

import asyncio
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

from carrel.errors import KeyMissing, StorageWriteError
from carrel.storage.base import (
    Block,
    Expected,
    Guard,
    Lock,
    Signals,
    Stamp,
    check_key,
    check_records,
    guard_lost,
    is_expected,
    is_within,
    process_name,
)

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


class _MemoryLock:
    def __init__(self, store: "MemoryStore", key: str) -> None:
        self.lost = asyncio.Event()
        self._store = store
        self._key = key

    async def release(self) -> None:
        self._store._release(self._key, self)


class MemoryStore:
    """Everything in plain dicts; `sync` has no effect, as there is no disk. Locks hold within the process.

    Each method does its work in one step under a thread lock, so an append cannot be divided by a delete."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._kept: dict[str, _Object | _Log] = {}
        self._version = 0
        self._locks: dict[str, _MemoryLock] = {}
        self._watched = Signals()
        self._released = Signals()

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._kept)} keys)"

    # --- objects ----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        found = self._kept.get(check_key(key))
        return found.data if isinstance(found, _Object) else None

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [await self.get(key) for key in keys]

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        check_key(key)
        with self._mutex:
            self._check_guard(key, guard)
            return self._put(key, bytes(data), expect)

    async def put_pieces(
        self, key: str, pieces: AsyncIterable[bytes], *, expect: Expected = None, guard: Guard | None = None
    ) -> Stamp | None:
        check_key(key)
        return await self.put(key, b"".join([bytes(piece) async for piece in pieces]), expect=expect, guard=guard)

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        data = await self.get(key)
        if data is None:
            raise KeyMissing(f"there is no object {key!r}")
        for offset in range(start, len(data), _PIECE):
            yield data[offset : offset + _PIECE]
            await asyncio.sleep(0)

    async def delete(self, key: str, *, expect: tuple[str, Expected] | None = None, guard: Guard | None = None) -> bool:
        check_key(key)
        with self._mutex:
            self._check_guard(key, guard)
            if expect is not None and not is_expected(expect[1], self._stamp(check_key(expect[0]))):
                return False
            gone = [name for name in self._kept if is_within(name, key)]
            for name in gone:
                del self._kept[name]
                self._watched.set(name)
        return bool(gone)

    async def copy(self, source: str, target: str, *, guard: Guard | None = None) -> None:
        check_key(source)
        check_key(target)
        with self._mutex:
            self._check_guard(target, guard)
            found = self._kept.get(source)
            if not isinstance(found, _Object):
                raise KeyMissing(f"there is no object {source!r} to copy to {target!r}")
            self._put(target, found.data, None)

    def _put(self, key: str, data: bytes, expect: Expected) -> Stamp | None:
        if not is_expected(expect, self._stamp(key)):
            return None
        if isinstance(self._kept.get(key), _Log):
            raise StorageWriteError(f"{key!r} is a log and cannot be replaced by an object; delete it first")
        stamp = self._next_stamp(len(data))
        self._kept[key] = _Object(data, stamp)
        return stamp

    def _stamp(self, key: str) -> Stamp | None:
        found = self._kept.get(key)
        return found.stamp if found else None

    def _next_stamp(self, size: int) -> Stamp:
        self._version += 1
        return Stamp(size, time.time(), self._version)

    def _check_guard(self, key: str, guard: Guard | None) -> None:
        if guard is not None and self._stamp(guard[0]) != guard[1]:
            raise guard_lost(key, guard)

    # --- what is there ----------------------------------------------------------------------------------------------

    async def stamp(self, key: str) -> Stamp | None:
        return self._stamp(check_key(key))

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        return [await self.stamp(key) for key in keys]

    async def scan(self, prefix: str, names: Collection[str] = ()) -> dict[str, Stamp]:
        start = f"{check_key(prefix)}/" if prefix else ""
        with self._mutex:
            below = {key: kept.stamp for key, kept in self._kept.items() if key.startswith(start)}
        if not names:
            return below
        return {key: stamp for key, stamp in below.items() if key[len(start) :].partition("/")[2] in names}

    async def folders(self, prefix: str = "") -> list[str]:
        start = f"{check_key(prefix)}/" if prefix else ""
        with self._mutex:
            below = [key[len(start) :] for key in self._kept if key.startswith(start)]
        return sorted({rest.split("/", 1)[0] for rest in below if "/" in rest})

    # --- logs -------------------------------------------------------------------------------------------------------

    async def append(
        self,
        key: str,
        records: Sequence[bytes],
        *,
        sync: bool = False,
        create: bool = True,
        after: int | None = None,
        guard: Guard | None = None,
    ) -> int:
        check_key(key)
        check_records(key, records)
        with self._mutex:
            self._check_guard(key, guard)
            log = self._kept.get(key)
            if isinstance(log, _Object):
                raise StorageWriteError(f"{key!r} is an object; use another key for a log")
            if log is None and (after or not create):
                raise KeyMissing(f"there is no log {key!r}; nothing was written")
            if after is not None and after != (len(log.records) if log is not None else 0):
                return 0
            if log is None:
                log = self._kept[key] = _Log(self._next_stamp(0))
            self._add(key, log, records)
            return len(log.records)

    def _add(self, key: str, log: _Log, records: Sequence[bytes]) -> None:
        if records:
            log.records.extend(map(bytes, records))
            log.stamp = self._next_stamp(log.stamp.size + sum(len(record) + 1 for record in records))
            self._watched.set(key)

    async def copy_log(
        self, source: str, target: str, *, through: int, more: Sequence[bytes] = (), guard: Guard | None = None
    ) -> int:
        check_key(source)
        check_key(target)
        check_records(target, more)
        with self._mutex:
            self._check_guard(target, guard)
            log = self._kept.get(source)
            if not isinstance(log, _Log) or len(log.records) < through:
                raise KeyMissing(
                    f"the log {source!r} has no record {through} to copy to {target!r}; nothing was written"
                )
            if target in self._kept:
                raise StorageWriteError(f"{target!r} exists already, so it cannot become a copy of {source!r}")
            copied = self._kept[target] = _Log(self._next_stamp(0))
            self._add(target, copied, [*log.records[:through], *more])
        return through + len(more)

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        log = self._kept.get(check_key(key))
        if not isinstance(log, _Log):
            return
        first = max(from_seq, 1)
        while records := log.records[first - 1 : first - 1 + _BLOCK_RECORDS]:
            yield Block(first, records)
            first += len(records)
            await asyncio.sleep(0)  # a long log must not keep the loop from its other tasks

    async def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        log = self._kept.get(check_key(key))
        if not isinstance(log, _Log):
            return
        end = len(log.records) if before_seq is None else min(before_seq - 1, len(log.records))
        while end > 0:
            start = max(end - _BLOCK_RECORDS, 0)
            yield Block(start + 1, log.records[start:end])
            end = start
            await asyncio.sleep(0)

    async def incomplete_tail(self, key: str) -> bytes:
        check_key(key)
        return b""

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        seq = max(from_seq, 1)
        watched: _Log | None = None
        with self._watched.waiting_for(check_key(key)) as signal:
            while True:
                signal.clear()
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
                await signal.wait()

    # --- locks ------------------------------------------------------------------------------------------------------

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        check_key(key)
        lock = _MemoryLock(self, key)
        if self._locks.setdefault(key, lock) is lock:
            return lock
        if not wait:
            return None
        with self._released.waiting_for(key) as signal:
            while self._locks.setdefault(key, lock) is not lock:
                await signal.wait()
                signal.clear()
        return lock

    def _release(self, key: str, lock: _MemoryLock) -> None:
        with self._mutex:
            if self._locks.get(key) is lock:
                del self._locks[key]
                self._released.set(key)

    async def lock_owner(self, key: str) -> str | None:
        return process_name() if check_key(key) in self._locks else None

    async def close(self) -> None:
        for key, lock in list(self._locks.items()):
            self._release(key, lock)

    async def list(self, prefix: str = "") -> list[str]:
        if prefix:
            check_key(prefix)
        with self._mutex:
            return sorted(key for key in self._kept if not prefix or is_within(key, prefix))
