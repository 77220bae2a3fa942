"""The Store in plain files: every key is a path below one folder, and a person can read and edit what is there."""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from carrel.errors import KeyMissing
from carrel.storage import file_objects
from carrel.storage.file_changes import Cursor, FolderChanges
from carrel.storage.file_lock import FileLocks
from carrel.storage.file_log import Adding, OpenLogs, joined
from carrel.storage.file_pieces import Arriving, piece_at
from carrel.storage.file_read import DIRECT, Backward, Counted, Forward, LogView, next_block
from carrel.storage.file_tree import FileTree, read_failed
from carrel.storage.file_watch import FileWatch
from carrel.storage.group_sync import group_sync
from carrel.storage.seam import Block, Changes, Lock, Stamp

T = TypeVar("T")

_FEW = 16
"""So many small files are read or looked at in the event loop's own thread; more, in another."""


class FileStore:
    """Objects and logs below `root`, which is made by the first write.

    Folders are 0700 and files 0600. A log is a file of lines; its sequence numbers are its line numbers. Names that
    begin with a dot are the store's own. `inotify=False` looks for changes by itself: for file systems that other
    machines write to, of which the kernel here is told nothing."""

    def __init__(self, root: Path | str, *, inotify: bool = True) -> None:
        self.root = Path(root)
        self._inotify = inotify
        self._tree = FileTree(root)
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        self._logs = OpenLogs(self._tree)
        self._locks = FileLocks(self._tree)
        self._watch = FileWatch(self._tree, inotify=self._inotify)
        self._changes: weakref.WeakSet[FolderChanges] = weakref.WeakSet()
        self._counted = Counted()

    def _begin_in_child(self) -> None:
        """After a fork nothing open may be shared with the parent: a lock on a file would be a lock of both."""
        self._locks.forget()
        self._begin()

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"

    # --- objects ----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        opened = self._tree.open(key)
        if opened is None:
            return None
        file, found = opened
        if found.st_size <= DIRECT:
            return self._tree.content(key, file, found.st_size)
        return await asyncio.to_thread(self._tree.content, key, file, found.st_size)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) <= _FEW:
            return [await self.get(key) for key in keys]
        return await asyncio.to_thread(self._tree.get_many, keys)

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        only_new: bool = False,
        only_existing: bool = False,
        held: Sequence[Lock] = (),  # the kernel takes none away from who lives
    ) -> bool:
        return await _to_its_end(
            file_objects.put, self._tree, key, data, only_new=only_new, only_existing=only_existing
        )

    async def put_pieces(self, key: str, pieces: AsyncIterable[bytes], *, held: Sequence[Lock] = ()) -> int:
        arriving, size = Arriving(self._tree, key), 0
        try:
            await _to_its_end(arriving.begin)
            async for piece in pieces:
                size += len(piece)
                await asyncio.to_thread(arriving.add, piece)
            await _to_its_end(arriving.place)
        finally:
            arriving.drop()
        return size

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        opened = self._tree.open(key)
        if opened is None:
            raise KeyMissing(f"there is no object {key!r}")
        path, file = self._tree.path(key), opened[0]
        while piece := await asyncio.to_thread(piece_at, path, file, start):
            yield piece
            start += len(piece)

    async def copy(self, source: str, target: str) -> None:
        await _to_its_end(file_objects.copy, self._tree, source, target)
        self._note([target])

    async def delete(
        self, key: str, *, as_of: tuple[str, Stamp | None] | None = None, held: Sequence[Lock] = ()
    ) -> bool:
        return await _to_its_end(self._delete, key, as_of)

    def _delete(self, key: str, as_of: tuple[str, Stamp | None] | None) -> bool:
        keys = self._tree.keys(key) if self._changes else []
        removed = file_objects.remove(self._tree, key, as_of)
        if removed:
            self._logs.delete(key)
            self._note(keys)
        return removed

    def _note(self, keys: Sequence[str]) -> None:
        for changes in [*self._changes]:
            changes.note(keys)

    async def folders(self, prefix: str = "") -> list[str]:
        return await asyncio.to_thread(self._tree.folders, prefix)

    async def stamp(self, key: str) -> Stamp | None:
        return self._tree.stamps([key])[0]

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        if len(keys) <= _FEW:
            return self._tree.stamps(keys)
        return await asyncio.to_thread(self._tree.stamps, keys)

    # --- logs -------------------------------------------------------------------------------------------------------

    async def append(
        self, key: str, records: Sequence[bytes], *, sync: bool = False, create: bool = True, after: int | None = None
    ) -> int:
        adding = Adding(joined(key, records), len(records), create and not after, sync, after)
        while True:
            log = self._logs.get(key)
            appended = log.append_now(adding)
            if appended is None:
                later = log.append_later(adding)
                if later is None:
                    continue
                appended = await later
            seq, unsynced = appended
            if sync and unsynced is not None:
                await group_sync.synced(unsynced)
            return seq

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        view = self._view(key)
        if view is None:
            return
        try:
            if from_seq > 1 and not self._counted.is_marked(view):
                await asyncio.to_thread(self._counted.mark, view)
            forward = Forward.from_line(view, max(from_seq, 1), self._counted)
        except OSError as error:
            raise read_failed(view.path, error) from error
        while block := await next_block(forward):
            yield block

    async def read_back(self, key: str, before_seq: int | None = None) -> AsyncIterator[Block]:
        view = self._view(key)
        if view is None:
            return
        try:
            if view.size <= DIRECT:
                backward = Backward(view, before_seq, self._counted)
            else:
                backward = await asyncio.to_thread(Backward, view, before_seq, self._counted)
        except OSError as error:
            raise read_failed(view.path, error) from error
        while block := await next_block(backward):
            if block.first_seq == 1:
                # The file is closed first: who wants but one block never comes back, and the loop takes its time.
                del view, backward
                yield block
                return
            yield block

    async def torn(self, key: str) -> bytes:
        view = self._view(key)
        if view is None:
            return b""
        try:
            return view.torn()
        except OSError as error:
            raise read_failed(view.path, error) from error

    def _view(self, key: str) -> LogView | None:
        return LogView.open(self._tree, key)

    def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        return self._watch.follow(key, from_seq)

    # --- locks and changes ------------------------------------------------------------------------------------------

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        return await self._locks.take(key, wait=wait)

    async def holder(self, key: str) -> str | None:
        return await self._locks.holder(key)

    async def changed(self, prefix: str, cursor: object = None) -> Changes:
        self._tree.folder(prefix)
        if not self._inotify:
            return Changes(None, None)
        if isinstance(cursor, Cursor) and cursor.changes in self._changes and cursor.changes.prefix == prefix:
            changes = cursor.changes
            told = changes.since(cursor.tick)
            if told is not None:
                return Changes(*told)
        else:
            changes = FolderChanges(self._tree, prefix)
            self._changes.add(changes)
        return Changes(await asyncio.to_thread(changes.begin), None)

    async def close(self) -> None:
        self._logs.close()
        self._locks.close()
        for changes in [*self._changes]:
            changes.end()

    async def list(self, prefix: str = "") -> list[str]:
        return await asyncio.to_thread(self._tree.keys, prefix)


async def _to_its_end(write: Callable[..., T], *words: Any, **more: Any) -> T:
    """Do it in a thread; one who is cancelled waits until it is done.

    Nobody can stop it, and it must not come after what somebody else writes once the caller has let go of a lock."""
    writing = asyncio.get_running_loop().run_in_executor(None, partial(write, *words, **more))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([writing])
        writing.cancelled() or writing.exception()
        raise


_stores: "weakref.WeakSet[FileStore]" = weakref.WeakSet()


def _begin_in_child() -> None:
    for store in [*_stores]:
        store._begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)
