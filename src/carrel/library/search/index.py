"""Search for tools, workflows and artifacts by the meaning of their descriptions and by the words of their names."""

import asyncio
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

from carrel.embedding import EmbedderOption
from carrel.library.search.vectors import VectorIndex
from carrel.library.search.words import WordIndex, split_words
from carrel.storage.base import Store

MIN_COSINE = 0.18
"""Entries with a lower cosine are no more similar to a query than any other entry."""

VECTOR_WAIT = 1.5
"""Seconds a search waits for vectors that are being made; then it uses those that are there."""

LONGEST_QUERY = 2000
"""Characters of a query that are searched for: the work cannot be interrupted."""

_LONGEST_FIELD, _LONGEST_DESCRIPTION, _LONGEST_TEXT = 20_000, 2000, 200
_SLICE = 0.02
"""Seconds after which indexing lets other tasks run."""
_NEAREST = 100


class SearchEntry(NamedTuple):
    """Something that can be found."""

    key: str
    """Identifies the entry in a match."""
    name: str
    description: str = ""
    parameters: str = ""
    """Names and descriptions of the parameters."""
    text: str = ""
    """Further text, such as a docstring or tags."""


class SearchMatch(NamedTuple):
    """An entry that a search has found."""

    key: str
    score: float
    """Higher is better; comparable only among the matches of one search."""
    how: Literal["words", "meaning", "both"] = "words"
    """What it was found by."""


class LibrarySearch:
    """Entries of one kind, searched by meaning and by words. For one event loop at a time.

    Vectors are kept below `prefix` of the store, so that no text is embedded twice; without a store, in memory.
    Nothing is loaded or indexed before the first search."""

    def __init__(
        self, store: Store | None, prefix: str, embedder: EmbedderOption = None, *, vector_wait: float = VECTOR_WAIT
    ) -> None:
        self._vector_wait = vector_wait
        self._wanted: dict[str, SearchEntry] = {}
        self._entries: dict[str, SearchEntry] = {}
        self._unindexed: dict[str, None] = {}
        """Keys whose words are not indexed as they are now."""
        self._words = WordIndex()
        self._vectors = VectorIndex(store, prefix, embedder)

    def set_entries(self, entries: Iterable[SearchEntry]) -> None:
        """Replace the entries. The next search indexes those that changed."""
        self._wanted = {entry.key: entry for entry in entries}

    async def ready(self) -> None:
        """Wait until all entries can be found by meaning."""
        await self._index_changes()
        await self._vectors.wait()

    async def search(self, query: str, limit: int = 10) -> list[SearchMatch]:
        """Return the entries that match a query best, the best first. Any text is a valid query.

        Having all words of the query counts as much as the highest cosine, having half of them hardly anything,
        because a query in other words shares some word with some entry by chance."""
        query = query[:LONGEST_QUERY]
        await self._index_changes()
        if limit < 1 or not self._entries:
            return []
        await self._vectors.wait(self._vector_wait)
        found = await self._vectors.find(query, _NEAREST, MIN_COSINE)
        cosines = {key: cosine for key, cosine in found if key in self._entries}
        coverage = self._words.coverage(query)
        scores = {key: cosines.get(key, 0.0) + coverage.get(key, 0.0) ** 4 for key in coverage.keys() | cosines.keys()}
        best = sorted(scores, key=lambda key: (-scores[key], key))[:limit]
        return [SearchMatch(key, scores[key], _how(key in coverage, key in cosines)) for key in best]

    async def close(self) -> None:
        """Stop the work in the background; closing twice has no effect, and a later search starts it again."""
        await self._vectors.close()

    async def _index_changes(self) -> None:
        """Index the words of changed entries; other tasks run meanwhile and may set other entries."""
        while self._entries is not self._wanted:
            before, now = self._entries, self._wanted
            changed = [key for key, entry in now.items() if before.get(key) != entry]
            removed = before.keys() - now.keys()
            self._entries = now
            self._unindexed |= dict.fromkeys((*removed, *changed))
            if changed or removed:
                self._vectors.set_texts({key: text_to_embed(entry) for key, entry in now.items()})
        slice_end = time.monotonic() + _SLICE
        while self._unindexed:
            key = next(iter(self._unindexed))
            self._unindexed.pop(key, None)
            self._words.remove(key)
            if key in self._entries:
                fields = {name: text[:_LONGEST_FIELD] for name, text in self._entries[key]._asdict().items()}
                self._words.put(key, fields)
            if time.monotonic() > slice_end:
                await asyncio.sleep(0)
                slice_end = time.monotonic() + _SLICE


def _how(by_words: bool, by_meaning: bool) -> Literal["words", "meaning", "both"]:
    if by_words and by_meaning:
        return "both"
    return "words" if by_words else "meaning"


def text_to_embed(entry: SearchEntry) -> str:
    """Return the text by which an entry is found by meaning: name as words, description, some of the text."""
    more = entry.text.strip().removeprefix(entry.description.strip()).strip()[:_LONGEST_TEXT]
    about = " ".join(filter(None, (entry.description.strip()[:_LONGEST_DESCRIPTION], more)))
    name = " ".join(split_words(entry.name))
    return f"{name}: {about}" if about else name
