"""Pure: which words a text has, in the form in which they are compared."""

import re
import unicodedata

_JOINTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[^\W_]+")
# Written without spaces: kana, Han, Hangul, Thai, Lao, Khmer, Myanmar.
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]+"
)

_SAYING_NOTHING = frozenset(
    (  # noqa: SIM905 - a hundred quoted words in a column are harder to read
        "a about all also am an and any are as at be been being but by can could did do does doing done down each for "
        "from get gets give gives had has have having he her him his how i if in into is it its just let like make "
        "makes may me might my need needs no not now of off on one onto or our out over please shall she should so "
        "some such than that the their them then there these they thing things this those to too up us use used uses "
        "using very want wants was we were what when where which while who whom whose why will with within without "
        "would you your "
    ).split()
)


def terms(text: str) -> list[str]:
    """The words of a text as they are compared: `fetchJSON_files` and "Fetching a JSON file" have the same ones."""
    found: list[str] = []
    for word in spelled(text):
        if word.isascii() or not _UNSPACED.search(word):
            found.append(stem(word))
        else:
            found += _unspaced_terms(word)
    return found


def spelled(text: str) -> list[str]:
    """The words of a text as they are written, but for case and accents; names fall into their parts."""
    return _WORD.findall(_folded(_JOINTS.sub(" ", text)))


def in_one_piece(name: str) -> str:
    """A name as people type it who know it: `fetchjson` is `fetch_json`."""
    return "".join(_WORD.findall(_folded(name)))


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    # Accents go; the marks that change a kana's sound are put back by composing again.
    plain = "".join(piece for piece in unicodedata.normalize("NFKD", text) if not "\u0300" <= piece <= "\u036f")
    return unicodedata.normalize("NFKC", plain).casefold()


def _unspaced_terms(word: str) -> list[str]:
    """Each sign and each two neighbours: there is nothing else to tell where a word ends."""
    found: list[str] = []
    at = 0
    for run in _UNSPACED.finditer(word):
        if word[at : run.start()]:
            found.append(stem(word[at : run.start()]))
        signs = run[0]
        found += [*signs, *(signs[i : i + 2] for i in range(len(signs) - 1))]
        at = run.end()
    if word[at:]:
        found.append(stem(word[at:]))
    return found


def stem(word: str) -> str:
    """What "compress", "compressing", "compressed", "compresses" and "compression" have in common."""
    if len(word) <= 3 or not word.isascii() or not word.isalpha():
        return word
    for ending, instead, least in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= least:
            word = word[: -len(ending)] + instead
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeioulsz":
        word = word[:-1]
    if len(word) > 4 and word[-1] in "ey":
        word = word[:-1] + ("i" if word[-1] == "y" else "")
    return word


_ENDINGS = (
    ("news", "news", 0),
    ("ations", "ate", 3),
    ("ation", "ate", 3),
    ("izers", "ize", 3),
    ("izer", "ize", 3),
    ("ions", "", 4),
    ("ion", "", 4),
    ("ments", "", 5),
    ("ment", "", 5),
    ("ings", "", 3),
    ("ing", "", 3),
    ("iest", "y", 3),
    ("ies", "y", 2),
    ("ied", "y", 2),
    ("sses", "ss", 2),
    ("ators", "ate", 3),
    ("ator", "ate", 3),
    ("ers", "", 4),
    ("er", "", 4),
    ("ed", "", 3),
    ("ly", "", 4),
    ("shes", "sh", 2),
    ("ches", "ch", 2),
    ("xes", "x", 2),
    ("ss", "ss", 2),
    ("us", "us", 2),
    ("is", "is", 2),
    ("s", "", 3),
)


def telling_terms(query: str) -> list[str]:
    """The words of a question without those that every question has; all of them when it has no others."""
    said = spelled(query)
    telling = " ".join(word for word in said if word not in _SAYING_NOTHING)
    return list(dict.fromkeys(terms(telling or query)))
