"""What whoever turns texts into vectors promises."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Vectors: TypeAlias = NDArray[float32]


@runtime_checkable
class Embedder(Protocol):
    """Gives each text a place among all others.

    Called from threads, from several at once; never touches the network."""

    @property
    def name(self) -> str:
        """Names the model and its version: vectors of different names are never compared."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    def embed(self, texts: Sequence[str]) -> "Vectors":
        """One row per text: of length 1, or all zeros for a text that says nothing."""


@runtime_checkable
class KnowsWords(Protocol):
    """An embedder that can tell a text that it understands from one that it only spells."""

    def knows(self, text: str) -> bool:
        """Whether any word of the text means something to it; a vector of none of them is noise."""


def speakable(text: str) -> str:
    """The text without what cannot be written as UTF-8, which tokenizers refuse."""
    return text.encode("utf-8", "replace").decode("utf-8")


def encoded(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any]:
    """The pieces of each text; RuntimeError where the tokenizer gives up, as when it may start no threads."""
    try:
        return [tokenizer.encode(texts[0])] if len(texts) == 1 else tokenizer.encode_batch_fast(texts)
    except BaseException as problem:
        # A panic in its Rust is no Exception, and would end whoever only wanted to find something.
        if type(problem).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizer gave up: {problem}") from problem
