"""Text for people: control characters made visible, "did you mean", sizes, counts, times, JSON. Pure."""

import difflib
import heapq
import json
import math
import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from html import escape
from typing import Any
from urllib.parse import quote

import orjson

# Characters that act without being seen: they move a cursor or set a title (C0, DEL, C1), change the direction of
# letters (bidi embeddings, overrides and isolates), break lines, or carry text that only a model reads (tag characters
# and runs of zero-width characters). A single zero-width character joins or separates letters in many scripts, or
# selects a variant of one, so it is kept.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
    "|(?<=[\u200b-\u200d\u2060-\u2064])[\u200b-\u200d\u2060-\u2064]"
    "|(?<=[\ufe00-\ufe0f\U000e0100-\U000e01ef])[\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
_LINE_ENDS = re.compile(r"\r\n?")
_LONGEST_NAME, _MOST_NAMES = 200, 50
"""Comparing names takes the square of their length, so only their beginnings and the likeliest ones are compared."""
_LONGEST_CELL = 2000
"""Characters of a text in a table for notebooks."""
_MISSPELLED = 0.8
"""The least similarity of an unknown field to a known one that is reported as a misspelling."""


def neutralize_control_chars(text: object) -> str:
    """Replace each control character with its picture (␛) or its number (⟦U+202E⟧)."""
    return _CONTROL.sub(_visible, _LINE_ENDS.sub("\n", str(text)))


def single_line(text: object) -> str:
    """Neutralize control characters and replace each run of white space with one space."""
    return " ".join(neutralize_control_chars(text).split())


def escape_control_chars_in_json(text: str) -> str:
    """Write each control character of a JSON text as an escape; its value stays the same."""
    return _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟦U+{code:04X}⟧"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error message about an unknown name: similar names, else the existing ones, else nothing."""
    name = name[:_LONGEST_NAME]
    known = sorted({other[:_LONGEST_NAME] for other in names})
    folded = {other.lower(): other for other in known}
    pairs = _letter_pairs(name.lower())
    alike = heapq.nlargest(_MOST_NAMES, folded, key=lambda other: _likeness(pairs, _letter_pairs(other)))
    found = difflib.get_close_matches(name.lower(), alike, n=3, cutoff=0.6)
    found += [other for other in folded if name and name.lower() in other and other not in found][: 3 - len(found)]
    if found:
        return f"; did you mean {_joined_with_or([folded[other] for other in found])}?"
    if not known:
        return ""
    shown = ", ".join(known[:8])
    return f"; there is {shown}" if len(known) <= 8 else f"; there are {shown} and {len(known) - 8} more"


def refuse_misspelled_fields(value: object, known: Collection[str]) -> None:
    """Raise ValueError for a field that is almost the name of a known one; other unknown fields are allowed."""
    if not isinstance(value, dict):
        return
    for name in value.keys() - set(known):
        similar = difflib.get_close_matches(str(name).lower(), known, 1, _MISSPELLED)
        if similar:
            raise ValueError(f"there is no field {name!r}; did you mean {similar[0]!r}?")


def _letter_pairs(word: str) -> set[str]:
    return {word[at : at + 2] for at in range(max(len(word) - 1, 1))}


def _likeness(one: set[str], other: set[str]) -> float:
    return len(one & other) / (len(one) + len(other))


def _joined_with_or(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def parse_time(value: object) -> datetime | None:
    """An ISO time in UTC; None for anything else."""
    if not isinstance(value, str) or not value:
        return None
    try:
        when = datetime.fromisoformat(value)
        return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def readable_time(value: object) -> str:
    """An ISO time as day and time in UTC; anything else unchanged."""
    when = parse_time(value)
    return f"{when.day} {when:%b %Y, %H:%M} UTC" if when else str(value or "")


def readable_size(count: int) -> str:
    """A number of bytes with a unit."""
    if count < 1024:
        return "1 byte" if count == 1 else f"{count} bytes"
    size = count / 1024
    for unit in ("KB", "MB"):
        if size < 1024:
            return f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GB"


def count_variables(count: int) -> str:
    return "1 variable" if count == 1 else f"{count:,} variables"


def count_messages(count: int) -> str:
    """A number of messages in words, such as `1 message`."""
    return "1 message" if count == 1 else f"{count:,} messages"


def html_table(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """A table for notebooks with a name and a text in each row; the text is escaped, and cut where it is long."""
    body = "".join(f"<tr><th>{escape(name)}</th><td><pre>{_cell(str(text))}</pre></td></tr>" for name, text in rows)
    return f"<table><caption>{escape(single_line(caption))}</caption>{body}</table>"


def _cell(text: str) -> str:
    rest = len(text) - _LONGEST_CELL
    return escape(neutralize_control_chars(text[:_LONGEST_CELL])) + (f"… {rest:,} more characters" if rest > 0 else "")


# --- what JSON or UTF-8 cannot hold -----------------------------------------------------------------------------------


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can hold the text, that is, whether it has no lone surrogate."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def escape_surrogates(data: Any) -> Any:
    """Return JSON data with every lone surrogate written as its escape."""
    match data:
        case str():
            return data if data.isascii() else data.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {escape_surrogates(name): escape_surrogates(part) for name, part in data.items()}
        case list() | tuple():
            return [escape_surrogates(part) for part in data]
        case _:
            return data


def url_name(name: str) -> str:
    """Return a file's name or path as it is, percent-encoded if it is not UTF-8."""
    return name if is_utf8(name) else quote(name, safe="/", errors="surrogateescape")


def json_bytes(data: Any) -> bytes:
    """Return data as JSON, including what orjson refuses: integers of any size, surrogates, deep nesting."""
    try:
        return orjson.dumps(data)
    except TypeError:
        pass
    try:
        return json.dumps(data, allow_nan=False).encode("ascii")
    except ValueError:
        return json.dumps(_without_infinities(data)).encode("ascii")


def _without_infinities(data: Any) -> Any:
    match data:
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: _without_infinities(part) for name, part in data.items()}
        case list() | tuple():
            return [_without_infinities(part) for part in data]
        case _:
            return data
