"""Texts as vectors: near each other when they mean the same, whatever the words."""

import importlib.util
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Vectors = NDArray[float32]

logger = logging.getLogger(__name__)

_AT_ONCE = 256
_loading = threading.Lock()


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


class StaticEmbedder:
    """The average of what each word means by itself: small, quick, and its weights lie inside an installed package.

    Knows word families and topics ("crash" is near "exception"), not the order of words."""

    name = "wordllama-l2-supercat-256"
    dimensions = 256

    def __init__(self, folder: Path) -> None:
        """`folder`: where wordllama is installed."""
        self._weights = folder / "weights" / "l2_supercat_256.safetensors"
        self._tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self._loaded: tuple[Any, Any] | None = None

    @property
    def installed(self) -> bool:
        return self._weights.is_file() and self._tokenizer.is_file()

    def embed(self, texts: Sequence[str]) -> "Vectors":
        import numpy  # noqa: PLC0415 - a third of a second, and only searching by meaning needs it

        tokenizer, weights = self._load()
        vectors = numpy.zeros((len(texts), self.dimensions), dtype=numpy.float32)
        for start in range(0, len(texts), _AT_ONCE):
            batch = [_speakable(text) for text in texts[start : start + _AT_ONCE]]
            for row, tokens in enumerate(tokenizer.encode_batch(batch, add_special_tokens=False), start):
                if tokens.ids:
                    vectors[row] = weights[tokens.ids].sum(axis=0)
        lengths = numpy.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= numpy.maximum(lengths, 1e-12)
        return vectors

    def _load(self) -> tuple[Any, Any]:
        # The two files are read as they are: importing wordllama itself takes most of a second, sets up the
        # root logger, and brings code that can download.
        with _loading:
            if self._loaded is None:
                import numpy  # noqa: PLC0415
                from safetensors import safe_open  # noqa: PLC0415 - loads numpy
                from tokenizers import Tokenizer  # noqa: PLC0415 - a compiled package, for this class only

                with safe_open(self._weights, framework="numpy") as tensors:
                    weights = tensors.get_tensor("embedding.weight").astype(numpy.float32)
                tokenizer = Tokenizer.from_file(str(self._tokenizer))
                tokenizer.no_padding()
                tokenizer.no_truncation()
                self._loaded = tokenizer, weights
            return self._loaded


def _speakable(text: str) -> str:
    """The text without what cannot be written as UTF-8, which the tokenizer refuses."""
    return text.encode("utf-8", "replace").decode("utf-8")


def default_embedder() -> Embedder | None:
    """The one that comes with carrel, or None where its package is missing. Loads nothing before it is used."""
    found = importlib.util.find_spec("wordllama")
    embedder = StaticEmbedder(Path(found.origin).parent) if found is not None and found.origin else None
    if embedder is None or not embedder.installed:
        logger.info("no weights of wordllama are installed: search goes by words alone")
        return None
    return embedder
