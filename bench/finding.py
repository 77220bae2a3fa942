"""Finding the right one of 2,000 entries: how often, how fast, how soon after a cold start, with how much memory."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from carrel.library.search import LibrarySearch, SearchEntry
from carrel.storage.files.store import FileStore
from measure import Line, Scale, no_more_than

DATA = Path(__file__).parent / "data" / "finding"
KINDS = ("words", "other", "oblique")
REPEATS = 5

FIRST, AMONG_FIVE = 70, 85
"""Right one first, and among five, in percent of the questions in the same and in other words."""


class Question(NamedTuple):
    kind: str
    key: str
    text: str


def entries() -> list[SearchEntry]:
    lines = [line for file in sorted(DATA.glob("*.txt")) if "queries" not in file.name for line in _lines(file)]
    named = [line.split(": ", 1) for line in lines]
    return [SearchEntry(name, name, description) for name, description in named]


def questions(half: str) -> list[Question]:
    """Of `dev`, which may be tuned on, or `held-out`, which is only measured."""
    return [Question(*(part.strip() for part in line.split("|"))) for line in _lines(DATA / f"queries-{half}.txt")]


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith("#")]


class Quality(NamedTuple):
    """Shares in percent."""

    first: float
    among_five: float


async def quality(index: LibrarySearch, questions: list[Question]) -> dict[str, Quality]:
    """For each kind of question, and for `all`: those in the same and in other words together."""
    ranks: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for question in questions:
        found = [hit.key for hit in await index.search(question.text, 5)]
        ranks[question.kind].append(found.index(question.key) if question.key in found else 9)
    ranks["all"] = ranks["words"] + ranks["other"]
    return {kind: Quality(_percent(of, 1), _percent(of, 5)) for kind, of in ranks.items()}


def _percent(ranks: list[int], within: int) -> float:
    return 100 * sum(rank < within for rank in ranks) / len(ranks)


async def measure(scale: Scale) -> list[Line]:
    folder = scale.folder / "finding"
    index = LibrarySearch(FileStore(folder), "search/workflows")
    index.set_entries(entries())
    start = time.perf_counter()
    await index.ready()
    embedding = time.perf_counter() - start
    found = await quality(index, questions("held-out"))
    tuned = await quality(index, questions("dev"))
    texts = [question.text for question in questions("held-out")]
    fresh, fresh_cpu = zip(*[await _once(index, f"{text} now") for text in texts], strict=True)
    again, again_cpu = zip(*[await _once(index, f"{text} now") for text in texts], strict=True)
    await index.close()
    colds = [await asyncio.to_thread(_cold_start, folder) for _ in range(REPEATS)]
    what = "finding with the packaged word vectors"
    return [
        _at_least(f"{what}, right one first", found["all"].first, FIRST, found, tuned),
        _at_least(f"{what}, among five", found["all"].among_five, AMONG_FIVE, found, tuned),
        no_more_than(
            f"{what}, a search",
            1e3 * statistics.median(fresh),
            5,
            "ms",
            how=f"2,000 entries, a new question; {1e3 * statistics.median(fresh_cpu):.1f} ms of the processor",
        ),
        no_more_than(
            f"{what}, the same again",
            1e3 * statistics.median(again),
            5,
            "ms",
            how=f"its vector is remembered; {1e3 * statistics.median(again_cpu):.1f} ms of the processor",
        ),
        no_more_than(
            f"{what}, ready after a cold start",
            statistics.median(cold["ready"] for cold in colds),
            1.5,
            "s",
            repeats=REPEATS,
            how=f"a new process, vectors kept in the store; making them took {embedding:.1f} s",
        ),
        no_more_than(
            f"{what}, memory added",
            max(cold["memory"] for cold in colds),
            150,
            "MB",
            how="of that process, numpy and the model included, "
            f"{statistics.median(cold['shared'] for cold in colds):.0f} MB of it files that processes share",
        ),
    ]


def _at_least(what: str, share: float, least: float, held: dict[str, Quality], tuned: dict[str, Quality]) -> Line:
    parts = "; ".join(f"{kind} {of.first:.0f} / {of.among_five:.0f}" for kind, of in held.items())
    how = f"held out, first / five: {parts}; tuned on: {tuned['all'].first:.0f} / {tuned['all'].among_five:.0f}"
    return Line(what, share, None, "%", f"≥ {least:g} %", share >= least, how=how)


async def _once(index: LibrarySearch, text: str) -> tuple[float, float]:
    """Seconds that go by, and seconds of the processor, which a busy machine changes less."""
    start, start_cpu = time.perf_counter(), time.process_time()
    await index.search(text)
    return time.perf_counter() - start, time.process_time() - start_cpu


def _cold_start(folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


async def _cold(folder: Path) -> dict[str, float]:
    listed = entries()
    before = _memory()
    start = time.perf_counter()
    index = LibrarySearch(FileStore(folder), "search/workflows")
    index.set_entries(listed)
    await index.ready()
    hits = await index.search("make pictures smaller")
    taken = time.perf_counter() - start
    after = _memory()
    await index.close()
    if not hits:
        raise AssertionError("nothing was found")
    return {
        "ready": taken,
        "memory": after["VmRSS"] - before["VmRSS"],
        "shared": after["RssFile"] - before["RssFile"],
    }


def _memory() -> dict[str, float]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) / 1000 for words in lines if words[0] in ("VmRSS:", "RssFile:")}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_cold(Path(sys.argv[1])))))
