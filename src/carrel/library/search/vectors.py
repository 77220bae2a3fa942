"""The vectors of entries: made in the background, kept in the store, and compared with the vector of a query."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from carrel.embedding import Embedder, EmbedderOption, NearestVectors, WordVectors, choose_embedder, pack_vectors
from carrel.errors import StorageError
from carrel.storage.base import Store

logger = logging.getLogger(__name__)

FORMAT = b"carrel vectors 1\n"
_DIGEST = 16
_SPARE = 1000
"""Vectors of old texts that the cache may hold before they are removed."""
_BATCH = 32
_STEP = 256
"""So many new vectors are made before they are searched and stored, so a large library becomes searchable in steps."""
_FAILED = "searching %s by words only: the embedder failed (%s)"


def digest(text: str) -> bytes:
    """Return the key of a text in the cache."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


class VectorCache:
    """Vectors of one embedder by the digest of their text, a byte per dimension: only the direction is kept."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._rows: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __getitem__(self, key: bytes) -> bytes:
        return self._rows[key]

    def add(self, keys: Sequence[bytes], vectors: Iterable[Iterable[float]]) -> None:
        """Add new vectors; those that are there stay as they are."""
        for key, vector in zip(keys, pack_vectors(vectors, self._dimensions), strict=True):
            self._rows.setdefault(key, vector)

    def encode(self) -> bytes:
        """Encode as one object: the format, number and length of the vectors, all digests, all vectors."""
        sizes = f"{len(self._rows)} {self._dimensions}\n".encode()
        return b"".join([FORMAT, sizes, *self._rows.keys(), *self._rows.values()])

    def absorb(self, data: bytes) -> bool:
        """Add the vectors of an encoded cache; return False and add none when it is damaged or of another length."""
        if not data.startswith(FORMAT):
            return False
        sizes = data[len(FORMAT) : len(FORMAT) + 40].split(b"\n", 1)[0]
        try:
            count, dimensions = map(int, sizes.split())
        except ValueError:
            return False
        start = len(FORMAT) + len(sizes) + 1
        middle = start + count * _DIGEST
        if count < 0 or dimensions != self._dimensions or len(data) != middle + count * dimensions:
            return False
        for number in range(count):
            key = data[start + number * _DIGEST : start + (number + 1) * _DIGEST]
            self._rows.setdefault(key, data[middle + number * dimensions : middle + (number + 1) * dimensions])
        return True

    def without_old(self, wanted: Iterable[bytes]) -> "VectorCache":
        """Return this cache, or one of the wanted vectors only if most of the others are of old texts."""
        kept = [key for key in dict.fromkeys(wanted) if key in self._rows]
        if len(self) <= 2 * len(kept) + _SPARE:
            return self
        smaller = VectorCache(self._dimensions)
        smaller._rows = {key: self._rows[key] for key in kept}
        return smaller


class VectorIndex:
    """Finds texts by meaning. Loads nothing before the first query.

    An embedder that fails switches search by meaning off for this index, with one warning in the log."""

    def __init__(self, store: Store | None, prefix: str, embedder: EmbedderOption) -> None:
        self._store = store
        self._prefix = prefix
        self._embedder: Embedder | None = choose_embedder(embedder)
        self._wanted: Mapping[str, str] = {}
        self._done: Mapping[str, str] | None = None
        self._digests: dict[str, bytes] = {}
        self._cache: VectorCache | None = None
        self._nearest: NearestVectors[str] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether all texts have vectors, or none will get one."""
        return self._embedder is None or self._done is self._wanted

    def set_texts(self, texts: Mapping[str, str]) -> None:
        """Replace the texts, by key."""
        self._wanted = texts

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until all texts have vectors, at most so many seconds; the work continues in the background."""
        while not self.is_current:
            task = self._task
            if task is None or task.done() or task.get_loop().is_closed():
                task = self._task = asyncio.create_task(self._update(), name=f"vectors of {self._prefix}")
            elif task.get_loop() is not asyncio.get_running_loop():
                return  # another thread's loop does the work; use what is there so far
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done or seconds is not None or task.cancelled():
                return

    async def close(self) -> None:
        """Stop the work in the background; closing twice has no effect, and a later query starts it again."""
        task, self._task = self._task, None
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait({task})

    async def find(self, query: str, count: int, min_cosine: float) -> list[tuple[str, float]]:
        """Return the keys of the nearest texts that have vectors so far, the nearest first, with their cosines."""
        nearest, embedder = self._nearest, self._embedder
        if nearest is None or embedder is None or not query.strip():
            return []
        try:
            vector = list(map(float, next(iter(await asyncio.to_thread(embedder.embed, [query])))))
        except Exception as error:  # noqa: BLE001 -- whatever an embedder raises is logged, and search by words goes on
            self._switch_off(error)
            return []
        return nearest.find(vector, count, min_cosine)

    def _switch_off(self, error: Exception) -> None:
        logger.warning(_FAILED, self._prefix, error, exc_info=True)
        self._embedder = self._nearest = None

    async def _update(self) -> None:
        try:
            while not self.is_current and self._embedder is not None:
                if self._cache is None:
                    self._cache = VectorCache(self._embedder.dimensions)
                    await self._read_stored(self._embedder, self._cache)
                await self._embed_missing(self._wanted, self._embedder, self._cache)
        except Exception as error:  # noqa: BLE001 -- whatever an embedder raises is logged, and search by words goes on
            self._switch_off(error)

    async def _embed_missing(self, wanted: Mapping[str, str], embedder: Embedder, cache: VectorCache) -> None:
        self._digests = {text: self._digests.get(text) or digest(text) for text in wanted.values()}
        missing = [text for text, key in self._digests.items() if key not in cache]
        for start in range(0, len(missing), _BATCH):
            texts = missing[start : start + _BATCH]
            vectors = await asyncio.to_thread(embedder.embed, texts)
            cache.add([self._digests[text] for text in texts], vectors)
            if self._wanted is not wanted:
                return
            if (start // _BATCH + 1) * _BATCH % _STEP == 0:
                await self._publish(wanted, embedder, cache)
                await self._store_cache(embedder, cache)
        await self._publish(wanted, embedder, cache)
        self._done = wanted
        if missing:
            await self._store_cache(embedder, cache)

    async def _publish(self, wanted: Mapping[str, str], embedder: Embedder, cache: VectorCache) -> None:
        """Let the texts that have vectors be found."""
        ready = {key: self._digests[text] for key, text in wanted.items() if self._digests[text] in cache}
        packed = [cache[found] for found in ready.values()]
        # Averages of words are all a little similar; models for sentences are trained not to be.
        centered = isinstance(embedder, WordVectors)
        self._nearest = await asyncio.to_thread(
            NearestVectors, list(ready), packed, embedder.dimensions, centered=centered
        )

    async def _read_stored(self, embedder: Embedder, cache: VectorCache) -> None:
        if self._store is None:
            return
        try:
            data = await self._store.get(self._key(embedder))
        except StorageError as error:
            logger.warning("the vectors of %s cannot be read and are made again: %s", self._prefix, error)
            return
        if data is not None and not cache.absorb(data):
            logger.warning("the vectors of %s are damaged and are made again", self._prefix)

    async def _store_cache(self, embedder: Embedder, cache: VectorCache) -> None:
        if self._store is None:
            return
        # Another process may have stored others meanwhile. Of two that write at once, one makes its vectors again.
        await self._read_stored(embedder, cache)
        smaller = cache.without_old(self._digests.values())
        try:
            await self._store.put(self._key(embedder), smaller.encode())
        except StorageError as error:
            logger.warning("the vectors of %s could not be stored: %s", self._prefix, error)

    def _key(self, embedder: Embedder) -> str:
        return f"{self._prefix}/{embedder.name}"
