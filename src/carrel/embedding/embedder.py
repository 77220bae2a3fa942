"""The protocol of embedders, and which embedder an option chooses."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from carrel.embedding.word_vectors import WordVectors


@runtime_checkable
class Embedder(Protocol):
    """Turns texts into vectors. Called from threads, from several at once."""

    @property
    def name(self) -> str:
        """The model with its version: vectors of embedders with different names are never compared."""

    @property
    def dimensions(self) -> int:
        """Length of a vector."""

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Return one row of floats per text: of length 1, or all zeros for a text without meaning."""


EmbedderOption: TypeAlias = Embedder | Literal[False] | None
"""What `embedder=` takes: None for the packaged word vectors, False for no search by meaning."""


def choose_embedder(option: EmbedderOption) -> Embedder | None:
    """Return the embedder that an option stands for; None when search by meaning is off. Loads nothing."""
    if option is None:
        return _packaged()
    if option is False:
        return None
    if not isinstance(option, Embedder):
        raise TypeError(
            f"embedder={option!r:.60} is not an Embedder; pass an object with name, dimensions and embed(texts), "
            "None for the packaged word vectors, or False for no search by meaning"
        )
    return option


@lru_cache(maxsize=1)
def _packaged() -> WordVectors:
    return WordVectors()
