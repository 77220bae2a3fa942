"""Which of many texts have the words that are asked for, and how much each is about them: BM25."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from carrel.library.search.words import in_one_piece, telling_terms, terms

FIELDS = {"name": (3.0, 3.0), "description": (2.0, 12.0), "parameters": (0.8, 8.0), "text": (0.7, 60.0)}
"""How much a word in each field counts, and how many words the field usually has.

The usual length is a constant and not today's average, so that a text weighs the same whatever stands beside it and
one that is added changes no other."""

_SATURATION = 1.2
_LENGTH_MATTERS = 0.6
_PREFIX_FROM = 3
_PREFIXES = 24


class WordIndex:
    """BM25 over texts with fields; adding and removing one costs that one only."""

    def __init__(self) -> None:
        self._having: dict[str, dict[str, float]] = {}
        """For each term the keys that have it, and how much each is about it: from 0 to 1."""
        self._terms: dict[str, tuple[str, ...]] = {}
        self._sorted: list[str] | None = None

    def __len__(self) -> int:
        return len(self._terms)

    def put(self, key: str, fields: Mapping[str, str]) -> None:
        """Take a text, in place of what was under this key before."""
        self.remove(key)
        amounts: dict[str, float] = {}
        for field, (weight, usual) in FIELDS.items():
            found = terms(fields.get(field, ""))
            if field == "name" and len(found) > 1:
                found.append(in_one_piece(fields[field]))
            share = weight / (1 - _LENGTH_MATTERS + _LENGTH_MATTERS * len(found) / usual)
            for term, count in Counter(found).items():
                amounts[term] = amounts.get(term, 0.0) + share * count
        for term, amount in amounts.items():
            keys = self._having.get(term)
            if keys is None:
                keys = self._having[term] = {}
                self._sorted = None
            keys[key] = amount / (_SATURATION + amount)
        self._terms[key] = tuple(amounts)

    def remove(self, key: str) -> None:
        for term in self._terms.pop(key, ()):
            keys = self._having[term]
            del keys[key]
            if not keys:
                del self._having[term]
                self._sorted = None

    def shares(self, query: str) -> dict[str, float]:
        """For each text that has any of the words, how much of the question that answers: 1 would be all of it.

        A word that is in every text counts next to nothing, one that is in none as much as any."""
        found: dict[str, float] = {}
        asked = 0.0
        for term in telling_terms(query):
            having = self._having.get(term)
            if having is None and len(term) >= _PREFIX_FROM:
                having = self._begun(term)
            rarity = self._rarity(len(having or ()))
            asked += rarity
            for key, about in (having or {}).items():
                found[key] = found.get(key, 0.0) + rarity * about
        return {key: share / asked for key, share in found.items()}

    def _rarity(self, count: int) -> float:
        total = len(self._terms)
        return math.log(1 + (total - count + 0.5) / (count + 0.5)) / math.log(1 + (total + 0.5) / 1.5)

    def _begun(self, start: str) -> dict[str, float]:
        """What has a word that goes on from this one, at half its weight."""
        if self._sorted is None:
            self._sorted = sorted(self._having)
        at = bisect_left(self._sorted, start)
        merged: dict[str, float] = {}
        for term in self._sorted[at : at + _PREFIXES]:
            if not term.startswith(start):
                break
            for key, about in self._having[term].items():
                merged[key] = max(merged.get(key, 0.0), about / 2)
        return merged
