"""Another process that uses a store: `python -m tests.support.store_process ADDRESS VERB ARGUMENT…`."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from carrel.storage.base import MISSING, Store, process_name
from tests.support.stores import open_store


def say(words: object) -> None:
    print(words, flush=True)


async def hear() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).rstrip("\n")


async def append(store: Store, key: str, count: str, label: str) -> None:
    """Append each record alone after a "go", then print their numbers."""
    say("ready")
    await hear()
    say(json.dumps([await store.append(key, [f"{label} {number}".encode()]) for number in range(int(count))]))


async def append_forever(store: Store, key: str) -> None:
    """Append without end; print each record's number as soon as it is acknowledged."""
    while True:
        say(await store.append(key, [b"x" * 300]))


async def append_until_gone(store: Store, key: str) -> None:
    await store.append(key, [b"first"])
    say("began")
    while True:
        try:
            await store.append(key, [b"more"], create=False)
        except KeyError:
            return say("gone")


async def put_new(store: Store, key: str, value: str) -> None:
    say("ready")
    await hear()
    say(await store.put(key, value.encode(), expect=MISSING) is not None)


async def hold(store: Store, key: str) -> None:
    """Take the lock, print its owner, and release it after a "go"."""
    say("asking")
    lock = await store.lock(key)
    assert lock
    say(process_name())
    await hear()
    await lock.release()
    say("released")


async def replace_locked(store: Store) -> None:
    """Take a lock, read the version of an object, and replace that version after a "go"."""
    assert await store.lock("s")
    found = await store.stamp("o") or MISSING
    say("holds")
    await hear()
    say("written" if await store.put("o", b"late", expect=found) else "refused")


async def watch(store: Store, key: str) -> None:
    say("watching")
    async for seq, record in store.watch(key):
        say(f"{seq} {record.hex()}")
    say("ended")


async def delete(store: Store, key: str) -> None:
    say(await store.delete(key))


async def main(address: str, verb: str, *words: str) -> None:
    store = open_store(json.loads(address))
    verbs: list[Callable[..., Awaitable[None]]] = [
        append,
        append_forever,
        append_until_gone,
        put_new,
        hold,
        replace_locked,
        watch,
        delete,
    ]
    await {known.__name__: known for known in verbs}[verb](store, *words)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
