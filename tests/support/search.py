"""Helpers for tests of the session search."""

from collections.abc import Sequence
from typing import Any

import numpy

from carrel.conversation.messages import (
    assistant_message,
    text_block,
    user_text_message,
)
from carrel.conversation.search.search import SearchHit
from carrel.conversation.store import SessionStore


async def add_turns(store: SessionStore, session_id: str, *texts: str, title: str | None = None) -> None:
    """Append messages of the user and the assistant in turn."""
    if title is not None:
        await store.create_session(title, session_id=session_id)
    for number, text in enumerate(texts):
        message = user_text_message(text) if number % 2 == 0 else assistant_message([text_block(text)])
        await store.append_message(session_id, message)


def places(hits: Sequence[SearchHit]) -> list[tuple[str, int]]:
    return [(hit.session_id, hit.seq) for hit in hits]


def marked(hit: SearchHit) -> list[str]:
    return [hit.snippet[start:end] for start, end in hit.marks]


class FruitEmbedder:
    """An embedder that can tell texts about fruit from texts about metal."""

    dimensions = 2
    texts: list[str]

    def __init__(self, name: str = "fruit-1") -> None:
        self.name = name
        self.texts = []

    def embed(self, texts: Sequence[str]) -> Any:
        self.texts += texts
        fruit, metal = {"apple", "pear", "fruit", "juicy"}, {"iron", "copper", "metal", "shiny"}
        rows = [[len(fruit & set(text.lower().split())), len(metal & set(text.lower().split()))] for text in texts]
        vectors = numpy.array(rows, dtype=numpy.float32).reshape(-1, 2)
        return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
