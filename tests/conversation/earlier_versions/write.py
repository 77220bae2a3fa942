"""Write sessions with whatever carrel is on the path: `PYTHONPATH=<clone>/src python write.py FOLDER`.

This ran at the commits that README.md names; it skips what a commit does not have yet."""

import asyncio
import base64
import inspect
import sys
from itertools import count
from typing import Any

from carrel.conversation.messages import (
    assistant_message,
    build_message,
    image_block,
    text_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.store import SessionStore

PICTURE = base64.b64encode(bytes(range(256)) * 260).decode()  # 66,560 bytes: early versions put it into blobs/
minute = count()


def now() -> str:
    return f"2026-01-01T00:{next(minute):02}:00+00:00"


async def main(folder: str) -> None:
    settings: dict[str, Any] = {"embedder": None, "now": now}
    known = inspect.signature(SessionStore).parameters
    store = SessionStore(folder, **{name: value for name, value in settings.items() if name in known})
    about = {"provider": "anthropic", "model": "some-model", "cwd": "/work", "api_base": None}
    await store.create_session("New chat", session_id="talk", **about)
    await store.append_message("talk", user_text_message("List the files"))
    await store.append_message(
        "talk", assistant_message([tool_use_block(tool_id="c1", name="ls", input={"path": "."})])
    )
    long = "\n".join(f"file-{number}.txt" for number in range(4000))
    await store.append_message("talk", build_message("user", [tool_result_block(tool_use_id="c1", model_text=long)]))
    usage = {"provider": "anthropic", "model": "some-model", "usage": {"input_tokens": 12, "output_tokens": 30}}
    await store.append_message("talk", build_message("assistant", [text_block("There are 4000.")], meta=usage))
    picture = [text_block("And this?"), image_block(PICTURE, mime_type="image/png", name="chart.png")]
    await store.append_message("talk", build_message("user", picture))
    await store.append_message("talk", assistant_message([text_block("A chart.")]))
    await store.append_rewind("talk", 6)
    if hasattr(store, "label"):
        await store.label("talk", "before the summary")
        await store.set_tags("talk", ["kept"])
    if hasattr(store, "compact"):

        async def summarize(messages: object) -> str:
            return "Files were listed."

        await store.compact("talk", summarize, keep_tokens=1)
    await store.append_message("talk", user_text_message("Go on"))
    if hasattr(store, "fork_session"):
        await store.fork_session("talk", 1, new_id="branch")
        await store.append_message("branch", user_text_message("Elsewhere"))
    await store.close()


asyncio.run(main(sys.argv[1]))
