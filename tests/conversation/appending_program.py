"""A program that appends to a session and says so: each acknowledged sequence number is a line on stdout.

python appending_program.py DATA_DIR SESSION_ID NAME COUNT [DURABILITY] [WAIT_FOR_STDIN]"""

import asyncio
import sys

from carrel.conversation.messages import assistant_message, tool_use_block, user_text_message
from carrel.conversation.store import SessionStore
from carrel.errors import CarrelError


async def main(data_dir: str, session_id: str, name: str, count: str, durability: str = "os", wait: str = "") -> int:
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
        call = assistant_message([tool_use_block(tool_id="t1", name="slow", input={})])
        print(await store.append_message(session_id, call), "call", flush=True)
    if wait:
        await asyncio.to_thread(sys.stdin.readline)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
