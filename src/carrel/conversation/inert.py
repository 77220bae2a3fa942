"""Pure: text made harmless to look at, on a terminal and on a page; what would act unseen is shown by name instead."""

import json
import re

# What moves a cursor or a title (C0, DEL, C1), turns letters around (bidi embeddings, overrides and isolates),
# breaks lines where nobody sees it, or carries words that only a model reads: tag characters, and rows of those without
# a width. One alone joins or parts letters in many scripts, or chooses between two forms of one.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
    "|(?<=[\u200b-\u200d\u2060-\u2064])[\u200b-\u200d\u2060-\u2064]"
    "|(?<=[\ufe00-\ufe0f\U000e0100-\U000e01ef])[\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
_LINES = re.compile(r"\r\n?")


def _named(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟦U+{code:04X}⟧"


def inert(text: object) -> str:
    """The text with every character that acts shown as a picture (␛) or by its number (⟦U+202E⟧)."""
    return _ACTING.sub(_named, _LINES.sub("\n", str(text)))


def inert_json(text: str) -> str:
    """JSON that says the same, with every character that acts as an escape."""
    return _ACTING.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def inert_line(text: object) -> str:
    """The same on one line: every run of white space is one space."""
    return " ".join(inert(text).split())
