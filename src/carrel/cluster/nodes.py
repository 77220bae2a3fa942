"""The nodes of a cluster: which one gets a new session, and the protocol of what starts and ends them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Protocol

import orjson

from carrel.errors import NodeNotFound
from carrel.server.node import drain_key, node_infos
from carrel.session import open_shared_storage
from carrel.storage.base import Store
from carrel.storage.leases import Leases
from carrel.wire.answers import NodeInfo

PREFERRED = 8
"""Nodes that share the sessions of one sample: more would prepare it more often, fewer would be overloaded."""
_FULLER = 1.25
"""A preferred node that is this much fuller than the mean is not chosen."""


def choose(nodes: Sequence[NodeInfo], sample: str, random: Random) -> NodeInfo | None:
    """Return the node for a new session of this sample ("" without one); None if no node has room.

    It is the emptier of two of the nodes that rendezvous hashing prefers for the sample, or of any two if that one is
    a quarter fuller than the mean. A gateway sees an old state; always taking the emptiest node would flood it."""
    open_nodes = [node for node in nodes if node.state == "ready" and node.free_slots > 0]
    if not open_nodes:
        return None
    if sample and len(open_nodes) > 1:
        mean = sum(node.sessions for node in open_nodes) / len(open_nodes)
        found = _emptier(_preferred(open_nodes, sample), sample, random)
        if found.sessions <= max(_FULLER * mean, 1):
            return found
    return _emptier(open_nodes, sample, random)


def _emptier(nodes: Sequence[NodeInfo], sample: str, random: Random) -> NodeInfo:
    pair = random.sample(nodes, min(2, len(nodes)))
    return min(pair, key=lambda node: (node.sessions, sample not in node.samples))


def _preferred(nodes: Sequence[NodeInfo], sample: str) -> list[NodeInfo]:
    """Return the nodes with the highest hashes for a sample; when a node comes or goes, most samples keep theirs."""

    def rank(node: NodeInfo) -> bytes:
        return hashlib.blake2b(f"{node.name}\0{sample}".encode(), digest_size=8).digest()

    return sorted(nodes, key=rank, reverse=True)[:PREFERRED]


@dataclass(frozen=True)
class EngineNode:
    """A place in which an engine runs a node, or could."""

    name: str
    """Of the node in the cluster."""
    where: str
    """The machine, as the engine names it."""
    state: str
    """`running`, `starting`, `ended` or `unknown`."""


class Cluster:
    """The nodes of a store, as people see and drain them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leases = Leases(store)

    async def list(self) -> list[NodeInfo]:
        """Return all nodes by name; one whose lease was not renewed for its length is `overdue`."""
        return node_infos(await self._leases.look())

    async def has(self, name: str) -> bool:
        """Return whether there is a node of this name."""
        return any(info.name == name for info in await self.list())

    async def drain(self, name: str, until: float | None) -> None:
        """Let a node take no new sessions, and end when it is empty or at `until`; NodeNotFound if there is none."""
        if name not in (found := [info.name for info in await self.list()]):
            raise NodeNotFound(f"there is no node {name!r}; there is: {', '.join(found) or 'none'}")
        await self._store.put(drain_key(name), orjson.dumps({"until": until}))

    async def undo_drain(self, name: str) -> None:
        """Let a node take sessions again."""
        if not await self._store.delete(drain_key(name)):
            raise NodeNotFound(f"no node {name!r} is being drained; `carrel cluster status` lists the nodes")


@asynccontextmanager
async def open_cluster(store: str) -> AsyncIterator[Cluster]:
    """Open the cluster of a store."""
    async with open_shared_storage(store) as storage:
        yield Cluster(storage.store)


class Nodes(Protocol):
    """What starts nodes: Ray, or nothing (a list of URLs). It never decides that a node is lost: its lease does."""

    async def wanted(self, count: int | None) -> None:
        """Run so many nodes, or with None one on each machine."""

    async def list(self) -> list[EngineNode]:
        """Return the nodes that were started."""

    async def drain(self, name: str, until: float | None = None) -> None:
        """Let a node take no new sessions, and end when it is empty or at `until`, in seconds since the epoch."""

    async def remove(self, name: str) -> None:
        """End a node and make sure that its process is dead."""
