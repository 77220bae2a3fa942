"""Secrets of the host's environment: substituted just before use, redacted in everything that comes back."""

import base64
import contextlib
import html
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from carrel.errors import ConfigurationError

SHORTEST = 4
"""Shorter values are not redacted: they are part of many other texts."""

LONG = 8
"""A value of this length is redacted anywhere, also within a word."""
MIXED = 6
"""So is a value of this length with letters and with digits or symbols: `hunter2`."""

_SHORTEST_BASE64 = 5
"""Shorter pieces of base64 are found in any picture."""
_HEX = re.compile("[0-9A-Fa-f]+")
_NUMBER = re.compile(r"[+-]?[0-9]*[.,]?[0-9]+")
_WORD_BEFORE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[abfnrtv])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    r"|(?<=%[0-9A-Fa-f]{2})|(?<=[\[;0-9]m))"
)
"""Matches where a word may begin: not after a letter, or after an escape of Python, of a URL or of a terminal."""
CONTEXT = 6
"""Characters before a value that the expression above looks at."""


def is_secret(value: str) -> bool:
    """Whether a value is redacted: a port, a flag or a word such as `main` is not, because they are in many texts."""
    bare = value.strip()
    if len(bare) >= LONG:
        return True
    is_word = bare.isalpha() and (bare.islower() or bare.isupper() or bare.istitle())
    return len(bare) >= SHORTEST and not is_word and not _NUMBER.fullmatch(bare)


def is_word_only(value: str, form: str) -> bool:
    """Whether this form of a value is redacted only as a separate word, because it is short."""
    bare = value.strip()
    return len(bare) < LONG and form in (value, bare) and not _is_mixed(bare)


def _is_mixed(bare: str) -> bool:
    """Whether a value is unlikely within other words: no version (`v1.2.3`), name (`us-east`) or hex number."""
    letters = sum(map(str.isalpha, bare))
    symbols = [letter for letter in bare if not letter.isalpha() and letter not in "-_./: "]
    return len(bare) >= MIXED and letters >= 2 and bool(symbols) and not _HEX.fullmatch(bare)


def _expression(form: str, *, word_only: bool) -> str:
    """Return a regular expression for a form, anywhere or only as a separate word."""
    if not word_only:
        return re.escape(form)
    before = _WORD_BEFORE if re.match("[A-Za-z0-9]", form) else ""
    after = "(?![A-Za-z0-9])" if re.search(r"[A-Za-z0-9]\Z", form) else ""
    return f"{before}{re.escape(form)}{after}"


def encoded_forms(value: str) -> list[str]:
    """Return a value as it is, in a URL, JSON, Python or HTML, and in base64, also within a longer text."""
    data = value.encode("utf-8", "surrogateescape")
    forms = [
        value,
        value.strip(),
        quote(data, safe=""),
        quote(data),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        html.escape(value),
        *_base64_forms(data),
    ]
    return [form for form in dict.fromkeys(forms) if len(form) >= SHORTEST]


def _base64_forms(data: bytes) -> list[str]:
    """Return the base64 of data at each of the three offsets, without the letters that neighbors contribute to."""
    found = []
    for alphabet in (b"+/", b"-_"):
        found.append(base64.b64encode(data, alphabet).decode().rstrip("="))
        for offset in range(3):
            encoded = base64.b64encode(bytes(offset) + data, alphabet).decode()
            core = encoded[(offset * 8 + 5) // 6 : (offset + len(data)) * 8 // 6]
            if len(core) >= _SHORTEST_BASE64:
                found.append(core)
    return found


_PLACEHOLDER = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_LARGEST = 10**100
"""Larger numbers are not compared, because Python does not convert all of them to text."""


class Secrets:
    """Replaces `${NAME}` by the environment's value, and in all output every replaced value by `${NAME}` again."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: where names are looked up, each time; None for that of this process."""
        self._environment = os.environ if environment is None else environment
        self._forms: dict[str, str] = {}
        """All forms of the known values, the longest first, with their placeholders."""
        self._word_only: dict[str, bool] = {}
        self._pattern: re.Pattern[str] | None = None
        self._forms_in_bytes: dict[bytes, bytes] = {}
        self._pattern_in_bytes: re.Pattern[bytes] | None = None

    def substitute(self, text: str) -> str:
        """Return the text with each `${NAME}` replaced; `ConfigurationError` when one is not set."""
        return _PLACEHOLDER.sub(self._value, text) if "${" in text else text

    def substitute_all(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Substitute in the values of a mapping, such as an environment."""
        return {name: self.substitute(text) for name, text in texts.items()}

    def substitute_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Substitute in headers, without white space at their ends, such as the line break of a file that a secret was
        read from; `ConfigurationError` for one that cannot be sent, which does not contain the value."""
        values = {name: text.strip() for name, text in self.substitute_all(headers).items()}
        for name, text in values.items():
            if not (text.isascii() and text.isprintable()):
                raise ConfigurationError(
                    f"the header {name} cannot be sent: the value of {headers[name]!r} is not plain ASCII on one line"
                )
        return values

    def _value(self, placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"{placeholder[0]!r} names no environment variable; write ${{NAME}}")
        value = self._environment.get(name)
        if value is None:
            raise ConfigurationError(f"the environment variable {name} is not set; set it where carrel is started")
        self._remember(name, value)
        return value

    def _remember(self, name: str, value: str) -> None:
        if value in self._forms or not is_secret(value):
            return
        for form in encoded_forms(value):
            self._forms.setdefault(form, f"${{{name}}}")
            self._word_only[form] = self._word_only.get(form, True) and is_word_only(value, form)
        # The longest first, because one secret may be the beginning of another.
        self._forms = dict(sorted(self._forms.items(), key=lambda item: -len(item[0])))
        expression = "|".join(_expression(form, word_only=self._word_only[form]) for form in self._forms)
        self._pattern = re.compile(expression)
        self._forms_in_bytes = {_encode(form): _encode(placeholder) for form, placeholder in self._forms.items()}
        self._pattern_in_bytes = re.compile(_encode(expression))

    @property
    def known(self) -> int:
        """How many forms are known; a text that was redacted when there were fewer may contain others."""
        return len(self._forms)

    def redact(self, text: str, before: str = "") -> str:
        """Return the text with every known value replaced by its placeholder, in all known forms.

        `before`: the text before it, which decides where a word begins."""
        # Looking for each form in turn is many times faster than one expression, and most texts have none.
        if self._pattern is None or not any(form in text for form in self._forms):
            return text
        parts: list[str] = []
        last, text = len(before), before + text
        for found in self._pattern.finditer(text, last):
            parts += text[last : found.start()], self._forms[found[0]]
            last = found.end()
        return "".join([*parts, text[last:]])

    def redact_bytes(self, data: bytes) -> bytes:
        """Redact in bytes."""
        if self._pattern_in_bytes is None or not any(form in data for form in self._forms_in_bytes):
            return data
        return self._pattern_in_bytes.sub(lambda found: self._forms_in_bytes[found[0]], data)

    def redact_piece(self, data: bytes, *, cut_start: bool = False, cut_end: bool = False) -> bytes:
        """Redact in a piece of longer output; at a cut, remove as many bytes as a part of a value may have."""
        margin = max(map(len, self._forms_in_bytes), default=1) - 1
        data = self.redact_bytes(data)
        return data[margin if cut_start else 0 : max(len(data) - margin, 0) if cut_end else None]

    def redact_data(self, value: Any) -> Any:
        """Redact in all texts within data; a number is replaced if all of it is a value."""
        if self._pattern is None:
            return value
        match value:
            case str():
                return self.redact(value)
            case bytes():
                return self.redact_bytes(value)
            case dict():
                return {self.redact_data(key): self.redact_data(item) for key, item in value.items()}
            case bool():
                return value
            case int():
                return self._forms.get(str(value), value) if abs(value) < _LARGEST else value
            case list():
                return [self.redact_data(item) for item in value]
            case set() | frozenset():
                return type(value)(map(self.redact_data, value))
            case tuple() if type(value) is tuple:
                return tuple(self.redact_data(item) for item in value)
            case _:
                return value

    def redacting(self, on_output: Callable[[str], None]) -> "RedactingStream":
        """Return a stream that redacts text which comes in pieces, also where a value is split between two."""
        return RedactingStream(self, on_output)

    def redact_beginning(self, text: str, start: int) -> tuple[str, int]:
        """Redact a text from `start` on while more of it is to come; also return how far into the text that reaches."""
        if self._pattern is None:
            return text[start:], len(text)
        parts: list[str] = []
        end = len(text) - self._open_length(text[start:])
        for found in self._pattern.finditer(text, start):
            if found.start() >= end:
                break
            parts += text[start : found.start()], self._forms[found[0]]
            start = found.end()
            if start > end:
                end = len(text) - self._open_length(text[start:])
        return "".join([*parts, text[start:end]]), end

    def _open_length(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a value, or a word that ends here."""
        for length in range(min(max(map(len, self._forms)), len(text)), 0, -1):
            end = text[-length:]
            if any(form.startswith(end) and (len(form) > length or self._word_only[form]) for form in self._forms):
                return length
        return 0


class RedactingStream:
    """Passes on pieces of a text without the values in it; holds back only what may be the beginning of one."""

    def __init__(self, secrets: Secrets, on_output: Callable[[str], None]) -> None:
        self._secrets = secrets
        self._on_output = on_output
        self._before = ""
        self._held_back = ""

    def __call__(self, piece: str) -> None:
        text = self._before + self._held_back + piece
        redacted, end = self._secrets.redact_beginning(text, len(self._before))
        self._before, self._held_back = text[max(0, end - CONTEXT) : end], text[end:]
        if redacted:
            self._on_output(redacted)

    def end(self) -> None:
        """Pass on what was held back; there is no more."""
        rest = self._secrets.redact(self._held_back, self._before)
        self._before = self._held_back = ""
        if rest:
            self._on_output(rest)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


_LOGGERS = (
    "httpx2",
    *(f"httpcore2{part}" for part in ("", ".connection", ".http11", ".http2", ".proxy", ".socks")),
    "mcp.client.stdio",
    "mcp.client.streamable_http",
    "mcp.client.sse",
)
_current: ContextVar[Secrets | None] = ContextVar("carrel_secrets_of_requests", default=None)


@contextlib.contextmanager
def redacted_http_logs(secrets: Secrets) -> Iterator[None]:
    """Redact what HTTP clients log of requests made in this block, or in tasks started in it."""
    for name in _LOGGERS:
        # Adding the same filter again changes nothing.
        logging.getLogger(name).addFilter(_redact_record)
    token = _current.set(secrets)
    try:
        yield
    finally:
        _current.reset(token)


def _redact_record(record: logging.LogRecord) -> bool:
    secrets = _current.get()
    if secrets is not None:
        record.msg, record.args = secrets.redact(record.getMessage()), ()
        # The caller gets the error; tracebacks of the SDK could contain secrets and are of no use here.
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return True
