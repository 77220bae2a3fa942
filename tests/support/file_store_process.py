"""The other program of the file store's own tests: does one thing to a folder that needs a process of its own."""

import asyncio
import fcntl
import os
import resource
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from carrel.errors import StorageReadError, StorageWriteError
from carrel.storage.base import Lock
from carrel.storage.files.store import FileStore


async def everything(store: FileStore, key: str) -> list[bytes]:
    return [record async for block in store.read(key) for record in block.records]


def say(words: object) -> None:
    print(words, flush=True)


async def append_batches(root: Path, size: str) -> None:
    """Batches of ten records, for ever; says the number of each as soon as it is acknowledged."""
    store = FileStore(root)
    while True:
        say(await store.append("s/log.jsonl", [b'"%s"' % (b"x" * int(size))] * 10))


async def put_over_and_over(root: Path, size: str) -> None:
    store = FileStore(root)
    say("began")
    for number in range(10**9):
        await store.put("s/object", b"%d" % (number % 10) * int(size))


async def hold_file(root: Path, key: str) -> None:
    """Locks a log's file as an append does, and keeps it until a line comes."""
    with open(root / key, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        say("locked")
        sys.stdin.readline()


def append_with_child(root: Path, count: str) -> None:
    """Appends together with a forked child, both with the store that the parent had in use before."""
    store = FileStore(root)

    async def begin() -> Lock | None:
        await store.append("s/log.jsonl", [b"before"], sync=True)
        return await store.lock("mine")

    async def go_on(name: str) -> None:
        for number in range(int(count)):
            await store.append("s/log.jsonl", [f"{name} {number}".encode()], sync=number % 10 == 0)
        if name == "child":
            assert lock is not None
            await lock.release()  # it has none

    lock = asyncio.run(begin())
    child = os.fork()
    asyncio.run(go_on("parent" if child else "child"))
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    say(f"held by {'no process' if asyncio.run(FileStore(root).lock_owner('mine')) is None else 'another process'}")


def leave_child_behind(root: Path) -> None:
    """Dies with a lock while a forked child lives on."""
    store = FileStore(root)
    lock = asyncio.run(store.lock("mine"))
    assert lock is not None
    if os.fork():
        os._exit(0)
    say("parent is gone")
    sys.stdin.readline()


async def meet_a_file_size_limit(root: Path) -> None:
    """Appends until the limit stops it, looks at the log, and goes on when the limit is lifted."""
    store = FileStore(root)
    await store.append("s/log.jsonl", [b"x" * 100] * 20)
    await store.put("s/object", b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    await fill_and_go_on(
        store, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    )


async def meet_a_full_disk(root: Path) -> None:
    """The same on a small file system of its own."""
    store = FileStore(root)
    await store.append("s/log.jsonl", [b"x" * 100] * 20)
    await store.put("s/object", b"old")
    ballast = root / "s/ballast"
    free = os.statvfs(root)
    ballast.write_bytes(b"x" * (free.f_bavail * free.f_bsize - 16384))
    await fill_and_go_on(store, ballast.unlink)


async def fill_and_go_on(store: FileStore, make_room: Callable[[], object]) -> None:
    count = 20
    for batch in (1, 5):
        refused = None
        while refused is None:
            try:
                count = await store.append("s/log.jsonl", [b"y" * 999] * batch)
            except StorageWriteError as error:
                refused = error
        say(f"refused: {refused}")
    assert len(await everything(store, "s/log.jsonl")) == count
    assert await store.incomplete_tail("s/log.jsonl") == b""
    try:
        await store.put("s/object", b"z" * 100_000)
    except StorageWriteError as error:
        say(f"refused: {error}")
    assert await store.get("s/object") == b"old"
    with open(store.root / "s/log.jsonl", "ab") as other:
        other.write(b'{"torn')
    try:
        await store.append("s/log.jsonl", [b"y" * 999])
    except StorageWriteError as error:
        say(f"refused: {error}")
    assert await store.incomplete_tail("s/log.jsonl") in (b'{"torn', b"")
    assert len(await everything(store, "s/log.jsonl")) == count
    make_room()
    assert await store.append("s/log.jsonl", [b"again"]) == count + 1
    assert await store.put("s/object", b"z" * 100_000)
    records = await everything(store, "s/log.jsonl")
    assert len(records) == count + 1
    assert set(records) == {b"x" * 100, b"y" * 999, b"again"}
    assert (store.root / "s/log.torn").read_bytes() == b'{"torn'
    assert [name for name in os.listdir(store.root / "s") if name.startswith(".new")] == []
    say("whole")


async def be_refused(root: Path) -> None:
    """Every verb, where nothing may be written or read."""
    store = FileStore(root)
    attempts: list[Coroutine[Any, Any, object]] = [
        store.put("s/object", b"new"),
        store.put("t/object", b"new"),
        store.append("s/log.jsonl", [b"new"]),
        store.append("t/log.jsonl", [b"new"]),
        store.delete("s"),
        store.lock("s"),
        store.get("s/object"),
        everything(store, "s/log.jsonl"),
    ]
    for attempt in attempts:
        try:
            await attempt
            say("done")
        except (StorageReadError, StorageWriteError) as error:
            say(f"{type(error).__name__}: {error}")


async def become_another_user() -> None:
    await asyncio.to_thread(str)  # loads what threads need, while we may still read it
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


async def be_refused_as_another_user(root: Path) -> None:
    await become_another_user()
    await be_refused(root)


async def look_beside_a_forbidden_folder(root: Path) -> None:
    store = FileStore(root)
    await become_another_user()
    for key in ("s/a/object", "s/b/object", "s/c/object"):
        await store.put(key, b"x")
    (root / "s/b").chmod(0)
    say(await store.folders("s"))
    say(sorted(await store.scan("s", ("object", "other"))))
    (root / "s/b").chmod(0o700)


if __name__ == "__main__":
    verbs: list[Callable[..., Coroutine[Any, Any, None] | None]] = [
        append_batches,
        put_over_and_over,
        hold_file,
        append_with_child,
        leave_child_behind,
        meet_a_file_size_limit,
        meet_a_full_disk,
        be_refused,
        be_refused_as_another_user,
        look_beside_a_forbidden_folder,
    ]
    verb = {verb.__name__: verb for verb in verbs}[sys.argv[1]]
    began = verb(Path(sys.argv[2]), *sys.argv[3:])
    if began is not None:
        asyncio.run(began)
