"""Backends for the shared suite of stores, their differences with reasons, and other processes that use a store."""

import asyncio
import contextlib
import importlib
import json
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from carrel.errors import StorageError
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from carrel.storage.redis.store import RedisStore

T = TypeVar("T")

KINDS = ("memory", "file", "redis")

DIFFERENCES: dict[tuple[str, str], str] = {
    ("memory", "between processes"): "what is in one process's memory is seen by no other",
    ("memory", "memory stays flat"): "its records are in memory anyway, and a block only refers to them",
    ("redis", "a running append creates nothing"): "an append that arrives after a delete looks like a new one",
    ("file", "any name in a key"): "file names have at most 255 bytes, and those that begin with a dot are reserved",
    ("file", "a log is not an object"): "both are files, and a person may replace one by the other",
    ("file", "a key may also be a folder"): "keys are paths, and a path is a file or a folder",
}
"""(kind, promise): why this kind does not keep it. Tests of that promise do not run for that kind."""


def differs(kind: str, promise: str) -> bool:
    return (kind, promise) in DIFFERENCES


def file_store(folder: str) -> FileStore:
    return FileStore(folder)


def redis_store(url: str, prefix: str) -> RedisStore:
    return RedisStore(url, prefix)


class Backend:
    """Opens stores on the same data; each `open` returns another one.

    `address` is a function ("package.module:name") that opens a store, and its arguments, so that other processes can
    open one too. Without an address there is one MemoryStore."""

    def __init__(self, *address: str) -> None:
        self.address = [*address]
        self._memory = MemoryStore()
        self._stores: list[Store] = []
        self._others: list[OtherProcess] = []

    @classmethod
    def of_kind(cls, kind: str, folder: Path, redis_url: str) -> "Backend":
        """Create an empty backend of one of carrel's kinds."""
        if kind == "memory":
            return cls()
        if kind == "file":
            return cls(f"{__name__}:file_store", str(folder))
        return cls(f"{__name__}:redis_store", redis_url, f"t-{uuid.uuid4().hex}")

    def open(self) -> Store:
        store = open_store(self.address) if self.address else self._memory
        self._stores.append(store)
        return store

    async def done_with(self, store: Store) -> None:
        """Close a store in the loop that used it, unless it is the shared one."""
        if store is not self._memory:
            await store.close()

    async def other(self, *words: str) -> "OtherProcess":
        """Start another process on the same data that runs this command of `store_process.py`."""
        other = await OtherProcess.start(self.address, words)
        self._others.append(other)
        return other

    async def clear(self) -> None:
        """End the other processes, delete everything and close the stores."""
        for other in self._others:
            await other.kill()
        if self.address:
            cleaner = open_store(self.address)
            with contextlib.suppress(StorageError):  # its server is down
                for folder in {key.split("/")[0] for key in await cleaner.list()}:
                    await cleaner.delete(folder)
            await cleaner.close()
        for store in self._stores:
            await store.close()


def open_store(address: list[str]) -> Store:
    """Open the store with this address."""
    module, _, name = address[0].partition(":")
    store: Store = getattr(importlib.import_module(module), name)(*address[1:])
    return store


class OtherProcess:
    """A child process that reads and writes lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: list[str], words: tuple[str, ...]) -> "OtherProcess":
        command = [sys.executable, "-m", "tests.support.store_process", json.dumps(address), *words]
        pipe = asyncio.subprocess.PIPE
        root = Path(__file__).parents[2]
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=root))

    async def line(self) -> str:
        """Return its next line; "" after it has ended."""
        assert self._process.stdout
        return (await asyncio.wait_for(self._process.stdout.readline(), 60)).decode().rstrip("\n")

    async def send(self, line: str = "go") -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    async def kill(self) -> None:
        """Kill it with SIGKILL and wait for its end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


def in_a_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> Awaitable[T]:
    """Run a coroutine in another thread with its own event loop."""
    return asyncio.to_thread(lambda: asyncio.run(work()))


async def everything(store: Store, key: str, from_seq: int = 1) -> list[bytes]:
    """Return all records of a log and check that its blocks have no gaps."""
    records: list[bytes] = []
    async for block in store.read(key, from_seq):
        assert block.first_seq == from_seq + len(records)
        assert block.records
        records += block.records
    return records


async def everything_back(store: Store, key: str, before_seq: int | None = None) -> list[bytes]:
    """Return all records of a log, read from its end."""
    records: list[bytes] = []
    first = None
    async for block in store.read_back(key, before_seq):
        end = block.first_seq + len(block.records)
        assert end == first if first is not None else before_seq is None or end <= before_seq
        first = block.first_seq
        records = block.records + records
    assert first in (1, None)
    return records


async def until(look: Callable[[], Awaitable[object]], expected: object) -> None:
    """Wait for something that happens in another process."""
    async with asyncio.timeout(60):
        while await look() != expected:  # noqa: ASYNC110 -- no task of this process could set an event
            await asyncio.sleep(0.02)


class Listener:
    """Watches a log in a task and returns its records one by one."""

    def __init__(self, store: Store, key: str, from_seq: int = 1) -> None:
        self._came: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._listen(store, key, from_seq))

    async def _listen(self, store: Store, key: str, from_seq: int) -> None:
        async for seq, record in store.watch(key, from_seq):
            self._came.put_nowait((seq, record))
        self._came.put_nowait(None)

    async def next(self) -> tuple[int, bytes] | None:
        """Return the next record, or None after the watch has ended."""
        getting = asyncio.create_task(self._came.get())
        await asyncio.wait([getting, self._task], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if not getting.done() and self._task.done():
            self._task.result()
        return await asyncio.wait_for(getting, 30)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
