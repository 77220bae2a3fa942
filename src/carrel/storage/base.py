"""The Store protocol: what every storage backend promises. A backend keeps bytes and knows nothing about them."""

import asyncio
import contextlib
import os
import re
import socket
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from carrel.errors import GuardLost, KeyRefused, StorageWriteError

T = TypeVar("T")

MAX_RECORD = 256 * 1024 * 1024
"""The longest record a log accepts, in bytes."""

MAX_KEY = 1024
"""The longest key, in bytes."""

_KEY_PART = re.compile(r"[^\x00-\x1f\x7f/\\]+")


class Block:
    """Consecutive records of a log, made from a list of records or from their bytes joined by newlines."""

    __slots__ = ("_array", "_records", "count", "first_seq")

    def __init__(self, first_seq: int, records: list[bytes] | None = None, *, joined: bytes | memoryview = b"") -> None:
        self.first_seq = first_seq
        self._records = records
        self._array = b""
        if records is None:
            bracketed = b"".join((b"[", joined, b"]"))
            self._array = bracketed.replace(b"\n", b",\n")
            # The growth is the number of newlines; this is faster than counting them.
            self.count = len(self._array) - len(bracketed) + 1
        else:
            self.count = len(records)

    @property
    def records(self) -> list[bytes]:
        if self._records is None:
            self._records = self._array[1:-1].split(b",\n")
        return self._records

    @property
    def array(self) -> bytes:
        """All records in brackets, separated by a comma and a newline: one JSON array if each record is JSON."""
        return self._array or b"[%b]" % b",\n".join(self.records)

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and (self.first_seq, self.records) == (other.first_seq, other.records)

    def __repr__(self) -> str:
        return f"Block({self.first_seq}, {self.records!r})"

    __hash__ = None  # type: ignore[assignment]


class Stamp(NamedTuple):
    """The version of a key; equal stamps mean unchanged content."""

    size: int
    modified: float
    """Seconds since the epoch."""
    version: int
    """A number by which the backend tells versions apart."""


class Missing:
    """The type of `MISSING`."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()
"""Used as `expect`: the key must not exist."""

Expected = Stamp | Missing | None
"""A condition on a key: this version, `MISSING`, or None for no condition."""

Guard = tuple[str, Stamp]
"""A key and its version: the write happens only while that object is unchanged, else `GuardLost` is raised."""


class Lock(Protocol):
    """A lock that is held. It is also released when the process that holds it ends."""

    lost: asyncio.Event
    """Set when the lock was lost although it was not released, as when a server has not heard of its holder in time."""

    async def release(self) -> None: ...


@runtime_checkable
class Store(Protocol):
    """Objects and logs under path-like keys (`sessions/a1/meta.json`).

    Every method refuses a key that is not a plain relative path with `KeyRefused`, raises `StorageReadError` or
    `StorageWriteError` when the medium fails, and `StorageUnavailable` when a server does not answer. A failed write
    leaves what was there before. A store can be used from several tasks, threads with their own event loops, and
    processes at once. A `guard` makes a write conditional on another object; see `Guard`."""

    async def get(self, key: str) -> bytes | None:
        """Return the bytes of the object, or None if there is none."""

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return many small objects with few round trips or threads."""

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        """Replace the object atomically and return its new stamp; readers see the old bytes or the new.

        Returns None and writes nothing if `expect` does not hold."""

    async def put_pieces(
        self, key: str, pieces: AsyncIterable[bytes], *, expect: Expected = None, guard: Guard | None = None
    ) -> Stamp | None:
        """Do the same as `put` for an object that is too large to hold in memory.

        Nothing is visible before the last piece is written; `expect` and `guard` are checked then. Nothing is written
        if the pieces raise or the call is cancelled."""

    def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        """Iterate over the bytes of the object from `start` on, piece by piece; `KeyMissing` if there is none.

        All pieces are of one version: `StorageReadError` if it was replaced and the rest cannot be read any more."""

    async def delete(self, key: str, *, expect: tuple[str, Expected] | None = None, guard: Guard | None = None) -> bool:
        """Remove the object or log and everything below `key/`; return False if there was nothing.

        `expect` is a key (the deleted one, or one below it) and its condition; if it does not hold, nothing is
        removed and the result is False. An append with `create=False` never recreates what was deleted."""

    async def copy(self, source: str, target: str, *, guard: Guard | None = None) -> None:
        """Make `target` an object with the bytes of `source`; `KeyMissing` if there is none.

        Only for objects that are never replaced: the two may share their storage."""

    async def stamp(self, key: str) -> Stamp | None:
        """Return the version of the object or log, or None if there is none."""

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        """Return the versions of many keys."""

    async def scan(self, prefix: str, names: Collection[str] = ()) -> dict[str, Stamp]:
        """Return all keys below `prefix/` with their versions.

        With `names`, only the keys `prefix/FOLDER/NAME` of these names: cheaper, as nothing else is looked at."""

    async def folders(self, prefix: str = "") -> list[str]:
        """Return the names directly below `prefix/` that have keys below them, sorted."""

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
        """Add records (without newlines) to a log and return the sequence number of the last one, counted from 1.

        All of them are added or none, in the order in which the tasks of one loop called. No records make an empty
        log if there is none. When this returns, the records survive the death of this process; with `sync` also a
        power cut. `KeyMissing` if the log was deleted during the call, or is missing and `create` is False or `after`
        is above 0. With `after`, returns 0 and writes nothing unless the last record has this number (0: none)."""

    async def copy_log(
        self, source: str, target: str, *, through: int, more: Sequence[bytes] = (), guard: Guard | None = None
    ) -> int:
        """Make `target` a new log with the records 1 to `through` of `source` and then `more`, in one step.

        Returns the number of its last record. `KeyMissing` if the source has no record `through`, `StorageWriteError`
        if the target exists."""

    def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        """Iterate over the records from `from_seq` on, oldest first; nothing if there is no such log. Never writes.

        An incomplete last record (still being written, or cut by a crash) is left out."""

    def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        """Iterate from the end (or before `before_seq`): newest block first, records in order within a block.

        `hint` is the sequence number and size in bytes that the log had at an earlier time. A store that must count
        records starts there instead of at the beginning."""

    async def incomplete_tail(self, key: str) -> bytes:
        """Return the bytes of an incomplete last record, b"" if the log ends with a whole one."""

    def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        """Iterate like `read`, then over each record as any process appends it, until the log is deleted.

        Waits for a log that does not exist yet."""

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        """Take the lock `key`, exclusive among all processes; None if held and `wait` is False. Not re-entrant."""

    async def lock_owner(self, key: str) -> str | None:
        """Return the `process_name()` that holds the lock, or None."""

    async def close(self) -> None:
        """Release files, connections and locks. May be called twice; the store can be used again afterwards."""

    async def list(self, prefix: str = "") -> list[str]:
        """Return all keys that are `prefix` or below `prefix/`, sorted."""


@contextlib.asynccontextmanager
async def locked(store: Store, key: str) -> AsyncIterator[None]:
    """Hold the lock of a key among all processes; waits for another holder."""
    lock = await store.lock(key)
    assert lock is not None
    try:
        yield
    finally:
        await asyncio.shield(lock.release())


def guarded(store: Store, guard: Guard) -> Store:
    """Wrap a store so that every write carries this guard."""
    return cast(Store, _GuardedStore(store, guard))


class _GuardedStore:
    _WRITES = ("put", "put_pieces", "delete", "copy", "append", "copy_log")

    def __init__(self, store: Store, guard: Guard) -> None:
        self._store = store
        for name in self._WRITES:
            setattr(self, name, partial(getattr(store, name), guard=guard))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def is_expected(expect: Expected, found: Stamp | None) -> bool:
    """Return whether a condition holds for what was found."""
    return expect is None or found == (None if isinstance(expect, Missing) else expect)


def guard_lost(key: str, guard: Guard) -> GuardLost:
    """Return the error for a write that was refused because its guard has changed."""
    return GuardLost(f"{key!r} was not written: {guard[0]!r}, which guards this write, was changed or deleted")


def check_key(key: str) -> str:
    """Return the key if it is a plain relative path, else raise `KeyRefused`."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise KeyRefused(f"invalid key {key!r}: it contains a lone surrogate, which no file name can") from None
    if size > MAX_KEY:
        raise KeyRefused(f"the key {key[:40]!r}… is longer than {MAX_KEY} bytes; use a shorter one")
    for part in key.split("/"):
        if part in ("", ".", "..") or not _KEY_PART.fullmatch(part):
            raise KeyRefused(
                f"invalid key {key!r}: it is not a plain relative path (no empty part, '.', '..', backslash or"
                " control character)"
            )
    return key


def check_records(key: str, records: Sequence[bytes]) -> None:
    """Raise `StorageWriteError` if a record cannot be one line of a log."""
    for record in records:
        if len(record) > MAX_RECORD or b"\n" in record:
            raise StorageWriteError(
                f"a record for {key!r} contains a newline or is longer than {MAX_RECORD} bytes; nothing was written"
            )


@lru_cache(maxsize=1)
def _name_of(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{os.urandom(6).hex()}"


def process_name() -> str:
    """Return a name for this process that no other process has, also one with this number in a container."""
    return _name_of(os.getpid())


class Signal:
    """An event of one event loop that any thread may set."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until it is set, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


class Signals:
    """The signals of tasks that wait for a change of a key, in any number of event loops."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: dict[str, set[Signal]] = {}

    @contextlib.contextmanager
    def waiting_for(self, key: str) -> Iterator[Signal]:
        """Give a signal that is set when `key` changes."""
        signal = Signal()
        with self._guard:
            self._waiting.setdefault(key, set()).add(signal)
        try:
            yield signal
        finally:
            with self._guard:
                self._waiting[key].discard(signal)
                if not self._waiting[key]:
                    del self._waiting[key]

    def set(self, key: str) -> None:
        """Wake the tasks that wait for this key."""
        if key in self._waiting:
            with self._guard:
                for signal in self._waiting.get(key, ()):
                    signal.set()

    def set_below(self, key: str) -> None:
        """Wake the tasks that wait for this key or one below it."""
        for waiting in [other for other in list(self._waiting) if is_within(other, key)]:
            self.set(waiting)


def is_within(key: str, prefix: str) -> bool:
    """Return whether `key` is `prefix` or below it."""
    return key == prefix or key.startswith(f"{prefix}/")


class LoopSemaphore:
    """Lets at most so many tasks of each event loop go on at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._loops = weakref.WeakKeyDictionary()

    def turn(self) -> asyncio.Semaphore:
        return self._loops.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most))


@dataclass(eq=False)
class _Turns:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class KeyedLock:
    """One fair lock per key for the tasks of each event loop; a key that is not in use costs nothing."""

    def __init__(self) -> None:
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Turns]]
        self._loops = weakref.WeakKeyDictionary()

    def is_free(self, key: str) -> bool:
        """Return whether no task of this loop holds the lock of this key or waits for it."""
        return key not in self._loops.get(asyncio.get_running_loop(), ())

    async def acquire(self, key: str) -> Callable[[], None]:
        """Wait for the lock of this key; returns the function that releases it, from any thread."""
        loop = asyncio.get_running_loop()
        keys = self._loops.setdefault(loop, {})
        turns = keys.setdefault(key, _Turns())
        turns.users += 1

        def leave() -> None:
            turns.users -= 1
            if not turns.users:
                del keys[key]

        def release() -> None:
            turns.lock.release()
            leave()

        def release_from_anywhere() -> None:
            try:
                running = asyncio.get_running_loop()
            except RuntimeError:
                running = None
            if running is loop:
                release()
            else:
                with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits any more
                    loop.call_soon_threadsafe(release)

        try:
            await turns.lock.acquire()
        except BaseException:
            leave()
            raise
        return release_from_anywhere

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of this key."""
        release = await self.acquire(key)
        try:
            yield
        finally:
            release()


async def finish(
    threads: Executor | None, work: Callable[..., T], *arguments: Any, undo: Callable[[T], None] | None = None
) -> T:
    """Call a blocking function in a thread; if the caller is cancelled, wait until it is done.

    A thread cannot be stopped, and its write must not come after what others write once the caller has released a
    lock. `undo` is called with a result that the cancelled caller does not get."""
    working = asyncio.get_running_loop().run_in_executor(threads, partial(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        if not working.cancelled() and working.exception() is None and undo is not None:
            undo(working.result())
        raise
