"""Pure: what somebody typed into a search, how well a text answers it, and which piece of the text to show."""

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

from carrel.storage.catalogue import UNSPACED, Phrase

MAX_LENGTH = 2000
MAX_PHRASES = 24
SNIPPET = 200
"""About how many characters of a hit are shown."""

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»')
_LETTER = f"[^\\W_{UNSPACED}]"
_MARKS = "[\u0300-\u036f]*"
_MARK = re.compile("[\u0300-\u036f]")

_ENOUGH = 40
_FIRST = 8
_AGAIN = 1.2
_FIELD_WEIGHTS = {"title": 3.0, "said": 1.0, "did": 0.4}

Span = tuple[int, int]


class Query(NamedTuple):
    """What is looked for."""

    phrases: list[Phrase]
    """One for each piece between spaces, or between quotes; a document that has all of them is the best answer."""
    words: list[Phrase]
    """The single words, for when no document has all of that."""
    quoted: list[Phrase]
    """Those in quotes, without which nothing will do."""
    plain: str
    """The text as it was typed, without control characters, for looking by meaning."""


@cache
def _word() -> re.Pattern[str]:
    # Classes as large as these take some milliseconds to compile, which only who searches should pay.
    return re.compile(f"[{UNSPACED}]|{_LETTER}+")


@cache
def _letter() -> re.Pattern[str]:
    return re.compile(_LETTER)


@cache
def _unspaced() -> re.Pattern[str]:
    return re.compile(f"[{UNSPACED}]")


@cache
def _accented() -> re.Pattern[str]:
    """Characters that may have case or an accent; dashes, quotes, ideographs and emoji, the usual reasons why a text
    is not ASCII, have neither."""
    return re.compile(
        "[\u00c0-\u1fff\u2100-\u218f\u2c00-\u2dff\ua640-\ua7ff\ufb00-\ufb4f\uff00-\uffef\U00010400-\U0001e943]"
    )


def parse(text: str) -> Query:
    """Any text at all; a query without a word in it has no phrases."""
    plain = unicodedata.normalize("NFC", text[:MAX_LENGTH])
    plain = "".join(character if character.isprintable() else " " for character in plain).strip()
    phrases: list[Phrase] = []
    insisted: list[Phrase] = []
    at = 0
    for quoted in [*_QUOTED.finditer(plain), None]:
        pieces = plain[at : quoted.start() if quoted else len(plain)].split()
        phrases += [Phrase(words) for piece in pieces if (words := _words(piece))]
        if quoted:
            if inner := _words(next(group for group in quoted.groups() if group is not None)):
                insisted.append(Phrase(inner))
                phrases.append(insisted[-1])
            at = quoted.end()
    phrases = list(dict.fromkeys(phrases))[:MAX_PHRASES]
    if phrases and _goes_on(plain, phrases[-1]):
        phrases[-1] = phrases[-1]._replace(prefix=True)
    return Query(phrases, _single_words(phrases), list(dict.fromkeys(insisted))[:MAX_PHRASES], plain)


def _words(text: str) -> tuple[str, ...]:
    return tuple(_word().findall(text))[:MAX_PHRASES]


def _goes_on(plain: str, last: Phrase) -> bool:
    """The last word may be one that is still being typed; one or two letters would match too much to mean anything."""
    word = last.words[-1]
    return len(word) > 2 and plain.rstrip("*").endswith(word)


def _single_words(phrases: Sequence[Phrase]) -> list[Phrase]:
    """Each word by itself; of a text without spaces, each two characters that stand together."""
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


class _Folding(dict[int, str]):
    """What each character becomes, found out when it is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        base = unicodedata.normalize("NFD", character)[0].lower()
        self[code] = base if len(base) == 1 else character
        return self[code]


_folding = _Folding()


def _folded(text: str) -> str:
    return text.translate(_folding) if not text.isascii() and _accented().search(text) else text.lower()


class Folded(NamedTuple):
    """A text without case and accents, every character at its place."""

    text: str
    marks: bool
    """Some accents stand as characters of their own."""

    @classmethod
    def of(cls, text: str) -> "Folded":
        return cls(_folded(text), not text.isascii() and _MARK.search(text) is not None)


@lru_cache(maxsize=256)
def _pattern(phrase: Phrase, marks: bool) -> re.Pattern[str]:
    """Finds the phrase in a folded text; begins with a letter as it is, which the search for it can use."""
    body = ""
    for index, word in enumerate(phrase.words):
        if index:
            alone = _unspaced().fullmatch(word) or _unspaced().fullmatch(phrase.words[index - 1])
            body += f"[\\W_]{'*' if alone else '+'}"
        body += "".join(letter + (_MARKS if marks else "") for letter in map(re.escape, _folded(word)))
    if phrase.prefix:
        body += f"(?P<rest>{_LETTER}*)"
    elif not _unspaced().fullmatch(phrase.words[-1]):
        body += f"(?!{_LETTER})"
    return re.compile(body)


def matches(phrase: Phrase, folded: Folded) -> Iterator[re.Match[str]]:
    """Where a text has the phrase, as the catalogue sees it; at most so often as to tell that it does."""
    text, marks = folded
    alone = _unspaced().fullmatch(phrase.words[0])
    found = (
        match
        for match in _pattern(phrase, marks).finditer(text)
        if alone or match.start() == 0 or not _letter().fullmatch(text, match.start() - 1, match.start())
    )
    return islice(found, _ENOUGH)


class Judgement(NamedTuple):
    score: float
    coverage: float
    """How much of what was asked for is there at all, from 0 to 1, rare words counting more."""


def rarity(share: float) -> float:
    """How much a word tells that this share of all documents has."""
    return 0.1 - math.log(max(share, 1e-6))


def judge(query: Query, shares: dict[Phrase, float], fields: dict[str, str]) -> Judgement:
    """How well a document answers; `shares` says how common each word of the query is."""
    texts = {name: Folded.of(text) for name, text in fields.items() if text}
    total = answered = found = 0.0
    nearest: list[list[int]] = []
    present: dict[Phrase, bool] = {}
    for word in query.words:
        worth = rarity(shares.get(word, 1.0))
        total += worth
        weight, places = _weight(word, texts)
        present[word] = weight > 0
        if weight:
            answered += worth
            found += worth * weight / (weight + 1)
            nearest.append(places)
    if not total:
        return Judgement(0.0, 0.0)
    whole = 0
    for phrase in query.phrases:
        if phrase not in present:
            present[phrase] = all(present.get(Phrase((word,)), True) for word in phrase.words) and any(
                _has(phrase, text) for text in texts.values()
            )
        whole += present[phrase]
    together = _closeness(nearest) if len(nearest) > 1 else 0.0
    coverage = answered / total
    score = coverage * (found / total + 0.3 * whole / len(query.phrases) + 0.3 * together)
    return Judgement(score, coverage)


def _weight(word: Phrase, texts: dict[str, Folded]) -> tuple[float, list[int]]:
    """How much a document has of a word, and where it stands in what was said."""
    weight = 0.0
    places: list[int] = []
    for name, text in texts.items():
        hits = list(matches(word, text))
        exact = sum(1 for hit in hits if not (word.prefix and hit["rest"]))
        count = exact + 0.4 * (len(hits) - exact)
        # A short text that has the word is more about it than a long one; that it is there again says less and less.
        weight += _FIELD_WEIGHTS[name] * (_AGAIN + 1) * count / (_AGAIN + count) / (1 + len(text.text) / 4000)
        if name == "said" or not places:
            places = [hit.start() for hit in hits] or places
    return weight, places


def _has(phrase: Phrase, text: Folded) -> bool:
    return next(matches(phrase, text), None) is not None


def _closeness(places: list[list[int]]) -> float:
    """1 when the words stand together, towards 0 the farther they are apart; judged by where each stands first."""
    first, *others = places
    spread = min(max(_distance(start, other) for other in others) for start in first[:_FIRST])
    return 1 / (1 + spread / 80)


def _distance(start: int, places: list[int]) -> int:
    at = bisect_left(places, start)
    return min(abs(start - place) for place in places[max(0, at - 1) : at + 1])


def snippet(query: Query, text: str, size: int = SNIPPET) -> tuple[str, list[Span]]:
    """The piece of a text that answers best, in one line, and where the words that were asked for stand in it."""
    line = " ".join(text.split())
    plain = Folded.of(line)
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
    """Where the stretch of this size begins that has the most marks."""
    best, most, tail = 0, 0, 0
    for head, (first, _) in enumerate(marked):
        while first - marked[tail][0] > size * 3 // 4:
            tail += 1
        if head - tail + 1 > most:
            best, most = marked[tail][0], head - tail + 1
    return best
