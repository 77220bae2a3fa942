"""Leases over a Store: names that processes hold as long as they renew them, with what each says about itself.

    <folder>/<name>/lease    written when the name is taken; its version guards every write of the holder
    <folder>/<name>/info     written at each renewal

A holder is lost when its `info` has not changed for the length of its lease, by the clock of the observer. The process
that then takes the name writes `lease` anew, and the store refuses all later writes of the holder before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from carrel.errors import GuardLost, LeaseHeld, StorageError
from carrel.storage.base import MISSING, Guard, Stamp, Store, process_name

NODES = "cluster/nodes"
"""The folder of the leases of nodes."""
LEASE_SECONDS = 10.0
_RENEWALS = 6
"""How often a lease is renewed within its length."""
_STEP_SECONDS = 0.25
"""How long the deadline sleeps at most: the loop's clock stands still while the machine is suspended."""
_LIVING_RENEWALS = 3
"""A holder that was seen to renew this often lives."""
_MAX_PENDING = 5
"""Renewals that may wait for an answer at one time."""

logger = logging.getLogger("carrel.storage")


def boot_time() -> float:
    """Return the seconds since the machine was started, also those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Lease:
    """A name that this process has taken."""

    name: str
    guard: Guard
    """Makes a write conditional on the lease."""
    seconds: float
    taken_at: float
    """By `boot_time`, before the request was sent."""


@dataclass(frozen=True)
class Holder:
    """The holder of a name, as an observer sees it."""

    name: str
    process: str
    """Its `process_name()`."""
    seconds: float
    """The length of its lease."""
    info: bytes
    """What it wrote at its last renewal; empty before the first."""
    renewed_at: float
    """The time of the last renewal by the clock of the store, in seconds since the epoch."""
    unchanged: float
    """For how long this observer has seen no renewal."""

    @property
    def is_overdue(self) -> bool:
        return self.unchanged > self.seconds


@dataclass
class _Observed:
    stamps: tuple[Stamp | None, Stamp | None]
    since: float
    process: str
    seconds: float
    info: bytes


class Leases:
    """Takes, renews and observes the leases of one folder. Not shared between event loops."""

    def __init__(
        self,
        store: Store,
        seconds: float = LEASE_SECONDS,
        *,
        folder: str = NODES,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """`seconds` is the length of the leases that this process takes."""
        self._store = store
        self._seconds = seconds
        self._folder = folder
        self._clock = clock
        self._observed: dict[str, _Observed] = {}
        self._looked_at: float | None = None

    def _key(self, name: str, part: str) -> str:
        return f"{self._folder}/{name}/{part}"

    async def take(self, name: str, info: bytes = b"") -> Lease | None:
        """Take a name that is free, or whose holder this observer has seen to be overdue; None if another holds it."""
        key, sent_at = self._key(name, "lease"), self._clock()
        observed = self._observed.get(name)
        if observed is not None and self._holder(name, observed).is_overdue:
            # A renewal that was not seen yet must count: it changes the other object, so look at it once more.
            if await self._store.stamp(self._key(name, "info")) != observed.stamps[1]:
                return None
            expect = observed.stamps[0] or MISSING
        else:
            expect = MISSING
        content = {"process": process_name(), "seconds": self._seconds}
        stamp = await self._store.put(key, orjson.dumps(content), expect=expect)
        if stamp is None:
            return None
        lease = Lease(name, (key, stamp), self._seconds, sent_at)
        self._observed.pop(name, None)
        await self.renew(lease, info)
        return lease

    async def renew(self, lease: Lease, info: bytes) -> None:
        """Hold a lease for longer; GuardLost if it was taken away."""
        await self._store.put(self._key(lease.name, "info"), info, guard=lease.guard)

    async def give_back(self, lease: Lease) -> None:
        """Release a name at once; nothing happens if it was taken away."""
        key, stamp = lease.guard
        await self._store.delete(key.rpartition("/")[0], expect=(key, stamp))

    async def is_taken(self, name: str) -> bool:
        """Return whether a name has a holder now, be it overdue."""
        return await self._store.stamp(self._key(name, "lease")) is not None

    async def look(self) -> list[Holder]:
        """Look at all leases; the time between two looks counts only if there was no outage between them."""
        began_at = self._clock()
        stamps = await self._store.scan(self._folder)
        now = self._clock()
        names = {key[len(self._folder) + 1 :].partition("/")[0] for key in stamps}
        changed = {}
        for name in names:
            pair = stamps.get(self._key(name, "lease")), stamps.get(self._key(name, "info"))
            if name not in self._observed or self._observed[name].stamps != pair:
                changed[name] = pair
        keys = [self._key(name, part) for name in changed for part in ("lease", "info")]
        found = iter(await self._store.get_many(keys) if keys else [])
        for (name, pair), lease, info in zip(changed.items(), found, found, strict=False):
            content = _parse(lease)
            seconds = float(content.get("seconds", self._seconds))
            # The time after the answer is never before the renewal, so nothing is overdue too early.
            self._observed[name] = _Observed(pair, now, str(content.get("process", "")), seconds, info or b"")
        for name in [name for name in self._observed if name not in names]:
            del self._observed[name]
        self._forgive_outage(began_at, now)
        return self.holders()

    def _forgive_outage(self, began_at: float, now: float) -> None:
        """Count anew after a gap: while the store could not be reached from here, holders could not renew either."""
        before, self._looked_at = self._looked_at, now
        for observed in self._observed.values():
            gap = now - (before if before is not None else began_at)
            if gap > observed.seconds / 2:
                observed.since = now

    def holders(self) -> list[Holder]:
        """Return the holders as the last look found them, by name."""
        return [self._holder(name, observed) for name, observed in sorted(self._observed.items())]

    def _holder(self, name: str, observed: _Observed) -> Holder:
        renewed = observed.stamps[1] or observed.stamps[0]
        return Holder(
            name,
            observed.process,
            observed.seconds,
            observed.info,
            renewed.modified if renewed is not None else 0.0,
            # Only up to the last look: what happened since then was not seen.
            (self._looked_at or observed.since) - observed.since,
        )

    async def take_or_wait(self, name: str, info: bytes = b"") -> Lease:
        """Take a name; if it is held, wait until its holder is overdue, or raise `LeaseHeld` if it is renewed."""
        renewals: set[tuple[str, float]] = set()
        while (lease := await self.take(name, info)) is None:
            holder = next((each for each in await self.look() if each.name == name), None)
            if holder is not None:
                # Without an info, a gateway renews it while it settles what the holder before has left.
                if holder.info:
                    renewals.add((holder.process, holder.renewed_at))
                # One may come late, from a process that has ended.
                if len(renewals) > _LIVING_RENEWALS:
                    raise LeaseHeld(f"the name {name!r} is used by {holder.process}, which is alive; use another name")
                await asyncio.sleep(holder.seconds / _RENEWALS)
        return lease


class LeaseKeeper:
    """Renews a lease in the background, and says when its holder must stop.

    It is `late` from half the length of the lease after the last renewal that succeeded, counted from before that was
    sent, by a timer of its own: a request to the store may take any time. It is `lost` when the store has said that
    another process has taken the name; that is final."""

    def __init__(
        self,
        leases: Leases,
        lease: Lease,
        info: Callable[[], bytes],
        on_change: Callable[[bool], Awaitable[None]],
        *,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """`info` is called for each renewal; `on_change(is_late)` when that changes."""
        self.lost = asyncio.Event()
        self.is_late = False
        self._leases, self._lease, self._info, self._on_change, self._clock = leases, lease, info, on_change, clock
        self._deadline = lease.taken_at + lease.seconds / 2
        self._pending: set[asyncio.Task[None]] = set()
        self._renewed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._renew_regularly()), asyncio.create_task(self._watch_deadline())]

    async def close(self) -> None:
        """Stop renewing, without giving the lease back."""
        tasks = {*self._tasks, *self._pending}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def renew_now(self) -> None:
        """Renew once more, as when the info has changed."""
        await self._renew()

    async def _renew_regularly(self) -> None:
        while not self.lost.is_set():
            # Each in a task of its own: one that gets no answer must not keep the next from being sent.
            if len(self._pending) < _MAX_PENDING:
                task = asyncio.create_task(self._renew())
                self._pending.add(task)
                task.add_done_callback(self._pending.discard)
            await asyncio.sleep(self._lease.seconds / _RENEWALS)

    async def _renew(self) -> None:
        sent_at = self._clock()
        try:
            await self._leases.renew(self._lease, self._info())
        except GuardLost:
            logger.error("the lease %s was lost: another process has taken it", self._lease.name)
            self.lost.set()
        except StorageError as problem:
            logger.warning("the lease %s was not renewed: %s", self._lease.name, problem)
        else:
            self._deadline = max(self._deadline, sent_at + self._lease.seconds / 2)
            self._renewed.set()

    async def _watch_deadline(self) -> None:
        while not self.lost.is_set():
            left = self._deadline - self._clock()
            if (left <= 0) != self.is_late:
                self.is_late = left <= 0
                await self._on_change(self.is_late)
                continue
            self._renewed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(left, 0.0), _STEP_SECONDS) if left > 0 else _STEP_SECONDS):
                    await self._renewed.wait()


def _parse(lease: bytes | None) -> dict[str, Any]:
    try:
        content = orjson.loads(lease or b"{}")
    except ValueError:
        content = {}
    return content if isinstance(content, dict) else {}
