"""The packaged word vectors: with and without numpy, loaded once, and never from the network."""

import gc
import mmap
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy
import pytest

from carrel.embedding import Embedder, NearestVectors, WordVectors, choose_embedder, pack_vectors
from carrel.embedding.embedder import _average, load_table


class WordVectorsWithoutNumpy(WordVectors):
    """The same as in an environment without numpy."""

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        table = load_table()
        return [_average(table, table.known_tokens(text)) for text in texts]


@pytest.fixture(scope="module", params=[WordVectors, WordVectorsWithoutNumpy])
def embedder(request: pytest.FixtureRequest) -> Embedder:
    made: Embedder = request.param()
    return made


def rows(embedder: Embedder, texts: list[str]) -> numpy.typing.NDArray[numpy.float32]:
    return numpy.array(embedder.embed(texts), dtype=numpy.float32).reshape(len(texts), embedder.dimensions)


TEXTS = [
    "Please look into why the login fails for users with two accounts",
    "How do I bake sourdough bread with a crisp crust?",
    "My laptop battery drains quickly overnight",
    "Plan a three day trip to Lisbon with kids",
]


@pytest.mark.parametrize(
    ("query", "meant"),
    [
        ("authentication problem", 0),
        ("baking", 1),
        ("power consumption of a notebook", 2),
        ("vacation with children", 3),
    ],
)
def test_other_words_for_the_same_thing_are_near(embedder: Embedder, query: str, meant: int) -> None:
    nearness = rows(embedder, TEXTS) @ rows(embedder, [query])[0]
    assert int(numpy.argmax(nearness)) == meant


def test_a_word_it_has_never_seen_is_known_by_its_pieces(embedder: Embedder) -> None:
    unseen, kin, other = rows(embedder, ["deployability", "deploy", "violin"])
    assert unseen @ kin > unseen @ other + 0.2


def test_words_that_every_text_has_weigh_little(embedder: Embedder) -> None:
    wordy, plain = rows(embedder, ["what is the best way to bake a loaf of it", "bake loaf"])
    assert wordy @ plain > 0.7


def test_vectors_have_the_promised_shape_and_length(embedder: Embedder) -> None:
    vectors = rows(embedder, ["one", "two words", "a longer text " * 500])
    assert vectors.shape == (3, embedder.dimensions)
    assert numpy.allclose(numpy.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_a_text_that_says_nothing_is_near_to_nothing(embedder: Embedder) -> None:
    assert not rows(embedder, ["", "🚀 —", "x" * 5000]).any()
    assert rows(embedder, []).shape == (0, embedder.dimensions)


def test_any_text_can_be_embedded(embedder: Embedder) -> None:
    odd = ["\x00", "\ud800 lone", "🚀", "數據庫", "\n\t", "a" * 100_000]
    assert numpy.isfinite(rows(embedder, odd)).all()


def test_the_same_text_gets_the_same_vector_in_any_company(embedder: Embedder) -> None:
    alone = rows(embedder, ["the same text"])[0]
    among = rows(embedder, ["short", "the same text", "a much longer text " * 50])[1]
    assert numpy.allclose(alone, among, atol=1e-6)


def test_several_threads_may_embed_at_once() -> None:
    found = WordVectors()
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(float(rows(found, TEXTS).sum()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


def test_asking_for_it_loads_nothing_and_loading_leaves_logging_alone() -> None:
    program = """
import logging, sys
from carrel.embedding import WordVectors
embedder = WordVectors()
assert "numpy" not in sys.modules, "loaded before it is needed"
embedder.embed(["a text"])
assert not {"requests", "torch", "tokenizers"} & set(sys.modules), "loaded without need"
assert logging.getLogger().handlers == []
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_network_is_never_used() -> None:
    program = """
import sys
def listen(event, arguments):
    assert not event.startswith("socket."), f"the network was used: {event} {arguments}"
sys.addaudithook(listen)
from carrel.embedding import WordVectors
print(len(WordVectors().embed(["a text"])[0]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "128"


@pytest.mark.parametrize("text", ["zzzqqq", "xqzjk vrtplk", "e3b0c44298fc1c149", "登录", "!?", "", "\ud800"])
def test_a_text_without_a_known_word_gets_zeros(embedder: Embedder, text: str) -> None:
    assert not rows(embedder, [text]).any()


@pytest.mark.parametrize("text", ["login", "zzzqqq login", "Deploymnt", "faild", "kubectl", "café", "ssh"])
def test_one_known_word_or_its_beginning_is_enough(embedder: Embedder, text: str) -> None:
    assert rows(embedder, [text]).any()


def test_both_ways_to_compute_give_the_same_vectors() -> None:
    texts = [*TEXTS, "Résumé café über naïve", "fetchJSON_files (5 px)!", "Deploymnt faild", "", "数据库 login"]
    fast, plain = rows(WordVectors(), texts), rows(WordVectorsWithoutNumpy(), texts)
    assert numpy.allclose(fast, plain, atol=1e-6)


def test_a_process_without_numpy_embeds_and_compares() -> None:
    program = """
import sys
class NoNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "tokenizers"):
            raise ModuleNotFoundError(name)
import importlib.util
sys.meta_path.insert(0, NoNumpy())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "numpy" else found(name, package)
from carrel.embedding import NearestVectors, WordVectors, pack_vectors
texts = ["bake bread", "send an email", "plan a trip"]
vectors = WordVectors().embed(texts)
nearest = NearestVectors(texts, pack_vectors(vectors, 128), 128, centered=True)
print(nearest.find(WordVectors().embed(["vacation journey"])[0], 1, 0.1)[0][0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "plan a trip"


def test_a_hundred_embedders_share_one_table() -> None:
    """A server has a search of tools for each session."""
    embedders = [choose_embedder(None) for _ in range(100)]
    for embedder in embedders[:3]:
        assert embedder is not None
        embedder.embed(["harbour"])
    WordVectors().embed(["harbour"])
    tables = [thing for thing in gc.get_objects() if isinstance(thing, mmap.mmap) and len(thing) > 6_000_000]
    assert len(tables) == 1


def test_the_nearest_vectors_come_first() -> None:
    packed = pack_vectors([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]], 3)
    nearest = NearestVectors(["x", "y", "z"], packed, 3)
    assert [key for key, _ in nearest.find([0.0, 1.0, 0.3], 2, -1)] == ["y", "z"]
    assert [key for key, _ in nearest.find([0.0, 1.0, 0.3], 9, 0.5)] == ["y"]
    assert nearest.find([0.0, 0.0, 0.0], 2, -1) == []
    assert NearestVectors([], [], 3).find([1.0, 0.0, 0.0], 2, -1) == []


class Reversed:
    """An embedder of a user."""

    name = "reversed-1"
    dimensions = 2

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [[0.0, 1.0] for _ in texts]


def test_an_option_chooses_the_embedder() -> None:
    own = Reversed()
    assert choose_embedder(own) is own
    assert choose_embedder(False) is None
    assert isinstance(choose_embedder(None), WordVectors)
    for wrong in ("default", True, object()):
        with pytest.raises(TypeError, match="is not an Embedder"):
            choose_embedder(wrong)  # type: ignore[arg-type]
