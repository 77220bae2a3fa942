"""What the host's environment holds and nobody inside may see: filled in at the last moment, hidden on the way back."""

import base64
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from carrel.errors import ConfigurationError

SHORTEST = 4
"""What is shorter is no secret, and hiding it would blacken half of every text."""

_PLACE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Say = Callable[[str], None]


class Secrets:
    """`${NAME}` in, the environment's value out; and every value that was given out, back to `${NAME}`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: where the names are looked up, each time; this process's own when None."""
        self._environment = os.environ if environment is None else environment
        self._forms: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._pattern_bytes: re.Pattern[bytes] | None = None

    def fill(self, text: str) -> str:
        """The text with each `${NAME}` replaced; `ConfigurationError` when one is not set."""
        return _PLACE.sub(self._value, text) if "${" in text else text

    def fill_all(self, texts: Mapping[str, str]) -> dict[str, str]:
        """The same for the values of a mapping, such as an environment or headers."""
        return {name: self.fill(text) for name, text in texts.items()}

    def _value(self, place: re.Match[str]) -> str:
        name = place[1]
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"{place[0]!r} names no environment variable; write ${{NAME}}")
        value = self._environment.get(name)
        if value is None:
            raise ConfigurationError(f"the environment variable {name} is not set; set it where carrel is started")
        self._know(name, value)
        return value

    def _know(self, name: str, value: str) -> None:
        if len(value) < SHORTEST or value in self._forms:
            return
        encoded = base64.b64encode(value.encode("utf-8", "surrogateescape")).decode().rstrip("=")
        forms = [
            value,
            *map(str, (quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1], repr(value)[1:-1])),
        ]
        for form in (*forms, json.dumps(value, ensure_ascii=False)[1:-1], encoded):
            self._forms.setdefault(form, f"${{{name}}}")
        # The longest first: one secret may be the beginning of another.
        longest_first = sorted(self._forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._pattern_bytes = re.compile(b"|".join(re.escape(_bytes(form)) for form in longest_first))

    def hide(self, text: str) -> str:
        """The text with every value that was ever filled in replaced by its name again, however it is written."""
        return self._pattern.sub(lambda found: self._forms[found[0]], text) if self._pattern else text

    def hide_in(self, value: Any) -> Any:
        """The same for all texts inside data."""
        if self._pattern is None or self._pattern_bytes is None:
            return value
        match value:
            case str():
                return self.hide(value)
            case bytes():
                return self._pattern_bytes.sub(lambda found: _bytes(self._forms[_text(found[0])]), value)
            case dict():
                return {self.hide_in(key): self.hide_in(item) for key, item in value.items()}
            case list():
                return [self.hide_in(item) for item in value]
            case tuple() if type(value) is tuple:
                return tuple(self.hide_in(item) for item in value)
            case _:
                return value

    def hiding(self, say: Say) -> "HidingStream":
        """The same for a text that comes in pieces, also when a value is cut in two."""
        return HidingStream(self, say)

    def begun(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a value."""
        return max((_overlap(text, form) for form in self._forms), default=0)


class HidingStream:
    """Says pieces of a text without the values in it; keeps back only what may be the beginning of one."""

    def __init__(self, secrets: Secrets, say: Say) -> None:
        self._secrets = secrets
        self._say = say
        self._kept = ""

    def __call__(self, piece: str) -> None:
        text = self._secrets.hide(self._kept + piece)
        kept = self._secrets.begun(text)
        self._kept = text[len(text) - kept :]
        if len(text) > kept:
            self._say(text[: len(text) - kept])

    def end(self) -> None:
        """There is no more: say what was kept back."""
        kept, self._kept = self._kept, ""
        if kept:
            self._say(kept)


def _overlap(text: str, form: str) -> int:
    for length in range(min(len(form) - 1, len(text)), 0, -1):
        if text.endswith(form[:length]):
            return length
    return 0


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
