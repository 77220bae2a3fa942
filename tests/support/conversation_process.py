"""Another process that uses sessions: `python -m tests.support.conversation_process VERB ARGUMENT…`."""

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from carrel.conversation.messages import assistant_message, tool_use_block, user_text_message
from carrel.conversation.store import SessionStore
from carrel.errors import CarrelError
from carrel.storage.files.store import FileStore
from tests.support.messages import call, outline


async def append(data_dir: str, session_id: str, name: str, count: str, durability: str = "os", wait: str = "") -> int:
    """Append messages; each acknowledged sequence number is a line on stdout."""
    store = SessionStore(data_dir, durability=durability, embedder=False)  # type: ignore[arg-type]
    for number in range(int(count)):
        text = f"{name}-{number} " + "x" * (number * 37 % 3000)
        try:
            seq = await store.append_message(session_id, user_text_message(text), cwd="/")
        except CarrelError as problem:
            print(f"refused {type(problem).__name__}: {problem}", flush=True)
            return 3
        print(seq, f"{name}-{number}", flush=True)
    if wait == "in-tool":
        made = assistant_message([tool_use_block(tool_id="t1", name="slow", input={})])
        print(await store.append_message(session_id, made), "call", flush=True)
    if wait:
        await asyncio.to_thread(sys.stdin.readline)
    return 0


async def call_tool(root: str, prefix: str, call_id: str) -> int:
    """Append a tool call and wait."""
    store = SessionStore(store=FileStore(Path(root)), prefix=prefix, embedder=False)
    await store.append_message("s", call(call_id))
    print("waiting", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return 0


async def load(root: str, prefix: str) -> int:
    """Load the session and print it."""
    store = SessionStore(store=FileStore(Path(root)), prefix=prefix, embedder=False)
    data = await store.load_session("s")
    print(outline(data["messages"] if data else []))
    return 0


async def use_many(data_dir: str, sessions: str, open_files: str) -> int:
    """Use many sessions at once although few files may be open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(open_files),) * 2)
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
            await asyncio.gather(*(step(f"s{number}") for number in range(int(sessions))))
    return 0


VERBS: dict[str, Callable[..., Awaitable[int]]] = {
    function.__name__: function for function in (append, call_tool, load, use_many)
}


async def main(verb: str, *arguments: str) -> int:
    return await VERBS[verb](*arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
