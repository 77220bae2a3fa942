"""Takes a lock, says so, and writes under it when it is told to: URL."""

import asyncio
import sys

from carrel.errors import StorageError
from carrel.storage.redis_store import RedisStore


async def main(url: str) -> None:
    store = RedisStore(url)
    lock = await store.lock("s")
    assert lock is not None
    print("holds", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        await store.put("o", b"late", held=[lock])
        print("written", flush=True)
    except StorageError as problem:
        print(type(problem).__name__, flush=True)
    await store.close()


asyncio.run(main(*sys.argv[1:]))
