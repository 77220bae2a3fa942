"""A Store on a Redis server, shared by as many machines as can reach it."""

import logging
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, NamedTuple

from carrel.errors import KeyMissing, LockLost, StorageReadError, StorageUnavailable, StorageWriteError
from carrel.storage import redis_pieces
from carrel.storage.call_order import CallOrder
from carrel.storage.redis_connection import RedisConnections
from carrel.storage.redis_lock import RedisLock
from carrel.storage.seam import MAX_RECORD, Block, Changes, Lock, Stamp, checked_key

_INLINE = 16 * 1024
"""A record longer than this lies beside the stream, so that a page of the stream is never large."""
_PAGE = 512
_BLOCK_BYTES = 4 * 1024 * 1024
_MAX_OBJECT = 512 * 1000 * 1000
_MAX_APPEND = 768 * 1024 * 1024
"""The server cuts the line at a request of 1 GiB."""
_LOOK_UP_MS = 10_000
"""How often a watcher that hears nothing makes sure that its log is still there."""
_GRAVE_MS = 15 * 60 * 1000
_REMEMBERED_DELETES = 10_000
_SYNC_MS = 30_000
_log = logging.getLogger("carrel.storage")


class _Entry(NamedTuple):
    """One entry of a stream; its id is `life-seq`, so that two logs that had the same key are told apart."""

    life: int
    seq: int
    record: bytes | None
    size: int


class _Kept(NamedTuple):
    """What the server notes down about a key."""

    stamp: Stamp
    life: int


class RedisStore:
    """Keeps everything under `prefix:` on one Redis (6.2 or newer, with replicas if you like; not a cluster).

    A log is a stream, an object a string. Every write is one script on the server: the bytes, the index of keys and
    the number of the change in one step, so it happens whole or not at all, also when memory runs out.

    What survives what: an acknowledged write survives the death of this process. Whether it survives the death of
    the *server* is decided by that server's settings (`appendonly`, `appendfsync`, `save`), not by us. `sync=True`
    waits until the server has synced its append-only file, where it keeps one and can tell (Redis 7.2: WAITAOF).
    On an older server set `appendfsync always`; with `appendonly no` nothing can promise it. Where it cannot be
    promised, this is logged once.

    When an append "began before" a delete: each delete has a number, and a store knows the newest number that any
    store of this process has heard of. A delete of that log with a higher number is news to us, and the server says
    how long ago it was. Longer than this append has taken so far, then the delete came first and the log is made
    anew. Otherwise the two ran at the same time, and the append raises `KeyError`. So a deleted log never comes back;
    at worst an append that begins within its own duration after another process's delete is refused as well.

    A lost connection is `StorageUnavailable`. A write is never sent twice: if the line broke after it was sent, only
    a look at the log can tell whether it arrived, and the message says so."""

    def __init__(self, url: str, prefix: str = "carrel") -> None:
        self._connections = RedisConnections(url, prefix)
        self._prefix = prefix
        self.place = self._connections.place
        """Which server and database, without the password."""
        self._known = _Known.of(self.place, prefix)
        self._locks: set[RedisLock] = set()
        self._order = CallOrder()
        self._warned = False

    def __repr__(self) -> str:
        return f"RedisStore({self._connections.address}, prefix={self._prefix!r})"

    def _at(self, kind: str, key: str) -> str:
        return f"{self._prefix}:{kind}:{checked_key(key)}"

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._connections.read(repr(key), "GET", self._at("object", key))
        return found

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [self._at("object", key) for key in keys]
        found: list[bytes | None] = []
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            found += await self._connections.read(f"{len(page)} objects", "MGET", *page)
        return found

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        only_new: bool = False,
        only_existing: bool = False,
        held: Sequence[Lock] = (),
    ) -> bool:
        checked_key(key)
        if len(data) > _MAX_OBJECT:
            raise StorageWriteError(
                f"{key!r} is {len(data)} bytes long; Redis takes {_MAX_OBJECT}. Nothing was written"
            )
        answer = await self._connections.run(
            "put", repr(key), key, int(only_new), int(only_existing), data, *_claims(held)
        )
        return self._done(answer, key, unwanted=False)

    async def put_pieces(self, key: str, pieces: AsyncIterable[bytes], *, held: Sequence[Lock] = ()) -> int:
        answer, size = await redis_pieces.placed(
            self._connections, checked_key(key), pieces, _MAX_OBJECT, lambda: _claims(held)
        )
        self._done(answer, key)
        return size

    def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        return redis_pieces.read(self._connections, key, start)

    async def delete(
        self, key: str, *, as_of: tuple[str, Stamp | None] | None = None, held: Sequence[Lock] = ()
    ) -> bool:
        checked_key(key)
        log, stamp = as_of or ("", None)
        then = log, stamp.version if stamp is not None else "", *_claims(held)
        answer = await self._connections.run("delete", repr(key), key, _GRAVE_MS, _REMEMBERED_DELETES, *then)
        return self._done(answer, key, none=False)

    async def copy(self, source: str, target: str) -> None:
        checked_key(source)
        checked_key(target)
        self._done(await self._connections.run("copy", repr(target), source, target), target, source=source)

    def _done(self, answer: list[Any], key: str, *, source: str = "", **values: bool) -> bool:
        """What a writing script answered: True, one of `values`, or an error."""
        said = answer[0].decode()
        if said == "ok":
            self._known.heard(answer[1])
            return True
        if said in values:
            return values[said]
        if said == "log":
            raise StorageWriteError(f"{key!r} is a log and cannot be replaced by an object; delete it first")
        if said == "taken":
            raise LockLost(
                f"{key!r} was not changed: its lock was lost, as this process stood still for so long that it went to"
                " somebody else, or the server was restarted; look at what is there now, and do it again"
            )
        if said == "lost":
            raise StorageWriteError(f"the pieces of {key!r} took too long and are gone; nothing was written")
        raise KeyMissing(f"there is no object {source!r} to copy to {key!r}")

    async def folders(self, prefix: str = "") -> list[str]:
        start = f"{checked_key(prefix)}/" if prefix else ""
        return sorted(_names(await self._connections.run("folders", repr(prefix), start)))

    async def stamp(self, key: str) -> Stamp | None:
        return (await self.stamps([key]))[0]

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        return [kept.stamp if kept else None for kept in await self._kept(keys)]

    async def _kept(self, keys: Sequence[str]) -> list[_Kept | None]:
        names = [checked_key(key) for key in keys]
        found: list[_Kept | None] = []
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            lines = await self._connections.read(f"the stamps of {page[0]!r}", "HMGET", f"{self._prefix}:stamps", *page)
            found += [_parsed(line) if line else None for line in lines]
        return found

    async def append(
        self, key: str, records: Sequence[bytes], *, sync: bool = False, create: bool = True, after: int | None = None
    ) -> int:
        began = time.monotonic()
        known = self._known.version
        checked_key(key)
        for record in records:
            if len(record) > MAX_RECORD or b"\n" in record:
                raise StorageWriteError(
                    f"a record for {key!r} has a newline or is longer than {MAX_RECORD} bytes; nothing was written"
                )
        if sum(map(len, records)) > _MAX_APPEND:
            raise StorageWriteError(f"the records for {key!r} are more than {_MAX_APPEND} bytes; append fewer at once")
        then = ("WAITAOF", 1, 0, _SYNC_MS) if sync and await self._can_sync() else ()
        expected = -1 if after is None else after
        while True:
            # Each command may go over a connection of its own, so only waiting keeps the order of the calls.
            async with self._order.turn(key):
                answer = await self._connections.run(
                    "append", repr(key), key, int(create), known, _INLINE, expected, *records, then=then
                )
            synced = True
            if then:
                answer, (local, _) = answer
                synced = local == 1
            said = answer[0].decode()
            if said != "deleted":
                break
            known, microseconds_ago, again = answer[1:]
            self._known.heard(known, again=bool(again))
            if microseconds_ago / 1e6 <= time.monotonic() - began:
                raise KeyMissing(f"the log {key!r} was deleted while this was appended to it; nothing was written")
        if said == "missing":
            raise KeyMissing(f"there is no log {key!r}, and it was not to be made")
        if said == "moved":
            return 0
        if said == "object":
            raise StorageWriteError(f"{key!r} is an object; records go to a log under a key of its own")
        if said == "lost":
            raise StorageReadError(
                f"{self!r} has lost the log {key!r}, though nobody deleted it through here: was its key evicted or"
                " deleted by hand? Delete the log to begin it anew; nothing was written"
            )
        self._known.heard(answer[1])
        if not synced:
            raise StorageUnavailable(
                f"{self!r} has the records for {key!r} in memory, but did not sync them to disk in {_SYNC_MS // 1000} s"
            )
        return int(answer[2])

    async def _can_sync(self) -> bool:
        """Whether the server can tell when a write is on its disk; once, a warning why not."""
        server = await self._connections.server()
        if not server:
            why = "does not tell this user how it is set up (INFO)"
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
        while True:
            page = await self._page("XRANGE", key, start, "+", life)
            for entries in _split(page):
                block = await self._block(key, entries)
                if block is None:
                    return
                yield block
            if len(page) < _PAGE:
                return
            life = page[-1].life
            start = f"{life}-{page[-1].seq + 1}"

    async def read_back(self, key: str, before_seq: int | None = None) -> AsyncIterator[Block]:
        life = await self._life(key) if before_seq is not None else None
        if before_seq is not None and (life is None or before_seq <= 1):
            return
        end = f"{life}-{(before_seq or 1) - 1}" if life else "+"
        while True:
            page = await self._page("XREVRANGE", key, end, "-", life)
            for entries in reversed(_split(page[::-1])):
                block = await self._block(key, entries)
                if block is None:
                    return
                yield block
            if len(page) < _PAGE or page[-1].seq == 1:
                return
            life = page[-1].life
            end = f"{life}-{page[-1].seq - 1}"

    async def _life(self, key: str) -> int | None:
        kept = (await self._kept([key]))[0]
        return kept.life or None if kept else None

    async def _page(self, command: str, key: str, start: str, end: str, life: int | None) -> list[_Entry]:
        answer = await self._connections.read(repr(key), command, self._at("log", key), start, end, "COUNT", _PAGE)
        page = [_entry(raw) for raw in answer]
        # The log was deleted between two pages and another made under its key: that one is not what is being read.
        return [entry for entry in page if entry.life == (life or page[0].life)]

    async def _block(self, key: str, entries: list[_Entry]) -> Block | None:
        """The records of some entries, or None when the log was deleted meanwhile."""
        large = [f"{entry.life}-{entry.seq}" for entry in entries if entry.record is None]
        beside = await self._connections.read(repr(key), "HMGET", self._at("big", key), *large) if large else []
        if None in beside:
            return None
        rest = iter(beside)
        return Block(entries[0].seq, [next(rest) if entry.record is None else entry.record for entry in entries])

    async def torn(self, key: str) -> bytes:
        checked_key(key)
        return b""

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        log, gone = self._at("log", key), self._at("gone", key)
        seq = max(from_seq, 1)
        async with self._connections.alone(repr(key)) as call:
            life = await self._life(key)
            while life is None:
                answer = await call("XREAD", "COUNT", 1, "BLOCK", _LOOK_UP_MS, "STREAMS", log, "0-0")
                life = _entry(answer[0][1][0]).life if answer else None
            while True:
                after = ("STREAMS", log, gone, f"{life}-{seq - 1}", f"{life}-0")
                answer = await call("XREAD", "COUNT", _PAGE, "BLOCK", _LOOK_UP_MS, *after)
                if answer is None and await self._life(key) != life:
                    return
                for name, raw in answer or ():
                    page = [_entry(entry) for entry in raw] if name == log.encode() else []
                    for entries in _split([entry for entry in page if entry.life == life]):
                        block = await self._block(key, entries)
                        if block is None:
                            return
                        for record in block.records:
                            yield seq, record
                            seq += 1
                    if not page or page[-1].life != life:
                        return

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        lock = RedisLock(self._connections, checked_key(key))
        if not await lock.take(wait=wait):
            return None
        self._locks = {held for held in self._locks if held.held} | {lock}
        return lock

    async def holder(self, key: str) -> str | None:
        return await RedisLock.holder(self._connections, checked_key(key))

    async def changed(self, prefix: str, cursor: object = None) -> Changes:
        start = f"{checked_key(prefix)}/" if prefix else ""
        run, born, seen = cursor.split("/") if isinstance(cursor, str) else ("", "", "-1")
        run_id = await self._connections.run_id()
        born_now, version, known, keys = await self._connections.run("changed", repr(prefix), start, born, seen)
        self._known.heard(version)
        # A server that was restarted may have lost its newest writes, and then uses their numbers again.
        exact = known and run == run_id
        return Changes(f"{run_id}/{born_now.decode()}/{version}", set(_names(keys)) if exact else None)

    async def close(self) -> None:
        locks, self._locks = self._locks, set()
        # Each of them, also where the server is gone: one that is still renewed would be held again when it is back.
        async with AsyncExitStack() as last:
            last.push_async_callback(self._connections.close)
            for lock in locks:
                last.push_async_callback(lock.release)

    async def list(self, prefix: str = "") -> list[str]:
        span = (f"[{checked_key(prefix)}", f"({prefix}0") if prefix else ("-", "+")  # "0" is what follows "/"
        found = await self._connections.read(f"the keys of {prefix!r}", "ZRANGEBYLEX", f"{self._prefix}:index", *span)
        keys = _names(found)
        return [key for key in keys if not prefix or key == prefix or key.startswith(f"{prefix}/")]


class _Known:
    """The newest change that any store of this process has heard of, per server and prefix."""

    _all: dict[tuple[str, str], "_Known"] = {}  # noqa: RUF012 -- shared on purpose
    _guard = threading.Lock()

    def __init__(self) -> None:
        self.version = 0

    @classmethod
    def of(cls, address: str, prefix: str) -> "_Known":
        with cls._guard:
            return cls._all.setdefault((address, prefix), cls())

    def heard(self, version: int, *, again: bool = False) -> None:
        """`again`: the server has begun to use numbers a second time."""
        with self._guard:
            self.version = version if again else max(self.version, version)


def _claims(held: Sequence[Lock]) -> list[str]:
    """What a script asks for before it writes: see `lost_lock` in its prelude."""
    return [part for lock in held if isinstance(lock, RedisLock) for part in lock.claim()]


def _names(found: Sequence[bytes]) -> list[str]:
    """Without those that cannot be ours: another program's."""
    try:
        return [name.decode() for name in found]
    except UnicodeDecodeError:
        names = [name.decode("utf-8", "replace") for name in found]
        return [name for name, raw in zip(names, found, strict=True) if name.encode() == raw]


def _parsed(line: bytes) -> _Kept:
    try:
        _, size, microseconds, version, life, _ = line.split(b" ")
        return _Kept(Stamp(int(size), int(microseconds) / 1e6, int(version)), int(life))
    except ValueError:
        raise StorageReadError(
            f"what Redis has noted down about a key was not written by carrel: {line!r:.80}"
        ) from None


def _entry(raw: Any) -> _Entry:
    try:
        (life, _, seq), (field, value) = raw[0].partition(b"-"), raw[1]
        if field == b"b":
            return _Entry(int(life), int(seq), None, int(value))
        return _Entry(int(life), int(seq), value, len(value))
    except ValueError:
        raise StorageReadError(f"an entry of a log in Redis was not written by carrel: {raw!r:.80}") from None


def _split(page: list[_Entry]) -> list[list[_Entry]]:
    """The page in pieces of no more bytes than a block may have, or of one record."""
    cuts, weight = [0], 0
    for place, entry in enumerate(page):
        weight += entry.size
        if weight > _BLOCK_BYTES and place > cuts[-1]:
            cuts.append(place)
            weight = entry.size
    cuts.append(len(page))
    return [page[start:end] for start, end in pairwise(cuts) if end > start]
