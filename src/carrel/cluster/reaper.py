"""Settling nodes that are lost: their sessions get an end in the records. Every gateway does it; one at a time."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from carrel.errors import StorageError
from carrel.server.node import node_lost_error
from carrel.server.records import RecordStore
from carrel.server.settling import settle_left
from carrel.storage.base import Store, guarded
from carrel.storage.leases import Lease, Leases

logger = logging.getLogger(__name__)


async def reap(store: Store, leases: Leases, name: str) -> bool:
    """Take the lease of a node that is overdue, end its sessions in the records, and remove it; False if it lives.

    From the moment of the taking, the node can write nothing. If this process dies meanwhile, its lease is overdue
    too, and another one continues."""
    lease = await leases.take(name)
    if lease is None:
        return False
    logger.warning("node %s is lost: its lease was not renewed in time; ending its sessions in the records", name)
    records = RecordStore(guarded(store, lease.guard), name)
    renewing = asyncio.create_task(_renew(leases, lease))
    try:
        ended = await settle_left(records, node_lost_error(name))
        if records.has_unsaved or await records.has_left_live():
            raise StorageError(f"the sessions of node {name} could not all be written; they are settled later")
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
    await leases.give_back(lease)
    logger.warning("node %s: %d sessions were ended", name, ended)
    return True


async def _renew(leases: Leases, lease: Lease) -> None:
    """Hold the lease while the sessions are ended; without it, the store refuses to write about them."""
    while True:
        with suppress(StorageError):
            await leases.renew(lease, b"")
        await asyncio.sleep(lease.seconds / 6)
