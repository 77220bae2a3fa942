"""Pure: the ways in which a secret may be written by somebody who was given it."""

import base64
import html
import json
import re
from urllib.parse import quote, quote_plus

SHORTEST = 4
"""What is shorter is no secret, and hiding it would blacken half of every text."""

LONG = 8
"""A value of so many characters is no part of another word by chance."""
MIXED = 6
"""Nor is one of so many that has letters, and digits or signs among them: `hunter2`."""

_SHORTEST_CORE = 5
"""Fewer letters of base64 are found in any picture."""
_ESCAPED = re.compile("%[0-9A-F]{2}")
_HEX = re.compile("[0-9A-Fa-f]+")
_NUMBER = re.compile(r"[+-]?[0-9]*[.,]?[0-9]+")
_WORD_BEFORE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[abfnrtv])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    r"|(?<=%[0-9A-Fa-f]{2})|(?<=[\[;0-9]m))"
)
"""Where a word may begin: after no letter, or after the last one of an escape of Python, of a URL or of a terminal."""
CONTEXT = 6
"""Characters before a value that this looks at."""


def is_secret(value: str) -> bool:
    """Whether a value is hidden: a port, a flag or a word such as `main` is not, for it stands in every other text."""
    bare = value.strip()
    if len(bare) >= LONG:
        return True
    is_word = bare.isalpha() and (bare.islower() or bare.isupper() or bare.istitle())
    return len(bare) >= SHORTEST and not is_word and not _NUMBER.fullmatch(bare)


def stands_alone(value: str, form: str) -> bool:
    """Whether this form of it is hidden only as a word of its own: a short one is a part of others by chance."""
    bare = value.strip()
    return len(bare) < LONG and form in (value, bare) and not _is_mixed(bare)


def _is_mixed(bare: str) -> bool:
    """Whether no other word has it in it by chance: no version (`v1.2.3`), no name (`us-east`), no hex number."""
    letters = sum(map(str.isalpha, bare))
    signs = [letter for letter in bare if not letter.isalpha() and letter not in "-_./: "]
    return len(bare) >= MIXED and letters >= 2 and bool(signs) and not _HEX.fullmatch(bare)


def expression_of(form: str, *, alone: bool) -> str:
    """A regular expression that finds it, anywhere or only as a word of its own."""
    if not alone:
        return re.escape(form)
    before = _WORD_BEFORE if re.match("[A-Za-z0-9]", form) else ""
    after = "(?![A-Za-z0-9])" if re.search(r"[A-Za-z0-9]\Z", form) else ""
    return f"{before}{re.escape(form)}{after}"


def forms_of(value: str) -> list[str]:
    """As it is; quoted for a URL, JSON, HTML or Python; in hex; in base64, also amid other text (`user:value`)."""
    data = value.encode("utf-8", "surrogateescape")
    quoted = [quote(data, safe=""), quote(data), quote_plus(data)]
    forms = [
        value,
        value.strip(),
        *quoted,
        *(_ESCAPED.sub(lambda found: found[0].lower(), form) for form in quoted),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        html.escape(value),
        data.hex(),
        data.hex().upper(),
        *_in_base64(data),
    ]
    return [form for form in dict.fromkeys(forms) if len(form) >= SHORTEST]


def _in_base64(data: bytes) -> list[str]:
    """Three letters stand for four: what a value looks like depends on how many bytes stand before it."""
    found = []
    for alphabet in (b"+/", b"-_"):
        found.append(base64.b64encode(data, alphabet).decode().rstrip("="))
        for before in range(3):
            written = base64.b64encode(bytes(before) + data, alphabet).decode()
            # Without the letters that its neighbours have a part in.
            core = written[(before * 8 + 5) // 6 : (before + len(data)) * 8 // 6]
            if len(core) >= _SHORTEST_CORE:
                found.append(core)
    return found
