"""The Store: what every backend promises, and nothing about what is kept in it."""

import os
import re
import socket
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

from carrel.errors import KeyRefused

MAX_RECORD = 256 * 1024 * 1024
"""The longest record a log takes, in bytes."""

LONGEST_KEY = 1024
"""Bytes."""
_PART = re.compile(r"[^\x00-\x1f\x7f/\\]+")


class Block:
    """Some records of a log that stand one after another; made from them, or from all of them joined by newlines."""

    __slots__ = ("_array", "_records", "count", "first_seq")

    def __init__(self, first_seq: int, records: list[bytes] | None = None, *, joined: bytes | memoryview = b"") -> None:
        self.first_seq = first_seq
        self._records = records
        self._array = b""
        if records is None:
            bracketed = b"".join((b"[", joined, b"]"))
            self._array = bracketed.replace(b"\n", b",\n")
            # By how much it grew says how many there are, and sooner than counting them would.
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
        """All of them in brackets, with a comma and a newline between two."""
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
    """Which version of a key this is; equal stamps mean unchanged content."""

    size: int
    modified: float
    """Seconds since the epoch."""
    version: int
    """Whatever the backend tells versions apart by."""


class Changes(NamedTuple):
    """What changed below a prefix since a cursor was handed out."""

    cursor: object
    """Give it to the next call."""
    keys: set[str] | None
    """The keys written or deleted since; None: unknown, look at everything."""


class Lock(Protocol):
    """A lock that is held. It also goes when the process that holds it does."""

    async def release(self) -> None: ...


@runtime_checkable
class Store(Protocol):
    """Objects and logs under path-like keys (`sessions/a1/meta.json`).

    Every method refuses a key that is no plain relative path with `KeyRefused`, raises `StorageReadError` or
    `StorageWriteError` when the medium fails and `StorageUnavailable` when a server is gone. A failed write
    leaves what was there. Safe to use from several tasks, threads with their own loops, and processes at once.
    """

    async def get(self, key: str) -> bytes | None:
        """The object's bytes, or None when there is none."""

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The same for many small objects, at the cost of few round trips or threads."""

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        only_new: bool = False,
        only_existing: bool = False,
        held: "Sequence[Lock]" = (),
    ) -> bool:
        """Replace the object atomically; a reader sees the old bytes or the new, also after a power cut.

        With `only_new`, False and nothing written when the key is there already. With `only_existing`, False and
        nothing written when it is not there: a put in flight never brings back what a delete removed meanwhile.

        `held` are locks of this store under which it was decided what to write. Where one can be lost to somebody
        else, by a holder who stood still for too long, that is `LockLost` and nothing written."""

    async def put_pieces(self, key: str, pieces: AsyncIterable[bytes], *, held: "Sequence[Lock]" = ()) -> int:
        """`put` for an object that is too large to hold; returns its size in bytes.

        Nothing is to be seen of it before its last piece is there; `held` is looked at then. When the pieces raise,
        or this is cancelled, nothing was written."""

    def pieces(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        """The object's bytes from `start` on, piece by piece; `KeyMissing` when there is none.

        All of one version: `StorageReadError` where it was replaced meanwhile and the rest cannot be had."""

    async def delete(
        self, key: str, *, as_of: "tuple[str, Stamp | None] | None" = None, held: "Sequence[Lock]" = ()
    ) -> bool:
        """Remove the object or log and everything below `key/`; False when there was nothing. `held` is as for `put`.

        An append to a log below it that began before never brings it back: it raises `KeyError`.

        `as_of` is a log below it and the stamp that it had when this was decided: False and nothing removed when
        somebody has appended to it since."""

    async def folders(self, prefix: str = "") -> list[str]:
        """The names directly below `prefix/` that have keys below them, sorted."""

    async def stamp(self, key: str) -> Stamp | None:
        """Which version of the object or log this is, or None."""

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        """The same for many."""

    async def copy(self, source: str, target: str) -> None:
        """Make `target` an object with the bytes of `source` without moving them through here; KeyError if missing.

        Only for objects that are never replaced (blobs): the two may share their storage."""

    async def append(
        self, key: str, records: Sequence[bytes], *, sync: bool = False, create: bool = True, after: int | None = None
    ) -> int:
        """Add records (no newline inside) after all others; returns the sequence number of the last, from 1.

        All of them or none, and in the order in which one loop's tasks called; no records make an empty log where
        there is none. When this returns they survive the death of this process, with `sync` a power cut.
        KeyError when the log was deleted meanwhile, or is missing and `create` is False or `after` above 0.

        With `after`, 0 and nothing written unless the last record has this number (0: there is none yet), so that
        what was decided by looking at the log is not written after what came since."""

    def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        """The records from `from_seq` on, oldest first; nothing when there is no such log. Never writes.

        A torn last record (one still being written, or cut by a crash) is not given."""

    def read_back(self, key: str, before_seq: int | None = None) -> AsyncIterator[Block]:
        """The same from the end (or from just before `before_seq`): newest block first, in order within a block."""

    async def torn(self, key: str) -> bytes:
        """The bytes of an unfinished last record, b"" when the log ends cleanly."""

    def watch(self, key: str, from_seq: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        """`read`, and then each record as any process appends it; ends only when the log is deleted or on cancel.

        Waits for a log that is not there yet."""

    async def lock(self, key: str, *, wait: bool = True) -> Lock | None:
        """Hold `key` alone, among all processes; None when it is held and `wait` is False. Not re-entrant."""

    async def holder(self, key: str) -> str | None:
        """Who holds the lock: a `process_name()`, or None."""

    async def changed(self, prefix: str, cursor: object = None) -> Changes:
        """What was written or deleted below `prefix/` since `cursor` (None: the first call; keys is None then)."""

    async def close(self) -> None:
        """Let go of files, connections and locks; twice is harmless. Usable again afterwards."""

    async def list(self, prefix: str = "") -> list[str]:
        """All keys that are `prefix` or below `prefix/`, sorted."""


def checked_key(key: str) -> str:
    """The key itself when it is a plain relative path, else `KeyRefused`."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise KeyRefused(f"{key!r} has half a surrogate pair in it, which no file can be called") from None
    if size > LONGEST_KEY:
        raise KeyRefused(f"the key {key[:40]!r}… is longer than {LONGEST_KEY} bytes; use a shorter one")
    for part in key.split("/"):
        if part in ("", ".", "..") or not _PART.fullmatch(part):
            raise KeyRefused(
                f"{key!r} is no plain relative path: no empty part, '.', '..', backslash or control character"
            )
    return key


@lru_cache(maxsize=1)
def _name_of(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{os.urandom(6).hex()}"


def process_name() -> str:
    """This process, told apart from all others that may share a store, also from one in a container like its own."""
    return _name_of(os.getpid())
