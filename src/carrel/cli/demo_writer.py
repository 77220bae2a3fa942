"""The process that `carrel demo` kills: writes a conversation, says what was acknowledged, and dies in mid-append.

`python -m carrel.cli.demo_writer FOLDER` prints `ready`, then a line `ID SEQ` for each message once the store has it.
"""

import asyncio
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from carrel.cli.demo_story import CUT_SHORT, MODEL, OTHERS, PROVIDER, STORY, STORY_ID
from carrel.conversation.log_entries import encode
from carrel.conversation.messages import ConversationMessage
from carrel.conversation.store import SessionStore
from carrel.errors import CarrelError


def dated(message: ConversationMessage) -> ConversationMessage:
    return {**message, "meta": {**message.get("meta", {}), "created_at": datetime.now(UTC).isoformat()}}


async def write(folder: Path) -> None:
    store = SessionStore(folder)
    print("ready", flush=True)
    for session_id, messages in {**OTHERS, STORY_ID: STORY}.items():
        for message in messages:
            seq = await store.append_message(
                session_id, dated(message), provider=PROVIDER, model=MODEL, cwd="/home/ada/nightly-reports"
            )
            print(session_id, seq, flush=True)
    die_while_writing(store.messages_path(STORY_ID))


def die_while_writing(path: Path) -> None:
    """Half a line reaches the file; the rest of the write never comes."""
    line = encode(dated(CUT_SHORT))
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(log, line[: len(line) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    try:
        asyncio.run(write(Path(sys.argv[1])))
    except CarrelError as problem:
        sys.exit(f"error: {problem}")
