"""Live forks: another process that goes on with the variables and files of a session."""

from __future__ import annotations

import asyncio
import socket

from carrel.errors import ForkRefused
from carrel.execution.channels import Record
from carrel.execution.connection import READY, SpawnFailed, WorkerConnection
from carrel.execution.executor import Handler
from carrel.execution.local_transport import LocalConnection, LocalTransport
from carrel.execution.results import WorkerDied

_SETTLE_TIME = 2.0
"""Seconds that a worker has to finish a fork that was given up."""


async def fork_connection(
    parent: LocalConnection, handlers: dict[str, Handler], *, as_checkpoint: bool = False, generation: str = ""
) -> LocalConnection:
    """Fork a session with its variables and files; after ForkRefused nothing has changed.

    With a `generation` its files are kept on the host, below the folder of the session that all of this came from.
    A worker that does not answer is ended, and WorkerDied raised. A fork for a checkpoint is there only to be forked
    itself: it keeps no snapshot, and no other process can look into it."""
    transport = parent.transport
    assert transport.init is not None
    control, init = socket.socketpair()
    channel, theirs = socket.socketpair()
    if not transport.zygote.acquire():
        raise ForkRefused("the process that the session came from is gone")
    try:
        new = LocalTransport(transport.zygote)
    except BaseException:
        transport.zygote.release()
        raise
    child = WorkerConnection(new, handlers)
    answer: asyncio.Future[Record] | None = None
    new.memory_kills = transport.memory_kills.shared()
    try:
        new.connect(channel, control)
        # Init builds the file system while the worker forks; the first to finish waits for the other.
        preparing = transport.init.request({"op": "fork", "generation": generation}, [init.fileno()])
        fds = [theirs.fileno(), new.stdout.write_end, new.stderr.write_end]
        answer = parent.request({"op": "fork", "checkpoint": as_checkpoint}, fds=fds)
        # Copying many files takes init as long as it takes; once they are there, the worker has nothing to wait for.
        await asyncio.wait([answer, preparing], return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(None if answer.done() else READY):
            forked = await asyncio.shield(answer)
        prepared = await preparing
        if prepared.get("op") != "fork_ready":
            raise ForkRefused(f"a live fork was refused: {prepared.get('message')}")
        transport.init.has_forked = True
        if "refused" in forked or forked.get("error"):
            raise ForkRefused(f"a live fork was refused: {forked.get('refused') or forked.get('error')}")
        theirs.close()
        new.stdout.handed_over()
        new.stderr.handed_over()
        await child.wait_ready("start the fork")
    except BaseException as problem:
        # Its end of the channel is seen once this process has closed its copies.
        init.close()
        theirs.close()
        await child.close()
        if isinstance(problem, TimeoutError):
            # Otherwise it would fork at the next request.
            parent.kill(f"it did not answer within {READY:.0f} seconds")
        if answer is not None and not answer.done():
            # After a cancellation the worker is still forking: it would take the next fork's file system.
            await asyncio.wait([answer], timeout=_SETTLE_TIME)
        if isinstance(problem, TimeoutError):
            raise WorkerDied("it did not answer a request to fork") from None
        if isinstance(problem, SpawnFailed):
            raise ForkRefused(f"a live fork failed: {problem}") from None
        raise
    finally:
        init.close()
        theirs.close()
    return child
