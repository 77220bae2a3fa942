"""Finds tools, workflows and artifacts by what they are called, what they say of themselves, and what they mean."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from carrel.library.search.word_index import WordIndex, best
from carrel.meaning import Embedder
from carrel.storage.seam import Store


class Entry(NamedTuple):
    """Something that can be found."""

    key: str
    """What a hit gives back; one entry per key."""
    name: str
    description: str = ""
    parameters: str = ""
    """Names of the parameters, and what is said of them."""
    text: str = ""
    """Whatever else tells what it is for: a docstring, tags."""


class Hit(NamedTuple):
    """An entry that answers a search."""

    key: str
    score: float
    """The higher the better; only good for comparing the hits of one search."""


class Index:
    """Entries of one kind, searched by words and by meaning.

    `store` and `place`: the prefix under which vectors are kept, so that no text is embedded twice; None keeps
    them in memory. `embedder=None` searches by words alone."""

    def __init__(
        self, store: Store | None, place: str, embedder: Embedder | Literal["default"] | None = "default"
    ) -> None:
        self._store = store
        self._place = place
        self._embedder = embedder
        self._given: dict[str, Entry] = {}
        self._entries: dict[str, Entry] = {}
        self._words = WordIndex()

    def update(self, entries: Iterable[Entry]) -> None:
        """From now on these are the entries. Only notes them: the work is done by the next search."""
        self._given = {entry.key: entry for entry in entries}

    async def ready(self) -> None:
        """Wait until everything can be found by its meaning too."""
        self._take()

    async def search(self, query: str, limit: int = 10) -> list[Hit]:
        """The entries that answer best, the best first; none when nothing has to do with it."""
        self._take()
        scores = self._words.scores(query)
        return [Hit(key, scores[key]) for key in best(scores, limit)]

    async def close(self) -> None:
        """Stop what is going on in the background; twice is harmless, and it is usable again."""

    def _take(self) -> None:
        if self._entries is self._given:
            return
        for key in self._entries.keys() - self._given.keys():
            self._words.remove(key)
        for key, entry in self._given.items():
            if self._entries.get(key) != entry:
                self._words.put(key, entry._asdict())
        self._entries = self._given
