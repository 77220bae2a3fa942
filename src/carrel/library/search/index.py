"""Finds tools, workflows and artifacts by what they are called, what they say of themselves, and what they mean."""

import asyncio
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

from carrel.library.search.blending import Hit, blended
from carrel.library.search.meanings import Meanings
from carrel.library.search.word_index import WordIndex
from carrel.library.search.words import spelled
from carrel.meaning import Embedder
from carrel.storage.base import Store

LEAST_NEARNESS = 0.18
"""Below this cosine, an entry has no more to do with a question than any other."""

PATIENCE = 1.5
"""Seconds a search waits for vectors that are being loaded or made; then it goes by those that are there."""

LONGEST_QUERY = 2000
"""Characters of a question that are looked for: its work is done in one piece, and nobody can stop it."""

_LONGEST_FIELD, _LONGEST_MEANING = 20_000, 2000
_TURN = 0.02
"""Seconds after which indexing lets others go on."""
_NEAREST = 100
_TEXT = 200


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


class Index:
    """Entries of one kind, searched by words and by meaning. For one event loop at a time.

    `store` and `place`: the prefix under which vectors are kept, so that no text is embedded twice; None keeps them in
    memory. `embedder=None` searches by words alone. Nothing is loaded or indexed before the first search."""

    def __init__(
        self,
        store: Store | None,
        place: str,
        embedder: Embedder | Literal["default"] | None = "default",
        *,
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        self._given: dict[str, Entry] = {}
        self._entries: dict[str, Entry] = {}
        self._missing: dict[str, None] = {}
        """Keys whose words are not indexed as they are now."""
        self._words = WordIndex()
        self._meanings = Meanings(store, place, embedder)

    def update(self, entries: Iterable[Entry]) -> None:
        """From now on these are the entries. Only notes them: the work is done by the next search, for what changed."""
        self._given = {entry.key: entry for entry in entries}

    async def ready(self) -> None:
        """Wait until everything can be found by its meaning too, however long that takes."""
        await self._take()
        await self._meanings.settle()

    async def search(self, query: str, limit: int = 10) -> list[Hit]:
        """The entries that answer best, the best first; none when nothing has to do with it.

        Any text is a question, and none is an error; what it says beyond 2,000 characters is not looked for."""
        query = query[:LONGEST_QUERY]
        await self._take()
        if limit < 1 or not self._entries:
            return []
        await self._meanings.settle(self._patience)
        near = await self._meanings.ask(query, _NEAREST, LEAST_NEARNESS)
        here = {key: nearness for key, nearness in near if key in self._entries}
        return blended(self._words.shares(query), here, limit)

    async def close(self) -> None:
        """Stop what is going on in the background; twice is harmless, and it is usable again."""
        await self._meanings.close()

    async def _take(self) -> None:
        """Index what changed; thousands take a while, in which others go on, and may give other entries."""
        while self._entries is not self._given:
            before, now = self._entries, self._given
            changed = [key for key, entry in now.items() if before.get(key) != entry]
            gone = before.keys() - now.keys()
            self._entries = now
            self._missing |= dict.fromkeys((*gone, *changed))
            if changed or gone:
                self._meanings.want({key: meaning_of(entry) for key, entry in now.items()})
        until = time.monotonic() + _TURN
        while self._missing:
            key = next(iter(self._missing))
            self._missing.pop(key, None)
            self._words.remove(key)
            if key in self._entries:
                fields = {name: text[:_LONGEST_FIELD] for name, text in self._entries[key]._asdict().items()}
                self._words.put(key, fields)
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + _TURN


def meaning_of(entry: Entry) -> str:
    """The text by which an entry is found by meaning: its name as words, what it says of itself, and a little more."""
    more = entry.text.strip().removeprefix(entry.description.strip()).strip()[:_TEXT]
    said = " ".join(filter(None, (entry.description.strip()[:_LONGEST_MEANING], more)))
    name = " ".join(spelled(entry.name))
    return f"{name}: {said}" if said else name
