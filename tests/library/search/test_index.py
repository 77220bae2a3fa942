"""The index: by words and by meaning, on every store; no text is embedded twice, and no failure stops a search."""

import asyncio
import logging
import threading
from collections.abc import Sequence

import numpy
import pytest

from carrel.library.search import LibrarySearch, SearchEntry, SearchMatch
from carrel.library.search.index import LONGEST_QUERY, text_to_embed
from carrel.storage.base import Store
from carrel.storage.memory import MemoryStore
from tests.support.stores import Backend

ENTRIES = [
    SearchEntry("resize", "resize_image", "Scale an image to a given width and height", "path width height"),
    SearchEntry("crop", "crop_image", "Cut a rectangular region out of an image"),
    SearchEntry("bake", "bake_bread", "A recipe for sourdough with a crisp crust"),
    SearchEntry("mail", "send_email", "Send a message with attachments", "to subject body"),
    SearchEntry("trip", "plan_trip", "Find hotels and trains for a vacation"),
]


class Topics:
    """An embedder that knows two things, counts its calls, and can be held up or made to fail."""

    name = "topics-1"
    dimensions = 3

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.failing = False

    def embed(self, texts: Sequence[str]) -> numpy.typing.NDArray[numpy.float32]:
        assert self.go_on.wait(30)
        if self.failing:
            raise OSError("the weights are gone")
        self.texts += texts
        topics = (("image", "picture", "photo"), ("bread", "loaf", "oven"), ("email", "letter"))
        rows = [[float(any(word in text for word in topic)) for topic in topics] for text in texts]
        vectors = numpy.array(rows, dtype=numpy.float32).reshape(len(texts), 3)
        return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def keys(hits: list[SearchMatch]) -> list[str]:
    return [hit.key for hit in hits]


async def test_the_default_finds_words_and_meaning() -> None:
    index = LibrarySearch(None, "search/x")
    index.set_entries(ENTRIES)
    await index.ready()
    [best, *_] = await index.search("crop an image")
    assert (best.key, best.how) == ("crop", "both")
    assert keys(await index.search("holiday journey"))[0] == "trip"
    assert keys(await index.search("holiday journey", 1)) == ["trip"]
    await index.close()


async def test_without_an_embedder_words_are_compared() -> None:
    index = LibrarySearch(None, "search/x", False)
    index.set_entries(ENTRIES)
    await index.ready()
    assert await index.search("picture") == []
    [hit] = await index.search("sourdough")
    assert (hit.key, hit.how) == ("bake", "words")


@pytest.mark.parametrize("query", ["", "   ", "\x00", "\ud800", "🚀", "数据库", "a" * 100_000, "(' OR 1=1 --"])
async def test_any_text_is_a_query(query: str) -> None:
    index = LibrarySearch(None, "search/x")
    index.set_entries(ENTRIES)
    await index.search(query)
    assert await index.search(query, 0) == []


async def test_without_entries_nothing_is_loaded() -> None:
    embedder = Topics()
    index = LibrarySearch(None, "search/x", embedder)
    assert await index.search("picture") == []
    index.set_entries(ENTRIES)
    assert embedder.texts == []


async def test_entries_are_added_and_removed() -> None:
    embedder = Topics()
    index = LibrarySearch(None, "search/x", embedder)
    index.set_entries(ENTRIES)
    assert set(keys(await index.search("photo"))) == {"resize", "crop"}
    index.set_entries([entry for entry in ENTRIES if entry.key != "crop"])
    assert keys(await index.search("photo")) == ["resize"]
    embedder.texts.clear()
    index.set_entries([SearchEntry("resize", "knead_bread", "Work the dough"), *ENTRIES[2:]])
    assert keys(await index.search("photo")) == []
    assert set(keys(await index.search("loaf"))) == {"resize", "bake"}
    assert embedder.texts == ["knead bread: Work the dough", "photo", "loaf"]


async def test_unchanged_entries_are_not_indexed_again() -> None:
    embedder = Topics()
    index = LibrarySearch(None, "search/x", embedder)
    index.set_entries(ENTRIES)
    await index.search("photo")
    embedder.texts.clear()
    index.set_entries(list(ENTRIES))
    await index.search("photo")
    index.set_entries(SearchEntry(*entry) for entry in reversed(ENTRIES))
    await index.search("photo")
    assert embedder.texts == ["photo", "photo"]


async def test_no_text_is_embedded_twice(backend: Backend) -> None:
    embedder = Topics()
    first = LibrarySearch(backend.open(), "search/workflows", embedder)
    first.set_entries(ENTRIES)
    await first.ready()
    assert len(embedder.texts) == len(ENTRIES)
    embedder.texts.clear()
    second = LibrarySearch(backend.open(), "search/workflows", embedder)
    second.set_entries([*ENTRIES, SearchEntry("new", "new_photo", "Take a photo")])
    assert set(keys(await second.search("picture"))) == {"resize", "crop", "new"}
    assert embedder.texts == ["new photo: Take a photo", "picture"]
    await first.close()
    await second.close()


async def test_two_indexes_share_a_store(backend: Backend) -> None:
    embedder = Topics()
    one, other = (
        LibrarySearch(backend.open(), "search/x", embedder),
        LibrarySearch(backend.open(), "search/x", embedder),
    )
    one.set_entries(ENTRIES[:2])
    other.set_entries(ENTRIES[2:])
    await one.ready()
    await other.ready()
    embedder.texts.clear()
    third = LibrarySearch(backend.open(), "search/x", embedder)
    third.set_entries(ENTRIES)
    await third.ready()
    assert embedder.texts == []


async def test_vectors_of_two_embedders_are_separate() -> None:
    store, first, second = MemoryStore(), Topics(), Topics()
    second.name = "topics-2"
    for embedder in (first, second, first):
        index = LibrarySearch(store, "search/x", embedder)
        index.set_entries(ENTRIES)
        await index.ready()
    assert len(first.texts) == len(second.texts) == len(ENTRIES)
    assert await store.list("search") == ["search/x/topics-1", "search/x/topics-2"]


async def test_damaged_vectors_are_made_again(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    store, embedder = backend.open(), Topics()
    await store.put("search/x/topics-1", b"carrel vectors 1\n5 3\nnot so many")
    index = LibrarySearch(store, "search/x", embedder)
    index.set_entries(ENTRIES)
    assert set(keys(await index.search("picture"))) == {"resize", "crop"}
    await index.ready()
    assert "damaged" in caplog.text
    again = LibrarySearch(store, "search/x", embedder)
    again.set_entries(ENTRIES)
    embedder.texts.clear()
    await again.ready()
    assert embedder.texts == []


async def test_a_store_that_cannot_be_written(caplog: pytest.LogCaptureFixture, backend: Backend) -> None:
    store, embedder = backend.open(), Topics()
    # A place that is no key is refused by every store, like a full disk.
    index = LibrarySearch(store, "../outside", embedder)
    index.set_entries(ENTRIES)
    await index.ready()
    assert set(keys(await index.search("picture"))) == {"resize", "crop"}
    assert "could not be stored" in caplog.text


async def test_words_are_compared_while_vectors_are_made() -> None:
    embedder = Topics()
    embedder.go_on.clear()
    index = LibrarySearch(None, "search/x", embedder, vector_wait=0.01)
    index.set_entries(ENTRIES)
    assert keys(await index.search("sourdough")) == ["bake"]
    assert await index.search("loaf") == []
    embedder.go_on.set()
    await index.ready()
    assert keys(await index.search("loaf")) == ["bake"]


async def test_a_large_library_is_searchable_in_steps() -> None:
    """The first vectors can be used while the last are not made yet."""
    embedder, seen = Topics(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(Topics):
        def embed(self, texts: Sequence[str]) -> numpy.typing.NDArray[numpy.float32]:
            if any("last" in text for text in texts):
                loop.call_soon_threadsafe(seen.set)
                assert self.go_on.wait(30)
            return embedder.embed(texts)

    slow = Slow()
    slow.go_on.clear()
    index = LibrarySearch(None, "search/x", slow, vector_wait=0.01)
    index.set_entries([*ENTRIES, *(SearchEntry(f"n{n}", f"n_{n}") for n in range(500)), SearchEntry("z", "last_image")])
    await index.search("nothing")
    await seen.wait()
    assert set(keys(await index.search("photo"))) == {"resize", "crop"}
    slow.go_on.set()
    await index.ready()
    assert set(keys(await index.search("photo"))) == {"resize", "crop", "z"}


async def test_an_embedder_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    embedder = Topics()
    embedder.failing = True
    index = LibrarySearch(None, "search/x", embedder)
    index.set_entries(ENTRIES)
    assert keys(await index.search("sourdough")) == ["bake"]
    assert keys(await index.search("crop")) == ["crop"]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "by words only" in warnings[0].message


async def test_an_embedder_that_fails_later(caplog: pytest.LogCaptureFixture) -> None:
    embedder = Topics()
    index = LibrarySearch(None, "search/x", embedder)
    index.set_entries(ENTRIES)
    await index.ready()
    embedder.failing = True
    assert keys(await index.search("sourdough")) == ["bake"]
    assert "by words only" in caplog.text


async def test_closing_stops_the_work_and_a_search_starts_it_again() -> None:
    embedder = Topics()
    embedder.go_on.clear()
    index = LibrarySearch(None, "search/x", embedder, vector_wait=0.01)
    index.set_entries(ENTRIES)
    await index.search("loaf")
    closing = asyncio.create_task(index.close())
    await asyncio.sleep(0)
    embedder.go_on.set()
    await closing
    await index.close()
    assert not [task for task in asyncio.all_tasks() if "vectors of" in task.get_name()]
    await index.ready()
    assert keys(await index.search("loaf")) == ["bake"]


def test_use_in_another_event_loop() -> None:
    embedder = Topics()
    embedder.go_on.clear()
    index = LibrarySearch(None, "search/x", embedder, vector_wait=0.01)
    index.set_entries(ENTRIES)

    async def begun() -> None:
        await index.search("loaf")
        embedder.go_on.set()

    async def ended() -> list[str]:
        await index.ready()
        return keys(await index.search("loaf"))

    asyncio.run(begun())
    assert asyncio.run(ended()) == ["bake"]


async def test_concurrent_searches_share_the_work() -> None:
    embedder = Topics()
    index = LibrarySearch(None, "search/x", embedder)
    index.set_entries(ENTRIES)
    found = await asyncio.gather(*(index.search("photo") for _ in range(20)))
    assert all(set(keys(hits)) == {"resize", "crop"} for hits in found)
    assert len([text for text in embedder.texts if text != "photo"]) == len(ENTRIES)


async def test_the_cache_is_bounded(backend: Backend) -> None:
    store: Store = backend.open()
    index = LibrarySearch(store, "search/x", Topics())
    for turn in range(4):
        index.set_entries(SearchEntry(f"{turn}-{n}", f"entry_{turn}_{n}") for n in range(600))
        await index.ready()
    kept = await store.get("search/x/topics-1")
    assert kept is not None
    assert int(kept.split(b"\n")[1].split()[0]) < 2400


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (SearchEntry("k", "resizeImage", "Scale it"), "resize image: Scale it"),
        (SearchEntry("k", "a_b"), "a b"),
        (SearchEntry("k", "run", "Does it.", text="Does it.\n\nIn three steps."), "run: Does it. In three steps."),
        (SearchEntry("k", "x", "", text="y" * 500), "x: " + "y" * 200),
    ],
)
def test_the_text_of_an_entry(entry: SearchEntry, text: str) -> None:
    assert text_to_embed(entry) == text


async def test_a_very_long_query() -> None:
    topics = Topics()
    index = LibrarySearch(None, "search/x", topics)
    index.set_entries([*ENTRIES, SearchEntry("huge", "huge", "w " * 1_000_000)])
    await index.ready()
    topics.texts.clear()
    hits = await index.search("crop image " + "word " * 4_000_000)
    assert hits[0].key == "crop"
    assert [len(text) <= LONGEST_QUERY for text in topics.texts] == [True]


async def test_a_very_long_description() -> None:
    topics = Topics()
    index = LibrarySearch(None, "search/x", topics)
    index.set_entries([SearchEntry("huge", "huge", "first " + "w " * 7_000_000 + "last")])
    assert [hit.key for hit in await index.search("first")] == ["huge"]
    await index.ready()
    assert max(map(len, topics.texts)) < 3000


async def test_other_tasks_run_while_entries_are_indexed() -> None:
    index = LibrarySearch(None, "search/x", False)
    index.set_entries(SearchEntry(f"e{number}", f"entry {number}", f"{number} " * 200) for number in range(2000))
    search = asyncio.create_task(index.search("1999"))
    turns = 0
    while not search.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5
    assert search.result()[0].key == "e1999"
