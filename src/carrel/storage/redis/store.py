"""A Store on a Redis server, shared by all machines that can reach it."""

import contextlib
import logging
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from carrel.errors import KeyMissing, StorageError, StorageReadError, StorageUnavailable, StorageWriteError
from carrel.storage.base import (
    Block,
    Expected,
    Guard,
    KeyedLock,
    Lock,
    Stamp,
    check_key,
    check_records,
)
from carrel.storage.redis.client import RedisClient
from carrel.storage.server_parts import RenewedLock, check_outcome, condition_text, owner_in

_PAGE = 64
_STAMP_PAGE = 1000
_PIECE = 1024 * 1024
_MAX_OBJECT = 512 * 1000 * 1000
_MAX_APPEND = 768 * 1024 * 1024
"""The server disconnects at a request of 1 GiB."""
_LOOK_MS = 1000
"""How often a watcher that receives nothing checks that its log still exists."""
_SYNC_MS = 30_000
_UPLOAD_MS = 15 * 60 * 1000
"""How long pieces wait for the next one; after that their sender is taken for dead."""
_log = logging.getLogger("carrel.storage")


class _LogEntry(NamedTuple):
    """One entry of a stream; its id is `life-seq`, so that two logs under the same key are told apart."""

    life: int
    seq: int
    record: bytes | None
    """None for a long record of an earlier version, which lies in a hash beside the stream."""


class _Note(NamedTuple):
    """What the server knows about a key."""

    stamp: Stamp
    life: int


class RedisStore:
    """Keeps everything under `prefix:` on one Redis (6.2 or newer, with replicas if you like; not a cluster).

    A log is a stream, an object a string. Every write is one script on the server: the bytes, the index of keys and
    the version in one step, so it happens whole or not at all, also when memory is used up.

    An acknowledged write survives the death of this process. Whether it survives the death of the *server* is decided
    by that server's settings (`appendonly`, `appendfsync`, `save`). `sync=True` waits until the server has synced its
    append-only file, if it keeps one and can tell (Redis 7.2: WAITAOF). On an older server set `appendfsync always`;
    with `appendonly no` nothing can promise it. Where it cannot be promised, this is logged once.

    A lost connection is `StorageUnavailable`. A write is never sent twice: if the connection broke after it was sent,
    only a look at the data can tell whether it arrived, and the message says so."""

    def __init__(self, url: str, prefix: str = "carrel") -> None:
        self._client = RedisClient(url, prefix)
        self._prefix = prefix
        self.place = self._client.place
        """The server and database, without the password."""
        self._locks: set[RenewedLock] = set()
        self._turns = KeyedLock()
        self._warned = False

    def __repr__(self) -> str:
        return f"RedisStore({self._client.address!r}, {self._prefix!r})"

    def _at(self, kind: str, key: str) -> str:
        return f"{self._prefix}:{kind}:{check_key(key)}"

    # --- objects ----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._client.read(repr(key), "GET", self._at("object", key))
        return found

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [self._at("object", key) for key in keys]
        found: list[bytes | None] = []
        for start in range(0, len(names), _STAMP_PAGE):
            page = names[start : start + _STAMP_PAGE]
            found += await self._client.read(f"{len(keys)} objects", "MGET", *page)
        return found

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        check_key(key)
        if len(data) > _MAX_OBJECT:
            raise _too_long(key)
        answer = await self._client.run("put", repr(key), key, condition_text(expect) or "*", data, guard=guard)
        return self._stamp_written(answer, key, guard)

    async def put_pieces(
        self, key: str, pieces: AsyncIterable[bytes], *, expect: Expected = None, guard: Guard | None = None
    ) -> Stamp | None:
        name, size, what = uuid.uuid4().hex, 0, repr(check_key(key))
        upload = f"{self._prefix}:coming:{name}"
        try:
            await self._client.write(what, "SET", upload, b"", "PX", _UPLOAD_MS)
            async for piece in pieces:
                size += len(piece)
                if size > _MAX_OBJECT:
                    raise _too_long(key)
                for start in range(0, len(piece), _PIECE):
                    await self._client.write(what, "APPEND", upload, piece[start : start + _PIECE])
                await self._client.write(what, "PEXPIRE", upload, _UPLOAD_MS)
            answer = await self._client.run("place", what, key, condition_text(expect) or "*", name, size, guard=guard)
            return self._stamp_written(answer, key, guard)
        finally:
            # If this cannot be sent, it expires by itself; after `place` there is nothing to remove.
            with contextlib.suppress(StorageError):
                await self._client.write(what, "UNLINK", upload)

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        check_key(key)
        version = b""
        while True:
            answer = await self._client.run("piece", repr(key), key, start, start + _PIECE - 1, version)
            if len(answer) == 1:
                if not version:
                    raise KeyMissing(f"there is no object {key!r}")
                raise StorageReadError(f"{key!r} was replaced or deleted while it was read; read it again")
            version, piece = answer
            if piece:
                yield piece
            start += len(piece)
            if len(piece) < _PIECE:
                return

    async def delete(self, key: str, *, expect: tuple[str, Expected] | None = None, guard: Guard | None = None) -> bool:
        check_key(key)
        condition = (check_key(expect[0]), condition_text(expect[1]) or "*") if expect else (key, "*")
        answer = await self._client.run("delete", repr(key), key, *condition, guard=guard)
        return self._outcome(answer, key, guard) == "ok"

    async def copy(self, source: str, target: str, *, guard: Guard | None = None) -> None:
        check_key(source)
        answer = await self._client.run("copy", repr(target), source, check_key(target), guard=guard)
        self._outcome(answer, target, guard, source=source)

    def _stamp_written(self, answer: list[Any], key: str, guard: Guard | None) -> Stamp | None:
        if self._outcome(answer, key, guard) != "ok":
            return None
        size, micros, version = map(int, answer[1].split(b" "))
        return Stamp(size, micros / 1e6, version)

    def _outcome(self, answer: list[Any], key: str, guard: Guard | None, *, source: str = "") -> str:
        """Return the first word a writing script answered, or raise what it stands for."""
        if answer[0] == b"vanished":
            raise StorageReadError(
                f"{self!r} has lost the log {key!r}, although carrel did not delete it: was its key evicted or deleted"
                " by hand? Delete the log to begin it anew; nothing was written"
            )
        return check_outcome(answer[0].decode(), key, guard, source)

    # --- what is there ----------------------------------------------------------------------------------------------

    async def stamp(self, key: str) -> Stamp | None:
        return (await self.stamps([key]))[0]

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        return [note.stamp if note else None for note in await self._notes(keys)]

    async def _notes(self, keys: Sequence[str]) -> list[_Note | None]:
        names = [check_key(key) for key in keys]
        found: list[_Note | None] = []
        for start in range(0, len(names), _STAMP_PAGE):
            page = names[start : start + _STAMP_PAGE]
            lines = await self._client.read(f"the stamps of {page[0]!r}", "HMGET", f"{self._prefix}:stamps", *page)
            found += [_parse_note(line) if line else None for line in lines]
        return found

    async def scan(self, prefix: str, names: Collection[str] = ()) -> dict[str, Stamp]:
        start = f"{check_key(prefix)}/" if prefix else ""
        if names:
            keys = [f"{start}{folder}/{name}" for folder in await self.folders(prefix) for name in names]
        else:
            keys = [key for key in await self.list(prefix) if key.startswith(start)]
        stamps = await self.stamps(keys)
        return {key: stamp for key, stamp in zip(keys, stamps, strict=True) if stamp is not None}

    async def folders(self, prefix: str = "") -> list[str]:
        start = f"{check_key(prefix)}/" if prefix else ""
        return sorted(_decode_names(await self._client.run("folders", repr(prefix), start)))

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
        if sum(map(len, records)) > _MAX_APPEND:
            raise StorageWriteError(f"the records for {key!r} are more than {_MAX_APPEND} bytes; append fewer at once")
        then = ("WAITAOF", 1, 0, _SYNC_MS) if sync and await self._can_sync() else ()
        expected = -1 if after is None else after
        # Each command may use another connection, so only waiting keeps the order of the calls.
        async with self._turns.hold(key):
            answer = await self._client.run(
                "append", repr(key), key, int(create), expected, *records, guard=guard, then=then
            )
        synced = True
        if then:
            answer, (local, _) = answer
            synced = local == 1
        self._outcome(answer, key, guard)
        if not synced:
            raise StorageUnavailable(
                f"{self!r} has the records for {key!r} in memory, but did not sync them to disk in {_SYNC_MS // 1000} s"
            )
        return int(answer[1])

    async def copy_log(
        self, source: str, target: str, *, through: int, more: Sequence[bytes] = (), guard: Guard | None = None
    ) -> int:
        check_key(source)
        check_records(target, more)
        arguments = (check_key(target), through, *more)
        answer = await self._client.run("copy_log", repr(target), source, *arguments, guard=guard)
        self._outcome(answer, target, guard, source=source)
        return int(answer[1])

    async def _can_sync(self) -> bool:
        """Return whether the server can tell when a write is on its disk; warn once if not."""
        server = await self._client.server()
        if not server:
            why = "does not tell this user its settings (INFO)"
        elif server.get("aof_enabled") != "1":
            why = "keeps no append-only file (appendonly no)"
        elif tuple(map(int, server["redis_version"].split(".")[:2])) < (7, 2):
            why = "is older than 7.2 and cannot tell when a write is on its disk; set appendfsync always"
        else:
            return True
        if not self._warned:
            self._warned = True
            _log.warning("a write to %r may not survive a power cut there: it %s", self, why)
        return False

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        life = await self._life(key) if from_seq > 1 else None
        if life is None and from_seq > 1:
            return
        start = f"{life}-{from_seq}" if life else "-"
        while page := await self._page("XRANGE", key, start, "+", life):
            block = await self._block(key, page)
            if block is None:
                return
            yield block
            if len(page) < _PAGE:
                return
            life = page[-1].life
            start = f"{life}-{page[-1].seq + 1}"

    async def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        life = await self._life(key) if before_seq is not None else None
        if before_seq is not None and (life is None or before_seq <= 1):
            return
        end = f"{life}-{(before_seq or 1) - 1}" if life else "+"
        while page := await self._page("XREVRANGE", key, end, "-", life):
            block = await self._block(key, page[::-1])
            if block is None:
                return
            yield block
            if page[-1].seq == 1:
                return
            life = page[-1].life
            end = f"{life}-{page[-1].seq - 1}"

    async def _life(self, key: str) -> int | None:
        note = (await self._notes([key]))[0]
        return note.life or None if note else None

    async def _page(self, command: str, key: str, start: str, end: str, life: int | None) -> list[_LogEntry]:
        answer = await self._client.read(repr(key), command, self._at("log", key), start, end, "COUNT", _PAGE)
        page = [_parse_entry(raw) for raw in answer]
        # If the log was deleted between two pages and made anew, the new one is not what is being read.
        return [entry for entry in page if entry.life == (life or page[0].life)]

    async def _block(self, key: str, entries: list[_LogEntry]) -> Block | None:
        """Return the records of some entries, or None if the log was deleted meanwhile."""
        large = [f"{entry.life}-{entry.seq}" for entry in entries if entry.record is None]
        beside = await self._client.read(repr(key), "HMGET", self._at("big", key), *large) if large else []
        if None in beside:
            return None
        rest = iter(beside)
        return Block(entries[0].seq, [next(rest) if entry.record is None else entry.record for entry in entries])

    async def incomplete_tail(self, key: str) -> bytes:
        check_key(key)
        return b""

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        log = self._at("log", key)
        seq = max(from_seq, 1)
        async with self._client.dedicated_connection(repr(key)) as call:
            life = await self._life(key)
            while life is None:
                answer = await call("XREAD", "COUNT", 1, "BLOCK", _LOOK_MS, "STREAMS", log, "0-0")
                life = _parse_entry(answer[0][1][0]).life if answer else await self._life(key)
            while True:
                answer = await call("XREAD", "COUNT", _PAGE, "BLOCK", _LOOK_MS, "STREAMS", log, f"{life}-{seq - 1}")
                if answer is None:
                    if await self._life(key) != life:
                        return
                    continue
                page = [_parse_entry(raw) for raw in answer[0][1]]
                block = await self._block(key, page) if page[-1].life == life else None
                if block is None:
                    return
                for record in block.records:
                    yield seq, record
                    seq += 1

    # --- locks ------------------------------------------------------------------------------------------------------

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        lock = RenewedLock(self._client, check_key(key))
        if not await lock.take(wait=wait):
            return None
        self._locks = {held for held in self._locks if held.is_held} | {lock}
        return lock

    async def lock_owner(self, key: str) -> str | None:
        token = await self._client.read(f"the lock {key!r}", "GET", f"{self._prefix}:lock:{check_key(key)}")
        return owner_in(token.decode("utf-8", "replace")) if token else None

    async def close(self) -> None:
        locks, self._locks = self._locks, set()
        # Every lock, also if the server is gone: one that is still renewed would be held when the server is back.
        async with AsyncExitStack() as last:
            last.push_async_callback(self._client.close)
            for lock in locks:
                last.push_async_callback(lock.release)

    async def list(self, prefix: str = "") -> list[str]:
        span = (f"[{check_key(prefix)}", f"({prefix}0") if prefix else ("-", "+")  # "0" is what follows "/"
        found = await self._client.read(f"the keys of {prefix!r}", "ZRANGEBYLEX", f"{self._prefix}:index", *span)
        keys = _decode_names(found)
        return [key for key in keys if not prefix or key == prefix or key.startswith(f"{prefix}/")]


def _too_long(key: str) -> StorageWriteError:
    return StorageWriteError(f"{key!r} is longer than the {_MAX_OBJECT} bytes that Redis accepts; nothing was written")


def _decode_names(found: Sequence[bytes]) -> list[str]:
    """Return the names that carrel can have written; other programs may write invalid text."""
    names = []
    for raw in found:
        with contextlib.suppress(UnicodeDecodeError):
            names.append(raw.decode())
    return names


def _parse_note(line: bytes) -> _Note:
    try:
        _, size, micros, version, life, _ = line.split(b" ")
        return _Note(Stamp(int(size), int(micros) / 1e6, int(version)), int(life))
    except ValueError:
        raise StorageReadError(f"what Redis has noted about a key was not written by carrel: {line!r:.80}") from None


def _parse_entry(raw: Any) -> _LogEntry:
    try:
        (life, _, seq), (field, value) = raw[0].partition(b"-"), raw[1]
        return _LogEntry(int(life), int(seq), None if field == b"b" else value)
    except ValueError:
        raise StorageReadError(f"an entry of a log in Redis was not written by carrel: {raw!r:.80}") from None
