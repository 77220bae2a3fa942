"""A session in another process: a line of JSON in is code, a line out its value; the end of input ends it."""

import asyncio
import json
import sys

from carrel import FileStorage, InProcessConfig, InProcessExecutor, RedisStorage, Session


async def main(kind: str, place: str, prefix: str, wheels: str) -> None:
    storage = RedisStorage(place, prefix) if kind == "redis" else FileStorage(place)
    executor = InProcessExecutor(InProcessConfig(wheelhouse=wheels, base=storage.base))
    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    out = sys.stdout
    async with storage, Session(storage, executor) as session:
        while line := await lines.readline():
            result = await session.run(json.loads(line))
            print(json.dumps(result.error or result.value, default=list), file=out, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
