"""Loading a long session, and going through one without holding it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from carrel.conversation.entries import build_compact_event
from carrel.conversation.metadata import encode_meta, new_meta
from carrel.conversation.store import SessionStore
from corpus import Writer
from measure import Line, Scale, in_turn, no_more_than, times_faster

ITERATE = """
import asyncio, resource, sys, tracemalloc
from carrel.conversation.store import SessionStore
async def main():
    store = SessionStore(sys.argv[1], embedder=None)
    async for message in store.iter_messages("warm-up"):
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.argv[3] == "traced":
        tracemalloc.start()
    count = 0
    async for message in store.iter_messages(sys.argv[2]):
        count += 1
    traced = tracemalloc.get_traced_memory()[1] if sys.argv[3] == "traced" else 0
    print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, traced)
asyncio.run(main())
"""


def write_log(folder: Path, name: str, count: int, compact: bool = False) -> Path:
    """A session of so many messages; with `compact`, all but the last few are summed up at the end."""
    writer = Writer(seed=count)
    home = folder / name
    home.mkdir(parents=True)
    lines: list[bytes] = []
    while len(lines) < count:
        lines += map(orjson.dumps, writer.session(len(lines), 60_000)[1])
    del lines[count:]
    if compact:
        event = build_compact_event("What was said so far.", provider="p", model="m", compacted_count=count)
        lines.append(orjson.dumps(event))
        lines += map(orjson.dumps, writer.session(0, 5_000)[1])
    (home / "messages.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    meta = new_meta(name, now="2026-01-01T00:00:00+00:00", title=name)
    (home / "meta.json").write_bytes(encode_meta(meta))
    return home / "messages.jsonl"


def plain_load(log: Path) -> list[dict[str, Any]]:
    """Parse every line; the newest compact replaces what was before it."""
    messages: list[dict[str, Any]] = []
    with log.open() as lines:
        for line in lines:
            entry = json.loads(line)
            if entry.get("role") == "compact":
                messages = [entry]
            else:
                messages.append(entry)
    return messages


async def measure(scale: Scale) -> list[Line]:
    count = scale(100_000)
    folder = scale.folder / "load"
    lines = []
    for name, target in (("all of it", 4), ("ending in a compact", 50)):
        id_ = name.replace(" ", "-")
        log = write_log(folder, id_, count, compact=target == 50)

        async def ours(id_: str = id_) -> None:
            async with SessionStore(folder, embedder=None) as store:
                data = await store.load_session(id_)
            assert data is not None
            assert data["messages"]

        async def plain(log: Path = log) -> None:
            assert plain_load(log)

        samples = await in_turn(5, ours=ours, plain=plain)
        how = f"{count} messages, {log.stat().st_size / 1e6:.0f} MB; plain: json.loads of every line"
        lines.append(times_faster(f"load, {name}", samples, target, unit="ms", how=how))
    return [*lines, *_memory(folder, count)]


def _memory(folder: Path, count: int) -> list[Line]:
    write_log(folder, "warm-up", 1000)
    write_log(folder, "a-tenth", count // 10)

    def peak(name: str, way: str) -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", ITERATE, str(folder), name, way], check=True, capture_output=True, text=True
        )
        messages, resident, traced = map(int, done.stdout.split())
        assert messages
        return resident * 1024, traced

    resident = [peak(name, "plain")[0] / 1e6 for name in ("a-tenth", "all-of-it")]
    traced = [peak(name, "traced")[1] / 1e6 for name in ("a-tenth", "all-of-it")]
    how = f"most memory in use at once while going through {count} messages, and through {count // 10}"
    return [
        no_more_than(
            "iter_messages, memory for ten times as many",
            traced[1] / traced[0],
            1.25,
            "times",
            how=f"{how}: {traced[1]:.1f} MB, {traced[0]:.1f} MB (tracemalloc)",
        ),
        no_more_than(
            "iter_messages, growth of the process",
            resident[1],
            max(2 * resident[0], 16.0),
            "MB",
            how=f"{how}: {resident[1]:.1f} MB, {resident[0]:.1f} MB (resident)",
        ),
    ]
