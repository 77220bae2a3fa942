"""Meaning: texts that say the same are near, nothing is loaded before it is needed, and the network is never asked."""

import gc
import subprocess
import sys
import threading

import numpy
import pytest

from carrel.conversation.nearest import Nearest, packed
from carrel.meaning import Embedder, plain_embedder
from carrel.storage.catalogue import Found


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return plain_embedder()


TEXTS = [
    "Please look into why the login fails for users with two accounts",
    "How do I bake sourdough bread with a crisp crust?",
    "My laptop battery drains quickly overnight",
    "Plan a three day trip to Lisbon with kids",
]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("authentication problem", 0),
        ("baking", 1),
        ("power consumption of a notebook", 2),
        ("vacation with children", 3),
    ],
)
def test_other_words_for_the_same_thing_are_near(embedder: Embedder, asked: str, meant: int) -> None:
    nearness = embedder.embed(TEXTS) @ embedder.embed([asked])[0]
    assert int(numpy.argmax(nearness)) == meant


def test_a_word_it_has_never_seen_is_known_by_its_pieces(embedder: Embedder) -> None:
    unseen, kin, other = embedder.embed(["recompressible", "compress", "violin"])
    assert unseen @ kin > unseen @ other + 0.2


def test_words_that_every_text_has_weigh_little(embedder: Embedder) -> None:
    wordy, plain = embedder.embed(["what is the best way to bake a loaf of it", "bake loaf"])
    assert wordy @ plain > 0.7


def test_vectors_have_the_promised_shape_and_length(embedder: Embedder) -> None:
    vectors = embedder.embed(["one", "two words", "a longer text " * 500])
    assert vectors.shape == (3, embedder.dimensions)
    assert vectors.dtype == numpy.float32
    assert numpy.allclose(numpy.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_a_text_that_says_nothing_is_near_to_nothing(embedder: Embedder) -> None:
    assert not embedder.embed(["", "🚀 —", "x" * 5000]).any()
    assert embedder.embed([]).shape == (0, embedder.dimensions)


def test_any_text_can_be_embedded(embedder: Embedder) -> None:
    odd = ["\x00", "\ud800 lone", "🚀", "數據庫", "\n\t", "a" * 100_000]
    assert numpy.isfinite(embedder.embed(odd)).all()


def test_the_same_text_gets_the_same_vector_in_any_company(embedder: Embedder) -> None:
    alone = embedder.embed(["the same text"])[0]
    among = embedder.embed(["short", "the same text", "a much longer text " * 50])[1]
    assert numpy.allclose(alone, among, atol=1e-6)


def test_several_threads_may_embed_at_once() -> None:
    found = plain_embedder()
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(float(found.embed(TEXTS).sum()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


def test_asking_for_it_loads_nothing_and_loading_leaves_logging_alone() -> None:
    program = """
import logging, sys
from carrel.meaning import plain_embedder
embedder = plain_embedder()
assert not {"numpy", "tokenizers"} & set(sys.modules), "loaded before it is needed"
embedder.embed(["a text"])
assert not {"requests", "torch"} & set(sys.modules), "loaded without need"
assert logging.getLogger().handlers == []
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_network_is_never_asked() -> None:
    program = """
import sys
def listen(event, arguments):
    assert not event.startswith("socket."), f"the network was asked: {event} {arguments}"
sys.addaudithook(listen)
from carrel.meaning import plain_embedder
print(plain_embedder().embed(["a text"]).shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 128)"


def test_a_byte_per_number_is_enough_to_tell_directions_apart(embedder: Embedder) -> None:
    vectors = embedder.embed(TEXTS)
    nearest = Nearest(embedder.dimensions)
    nearest.load([(Found("s", number), vector) for number, vector in enumerate(packed(vectors))])
    for number, vector in enumerate(vectors):
        place, nearness = nearest.ask(vector, 1, 0.5)[0]
        assert place == Found("s", number)
        assert nearness > 0.9995


def test_the_nearest_come_first_and_what_is_taken_away_is_gone(embedder: Embedder) -> None:
    nearest = Nearest(embedder.dimensions)
    asked = embedder.embed(["baking bread"])[0]
    assert nearest.ask(asked, 5, -1.0) == []
    nearest.load([])
    for number, vector in enumerate(packed(embedder.embed(TEXTS))):
        nearest.apply(f"session {number}", {7: vector})
    found = nearest.ask(asked, 2, -1.0)
    assert len(found) == 2
    assert found[0][0] == Found("session 1", 7)
    assert found[0][1] > found[1][1]
    nearest.apply("session 1", {7: None})
    assert all(place.source != "session 1" for place, _ in nearest.ask(asked, 5, 0.01))
    nearest.apply("session 0", {1: packed(embedder.embed(["baking bread"]))[0]}, forget=True)
    assert nearest.ask(asked, 1, 0.9)[0][0] == Found("session 0", 1)
    assert Found("session 0", 7) not in [place for place, _ in nearest.ask(asked, 9, 0.01)]


@pytest.mark.parametrize("text", ["zzzqqq", "xqzjk vrtplk", "e3b0c44298fc1c149", "登录", "!?", "", "\ud800"])
def test_what_is_no_word_is_not_known(text: str) -> None:
    assert not plain_embedder().knows(text)


@pytest.mark.parametrize("text", ["login", "zzzqqq login", "Deploymnt", "faild", "kubectl", "café", "ssh"])
def test_one_word_or_its_beginning_is_enough_to_be_known(text: str) -> None:
    assert plain_embedder().knows(text)


def test_all_embedders_share_one_table_of_vectors() -> None:
    """31 MB: a server has an index of tools for each session."""
    first, second = plain_embedder(), plain_embedder()
    assert numpy.array_equal(first.embed(["harbour"]), second.embed(["harbour"]))
    large = [
        thing for thing in gc.get_objects() if isinstance(thing, tuple) and len(thing) == 2 and _is_table(thing[1])
    ]
    assert len({id(thing[1]) for thing in large}) == 1


def _is_table(thing: object) -> bool:
    return isinstance(thing, numpy.ndarray) and thing.ndim == 2 and thing.shape[1] == 128 and len(thing) > 10_000
