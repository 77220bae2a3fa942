"""The other process of the suite: opens the store it is told, does one thing, and speaks in lines."""

import asyncio
import json
import sys

from carrel.storage.base import MISSING, Store, process_name
from tests.storage.suite import open_store


def say(words: object) -> None:
    print(words, flush=True)


async def hear() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).rstrip("\n")


async def append(store: Store, key: str, count: str, label: str) -> None:
    """Each record alone, after a "go"; then the numbers they got."""
    say("ready")
    await hear()
    say(json.dumps([await store.append(key, [f"{label} {number}".encode()]) for number in range(int(count))]))


async def append_forever(store: Store, key: str) -> None:
    """Says each record's number as soon as it is acknowledged."""
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
    """Takes the lock, says who holds it, and lets go when told."""
    say("asking")
    lock = await store.lock(key)
    assert lock
    say(process_name())
    await hear()
    await lock.release()
    say("released")


async def watch(store: Store, key: str) -> None:
    say("watching")
    async for seq, record in store.watch(key):
        say(f"{seq} {record.hex()}")
    say("ended")


async def delete(store: Store, key: str) -> None:
    say(await store.delete(key))


async def main(address: str, verb: str, *words: str) -> None:
    store = open_store(json.loads(address))
    verbs = [append, append_forever, append_until_gone, put_new, hold, watch, delete]
    await {known.__name__: known for known in verbs}[verb](store, *words)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
