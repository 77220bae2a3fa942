"""A Store in a Postgres database, shared by all machines that can reach it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

from carrel.errors import KeyMissing, StorageError, StorageReadError, StorageWriteError
from carrel.storage.base import (
    Block,
    Expected,
    Guard,
    Lock,
    Signals,
    Stamp,
    check_key,
    check_records,
)
from carrel.storage.postgres.client import PostgresClient
from carrel.storage.postgres.groups import Append, AppendGroups
from carrel.storage.server_parts import RenewedLock, check_outcome, condition_text, owner_in

_PAGE = 64
_PIECE = 1024 * 1024
_MAX_WRITE = 512 * 1024 * 1024
"""The server refuses a value of 1 GiB."""
_LOOK_SECONDS = 1.0
"""How often a watched log is looked at when nothing is heard of it."""
_WATCH_SECONDS = 60.0
"""How long other processes tell of a log after it was last noted that it is watched."""
_log = logging.getLogger("carrel.storage")
_UPLOAD_EXPIRES = "15 minutes"
"""How long pieces wait for the next one; after that their sender is taken for dead."""


class PostgresStore:
    """Keeps everything in the tables of one schema (Postgres 13 or newer), which the first use makes.

    Every write is one call of a function in the database, so it happens whole or not at all. An append without `sync`
    survives the death of this process; a crash of the server may cost what was appended in the last second. All other
    writes, and appends with `sync`, are on the server's disk when they return.

    A lost connection is `StorageUnavailable`. A write is never sent twice: if the connection broke after it was sent,
    only a look at the data can tell whether it arrived, and the message says so."""

    def __init__(self, url: str, schema: str = "carrel") -> None:
        self._client = PostgresClient(url, schema)
        self._schema = schema
        self.place = self._client.place
        """The server and database, without the password."""
        self._locks: set[RenewedLock] = set()
        self._watched = Signals()
        self._begin_groups()
        self._client.on_reset = self._begin_groups

    def _begin_groups(self) -> None:
        self._groups = AppendGroups(self._send_group, lambda: self._client.threads)

    def __repr__(self) -> str:
        return f"PostgresStore({self._client.place!r}, {self._schema!r})"

    # --- groups of appends ------------------------------------------------------------------------------------------

    async def _answer(self, append: Append) -> tuple[str, int]:
        """Wait for an append; if the caller is cancelled, until it is certain that nothing is written later."""
        answer = asyncio.wrap_future(append.answer)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not self._groups.withdraw(append):
                while not answer.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([answer])
                answer.exception()
            raise

    def _send_group(self, group: list[list[Append]]) -> list[tuple[str, int]]:
        keys = [appends[0].key for appends in group]
        records = [[record for append in appends for record in append.records] for appends in group]
        sync = any(append.sync for appends in group for append in appends)
        makes = [appends[0].create for appends in group]
        guards = [appends[0].guard for appends in group]
        added = [record for each in records for record in each]
        conditions = ([guard[0] for guard in guards], [guard[1] for guard in guards])
        values: tuple[Any, ...]
        if len(set(keys)) == len(keys) and all(appends[0].after is None for appends in group):
            owners = [owner for owner, each in enumerate(records, 1) for _ in each]
            places = [place for each in records for place in range(1, len(each) + 1)]
            function = "append_group(%s::text[], %s::bytea[], %s::integer[], %s::integer[], %s, %s::boolean[],"
            values = (keys, added, owners, places, sync, makes, *conditions)
        else:
            function = "append_each(%s::text[], %s::integer[], %s::bytea[], %s, %s::boolean[], %s::bigint[],"
            afters = [appends[0].after for appends in group]
            values = (keys, list(map(len, records)), added, sync, makes, afters, *conditions)
        rows = self._client.write_here(
            f"{len(group)} logs" if len(group) > 1 else repr(keys[0]),
            f"SELECT outcome, size, version FROM {function} %s::text[], %s::text[])",
            *values,
        )
        # After the commit: within it, one notification at a time would hold up all other commits.
        if watched := [key for key, row in zip(keys, rows, strict=True) if row[0] == "ok" and row[1]]:
            self._tell(watched)
        return [(outcome, int(version or 0)) for outcome, _, version in rows]

    def _tell(self, keys: list[str]) -> None:
        """Tell the processes that watch these logs; if that fails, they see it when they look."""
        try:
            query = "SELECT pg_notify(%s, key) FROM unnest(%s::text[]) key"
            self._client.write_here("a notification", query, self._client.channel, keys)
        except StorageError as problem:
            _log.warning("watchers of %d logs notice late that they grew: %s", len(keys), problem)

    # --- objects ----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        rows = await self._client.read(
            f"{len(keys)} objects" if len(keys) != 1 else repr(keys[0]),
            "SELECT key, string_agg(data, ''::bytea ORDER BY number) FROM keys JOIN pieces USING (content)"
            " WHERE key = ANY(%s) GROUP BY key",
            [check_key(key) for key in keys],
        )
        found: dict[str, bytes] = dict(rows)
        return [found.get(key) for key in keys]

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        check_key(key)
        if len(data) > _MAX_WRITE:
            return await self.put_pieces(key, _divided(data), expect=expect, guard=guard)
        answer = await self._call(
            key, "put(%s, %s, %s, %s, %s, %s)", key, bytes(data), _PIECE, condition_text(expect), guard=guard
        )
        return _stamp_written(answer, key, guard)

    async def put_pieces(
        self, key: str, pieces: AsyncIterable[bytes], *, expect: Expected = None, guard: Guard | None = None
    ) -> Stamp | None:
        check_key(key)
        await self._drop_uploads("touched < clock_timestamp() - %s::interval", _UPLOAD_EXPIRES)
        started = "INSERT INTO uploads SELECT nextval('numbers'), clock_timestamp() RETURNING content"
        [[content]] = await self._client.write(repr(key), started)
        try:
            number = size = 0
            waiting = bytearray()
            async for piece in pieces:
                waiting += piece
                size += len(piece)
                while len(waiting) >= _PIECE:
                    await self._add_piece(key, content, number, bytes(waiting[:_PIECE]))
                    del waiting[:_PIECE]
                    number += 1
            if waiting or not number:
                await self._add_piece(key, content, number, bytes(waiting))
            answer = await self._call(
                key, "place(%s, %s, %s, %s, %s, %s)", key, content, size, condition_text(expect), guard=guard
            )
        except BaseException:
            await self._drop_uploads("content = %s", content)
            raise
        if answer[0] != "ok":
            await self._drop_uploads("content = %s", content)
        return _stamp_written(answer, key, guard)

    async def _add_piece(self, key: str, content: int, number: int, data: bytes) -> None:
        added = await self._client.write(
            repr(key),
            "WITH alive AS (UPDATE uploads SET touched = clock_timestamp() WHERE content = %s RETURNING content)"
            " INSERT INTO pieces SELECT content, %s, %s FROM alive RETURNING number",
            content,
            number,
            data,
        )
        if not added:
            check_outcome("expired", key, None)

    async def _drop_uploads(self, condition: str, value: Any) -> None:
        await self._client.write(
            "an upload",
            f"WITH gone AS (DELETE FROM uploads WHERE {condition} RETURNING content)"
            " DELETE FROM pieces USING gone WHERE pieces.content = gone.content RETURNING number",
            value,
        )

    async def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        rows = await self._client.read(
            repr(key), "SELECT content, size FROM keys WHERE key = %s AND NOT is_log", check_key(key)
        )
        if not rows:
            raise KeyMissing(f"there is no object {key!r}")
        [[content, size]] = rows
        while start < size:
            number, skipped = divmod(start, _PIECE)
            found = await self._client.read(
                repr(key), "SELECT data FROM pieces WHERE content = %s AND number = %s", content, number
            )
            if not found:
                raise StorageReadError(f"{key!r} was replaced or deleted while it was read; read it again")
            yield found[0][0][skipped:]
            start += len(found[0][0]) - skipped

    async def delete(self, key: str, *, expect: tuple[str, Expected] | None = None, guard: Guard | None = None) -> bool:
        expected = (check_key(expect[0]), condition_text(expect[1])) if expect else (None, None)
        answer = await self._call(check_key(key), "remove(%s, %s, %s, %s, %s)", key, *expected, guard=guard)
        if check_outcome(answer[0], key, guard) != "ok":
            return False
        self._watched.set_below(key)
        return True

    async def copy(self, source: str, target: str, *, guard: Guard | None = None) -> None:
        check_key(source)
        answer = await self._call(check_key(target), "copy_object(%s, %s, %s, %s)", source, target, guard=guard)
        check_outcome(answer[0], target, guard, source)

    async def _call(self, what: str, function: str, *values: Any, guard: Guard | None) -> tuple[Any, ...]:
        """Call a function that writes; its last two parameters are the guard."""
        condition = (check_key(guard[0]), condition_text(guard[1])) if guard else (None, None)
        types = function.replace("(%s", "(%s::text", 1)  # the keys, so that the server need not guess
        [row] = await self._client.write(repr(what), f"SELECT * FROM {types}", *values, *condition)
        return row

    # --- what is there ----------------------------------------------------------------------------------------------

    async def stamp(self, key: str) -> Stamp | None:
        return (await self.stamps([key]))[0]

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        query = "SELECT key, size, modified, version FROM keys WHERE key = ANY(%s)"
        rows = await self._client.read("the stamps of keys", query, [check_key(key) for key in keys])
        found = {key: _stamp_of(stamp) for key, *stamp in rows}
        return [found.get(key) for key in keys]

    async def scan(self, prefix: str, names: Collection[str] = ()) -> dict[str, Stamp]:
        query, values = "SELECT key, size, modified, version FROM keys WHERE key >= %s AND key < %s", _below(prefix)
        if names:
            query += " AND split_part(substr(key, %s), '/', 2) = ANY(%s) AND split_part(substr(key, %s), '/', 3) = ''"
            first = len(prefix) + 2 if prefix else 1
            values += [first, list(names), first]
        rows = await self._client.read(f"the stamps below {prefix!r}", query, *values)
        return {key: _stamp_of(stamp) for key, *stamp in rows}

    async def folders(self, prefix: str = "") -> list[str]:
        first = len(prefix) + 2 if prefix else 1
        query = (
            "SELECT DISTINCT split_part(substr(key, %s), '/', 1) FROM keys"
            " WHERE key >= %s AND key < %s AND strpos(substr(key, %s), '/') > 0"
        )
        rows = await self._client.read(f"the folders of {prefix!r}", query, first, *_below(prefix), first)
        return sorted(name for (name,) in rows)

    async def list(self, prefix: str = "") -> list[str]:
        query, values = "SELECT key FROM keys WHERE key >= %s AND key < %s", _below(prefix)
        if prefix:
            query += " OR key = %s"
            values.append(prefix)
        return sorted(key for (key,) in await self._client.read(f"the keys of {prefix!r}", query, *values))

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
        if sum(map(len, records)) > _MAX_WRITE:
            raise StorageWriteError(f"the records for {key!r} are more than {_MAX_WRITE} bytes; append fewer at once")
        condition = (check_key(guard[0]), condition_text(guard[1])) if guard else (None, None)
        append = Append(key, list(map(bytes, records)), sync, create, after, condition)
        self._groups.add(append)
        outcome, last = await self._answer(append)
        check_outcome(outcome, key, guard)
        self._watched.set(key)
        return last

    async def copy_log(
        self, source: str, target: str, *, through: int, more: Sequence[bytes] = (), guard: Guard | None = None
    ) -> int:
        check_key(source)
        check_records(check_key(target), more)
        data = list(map(bytes, more))
        answer = await self._call(
            target, "copy_log(%s, %s, %s, %s::bytea[], %s, %s)", source, target, through, data, guard=guard
        )
        check_outcome(answer[0], target, guard, source)
        return int(answer[3])

    async def _content(self, key: str) -> tuple[int, int] | None:
        """Return where the records of a log are and the number of the last, or None if there is no such log."""
        query = "SELECT content, last FROM keys WHERE key = %s AND is_log"
        rows = await self._client.read(repr(key), query, check_key(key))
        return (int(rows[0][0]), int(rows[0][1])) if rows else None

    async def _page(self, key: str, content: int, first: int) -> Block | None:
        rows = await self._client.read(
            repr(key),
            "SELECT seq, data FROM records WHERE content = %s AND seq >= %s AND seq < %s ORDER BY seq",
            content,
            first,
            first + _PAGE,
        )
        return Block(rows[0][0], [data for _, data in rows]) if rows else None

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        found = await self._content(key)
        first = max(from_seq, 1)
        while found is not None and (block := await self._page(key, found[0], first)) is not None:
            yield block
            first = block.last_seq + 1

    async def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        found = await self._content(key)
        if found is None:
            return
        content, last = found
        end = last if before_seq is None else min(before_seq - 1, last)
        while end > 0:
            first = max(end - _PAGE + 1, 1)
            block = await self._page(key, content, first)
            if block is None:
                return  # it was deleted meanwhile
            yield Block(first, block.records[: end - first + 1])
            end = first - 1

    async def incomplete_tail(self, key: str) -> bytes:
        check_key(key)
        return b""

    async def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        check_key(key)
        seq = max(from_seq, 1)
        watched: int | None = None
        noted = 0.0
        self._client.listen(self._watched.set)
        with self._watched.waiting_for(key) as signal:
            while True:
                signal.clear()
                if (now := time.monotonic()) > noted + _WATCH_SECONDS / 2:
                    with contextlib.suppress(StorageWriteError):  # On a replica it is only looked at.
                        await self._client.write(repr(key), "SELECT note_watch(%s, %s)", key, _WATCH_SECONDS)
                    noted = now
                found = await self._content(key)
                if watched is None and found is not None:
                    watched = found[0]
                block = await self._page(key, watched, seq) if watched is not None else None
                if block is not None:
                    for record in block.records:
                        yield seq, record
                        seq += 1
                    continue
                if watched is not None and (found is None or found[0] != watched):
                    return
                await signal.wait(_LOOK_SECONDS)

    # --- locks ------------------------------------------------------------------------------------------------------

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        lock = RenewedLock(_Leases(self._client), check_key(key))
        if not await lock.take(wait=wait):
            return None
        self._locks = {held for held in self._locks if held.is_held} | {lock}
        return lock

    async def lock_owner(self, key: str) -> str | None:
        query = "SELECT token FROM locks WHERE key = %s AND expires > clock_timestamp()"
        rows = await self._client.read(f"the lock {key!r}", query, check_key(key))
        return owner_in(rows[0][0]) if rows else None

    async def close(self) -> None:
        locks, self._locks = self._locks, set()
        # Every lock, also if the server is gone: one that is still renewed would be held when the server is back.
        async with AsyncExitStack() as last:
            last.push_async_callback(self._client.close)
            for lock in locks:
                last.push_async_callback(lock.release)


class _Leases:
    """The rows of the locks, each of which expires unless it is renewed."""

    def __init__(self, client: PostgresClient) -> None:
        self._client = client

    async def _change(self, key: str, query: str, *values: Any) -> bool:
        return bool(await self._client.write(f"the lock {key!r}", query, *values))

    async def take(self, key: str, token: str, seconds: float) -> bool:
        query = (
            "INSERT INTO locks VALUES (%s, %s, clock_timestamp() + make_interval(secs => %s)) ON CONFLICT (key) DO"
            " UPDATE SET token = excluded.token, expires = excluded.expires WHERE locks.expires < clock_timestamp()"
            " RETURNING key"
        )
        return await self._change(key, query, key, token, seconds)

    async def renew(self, key: str, token: str, seconds: float) -> bool:
        query = (
            "UPDATE locks SET expires = clock_timestamp() + make_interval(secs => %s) WHERE key = %s AND token = %s"
            " RETURNING key"
        )
        return await self._change(key, query, seconds, key, token)

    async def release(self, key: str, token: str) -> None:
        await self._change(key, "DELETE FROM locks WHERE key = %s AND token = %s RETURNING key", key, token)


def _stamp_written(answer: tuple[Any, ...], key: str, guard: Guard | None) -> Stamp | None:
    return _stamp_of(answer[1:]) if check_outcome(answer[0], key, guard) == "ok" else None


def _stamp_of(row: Sequence[Any]) -> Stamp:
    size, modified, version = row
    return Stamp(size, modified / 1e6, version)


def _below(prefix: str) -> list[Any]:
    """Return the first key below a prefix, and the first one after those."""
    return [f"{check_key(prefix)}/", f"{prefix}0"] if prefix else ["", "\U0010ffff"]  # "0" is what follows "/"


async def _divided(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]
