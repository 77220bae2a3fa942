"""Vectors as they are kept: they come back, what is damaged is refused, what is old goes."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.library.search.vectors import VectorCache, digest

RANDOM = numpy.random.default_rng(5)


def unit(count: int, dimensions: int = 8) -> numpy.typing.NDArray[numpy.float32]:
    vectors = RANDOM.normal(size=(count, dimensions)).astype(numpy.float32)
    return vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)


def filled(texts: list[str]) -> VectorCache:
    table = VectorCache(8)
    table.add([digest(text) for text in texts], unit(len(texts)))
    return table


def test_vectors_keep_their_direction() -> None:
    vectors = unit(50)
    table = VectorCache(8)
    keys = [digest(str(number)) for number in range(50)]
    table.add(keys, vectors)
    unpacked = numpy.array([numpy.frombuffer(table[key], numpy.int8) for key in keys], dtype=numpy.float32)
    unpacked /= numpy.linalg.norm(unpacked, axis=1, keepdims=True)
    assert ((unpacked * vectors).sum(axis=1) > 0.999).all()


def test_a_cache_is_encoded_and_read() -> None:
    table, back = filled(["a", "b", "c"]), VectorCache(8)
    assert back.absorb(table.encode())
    keys = [digest("c"), digest("a")]
    assert [back[key] for key in keys] == [table[key] for key in keys]
    assert back.encode() == table.encode()


def test_absorbing_adds_new_vectors() -> None:
    table, other = filled(["a", "b"]), filled(["b", "c"])
    before = table[digest("b")]
    assert table.absorb(other.encode())
    assert len(table) == 3
    assert table[digest("b")] == before


@given(st.integers(0, 200), st.binary(max_size=3))
def test_a_damaged_cache_is_refused(at: int, instead: bytes) -> None:
    data = filled(["a", "b"]).encode()
    cut, table = data[:at] + instead + data[at + len(instead) + 1 :], VectorCache(8)
    if len(cut) != len(data):
        assert not table.absorb(cut)
        assert len(table) == 0


@pytest.mark.parametrize("data", [b"", b"carrel vectors 1\n", b"carrel vectors 1\n-1 8\n", b"carrel vectors 1\nx y\n"])
def test_other_data_are_refused(data: bytes) -> None:
    assert not VectorCache(8).absorb(data)


def test_a_cache_of_another_embedder_is_refused() -> None:
    assert not VectorCache(16).absorb(filled(["a"]).encode())


def test_old_vectors_are_removed() -> None:
    texts = [str(number) for number in range(3000)]
    table = filled(texts)
    assert table.without_old(digest(text) for text in texts[:1000]) is table
    smaller = table.without_old(digest(text) for text in texts[:10])
    assert len(smaller) == 10
    assert smaller[digest("3")] == table[digest("3")]
