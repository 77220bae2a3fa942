"""Secrets of the host's environment: substituted at the last moment, redacted in everything that comes back."""

import base64
import contextlib
import html
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, AnyStr
from urllib.parse import quote, quote_plus

from carrel.errors import ConfigurationError

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

    def hiding(self, say: Say) -> "RedactingStream":
        """The same for a text that comes in pieces, also when a value is cut in two."""
        return RedactingStream(self, say)

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


class RedactingStream:
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


_LOGGERS = (
    "httpx2",
    *(f"httpcore2{part}" for part in ("", ".connection", ".http11", ".http2", ".proxy", ".socks")),
    "mcp.client.streamable_http",
    "mcp.client.sse",
)
_OURS: ContextVar[Secrets | None] = ContextVar("carrel_secrets_of_requests", default=None)


@contextlib.contextmanager
def redacted_http_logs(secrets: Secrets) -> Iterator[None]:
    """Meanwhile, what is logged of requests made here, or in tasks begun here, has no secret in it."""
    for name in _LOGGERS:
        # Adding the same one again changes nothing.
        logging.getLogger(name).addFilter(_cleared)
    before = _OURS.set(secrets)
    try:
        yield
    finally:
        _OURS.reset(before)


def _cleared(record: logging.LogRecord) -> bool:
    secrets = _OURS.get()
    if secrets is not None:
        record.msg, record.args = secrets.hide(record.getMessage()), ()
        # Whoever called is told what went wrong; tracebacks of the SDK, and what is in them, are of use to nobody else.
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return True
