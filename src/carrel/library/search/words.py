"""The words of texts in a form in which they are compared, and an index of which entries have which words."""

import re
import unicodedata
from collections.abc import Mapping, Set

FIELD_WEIGHTS = {"name": 1.0, "description": 0.95, "parameters": 0.8, "text": 0.8}
"""How much a word of a query counts that stands in this field."""

_PREFIX_FROM = 3
_PREFIX_WEIGHT = 0.5
_JOINTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[^\W_]+")
# Scripts written without spaces: kana, Han, Hangul, Thai, Lao, Khmer, Myanmar.
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]+"
)
_ENDING = re.compile(r"(?:ations?|ators?|ions?|ings?|ers?|i?ed|i?e?(?<![su])s|y)?e?$")
_DOUBLED = re.compile(r"([bdfgkmnprt])\1$")
_LEAST_STEM = 3

_STOP_WORDS = frozenset(
    (  # noqa: SIM905 - a hundred quoted words in a column are harder to read
        "a about all also am an and any are as at be been being but by can could did do does doing done down each for "
        "from get gets give gives had has have having he her him his how i if in into is it its just let like make "
        "makes may me might my need needs no not now of off on one onto or our out over please shall she should so "
        "some such than that the their them then there these they thing things this those to too up us use used uses "
        "using very want wants was we were what when where which while who whom whose why will with within without "
        "would you your "
    ).split()
)


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case without accents; `fetchJSON_files` has three words."""
    return _WORD.findall(_fold(_JOINTS.sub(" ", text)))


def terms(text: str) -> list[str]:
    """Return the words of a text without common endings: "resizing" and "resize" have the same term."""
    found: list[str] = []
    for word in split_words(text):
        if word.isascii() or not _UNSPACED.search(word):
            found.append(_stem(word))
        else:
            found += _unspaced_terms(word)
    return found


def query_terms(query: str) -> list[str]:
    """Return the terms of a query without stop words, unless it has no other words."""
    content_words = " ".join(word for word in split_words(query) if word not in _STOP_WORDS)
    return list(dict.fromkeys(terms(content_words or query)))


def joined_words(name: str) -> str:
    """Return a name in one word, as people may type it: `fetchjson` for `fetch_json`."""
    return "".join(_WORD.findall(_fold(name)))


def _fold(text: str) -> str:
    if text.isascii():
        return text.lower()
    # Accents are dropped; composing again restores the marks that change a kana's sound.
    plain = "".join(piece for piece in unicodedata.normalize("NFKD", text) if not "\u0300" <= piece <= "\u036f")
    return unicodedata.normalize("NFKC", plain).casefold()


def _stem(word: str) -> str:
    if len(word) <= _LEAST_STEM or not word.isascii() or not word.isalpha():
        return word
    stem = _DOUBLED.sub(r"\1", _ENDING.sub("", word))
    return stem if len(stem) >= _LEAST_STEM else word


def _unspaced_terms(word: str) -> list[str]:
    """Return each character and each pair of neighbors, because nothing shows where a word ends."""
    found: list[str] = []
    for piece in re.split(f"({_UNSPACED.pattern})", word):
        if _UNSPACED.match(piece):
            found += [*piece, *(piece[at : at + 2] for at in range(len(piece) - 1))]
        elif piece:
            found.append(_stem(piece))
    return found


class WordIndex:
    """Which entries have which words, and in which field; adding or removing an entry costs only that entry."""

    def __init__(self) -> None:
        self._weights: dict[str, dict[str, float]] = {}
        """For each term the keys of the entries that have it, with the weight of the best field."""
        self._terms: dict[str, Set[str]] = {}

    def __len__(self) -> int:
        return len(self._terms)

    def put(self, key: str, fields: Mapping[str, str]) -> None:
        """Add an entry, or replace the one with this key."""
        self.remove(key)
        weights: dict[str, float] = {}
        for field, weight in FIELD_WEIGHTS.items():
            text = fields.get(field, "")
            for term in (*terms(text), joined_words(text)) if field == "name" else terms(text):
                weights.setdefault(term, weight)
        for term, weight in weights.items():
            self._weights.setdefault(term, {})[key] = weight
        self._terms[key] = weights.keys()

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one with this key."""
        for term in self._terms.pop(key, ()):
            keys = self._weights[term]
            del keys[key]
            if not keys:
                del self._weights[term]

    def coverage(self, query: str) -> dict[str, float]:
        """Return for each entry with any word of the query how much of the query its words cover, from 0 to 1."""
        wanted = query_terms(query)
        covered: dict[str, float] = {}
        for term in wanted:
            for key, weight in (self._weights.get(term) or self._beginning_with(term)).items():
                covered[key] = covered.get(key, 0.0) + weight
        return {key: weight / len(wanted) for key, weight in covered.items()}

    def _beginning_with(self, start: str) -> dict[str, float]:
        """Return the entries with a longer word that begins like this one."""
        found: dict[str, float] = {}
        if len(start) >= _PREFIX_FROM:
            for term in [term for term in self._weights if term.startswith(start)]:
                for key, weight in self._weights[term].items():
                    found[key] = max(found.get(key, 0.0), weight * _PREFIX_WEIGHT)
        return found
