"""Meaning: texts that say the same are near, nothing is loaded before it is needed, and the network is never asked."""

import gc
import subprocess
import sys
import threading

import numpy
import pytest

from carrel.meaning import Embedder, plain_embedder


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
