"""The embedder that comes with carrel: words as fixed vectors, averaged."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carrel.meaning.seam import encoded, speakable

if TYPE_CHECKING:
    from carrel.meaning.seam import Vectors

UNKNOWN = "[UNK]"
"""Stands for what has no vector: signs, and scripts other than the Latin one."""

_FOLDER = Path(__file__).parent / "words"
_AT_ONCE = 256
_STEM = 4
"""Letters with which a word that has no vector begins as one that has: `deploymnt` is still about deploying."""
_loading = threading.Lock()


class StaticEmbedder:
    """The average of what each word means by itself: small, quick, and its vectors lie beside this file.

    Knows word families and topics ("crash" is near "exception"), not the order of words. The vectors were fitted so
    that their average is near to what MiniLM and MPNet say of a text: `scripts/make_word_vectors.py`."""

    name = "carrel-words-2"
    dimensions = 128

    def embed(self, texts: Sequence[str]) -> "Vectors":
        import numpy  # noqa: PLC0415 - a third of a second, and only searching by meaning needs it

        tokenizer, table = _load()
        vectors = numpy.zeros((len(texts), self.dimensions), dtype=numpy.float32)
        for start in range(0, len(texts), _AT_ONCE):
            batch = [speakable(text) for text in texts[start : start + _AT_ONCE]]
            for row, tokens in enumerate(encoded(tokenizer, batch), start):
                if tokens.ids:
                    vectors[row] = table[tokens.ids].sum(axis=0)
        lengths = numpy.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= numpy.maximum(lengths, 1e-12)
        return vectors

    def knows(self, text: str) -> bool:
        """Whether any word has a vector of its own, or begins with one; others are only spelled, piece by piece."""
        tokens = _load()[0].encode(speakable(text)).tokens
        return any(
            word != UNKNOWN and not word.startswith("##") and len(word) >= (_STEM if following.startswith("##") else 2)
            for word, following in pairwise([*tokens, ""])
        )


def _load() -> tuple[Any, Any]:
    """The tokenizer and the table of vectors: 31 MB, once per process, whichever thread is first."""
    with _loading:
        return _read_vectors()


@lru_cache(maxsize=1)
def _read_vectors() -> tuple[Any, Any]:
    import numpy  # noqa: PLC0415

    words = (_FOLDER / "words.txt").read_text("ascii").split()
    weights = numpy.load(_FOLDER / "weights.npy").astype(numpy.float32)
    return word_tokenizer(words), numpy.load(_FOLDER / "vectors.npy") * weights[:, None]


def word_tokenizer(words: Sequence[str]) -> Any:
    """Cuts a text into these words, and a word that is none of them into the longest pieces (`##…`) that are."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers  # noqa: PLC0415 - compiled, for this only

    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
