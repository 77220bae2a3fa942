"""Pure: one order from two, what has the words and what means the same."""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Hit(NamedTuple):
    """An entry that answers a search."""

    key: str
    score: float
    """The higher the better; only good for comparing the hits of one search."""
    how: Literal["words", "meaning", "both"] = "words"
    """What it was found by."""


def blended(by_words: Mapping[str, float], near: Mapping[str, float], limit: int) -> list[Hit]:
    """The nearness of each entry, and what its words add to it.

    `by_words`: for each entry which share of the question its words answer; `near`: the cosine of those that are near;
    both 0 to 1. To have all the words is worth as much as to mean the very same, to have half of them next to nothing:
    of a question in other words, some word is in some entry nevertheless."""
    scores = {key: near.get(key, 0.0) + by_words.get(key, 0.0) ** 4 for key in by_words.keys() | near.keys()}
    best = sorted(scores, key=lambda key: (-scores[key], key))[: max(limit, 0)]
    return [Hit(key, scores[key], _how(key in by_words, key in near)) for key in best]


def _how(said: bool, meant: bool) -> Literal["words", "meaning", "both"]:
    if said and meant:
        return "both"
    return "words" if said else "meaning"
