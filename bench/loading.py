"""Loading a long session, and going through one without holding it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from carrel.conversation.store import SessionStore
from corpus import Writer
from measure import Line, Scale, in_turn, no_more_than, times_faster

ITERATE = """
import asyncio, resource, sys, tracemalloc
from carrel.conversation.store import SessionStore
async def main():
    store = SessionStore(sys.argv[1], embedder=False)
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


def spoken(count: int) -> list[dict[str, Any]]:
    """People talking: short texts, no tools."""
    writer = Writer(seed=count)
    messages = []
    for number in range(count):
        text = [{"type": "text", "text": f"{number}: {writer.prose(2)}"}]
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return messages


def worked(count: int) -> list[dict[str, Any]]:
    """An agent at work: most of it is what tools took and gave."""
    writer = Writer(seed=count)
    messages: list[dict[str, Any]] = []
    while len(messages) < count:
        messages += writer.session(len(messages), 60_000)[1]
    # Not in the middle of a tool call, which loading would have to mend.
    while messages[count - 1]["role"] != "assistant" or "tool_use" in str(messages[count - 1]["content"]):
        count -= 1
    return messages[:count]


async def write_log(folder: Path, name: str, messages: list[dict[str, Any]], *, compact: bool = False) -> Path:
    """A session of these messages; with `compact`, all but the last turns are summed up at the end."""

    async def summarize(messages: list[dict[str, Any]]) -> str:
        return "What was said so far."

    async with SessionStore(folder, embedder=False) as store:
        for start in range(0, len(messages), 1000):
            await store.append_many(name, messages[start : start + 1000])
        if compact:
            await store.compact(name, summarize, keep_turns=3)
        return store.messages_path(name)


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
    logs = {
        "load, people talking": (await write_log(folder, "talk", spoken(count)), 2.5),
        "load, an agent at work": (await write_log(folder, "work", worked(count)), 2),
        "load, ending in a compact": (await write_log(folder, "compact", worked(count), compact=True), 50),
    }
    lines = []
    for what, (log, target) in logs.items():

        async def ours(id_: str = log.parent.name) -> object:
            async with SessionStore(folder, embedder=False) as store:
                data = await store.load_session(id_)
            assert data is not None
            assert data["messages"]
            return data

        async def plain(log: Path = log) -> object:
            messages = plain_load(log)
            assert messages
            return messages

        samples = await in_turn(5, ours=ours, plain=plain)
        how = f"{count} messages, {log.stat().st_size / 1e6:.0f} MB; plain: json.loads of every line"
        lines.append(times_faster(what, samples, target, unit="ms", how=how))
    await write_log(folder, "warm-up", worked(1000))
    await write_log(folder, "tenth", worked(count // 10))
    return [*lines, *_memory(folder, count)]


def _memory(folder: Path, count: int) -> list[Line]:
    def peak(name: str, way: str) -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", ITERATE, str(folder), name, way], check=True, capture_output=True, text=True
        )
        messages, resident, traced = map(int, done.stdout.split())
        assert messages
        return resident * 1024, traced

    resident = [peak(name, "plain")[0] / 1e6 for name in ("tenth", "work")]
    traced = [peak(name, "traced")[1] / 1e6 for name in ("tenth", "work")]
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
