"""Parse search queries, score texts against them and cut snippets. Pure."""

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

from carrel.storage.text_index import UNSPACED, Phrase

MAX_LENGTH = 2000
MAX_PHRASES = 24
SNIPPET = 200
"""Approximate length of a snippet in characters."""

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»')
_LETTER = f"[^\\W_{UNSPACED}]"
_MARKS = "[\u0300-\u036f]*"
_MARK = re.compile("[\u0300-\u036f]")

_MAX_MATCHES = 40
"""Matches of one phrase that are counted in a text."""
_MAX_STARTS = 8
_SATURATION = 1.2
"""As in BM25: the lower, the less repetitions of a word count."""
_FIELD_WEIGHTS = {"title": 3.0, "text": 1.0, "tools": 0.4}

Span = tuple[int, int]


class Query(NamedTuple):
    """A parsed search query."""

    phrases: list[Phrase]
    """One for each piece between spaces or quotes; documents that have all of them are the best hits."""
    words: list[Phrase]
    """The single words, for when no document has all phrases."""
    quoted: list[Phrase]
    """The phrases in quotes, which every hit must have."""
    plain: str
    """The text as typed, without control characters, for searching by meaning."""


@cache
def _word() -> re.Pattern[str]:
    # Compiled when first needed, because character classes as large as these take some milliseconds.
    return re.compile(f"[{UNSPACED}]|{_LETTER}+")


@cache
def _letter() -> re.Pattern[str]:
    return re.compile(_LETTER)


@cache
def _unspaced() -> re.Pattern[str]:
    return re.compile(f"[{UNSPACED}]")


@cache
def _accented() -> re.Pattern[str]:
    """Match characters that may have case or an accent.

    Dashes, quotes, ideographs and emoji, the usual reasons why a text is not ASCII, have neither."""
    return re.compile(
        "[\u00c0-\u1fff\u2100-\u218f\u2c00-\u2dff\ua640-\ua7ff\ufb00-\ufb4f\uff00-\uffef\U00010400-\U0001e943]"
    )


def parse(text: str) -> Query:
    """Parse any text; one without a word gives a query without phrases."""
    plain = unicodedata.normalize("NFC", text[:MAX_LENGTH])
    plain = "".join(character if character.isprintable() else " " for character in plain).strip()
    phrases: list[Phrase] = []
    quoted: list[Phrase] = []
    at = 0
    for match in [*_QUOTED.finditer(plain), None]:
        pieces = plain[at : match.start() if match else len(plain)].split()
        phrases += [Phrase(words) for piece in pieces if (words := _words(piece))]
        if match:
            if inner := _words(next(group for group in match.groups() if group is not None)):
                quoted.append(Phrase(inner))
                phrases.append(quoted[-1])
            at = match.end()
    phrases = list(dict.fromkeys(phrases))[:MAX_PHRASES]
    if phrases and _may_continue(plain, phrases[-1]):
        phrases[-1] = phrases[-1]._replace(prefix=True)
    return Query(phrases, _single_words(phrases), list(dict.fromkeys(quoted))[:MAX_PHRASES], plain)


def _words(text: str) -> tuple[str, ...]:
    return tuple(_word().findall(text))[:MAX_PHRASES]


def _may_continue(plain: str, last: Phrase) -> bool:
    """Whether the last word may still be being typed; one or two letters would match too much."""
    word = last.words[-1]
    return len(word) > 2 and plain.rstrip("*").endswith(word)


def _single_words(phrases: Sequence[Phrase]) -> list[Phrase]:
    """Split phrases into words; text without spaces into each two characters that stand together."""
    single: list[Phrase] = []
    for phrase in phrases:
        words = phrase.words
        for index, word in enumerate(words):
            following = words[index + 1 : index + 2]
            if not _unspaced().fullmatch(word):
                last = index == len(words) - 1
                single.append(Phrase((word,), phrase.prefix and last))
            elif following and _unspaced().fullmatch(following[0]):
                single.append(Phrase((word, *following)))
            elif len(words) == 1:
                single.append(phrase)
    return list(dict.fromkeys(single))[:MAX_PHRASES]


class _BaseLetters(dict[int, str]):
    """Maps each character to its lower case without accents, computed on first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        base = unicodedata.normalize("NFD", character)[0].lower()
        self[code] = base if len(base) == 1 else character
        return self[code]


_base_letters = _BaseLetters()


def _normalize(text: str) -> str:
    return text.translate(_base_letters) if not text.isascii() and _accented().search(text) else text.lower()


class NormalizedText(NamedTuple):
    """A text without case and accents; every character keeps its position."""

    text: str
    marks: bool
    """Whether some accents are characters of their own."""

    @classmethod
    def of(cls, text: str) -> "NormalizedText":
        return cls(_normalize(text), not text.isascii() and _MARK.search(text) is not None)


@lru_cache(maxsize=256)
def _pattern(phrase: Phrase, marks: bool) -> re.Pattern[str]:
    """Build the pattern of a phrase; it begins with a literal letter, which makes searching for it fast."""
    body = ""
    for index, word in enumerate(phrase.words):
        if index:
            alone = _unspaced().fullmatch(word) or _unspaced().fullmatch(phrase.words[index - 1])
            body += f"[\\W_]{'*' if alone else '+'}"
        body += "".join(letter + (_MARKS if marks else "") for letter in map(re.escape, _normalize(word)))
    if phrase.prefix:
        body += f"(?P<rest>{_LETTER}*)"
    elif not _unspaced().fullmatch(phrase.words[-1]):
        body += f"(?!{_LETTER})"
    return re.compile(body)


def matches(phrase: Phrase, normalized: NormalizedText) -> Iterator[re.Match[str]]:
    """Find a phrase in a text, by the same rules as the index; stops after `_MAX_MATCHES`."""
    text, marks = normalized
    alone = _unspaced().fullmatch(phrase.words[0])
    found = (
        match
        for match in _pattern(phrase, marks).finditer(text)
        if alone or match.start() == 0 or not _letter().fullmatch(text, match.start() - 1, match.start())
    )
    return islice(found, _MAX_MATCHES)


class Score(NamedTuple):
    """How well a document matches a query."""

    value: float
    coverage: float
    """Part of the query that the document has at all, from 0 to 1; rare words count more."""


def rarity(frequency: float) -> float:
    """Return how much a word counts that this share of all documents has."""
    return 0.1 - math.log(max(frequency, 1e-6))


def score_document(query: Query, frequencies: dict[Phrase, float], fields: dict[str, str]) -> Score:
    """Score a document; `frequencies` has the share of documents with each word of the query."""
    texts = {name: NormalizedText.of(text) for name, text in fields.items() if text}
    total = covered = weighted = 0.0
    positions: list[list[int]] = []
    present: dict[Phrase, bool] = {}
    for word in query.words:
        worth = rarity(frequencies.get(word, 1.0))
        total += worth
        weight, places = _weight(word, texts)
        present[word] = weight > 0
        if weight:
            covered += worth
            weighted += worth * weight / (weight + 1)
            positions.append(places)
    if not total:
        return Score(0.0, 0.0)
    phrases = 0
    for phrase in query.phrases:
        if phrase not in present:
            present[phrase] = all(present.get(Phrase((word,)), True) for word in phrase.words) and any(
                _has(phrase, text) for text in texts.values()
            )
        phrases += present[phrase]
    together = _closeness(positions) if len(positions) > 1 else 0.0
    coverage = covered / total
    value = coverage * (weighted / total + 0.3 * phrases / len(query.phrases) + 0.3 * together)
    return Score(value, coverage)


def _weight(word: Phrase, texts: dict[str, NormalizedText]) -> tuple[float, list[int]]:
    """Return the weight of a word in a document, and its positions in the text."""
    weight = 0.0
    places: list[int] = []
    for name, text in texts.items():
        hits = list(matches(word, text))
        exact = sum(1 for hit in hits if not (word.prefix and hit["rest"]))
        count = exact + 0.4 * (len(hits) - exact)
        # A short text with the word is more about it than a long one; each repetition counts less.
        weight += _FIELD_WEIGHTS[name] * (_SATURATION + 1) * count / (_SATURATION + count) / (1 + len(text.text) / 4000)
        if name == "text" or not places:
            places = [hit.start() for hit in hits] or places
    return weight, places


def _has(phrase: Phrase, text: NormalizedText) -> bool:
    return next(matches(phrase, text), None) is not None


def _closeness(places: list[list[int]]) -> float:
    """Return 1 when the words stand together, and less the farther apart their first positions are."""
    first, *others = places
    spread = min(max(_distance(start, other) for other in others) for start in first[:_MAX_STARTS])
    return 1 / (1 + spread / 80)


def _distance(start: int, places: list[int]) -> int:
    at = bisect_left(places, start)
    return min(abs(start - place) for place in places[max(0, at - 1) : at + 1])


def snippet(query: Query, text: str, size: int = SNIPPET) -> tuple[str, list[Span]]:
    """Return the part of a text that matches best, in one line, and the positions of the searched words in it."""
    line = " ".join(text.split())
    plain = NormalizedText.of(line)
    phrases = [phrase for phrase in query.phrases if _has(phrase, plain)]
    marked = _merged(hit.span() for phrase in phrases or query.words for hit in matches(phrase, plain))
    start = _best_start(marked, size)
    if start > 0:
        start = max(0, min(start - size // 4, len(line) - size))
    end = min(len(line), start + size)
    start = line.rfind(" ", max(0, start - 20), start) + 1 or start
    space = line.find(" ", end, end + 20)
    end = space if space >= 0 else end
    before, after = "…" if start else "", "…" if end < len(line) else ""
    shift = len(before) - start
    spans = [(first + shift, min(last, end) + shift) for first, last in marked if start <= first < end]
    return f"{before}{line[start:end]}{after}", spans


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _best_start(marked: list[Span], size: int) -> int:
    """Return the start of the part of this size with the most marks."""
    best, most, tail = 0, 0, 0
    for head, (first, _) in enumerate(marked):
        while first - marked[tail][0] > size * 3 // 4:
            tail += 1
        if head - tail + 1 > most:
            best, most = marked[tail][0], head - tail + 1
    return best
