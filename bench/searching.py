"""Searching a gigabyte in ten thousand sessions."""

import statistics
import time
from pathlib import Path

from carrel.conversation.store import SessionStore
from corpus import write_sessions
from measure import Line, Scale, no_more_than

QUERIES = (
    "atlas billing",
    "the",
    "self return",
    '"the method"',
    "why does the login fail after the deployment",
    "the upload of borealis is slow",
    "NotImplementedError subclass",
    "数据库连接池",
    "how are errors propagated between coroutines",
    "roll back the last mig",
    "zzyzx",
    "e",
)
REPEATS = 7


async def measure(scale: Scale) -> list[Line]:
    folder = scale.folder / "search"
    count = scale(10_000)
    size = write_sessions(folder, count=count, total_bytes=scale(1_000_000_000))
    async with SessionStore(folder) as store:
        start = time.perf_counter()
        await store.search("anything")
        indexing = time.perf_counter() - start
        taken = {query: await _taken(store, query) for query in QUERIES}
        plain = _read_through(folder, b"zzyzx")
        await store.append_message("another", {"role": "user", "content": [{"type": "text", "text": "one more word"}]})
        after_append = await _once(store, "one more word")
    index_size = sum(file.stat().st_size for file in folder.glob(".catalogue*"))
    medians = {query: statistics.median(samples) for query, samples in taken.items()}
    slowest = max(medians, key=lambda query: medians[query])
    of = f"{count} sessions, {size / 1e6:.0f} MB"
    return [
        Line(
            "search, indexing",
            size / 1e6 / indexing,
            None,
            "MB/s",
            "≥ 15 MB/s",
            size / 1e6 / indexing >= 15,
            how=f"{of}, in {indexing:.1f} s; the index has {index_size / 1e6:.0f} MB",
        ),
        Line(
            "search, median of all queries",
            1e3 * statistics.median(medians.values()),
            1e3 * plain,
            "ms",
            "≤ 150 ms",
            statistics.median(medians.values()) <= 0.15,
            plain / statistics.median(medians.values()),
            repeats=REPEATS,
            how=f"{of}; plain: read every log and look for the bytes",
            samples=taken,
        ),
        no_more_than(
            "search, the slowest query", 1e3 * medians[slowest], 150, "ms", repeats=REPEATS, how=f"{slowest!r}, {of}"
        ),
        no_more_than("search, right after an append", 1e3 * after_append, 150, "ms", how=of),
    ]


async def _once(store: SessionStore, query: str) -> float:
    start = time.perf_counter()
    await store.search(query)
    return time.perf_counter() - start


async def _taken(store: SessionStore, query: str) -> list[float]:
    await store.search(query)
    return [await _once(store, query) for _ in range(REPEATS)]


def _read_through(folder: Path, wanted: bytes) -> float:
    start = time.perf_counter()
    for home in folder.iterdir():
        if home.is_dir() and wanted in (home / "messages.jsonl").read_bytes().lower():
            raise AssertionError("that word is not there")
    return time.perf_counter() - start
