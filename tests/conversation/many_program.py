"""Many sessions at once in a process that may have few files open: python many_program.py DATA_DIR SESSIONS FILES"""

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from carrel.conversation.messages import user_text_message
from carrel.conversation.store import SessionStore


async def main(data_dir: str, sessions: int) -> None:
    async with SessionStore(data_dir, embedder=False) as store:
        steps: list[Callable[[str], Awaitable[Any]]] = [
            lambda id_: store.create_session(session_id=id_),
            lambda id_: store.append_message(id_, user_text_message("hello")),
            lambda id_: store.rename(id_, "Named"),
            lambda id_: store.label(id_, "here"),
            lambda id_: store.fork_session(id_, new_id=f"{id_}-fork"),
            store.load_session,
            store.archive,
            store.delete_session,
        ]
        for step in steps:
            await asyncio.gather(*(step(f"s{number}") for number in range(sessions)))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]),) * 2)
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
