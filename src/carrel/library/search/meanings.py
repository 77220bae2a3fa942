"""The vectors of the entries: read from the store, made where they are missing, and kept; all in the background."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from carrel.errors import StorageError
from carrel.library.search.vectors import Nearness, VectorTable, digest
from carrel.meaning import Embedder, MiniLMEmbedder, MPNetEmbedder, StaticEmbedder, default_embedder
from carrel.storage.base import Store

logger = logging.getLogger(__name__)

_AT_ONCE = 32
_STEP = 256
"""So many new vectors are made before they can be searched and are kept; a large library is found bit by bit."""
_QUESTIONS = 256
_FAILED = "searching %s by words alone: the embedder failed (%s)"


class Meanings:
    """Finds texts by what they mean. Nothing is loaded before it is first asked.

    An embedder that fails costs the meaning and not the search: it is said in the log, once."""

    def __init__(self, store: Store | None, place: str, embedder: Embedder | Literal["default"] | None) -> None:
        self._store = store
        self._place = place
        self._embedder = embedder
        self._wanted: Mapping[str, str] = {}
        self._done: Mapping[str, str] | None = None
        self._digests: dict[str, bytes] = {}
        self._table: VectorTable | None = None
        self._nearness: Nearness | None = None
        self._task: asyncio.Task[None] | None = None
        self._questions: OrderedDict[str, Any] = OrderedDict()

    @property
    def up_to_date(self) -> bool:
        return self._embedder is None or self._done is self._wanted

    def want(self, texts: Mapping[str, str]) -> None:
        """From now on these are the texts, by key."""
        self._wanted = texts

    async def settle(self, patience: float | None = None) -> None:
        """Wait until all texts have their vectors, at most so many seconds; the work goes on afterwards."""
        while not self.up_to_date:
            task = self._task
            if task is None or task.done() or task.get_loop().is_closed():
                task = self._task = asyncio.create_task(self._catch_up(), name=f"vectors of {self._place}")
            elif task.get_loop() is not asyncio.get_running_loop():
                return  # another thread's loop is at it; what is there so far must do
            done, _ = await asyncio.wait({task}, timeout=patience)
            if not done or patience is not None or task.cancelled():
                return

    async def close(self) -> None:
        """Stop working; twice is harmless, and it begins again when asked."""
        task, self._task = self._task, None
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait({task})

    async def ask(self, question: str, count: int, least: float) -> list[tuple[str, float]]:
        """The texts that are nearest to it among those that have a vector by now, the nearest first."""
        nearness, embedder = self._nearness, self._embedder
        if nearness is None or embedder is None or isinstance(embedder, str) or not question.strip():
            return []
        vector = self._questions.get(question)
        if vector is None:
            try:
                vector = (await asyncio.to_thread(embedder.embed, [_as_asked(question, embedder)]))[0]
            except Exception as problem:
                logger.warning(_FAILED, self._place, problem, exc_info=True)
                self._embedder = self._nearness = None
                return []
            self._questions[question] = vector
            while len(self._questions) > _QUESTIONS:
                self._questions.popitem(last=False)
        return nearness.ask(vector, count, least)

    async def _catch_up(self) -> None:
        try:
            if self._embedder == "default":
                self._embedder = await asyncio.to_thread(default_embedder)
            if self._embedder is None or isinstance(self._embedder, str):
                return
            if self._table is None:
                self._table = await self._kept(self._embedder)
            while not self.up_to_date:
                await self._make(self._wanted, self._embedder, self._table)
        except Exception as problem:
            logger.warning(_FAILED, self._place, problem, exc_info=True)
            self._embedder = self._nearness = None

    async def _make(self, wanted: Mapping[str, str], embedder: Embedder, table: VectorTable) -> None:
        self._digests = {text: self._digests.get(text) or digest(text) for text in wanted.values()}
        missing = [text for text, key in self._digests.items() if key not in table]
        for start in range(0, len(missing), _AT_ONCE):
            texts = missing[start : start + _AT_ONCE]
            vectors = await asyncio.to_thread(embedder.embed, texts)
            table.add([self._digests[text] for text in texts], vectors)
            if self._wanted is not wanted:
                return
            if (start // _AT_ONCE + 1) * _AT_ONCE % _STEP == 0:
                await self._show(wanted, embedder, table)
                await self._keep(embedder, table)
        await self._show(wanted, embedder, table)
        self._done = wanted
        if missing:
            await self._keep(embedder, table)

    async def _show(self, wanted: Mapping[str, str], embedder: Embedder, table: VectorTable) -> None:
        """Let what has a vector be found."""
        here = [(key, self._digests[text]) for key, text in wanted.items() if self._digests[text] in table]
        vectors = table.unit_vectors([found for _, found in here])
        # Averages of words are all a little alike; a model that was trained to tell sentences apart has seen to that.
        averages = isinstance(embedder, StaticEmbedder)
        self._nearness = await asyncio.to_thread(Nearness, [key for key, _ in here], vectors, leave_common=averages)

    # --- between sessions -------------------------------------------------------------------------------------------

    async def _kept(self, embedder: Embedder) -> VectorTable:
        table = await asyncio.to_thread(VectorTable, embedder.dimensions)
        await self._absorb(embedder, table)
        return table

    async def _absorb(self, embedder: Embedder, table: VectorTable) -> None:
        if self._store is None:
            return
        try:
            data = await self._store.get(self._key(embedder))
        except StorageError as problem:
            logger.warning("the vectors of %s cannot be read and are made again: %s", self._place, problem)
            return
        if data is not None and not table.absorb(data):
            logger.warning("the vectors of %s are damaged and are made again", self._place)

    async def _keep(self, embedder: Embedder, table: VectorTable) -> None:
        if self._store is None:
            return
        # Whoever shares this store may have made others meanwhile. Of two who write at once, one makes his again.
        await self._absorb(embedder, table)
        smaller = table.without_old(self._digests.values())
        try:
            await self._store.put(self._key(embedder), await asyncio.to_thread(smaller.encoded))
        except StorageError as problem:
            logger.warning("the vectors of %s could not be kept: %s", self._place, problem)

    def _key(self, embedder: Embedder) -> str:
        return f"{self._place}/{embedder.name}"


def _as_asked(question: str, embedder: Embedder) -> str:
    """Both learned from questions and their answers, and understand "trim a photo" better as a question."""
    return f"how to {question}" if isinstance(embedder, MiniLMEmbedder | MPNetEmbedder) else question
