"""Appending: one message after another, and many sessions at once with every append on the disk."""

import asyncio
import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from carrel.conversation.messages import user_text_message
from carrel.conversation.store import SessionStore
from measure import Line, Scale, in_turn, times_faster

APPENDERS = 32
SLOWER = 0.002
ROUNDS = 9


def message(number: int) -> dict[str, Any]:
    return user_text_message(f"message {number}: " + "please look at the parser and tell me what you think of it. " * 5)


def plain_append(folder: Path, message: dict[str, Any], meta: dict[str, Any]) -> None:
    with (folder / "messages.jsonl").open("a") as log:
        log.write(json.dumps(message) + "\n")
    meta["message_count"] += 1
    with (folder / "meta.json").open("w") as file:
        json.dump(meta, file, indent=2)


async def measure(scale: Scale) -> list[Line]:
    lines = [await _one_after_another(scale), await _on_the_disk(scale, "fsync", 5)]
    with _slower_disk():
        lines.append(await _on_the_disk(scale, "fsync, and 2 ms more for each sync", 10))
    return lines


@contextlib.contextmanager
def _slower_disk() -> Iterator[None]:
    """A disk that waits until it has the bytes, as those in laptops and clouds do: here it is pretended."""
    sync = os.fdatasync

    def slower(fd: int) -> None:
        time.sleep(SLOWER)
        sync(fd)

    with mock.patch.object(os, "fdatasync", slower):
        yield


async def _one_after_another(scale: Scale) -> Line:
    count = scale(2000)
    messages = [message(number) for number in range(count)]
    plain = scale.folder / "plain-append"
    plain.mkdir()
    meta = {"id": "a", "title": "New chat", "cwd": "/", "created_at": "2026-01-01", "message_count": 0}
    async with SessionStore(scale.folder / "append", embedder=False) as store:

        async def ours() -> None:
            for message in messages:
                await store.append_message("a", message)

        async def plainly() -> None:
            for message in messages:
                plain_append(plain, message, meta)

        samples = await in_turn(7, ours=ours, plain=plainly)
    how = f"{count} messages, one after another; plain: open, json.dumps, append, close, rewrite meta.json"
    return times_faster("append, durability os", samples, 10, unit="µs", per=count, how=how)


async def _on_the_disk(scale: Scale, kind: str, target: int) -> Line:
    """Rates, not times: how many appends a second 32 appenders reach together, against one alone."""
    alone, each = scale(400), max(4, scale(200))
    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    # What was written before and waits for the disk would be paid for here.
    os.sync()
    async with SessionStore(scale.folder / kind, "fsync", embedder=False) as store:
        for number in range(APPENDERS + 1):
            await store.append_message(f"s{number}", message(0))

        async def appender(name: str, count: int) -> None:
            for number in range(count):
                await store.append_message(name, message(number))

        for _ in range(ROUNDS):
            start = time.perf_counter()
            await appender(f"s{APPENDERS}", alone)
            rates["plain"].append(alone / (time.perf_counter() - start))
            start = time.perf_counter()
            await asyncio.gather(*(appender(f"s{number}", each) for number in range(APPENDERS)))
            rates["ours"].append(APPENDERS * each / (time.perf_counter() - start))
    together, one = statistics.median(rates["ours"]), statistics.median(rates["plain"])
    bare = statistics.median(_bare_threads(scale, alone, each) for _ in range(5))
    how = (
        f"{APPENDERS} appenders to {APPENDERS} sessions, against one alone; appends a second. What the disk gives: "
        f"{APPENDERS} bare threads that only write and sync reach {bare:.1f} times what one of them does"
    )
    return Line(
        f"append, durability {kind}, 32 at once",
        together,
        one,
        "/s",
        f"≥ {target} times",
        together >= target * one,
        together / one,
        repeats=ROUNDS,
        how=how,
        samples=rates,
    )


def _bare_threads(scale: Scale, alone: int, each: int) -> float:
    """How many times as many lines 32 threads write and sync as one thread does, each to a file of its own."""
    line = json.dumps(message(0)).encode() + b"\n"

    def write(number: int, count: int) -> None:
        with (scale.folder / f"bare-{number}").open("ab", buffering=0) as file:
            for _ in range(count):
                file.write(line)
                os.fdatasync(file.fileno())

    start = time.perf_counter()
    write(APPENDERS, alone)
    one = alone / (time.perf_counter() - start)
    threads = [threading.Thread(target=write, args=(number, each)) for number in range(APPENDERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return APPENDERS * each / (time.perf_counter() - start) / one
