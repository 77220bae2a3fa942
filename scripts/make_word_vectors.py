"""Makes `src/carrel/meaning/words`: a vector for each word, so that their sum says what larger models say of the text.

    python scripts/make_word_vectors.py TEXTS MINILM MPNET

- TEXTS: what `collect_texts.py` wrote: 43,000 words, and 168,000 short texts;
- MINILM, MPNET: what `read_texts.py` wrote of the two.

The same input gives the same table, but for rounding.

The two models' vectors of a text stand side by side, and their main directions are kept. The words' vectors are those
whose sums come nearest to them (least squares, by conjugate gradients), held to what the models say of each word alone.
What a word weighs comes out by itself: "the" explains nothing and becomes short."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import scipy.sparse

from carrel.meaning.static import UNKNOWN, word_tokenizer

FITTED, DIMENSIONS = 256, 128
"""So many main directions of the texts' vectors are fitted, and so many kept: the first ones say most."""
COMMON = 3e-4
"""A word of this share of all words counts half, to begin with."""
HOLD = 1.0
"""How much the word alone counts, in texts."""
ROUNDS, STEPS = 2, 12
OUT = Path(__file__).parents[1] / "src" / "carrel" / "meaning" / "words"


def unit(vectors: Any) -> Any:
    return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def taught(file: Path, texts: list[str], words: int) -> Any:
    """A model's vectors of the words and texts, without what all texts have in common."""
    with numpy.load(file) as kept:
        if kept["texts"].tolist() != texts:
            raise SystemExit(f"{file} is not of these texts; let read_texts.py read them")
        vectors = kept["vectors"].astype(numpy.float32)
    return unit(vectors - vectors[words:].mean(axis=0))


def fitted(rows: Any, wanted: Any, held: Any) -> Any:
    """The table for which `rows @ table` is nearest to `wanted`, and the table itself not far from `held`."""
    columns = rows.T.tocsr()
    scale = numpy.asarray(rows.multiply(rows).sum(axis=0)).reshape(-1, 1) + HOLD
    table = held.copy()
    left = columns @ (wanted - rows @ table)
    step = left / scale
    size = (left * step).sum(axis=0)
    for _ in range(STEPS):
        effect = columns @ (rows @ step) + HOLD * step
        far = size / (step * effect).sum(axis=0)
        table += far * step
        left -= far * effect
        before, size = size, (left * left / scale).sum(axis=0)
        step = left / scale + size / before * step
    return table


def main(texts_file: Path, minilm: Path, mpnet: Path) -> None:
    collected = json.loads(texts_file.read_text())
    alone, texts = collected["words"], collected["texts"]
    words = [UNKNOWN, *alone, *collected["pieces"]]
    every = [*alone, *texts]
    counted = Counter(word for text in texts for word in re.findall("[a-z]+", text.lower()))

    vectors = numpy.concatenate([taught(model, every, len(alone)) for model in (minilm, mpnet)], axis=1)
    of_texts = vectors[len(alone) :]
    middle = of_texts.mean(axis=0)
    _, directions = numpy.linalg.eigh(unit(of_texts - middle).T @ unit(of_texts - middle))
    main_ones = directions[:, ::-1][:, :FITTED]
    wanted = unit(unit(vectors - middle) @ main_ones)

    of_words = vectors[: len(alone)]
    place = {word: number for number, word in enumerate(words)}
    rarity = numpy.array([COMMON / (COMMON + counted[word] / counted.total()) for word in alone], dtype=numpy.float32)
    held = numpy.zeros((len(words), FITTED), dtype=numpy.float32)
    held[[place[word] for word in alone]] = (of_words - of_words.mean(axis=0)) @ main_ones * rarity[:, None]

    tokens = [found.ids for found in word_tokenizer(words).encode_batch(every)]
    ends = numpy.cumsum([0, *map(len, tokens)])
    flat = numpy.concatenate([numpy.array(ids, dtype=numpy.int32) for ids in tokens])
    known = (flat != place[UNKNOWN]).astype(numpy.float32)
    rows = scipy.sparse.csr_matrix((known, flat, ends), shape=(len(tokens), len(words)))
    # The sum of a text's words is as long as it comes; only its direction is to be the models'. So each text is divided
    # by that length: a guess in the first round, known in the next.
    lengths = numpy.maximum(numpy.asarray(rows.sum(axis=1)).ravel(), 1) ** 0.6
    for _ in range(ROUNDS):
        table = fitted(scipy.sparse.diags(1 / lengths).astype(numpy.float32) @ rows, wanted, held)
        lengths = numpy.maximum(numpy.linalg.norm(rows @ table, axis=1), 1e-6)
        print(f"as near as {(unit(rows @ table) * wanted).sum(axis=1)[len(alone) :].mean():.3f}", flush=True)

    table = table[:, :DIMENSIONS]
    longest = numpy.maximum(numpy.abs(table).max(axis=1, keepdims=True), 1e-9)
    numpy.save(OUT / "vectors.npy", numpy.rint(table / longest * 127).astype(numpy.int8))
    numpy.save(OUT / "weights.npy", (longest[:, 0] / 127).astype(numpy.float16))
    (OUT / "words.txt").write_text("\n".join(words) + "\n", "ascii")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
