"""The embedder that comes with carrel: words as fixed vectors, averaged."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carrel.meaning.seam import speakable

if TYPE_CHECKING:
    from carrel.meaning.seam import Vectors

_AT_ONCE = 256
_loading = threading.Lock()


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
            batch = [speakable(text) for text in texts[start : start + _AT_ONCE]]
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
