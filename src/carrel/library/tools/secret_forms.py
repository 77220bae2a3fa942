"""Pure: the ways in which a secret may be written by somebody who was given it."""

import base64
import html
import json
import re
from urllib.parse import quote, quote_plus

SHORTEST = 4
"""What is shorter is no secret, and hiding it would blacken half of every text."""

_SHORTEST_CORE = 5
"""Fewer letters of base64 are found in any picture."""
_ESCAPED = re.compile("%[0-9A-F]{2}")


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
