"""Pure: one order from two, what has the words and what means the same."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

FUSION = 10
"""How soon a lower rank counts less. Small, because the right entry is one and not a page of them."""


class Hit(NamedTuple):
    """An entry that answers a search."""

    key: str
    score: float
    """The higher the better; only good for comparing the hits of one search."""
    how: Literal["words", "meaning", "both"] = "words"
    """What it was found by."""


def blended(by_words: Mapping[str, float], near: Sequence[tuple[str, float]], limit: int) -> list[Hit]:
    """Reciprocal rank fusion in which words count as much as of the question they have.

    `by_words`: for each entry which share of the question its words answer, 0 to 1; `near`: the nearest first. An entry
    that has half of what was asked for leads its list like one that has all; its rank alone says too little."""
    scores: dict[str, float] = {}
    for rank, key in enumerate(sorted(by_words, key=lambda key: (-by_words[key], key)), 1):
        scores[key] = by_words[key] ** 2 / (FUSION + rank)
    meant = {key for key, _ in near}
    for rank, (key, _) in enumerate(near, 1):
        scores[key] = scores.get(key, 0.0) + 1 / (FUSION + rank)
    best = sorted(scores, key=lambda key: (-scores[key], key))[: max(limit, 0)]
    return [Hit(key, scores[key], _how(key in by_words, key in meant)) for key in best]


def _how(said: bool, meant: bool) -> Literal["words", "meaning", "both"]:
    if said and meant:
        return "both"
    return "words" if said else "meaning"
