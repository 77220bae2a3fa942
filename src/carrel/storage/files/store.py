"""The Store in plain files: every key is a path below one folder, and a person can read and edit what is there."""

import asyncio
import os
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from carrel.errors import KeyMissing, StorageWriteError
from carrel.storage.base import MISSING, Block, Expected, Guard, KeyedLock, Lock, Signals, Stamp, finish
from carrel.storage.files import objects
from carrel.storage.files.locks import FileLocks
from carrel.storage.files.log_reader import (
    IN_LOOP,
    START,
    BackwardReader,
    ForwardReader,
    LogSnapshot,
    Position,
    end_of_record,
    next_block,
)
from carrel.storage.files.log_writer import AppendRequest, LogFile, LogFileCache, joined_lines, sync_pool
from carrel.storage.files.objects import PIECE, PendingObject
from carrel.storage.files.paths import PathMapper, read_error

_FEW = 16
"""So many small files are read or looked at in the event loop's own thread; more, in another one."""

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02
_POLL_SECONDS = (0.05, 0.5)
"""How often a watched log is looked at for records of other processes: soon after the last one, then less often."""


class FileStore:
    """Objects and logs below `root`, which is made by the first write.

    Folders are 0700 and files 0600. A log is a file of lines; its sequence numbers are its line numbers. Names that
    begin with a dot are the store's own. Objects are compared and replaced under a lock on their folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._paths = PathMapper(root)
        self._reset()
        _stores.add(self)

    def _reset(self) -> None:
        self._logs = LogFileCache(self._paths)
        self._locks = FileLocks(self._paths)
        self._turns = KeyedLock()
        self._watched = Signals()

    def _reset_in_child(self) -> None:
        """After a fork no open file may be shared with the parent: a lock on it would belong to both."""
        self._locks.close_in_child()
        self._reset()

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"

    # --- objects ----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        opened = self._paths.open(key)
        if opened is None:
            return None
        file, found = opened
        if found.st_size <= IN_LOOP:
            return self._paths.read(key, file, found.st_size)
        return await asyncio.to_thread(self._paths.read, key, file, found.st_size)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) <= _FEW:
            return [await self.get(key) for key in keys]
        return await asyncio.to_thread(self._paths.get_many, keys)

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        return await finish(None, objects.put, self._paths, key, data, expect, guard)

    async def put_pieces(
        self, key: str, pieces: AsyncIterable[bytes], *, expect: Expected = None, guard: Guard | None = None
    ) -> Stamp | None:
        pending = await finish(None, PendingObject, self._paths, key, expect, guard, undo=PendingObject.discard)
        try:
            async for piece in pieces:
                await finish(None, pending.write, piece)
            return await finish(None, pending.place)
        finally:
            pending.discard()

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        opened = self._paths.open(key)
        if opened is None:
            raise KeyMissing(f"there is no object {key!r}")
        file = opened[0]
        try:
            while piece := await asyncio.to_thread(os.pread, file.fd, PIECE, start):
                yield piece
                start += len(piece)
        except OSError as error:
            raise read_error(self._paths.path(key), error) from error

    async def delete(self, key: str, *, expect: tuple[str, Expected] | None = None, guard: Guard | None = None) -> bool:
        removed = await finish(None, self._delete, key, expect, guard)
        if removed:
            self._watched.set_below(key)
        return removed

    def _delete(self, key: str, expect: tuple[str, Expected] | None, guard: Guard | None) -> bool:
        removed = objects.remove(self._paths, key, expect, guard)
        if removed:
            self._logs.mark_deleted(key)
        return removed

    async def copy(self, source: str, target: str, *, guard: Guard | None = None) -> None:
        await finish(None, objects.copy, self._paths, source, target, guard)

    # --- what is there ----------------------------------------------------------------------------------------------

    async def stamp(self, key: str) -> Stamp | None:
        return self._paths.stamps([key])[0]

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        if len(keys) <= _FEW:
            return self._paths.stamps(keys)
        return await asyncio.to_thread(self._paths.stamps, keys)

    async def scan(self, prefix: str, names: Collection[str] = ()) -> dict[str, Stamp]:
        return await asyncio.to_thread(self._paths.scan, prefix, names)

    async def folders(self, prefix: str = "") -> list[str]:
        return await asyncio.to_thread(self._paths.folders, prefix)

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
        data = joined_lines(key, records)
        request = AppendRequest(data, len(records), create and not after, sync, after, guard)
        log = self._logs.get(key)
        appended = log.append(request, in_loop=True) if self._turns.is_free(key) else None
        if appended is None:
            appended = await self._append_later(key, log, request)
        self._watched.set(key)
        seq, unsynced = appended
        if sync and unsynced is not None:
            await sync_pool.synced(unsynced)
        return seq

    async def _append_later(self, key: str, log: LogFile, request: AppendRequest) -> "tuple[int, Any]":
        """Append in a thread and in the order of the calls, trying again while another process holds the log."""
        request = request._replace(create=request.create and not log.was_opened())
        async with self._turns.hold(key):
            pause = _FIRST_PAUSE
            while (appended := await finish(None, partial(log.append, request, in_loop=False))) is None:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            return appended

    async def copy_log(
        self, source: str, target: str, *, through: int, more: Sequence[bytes] = (), guard: Guard | None = None
    ) -> int:
        lines = joined_lines(target, more)
        self._paths.path(target)
        await finish(None, self._copy_log, source, target, through, lines, guard)
        return through + len(more)

    def _copy_log(self, source: str, target: str, through: int, lines: bytes, guard: Guard | None) -> None:
        log = LogSnapshot.open(self._paths, source)
        found = end_of_record(log, through) if log is not None else None
        if log is None or found is None:
            raise KeyMissing(f"the log {source!r} has no record {through} to copy to {target!r}; nothing was written")
        pending = PendingObject(self._paths, target, MISSING, guard)
        try:
            end, has_newline = found
            pending.copy_range(log.fd, end)
            pending.write(lines if has_newline else b"\n" + lines)
            placed = pending.place()
        finally:
            pending.discard()
        if placed is None:
            raise StorageWriteError(f"{target!r} exists already, so it cannot become a copy of {source!r}")

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        log = LogSnapshot.open(self._paths, key)
        if log is None:
            return
        reader = ForwardReader(log, max(from_seq, 1))
        while block := await next_block(reader):
            yield block

    async def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        log = LogSnapshot.open(self._paths, key)
        if log is None:
            return
        known = Position(hint[1], hint[0]) if hint else None
        try:
            if log.size <= IN_LOOP:
                reader = BackwardReader(log, before_seq, known)
            else:
                reader = await asyncio.to_thread(BackwardReader, log, before_seq, known)
        except OSError as error:
            raise read_error(log.path, error) from error
        while block := await next_block(reader):
            if block.first_seq == 1:
                # Close the file first: a caller who wants one block may keep this generator for long.
                del log, reader
                yield block
                return
            yield block

    async def incomplete_tail(self, key: str) -> bytes:
        log = LogSnapshot.open(self._paths, key)
        if log is None:
            return b""
        try:
            return log.incomplete_tail()
        except OSError as error:
            raise read_error(log.path, error) from error

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        path = self._paths.safe_path(key)
        log: LogSnapshot | None = None
        position = START
        seq = max(from_seq, 1)
        with self._watched.waiting_for(key) as signal:
            pause = _POLL_SECONDS[0]
            while True:
                signal.clear()
                log = LogSnapshot.open(self._paths, key) if log is None else log.renewed()
                if log is not None:
                    was_deleted = not self._is_at(log, path)
                    reader = ForwardReader(log, seq, position)
                    while block := await next_block(reader):
                        pause = _POLL_SECONDS[0]
                        for record in block.records:
                            yield seq, record
                            seq += 1
                    if was_deleted or log.size < reader.offset:
                        return
                    position = Position(reader.offset, reader.lines)
                await signal.wait(pause)
                pause = min(pause * 1.5, _POLL_SECONDS[1])

    def _is_at(self, log: LogSnapshot, path: str) -> bool:
        """Return whether the file is still the log: while it is open here, its number is given to no other file."""
        try:
            return os.stat(path).st_ino == log.inode
        except OSError as error:
            if self._paths.is_missing(error):
                return False
            raise read_error(path, error) from error

    # --- locks ------------------------------------------------------------------------------------------------------

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        return await self._locks.take(key, wait=wait)

    async def lock_owner(self, key: str) -> str | None:
        return await self._locks.owner(key)

    async def close(self) -> None:
        self._logs.close()
        self._locks.release_all()

    async def list(self, prefix: str = "") -> list[str]:
        return await asyncio.to_thread(self._paths.keys, prefix)


_stores: "weakref.WeakSet[FileStore]" = weakref.WeakSet()


def _reset_in_child() -> None:
    for store in [*_stores]:
        store._reset_in_child()


os.register_at_fork(after_in_child=_reset_in_child)
