"""Takes a lock, reads the version of an object, and replaces that version when it is allowed to: URL."""

import asyncio
import sys

from carrel.storage.base import MISSING
from carrel.storage.redis.store import RedisStore


async def main(url: str) -> None:
    store = RedisStore(url)
    lock = await store.lock("s")
    assert lock is not None
    found = await store.stamp("o") or MISSING
    print("holds", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    stamp = await store.put("o", b"late", expect=found)
    print("written" if stamp else "refused", flush=True)
    await store.close()


asyncio.run(main(*sys.argv[1:]))
