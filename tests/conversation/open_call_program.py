"""A process that uses a session: `call` appends a tool call and waits; `load` loads the session and prints it."""

import asyncio
import sys
from pathlib import Path

from carrel.conversation.store import SessionStore
from carrel.storage.files.store import FileStore
from tests.conversation.words import call, outline


async def main(root: str, prefix: str, verb: str, call_id: str) -> None:
    store = SessionStore(store=FileStore(Path(root)), prefix=prefix, embedder=False)
    if verb == "call":
        await store.append_message("s", call(call_id))
        print("waiting", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    else:
        data = await store.load_session("s")
        print(outline(data["messages"] if data else []))


asyncio.run(main(*sys.argv[1:5]))
