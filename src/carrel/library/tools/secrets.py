"""What the host's environment holds and nobody inside may see: filled in at the last moment, hidden on the way back."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, AnyStr

from carrel.errors import ConfigurationError
from carrel.library.tools.secret_forms import CONTEXT, expression_of, forms_of, is_secret, stands_alone

_PLACE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_LARGEST = 10**100
"""Larger numbers are no secrets, and Python does not write them all."""

Say = Callable[[str], None]


class Secrets:
    """`${NAME}` in, the environment's value out; and every value that was given out, back to `${NAME}`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: where the names are looked up, each time; this process's own when None."""
        self._environment = os.environ if environment is None else environment
        self._forms: dict[str, str] = {}
        self._alone: dict[str, bool] = {}
        self._pattern: re.Pattern[str] | None = None
        self._in_bytes: dict[bytes, bytes] = {}
        self._pattern_bytes: re.Pattern[bytes] | None = None

    def fill(self, text: str) -> str:
        """The text with each `${NAME}` replaced; `ConfigurationError` when one is not set."""
        return _PLACE.sub(self._value, text) if "${" in text else text

    def fill_all(self, texts: Mapping[str, str]) -> dict[str, str]:
        """The same for the values of a mapping, such as an environment or headers."""
        return {name: self.fill(text) for name, text in texts.items()}

    def fill_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The same for headers, without white space at their ends, such as the line break of a file that a secret was
        read from; `ConfigurationError` for one that cannot be sent, which does not tell what is in it."""
        filled = {name: text.strip() for name, text in self.fill_all(headers).items()}
        for name, text in filled.items():
            if not (text.isascii() and text.isprintable()):
                told = f"with {headers[name]!r} filled in it is not plain ASCII on one line"
                raise ConfigurationError(f"the header {name} cannot be sent: {told}")
        return filled

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
        if value in self._forms or not is_secret(value):
            return
        for form in forms_of(value):
            self._forms.setdefault(form, f"${{{name}}}")
            self._alone[form] = self._alone.get(form, True) and stands_alone(value, form)
        # The longest first: one secret may be the beginning of another.
        longest_first = sorted(self._forms, key=len, reverse=True)
        expressions = [expression_of(form, alone=self._alone[form]) for form in longest_first]
        self._pattern = re.compile("|".join(expressions))
        self._in_bytes = {_bytes(form): _bytes(self._forms[form]) for form in longest_first}
        self._pattern_bytes = re.compile(_bytes("|".join(expressions)))

    @property
    def known(self) -> int:
        """How many forms of values are known by now; what was cleared when they were fewer may have others in it."""
        return len(self._forms)

    def hide(self, text: str, before: str = "") -> str:
        """The text with every value that was ever filled in replaced by its name again, in all forms that are known.

        `before`: what stands before it, where that matters."""
        # Looking for each in turn is many times quicker than an expression of all, and most texts have none.
        if self._pattern is None or not any(form in text for form in self._forms):
            return text
        if not before:
            return self._pattern.sub(lambda found: self._forms[found[0]], text)
        said: list[str] = []
        last, text = len(before), before + text
        for found in self._pattern.finditer(text, last):
            said += text[last : found.start()], self._forms[found[0]]
            last = found.end()
        return "".join([*said, text[last:]])

    def hide_bytes(self, data: bytes) -> bytes:
        """The same for bytes."""
        if self._pattern_bytes is None or not any(form in data for form in self._in_bytes):
            return data
        return self._pattern_bytes.sub(lambda found: self._in_bytes[found[0]], data)

    def hide_cut(self, data: bytes, *, start: bool = False, end: bool = False) -> bytes:
        """The same for what was cut out of something: at a cut, also without what may be a part of a value."""
        data = self.hide_bytes(data)
        if start:
            data = data[max((_rest(data, form) for form in self._in_bytes), default=0) :]
        if end:
            data = data[: len(data) - max((_overlap(data, form) for form in self._in_bytes), default=0)]
        return data

    def hide_in(self, value: Any) -> Any:
        """The same for all texts inside data; a number is replaced when it is a value as a whole."""
        if self._pattern is None:
            return value
        match value:
            case str():
                return self.hide(value)
            case bytes():
                return self.hide_bytes(value)
            case dict():
                return {self.hide_in(key): self.hide_in(item) for key, item in value.items()}
            case bool():
                return value
            case int():
                return self._forms.get(str(value), value) if abs(value) < _LARGEST else value
            case list():
                return [self.hide_in(item) for item in value]
            case set() | frozenset():
                return type(value)(map(self.hide_in, value))
            case tuple() if type(value) is tuple:
                return tuple(self.hide_in(item) for item in value)
            case _:
                return value

    def hiding(self, say: Say) -> "HidingStream":
        """The same for a text that comes in pieces, also when a value is cut in two."""
        return HidingStream(self, say)

    def begun(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a value, or one if the word ends there."""
        return max((_overlap(text, form, whole=self._alone[form]) for form in self._forms), default=0)

    def hide_begun(self, text: str, start: int) -> tuple[str, int]:
        """What can be said of a text from `start` on while more of it is to come, and how far into it that is."""
        if self._pattern is None:
            return text[start:], len(text)
        said: list[str] = []
        open_from = len(text) - self.begun(text[start:])
        for found in self._pattern.finditer(text, start):
            if found.start() >= open_from:
                break
            said += text[start : found.start()], self._forms[found[0]]
            start = found.end()
            if start > open_from:
                open_from = len(text) - self.begun(text[start:])
        return "".join([*said, text[start:open_from]]), open_from


class HidingStream:
    """Says pieces of a text without the values in it; keeps back only what may be the beginning of one."""

    def __init__(self, secrets: Secrets, say: Say) -> None:
        self._secrets = secrets
        self._say = say
        self._before = ""
        self._kept = ""

    def __call__(self, piece: str) -> None:
        text = self._before + self._kept + piece
        said, upto = self._secrets.hide_begun(text, len(self._before))
        self._before, self._kept = text[max(0, upto - CONTEXT) : upto], text[upto:]
        if said:
            self._say(said)

    def end(self) -> None:
        """There is no more: say what was kept back."""
        kept = self._secrets.hide(self._kept, self._before)
        self._before = self._kept = ""
        if kept:
            self._say(kept)


def _overlap(text: AnyStr, form: AnyStr, *, whole: bool = False) -> int:
    """How much of the form's beginning, but not all of it unless `whole`, is the text's end."""
    for length in range(min(len(form) if whole else len(form) - 1, len(text)), 0, -1):
        if text.endswith(form[:length]):
            return length
    return 0


def _rest(data: bytes, form: bytes) -> int:
    """How much of the form's end, but not all of it, is the data's beginning."""
    for length in range(min(len(form) - 1, len(data)), 0, -1):
        if form.endswith(data[:length]):
            return length
    return 0


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
