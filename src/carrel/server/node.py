"""A server as a node of a cluster: its lease, what it tells the others, and what it does when it cannot renew it.

cluster/nodes/<name>/lease, info    see `storage.leases`; `info` is a `NodeInfo`
cluster/nodes/<name>/drain          present while the node is to take no new sessions, and to end when it is empty"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import orjson

from carrel.errors import ConfigurationError, LeaseHeld, NodeUnreachable, ServerBusy, StorageError
from carrel.server.responses import send_error
from carrel.server.settings import ServerSettings
from carrel.session import FileStorage, SharedStorage
from carrel.storage.base import Lock, Store, guarded
from carrel.storage.leases import NODES, Holder, Lease, LeaseKeeper, Leases
from carrel.wire.answers import NodeInfo
from carrel.wire.verification import ErrorInfo

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

LOCK = "server/lock"
"""Held by a server that is not part of a cluster."""
NODE_LOST = "node_lost"
_ANSWERED_FROZEN = ("/api/v1/health", "/api/v1/metrics")
_LOOK_SECONDS = 1.0
"""How often a node looks at the others, and whether it is to be drained."""


def drain_key(name: str) -> str:
    """Return the key of the order to drain a node."""
    return f"{NODES}/{name}/drain"


def node_lost_error(name: str) -> ErrorInfo:
    """Return the error of a session whose node is lost."""
    return ErrorInfo(code=NODE_LOST, message=f"node {name} was lost, and the session's processes with it")


class StoreLock:
    """The store, for a server that is not part of a cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock: Lock | None = None

    async def take(self) -> None:
        """`ServerBusy` if another server or a cluster uses the store."""
        self._lock = await self._store.lock(LOCK, wait=False)
        if self._lock is None:
            owner = await self._store.lock_owner(LOCK)
            raise ServerBusy(f"another server ({owner}) uses this store; stop it, or give this one another --store")
        if nodes := await self._store.folders(NODES):
            raise ServerBusy(
                f"this store belongs to a cluster (nodes: {', '.join(nodes)}); add --join to become one of its nodes, "
                "or give this server another --store"
            )

    async def lost(self) -> None:
        """Wait until another server may use the store."""
        assert self._lock is not None
        await self._lock.lost.wait()

    async def release(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            await lock.release()


class Node:
    """The membership of a server in a cluster, from the taking of its lease to its end."""

    def __init__(self, storage: FileStorage | SharedStorage, settings: ServerSettings, url: str) -> None:
        if isinstance(storage, FileStorage):
            raise ConfigurationError(
                "--join: a folder cannot be shared by several machines; give --store redis://… or postgresql://…"
            )
        _check_url(url)
        self.name = settings.name
        self.url = url
        self.is_draining = False
        self._store: Store = storage.store
        self._storage = storage
        self._settings = settings
        self._leases = Leases(storage.store, settings.lease)
        self._lease: Lease | None = None
        self._keeper: LeaseKeeper | None = None
        self._describe: Callable[[], NodeInfo] | None = None
        """None until requests are answered."""
        self._end_sessions: Callable[[], asyncio.Future[object]] | None = None
        self._ending: asyncio.Future[object] | None = None
        self._stopped: list[int] = []
        """Processes that are paused."""
        self._drained = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def check_store(self) -> None:
        """Refuse a store that a server without `--join` uses."""
        if (owner := await self._store.lock_owner(LOCK)) is not None:
            raise ServerBusy(f"a server without --join ({owner}) uses this store; stop it first")

    async def join(self) -> None:
        """Take the lease; from now on each write of the storage needs it. A name whose node has died is waited for."""
        await self.check_store()
        try:
            self._lease = await self._leases.take_or_wait(self.name)
        except LeaseHeld as problem:
            raise ServerBusy(f"--name: {problem}") from None
        await self._store.delete(drain_key(self.name))
        self._storage.store = guarded(self._store, self._lease.guard)
        self._keeper = LeaseKeeper(self._leases, self._lease, self._info, self._late)
        self._keeper.start()

    def start(self, describe: Callable[[], NodeInfo], end_sessions: Callable[[], asyncio.Future[object]]) -> None:
        """Tell the cluster that requests are answered. `end_sessions` is for `--on-store-lost end`."""
        assert self._keeper is not None
        self._describe, self._end_sessions = describe, end_sessions
        self._watcher = asyncio.create_task(self._watch())

    @property
    def state(self) -> Literal["ready", "draining", "frozen"]:
        if self.is_frozen:
            return "frozen"
        return "draining" if self.is_draining else "ready"

    @property
    def is_frozen(self) -> bool:
        """Whether the lease may belong to another process by now, so that nothing may be done."""
        return self._keeper is not None and (self._keeper.is_late or self._keeper.lost.is_set())

    def _info(self) -> bytes:
        return self._describe().model_dump_json().encode() if self._describe is not None else b""

    async def _late(self, is_late: bool) -> None:
        if not is_late:
            logger.warning("node %s has its lease still, and continues", self.name)
            await asyncio.to_thread(continue_processes, self._stopped)
            self._stopped = []
            return
        logger.warning("node %s could not renew its lease: %s its sessions", self.name, self._settings.on_store_lost)
        if self._settings.on_store_lost == "freeze":
            self._stopped = await asyncio.to_thread(stop_processes)
            return
        # At once, and not after records that cannot be written now.
        await asyncio.to_thread(kill_descendants)
        if self._end_sessions is not None:
            self._ending = self._end_sessions()

    async def prepare_end(self) -> None:
        """Let the server end: processes that are paused could not."""
        if self.is_frozen:
            await asyncio.to_thread(kill_descendants)

    async def over(self) -> None:
        """Wait until the node has lost its lease, or is drained."""
        assert self._keeper is not None
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._keeper.lost, self._drained)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        if self._keeper.lost.is_set():
            # What runs there must not go on: its records say that it has ended.
            await asyncio.to_thread(kill_descendants)

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lease."""
        return self._keeper is not None and self._keeper.lost.is_set()

    async def _watch(self) -> None:
        """Look at the other nodes, and for an order to drain this one."""
        assert self._keeper is not None
        assert self._describe is not None
        await self._keeper.renew_now()
        while True:
            try:
                await self._leases.look()
                order = await self._store.get(drain_key(self.name))
            except StorageError:
                order = b"{}" if self.is_draining else None  # It stays as it is.
            if (order is not None) != self.is_draining:
                self.is_draining = order is not None
                await self._keeper.renew_now()
            if order is not None:
                until = orjson.loads(order).get("until")
                if self._describe().sessions == 0 or (until is not None and until <= time.time()):
                    self._drained.set()
            await asyncio.sleep(_LOOK_SECONDS)

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes of the cluster as they described themselves last."""
        return node_infos(self._leases.holders())

    async def leave(self) -> None:
        """Give the lease back; after its sessions were ended."""
        for task in filter(None, [self._watcher]):
            task.cancel()
            await asyncio.wait({task})
        if self._keeper is not None:
            await self._keeper.close()
        if self._lease is not None and not self.is_lost:
            with contextlib.suppress(StorageError):
                await self._leases.give_back(self._lease)


def node_infos(holders: list[Holder]) -> list[NodeInfo]:
    """Return the nodes among the holders of leases."""
    found = []
    for holder in holders:
        if (info := read_info(holder)) is not None:
            changes: dict[str, object] = {"renewed_seconds_ago": round(max(0.0, time.time() - holder.renewed_at), 3)}
            if holder.is_overdue:
                changes |= {"state": "overdue", "free_slots": 0}
            found.append(info.model_copy(update=changes))
    return found


def read_info(holder: Holder) -> NodeInfo | None:
    """Return what a node says about itself; None for a lease whose sessions are being settled."""
    if not holder.info:
        return None
    try:
        return NodeInfo.model_validate_json(holder.info)
    except ValueError as problem:
        logger.warning("the info of node %s is damaged and ignored: %s", holder.name, str(problem)[:200])
        return None


def _check_url(url: str) -> None:
    """Raise ConfigurationError for a URL at which gateways cannot reach a node."""
    expected = "give --url http://ADDRESS:PORT, as gateways and other nodes reach this one"
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError as problem:
        raise ConfigurationError(f"--url {url}: {problem}; {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise ConfigurationError(f"--url {url} is not the URL of a node; {expected}")
    if parts.hostname in ("0.0.0.0", "::"):
        raise ConfigurationError(f"--join: {parts.hostname} is an address to listen on; {expected}")


class FrozenMiddleware:
    """Answers 503 while the node is frozen: nothing was done, and it can be repeated."""

    def __init__(self, app: ASGIApp, node: Node) -> None:
        self._app = app
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._node.is_frozen and scope["path"] not in _ANSWERED_FROZEN:
            detail = f"node {self._node.name} cannot reach its store and is frozen; nothing was done"
            await send_error(send, 503, detail, NodeUnreachable, [(b"retry-after", b"1")])
            return
        await self._app(scope, receive, send)


# --- the processes of the sessions ----------------------------------------------------------------------------------


def stop_processes() -> list[int]:
    """Stop all descendants of this process until `continue_processes`; those that are stopped already stay so."""
    stopped: list[int] = []
    seen: set[int] = set()
    # A process that was running may have started another one meanwhile.
    while fresh := [(pid, state) for pid, state in descendants() if pid not in seen]:
        for pid, state in fresh:
            seen.add(pid)
            if state not in "TtZX" and _send(pid, signal.SIGSTOP):
                stopped.append(pid)
    return stopped


def continue_processes(stopped: list[int]) -> None:
    for pid in stopped:
        _send(pid, signal.SIGCONT)


def kill_descendants() -> None:
    for pid, _ in descendants():
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def descendants(root: int | None = None) -> list[tuple[int, str]]:
    """Return the processes below one, by default below this one, each with its state."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
            except (OSError, ValueError):
                continue  # It has ended.
            children.setdefault(int(parent), []).append((int(entry.name), state))
    found: list[tuple[int, str]] = []
    todo = [root or os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [pid for pid, _ in below]
    return found
