"""Appending messages with carrel and with mycode-sdk, alternately, each as its users call it.

mycode-sdk needs Python 3.12 and many packages, so it is no dependency of the benchmarks:

    uv venv -p 3.12 /tmp/mycode
    uv pip install -p /tmp/mycode mycode-sdk==0.4.2 .
    /tmp/mycode/bin/python bench/mycode_sdk.py
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mycode.session import SessionStore as MycodeStore

from carrel import SessionStore, user_text_message

ROUNDS = 7
MESSAGES = 500
FIELDS = {"provider": "p", "model": "m", "cwd": "/work", "api_base": None}


async def append(store: Any, session_id: str) -> tuple[float, float]:
    """Return the wall and the processor time of one append, in milliseconds."""
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(MESSAGES):
        await store.append_message(session_id, user_text_message(f"message {number} " + "word " * 100), **FIELDS)
    return (time.perf_counter() - began) / MESSAGES * 1000, (time.process_time() - cpu) / MESSAGES * 1000


async def main() -> None:
    times: dict[str, list[tuple[float, float]]] = {"carrel": [], "mycode-sdk": []}
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            "carrel": SessionStore(data_dir=Path(folder, "carrel")),
            "mycode-sdk": MycodeStore(data_dir=Path(folder, "mycode")),
        }
        for number in range(ROUNDS):
            for name, store in stores.items():
                times[name].append(await append(store, f"s{number}"))
        await stores["carrel"].close()
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    for name, (wall, cpu) in medians.items():
        print(f"{name:12} {wall:.3f} ms, {cpu:.3f} ms of processor time per message")
    print(
        f"mycode-sdk takes {medians['mycode-sdk'][0] / medians['carrel'][0]:.1f} times as long, "
        f"{medians['mycode-sdk'][1] / medians['carrel'][1]:.1f} times by processor time"
    )


if __name__ == "__main__":
    asyncio.run(main())
