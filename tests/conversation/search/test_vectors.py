"""The vectors of sessions in memory: the nearest are found, also after changes."""

import pytest

from carrel.conversation.search.indexer import SessionVectors
from carrel.embedding import Embedder, WordVectors, pack_vectors
from carrel.storage.text_index import DocumentRef


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return WordVectors()


TEXTS = [
    "Why does the login fail?",
    "How do I bake bread with a crisp crust?",
    "My battery drains quickly",
    "Plan a trip to Lisbon",
]


def test_packed_vectors_keep_their_direction(embedder: Embedder) -> None:
    vectors = embedder.embed(TEXTS)
    table = SessionVectors(embedder.dimensions)
    packed = pack_vectors(vectors, embedder.dimensions)
    table.load([(DocumentRef("s", number), vector) for number, vector in enumerate(packed)])
    for number, vector in enumerate(vectors):
        place, cosine = table.nearest(vector, 1, 0.5)[0]
        assert place == DocumentRef("s", number)
        assert cosine > 0.9995


def test_the_nearest_vectors_come_first_and_deleted_ones_are_gone(embedder: Embedder) -> None:
    table = SessionVectors(embedder.dimensions)
    [query] = (list(row) for row in embedder.embed(["baking bread"]))
    assert table.nearest(query, 5, -1.0) == []
    table.load([])
    for number, vector in enumerate(pack_vectors(embedder.embed(TEXTS), embedder.dimensions)):
        table.update(f"session {number}", {7: vector})
    found = table.nearest(query, 2, -1.0)
    assert len(found) == 2
    assert found[0][0] == DocumentRef("session 1", 7)
    assert found[0][1] > found[1][1]
    table.update("session 1", {7: None})
    assert all(place.source != "session 1" for place, _ in table.nearest(query, 5, 0.01))
    table.update("session 0", {1: pack_vectors(embedder.embed(["baking bread"]), embedder.dimensions)[0]}, replace=True)
    assert table.nearest(query, 1, 0.9)[0][0] == DocumentRef("session 0", 1)
    assert DocumentRef("session 0", 7) not in [place for place, _ in table.nearest(query, 9, 0.01)]
