"""Replace secrets in a message before it is written. The patterns are in `secret_patterns.toml`."""

import math
import re
import tomllib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from typing import Any

from carrel.conversation.messages import ConversationMessage
from carrel.errors import MessageRefused

_WORD_START = r"(?<![A-Za-z0-9_-])"
_NAMES = r"pass(?:word|wd|phrase)|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?key|credentials?"
_HARMLESS_BEFORE = re.compile(
    r"(?i)(?:page|next|prev|previous|continuation|sync|cancellation|cursor|public|public_?key|max|num|eos|bos|pad)[_-]?$"
)
_PLACEHOLDER = re.compile(
    r"(?i)[<{$*(\[]|%[sd(%]|x{3,}|\.{3}|…|https?://|my(?:pass|secret|token|key|user)|(?:your|example|dummy|fake|placeholder|changeme|redacted|none|null|true|false|"
    r"undefined|process\.env|os\.(?:environ|getenv)|env|config|settings|self|this|secrets?)(?![a-z0-9])"
)
_IDENTIFIER = re.compile(r"[A-Za-z]++|_?[A-Za-z]++[0-9]{0,2}(?:[_.-][A-Za-z]++[0-9]{0,2})++")
_NO_PASSWORD = re.compile(
    r"(?i)sha-?[0-9]|md5|argon2|base64|b?crypt|scrypt|pbkdf2|utf-?8|oauth2|(?:rsa|aes)-?[0-9]|pass|pwd|pw[0-9]"
)
"""Short texts with a digit that stand for a password: names of hash functions and of variables."""
_IN_EXAMPLES = frozenset({"password", "passwd", "pass", "pwd", "secret", "token", "user", "username"})
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.=+-]+)*;base64,[A-Za-z0-9+/=\s]*")
"""A text that is an image or another file; it is not searched."""


@dataclass(frozen=True)
class Pattern:
    """One kind of secret: its group `secret` is replaced, or the whole match if it has no such group."""

    name: str
    regex: str | re.Pattern[str]
    hints: tuple[str, ...] = ()
    """Texts of which at least one must occur, in any case, so that most texts are skipped by a plain search."""
    accepts: Callable[[str], bool] | None = None
    """A further check of each secret that was found; False keeps the text."""
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hints", tuple(hint.lower() for hint in self.hints))
        object.__setattr__(self, "compiled", re.compile(self.regex))

    def replace(self, text: str, lowered: str) -> str:
        """Replace each secret in a text by the name of the pattern."""
        if self.hints and not any(hint in lowered for hint in self.hints):
            return text
        return self.compiled.sub(self._replacement, text)

    def _replacement(self, match: re.Match[str]) -> str:
        group: str | int = "secret" if "secret" in self.compiled.groupindex else 0
        secret = match[group]
        if secret is None or (self.accepts is not None and not self.accepts(secret)):
            return match[0]
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return f"{match[0][:start]}[redacted:{self.name}]{match[0][end:]}"


def entropy(text: str) -> float:
    """Bits per character: about 4 for random hexadecimal, 5 and more for random letters and digits, less for words."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)


def looks_random(text: str) -> bool:
    """Whether a value is long, has letters and digits, and repeats no characters too often."""
    if len(text) < 12 or not any(map(str.isdigit, text)) or not any(map(str.isalpha, text)):
        return False
    return entropy(text) >= min(3.0, math.log2(len(text)) - 0.6)


def is_placeholder(text: str) -> bool:
    """Whether a value only represents a secret: `<password>`, `${TOKEN}`, `your-key-here`, `settings.token`."""
    return bool(_PLACEHOLDER.match(text) or _IDENTIFIER.fullmatch(text)) or text.lower() in _IN_EXAMPLES


def is_secret_named(name: str, value: str, *, is_literal: bool = False) -> bool:
    """Whether the value of something named `password`, `api_key` and so on is a secret.

    `is_literal`: the value cannot be a name in code, so that a short password counts too."""
    is_reference = value.lower().endswith(name.lower())
    if is_reference or is_placeholder(value) or "(" in value or "[" in value:
        return False
    if name.lower().startswith(("pass", "pwd")):
        mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
        return mixed and (len(value) >= 8 or (is_literal and len(value) >= 6 and not _NO_PASSWORD.match(value)))
    return looks_random(value)


def _is_token(token: str) -> bool:
    if _PLACEHOLDER.match(token):
        return False
    return _is_random_letters(token) or (not is_placeholder(token) and looks_random(token))


def _is_random_letters(token: str) -> bool:
    """Whether many letters are neither a word nor a camelCase name, which repeat letters and have few capitals."""
    if len(token) < 20 or not token.isalpha() or entropy(token) < 3.5:
        return False
    humps = 1 + sum(before.islower() and after.isupper() for before, after in pairwise(token))
    return humps == 1 or len(token) / humps < 3.5


def _is_password(password: str) -> bool:
    """Whether a text in the place of a password is one, however simple."""
    return not _PLACEHOLDER.match(password) and password.lower() not in _IN_EXAMPLES


def _has_digit(value: str) -> bool:
    return any(map(str.isdigit, value))


_ACCEPT = {"digit": _has_digit, "token": _is_token, "password": _is_password}


def _read_patterns() -> tuple[Pattern, ...]:
    source = files("carrel.conversation").joinpath("secret_patterns.toml").read_text("utf-8")
    return tuple(
        Pattern(
            entry["name"],
            entry["regex"] if entry.get("anywhere") else _WORD_START + entry["regex"],
            tuple(entry["hints"]),
            _ACCEPT.get(entry.get("accept")),
        )
        for entry in tomllib.loads(source)["pattern"]
    )


PATTERNS: tuple[Pattern, ...] = _read_patterns()
"""Keys and tokens of well-known services, and the places where passwords stand."""

_ASSIGNED = re.compile(
    rf"(?P<name>(?i:{_NAMES})|(?<=_)KEY)[\"'`\\]{{0,2}}[ \t]{{0,4}}(?P<sign>=>|:=|[:=])[ \t]{{0,4}}[\"'`\\]{{0,2}}"
    r"(?P<secret>[^\s\"'`\\,;<>]{6,512}+)"
)
_ASSIGNED_HINTS = (
    *("password", "passwd", "passphrase", "pwd", "secret", "token", "credential", "_key="),
    *(f"{what}{dash}key" for what in ("api", "access", "private", "auth") for dash in ("", "_", "-")),
)
_ENV_START = re.compile(r"(?:^|[\n;]|\\n)[ \t]{0,8}(?:export[ \t]{1,4}|set[ \t]{1,4}|-[ \t])?[A-Z0-9_]{0,64}$")
_SECRET_KEY = re.compile(rf"(?i)(?P<before>.{{0,64}}?)(?P<name>{_NAMES})")


def redact_assignments(text: str, lowered: str) -> str:
    """Replace values after names of secrets: `password = "…"`, `"api_key": "…"`, lines of .env files."""
    if not any(hint in lowered for hint in _ASSIGNED_HINTS):
        return text
    return _ASSIGNED.sub(_replaced_assignment, text)


def _replaced_assignment(match: re.Match[str]) -> str:
    name, secret = match["name"], match["secret"].rstrip("})]")
    before = match.string[max(0, match.start() - 80) : match.start()]
    tight = match[0][len(name) :].startswith("=") and not match[0][len(name) + 1].isspace()
    in_env = tight and name.isupper() and bool(_ENV_START.search(before))
    if in_env and name != "KEY":
        found = _is_password(secret) and not secret.isdigit()
    else:
        # `password = input1` is code; with a colon, in quotes, or without a space it is the password itself.
        is_literal = tight or match["sign"] == ":" or match[0][match.start("secret") - match.start() - 1] in "\"'`"
        found = is_secret_named(name, secret, is_literal=is_literal) and (in_env or name != "KEY")
    if not found or _HARMLESS_BEFORE.search(before):
        return match[0]
    start = match.start("secret") - match.start()
    return f"{match[0][:start]}[redacted:{'env' if in_env else 'assignment'}]{match[0][start + len(secret) :]}"


class Redactor:
    """Replaces secrets in messages by `[redacted:NAME]`; pass it to a store as `redact=`.

    `patterns` are the kinds to search for (default `PATTERNS`); `assignments` says whether values of names such as
    `password` or `API_KEY` are checked too. A message is never changed: the same object comes back if it has no
    secrets, else a copy of the changed parts."""

    def __init__(self, patterns: Iterable[Pattern] | None = None, *, assignments: bool = True) -> None:
        self._patterns = PATTERNS if patterns is None else tuple(patterns)
        self._assignments = assignments
        hints = {hint for pattern in self._patterns for hint in pattern.hints or ("",)}
        hints |= set(_ASSIGNED_HINTS if assignments else ())
        self._hints = [hint for hint in hints if not any(other in hint for other in hints - {hint})]

    def __call__(self, message: ConversationMessage) -> ConversationMessage:
        try:
            return self._copied(message, self._of_message)
        except RecursionError:
            raise MessageRefused("a message nested this deeply cannot be searched for secrets; not written") from None

    def text(self, text: str) -> str:
        """The text without secrets; the same object if it has none."""
        if _DATA_URL.fullmatch(text):
            return text
        lowered = text.lower()
        if not any(map(lowered.__contains__, self._hints)):
            return text
        redacted = text
        for pattern in self._patterns:
            redacted = pattern.replace(redacted, lowered)
        if self._assignments:
            redacted = redact_assignments(redacted, lowered)
        return text if redacted == text else redacted

    @staticmethod
    def _copied(value: dict[str, Any], new: Callable[[str, Any, dict[str, Any]], Any]) -> dict[str, Any]:
        """A copy of the dict with new values; the same dict if no value changed."""
        changed = {key: item for key, old in value.items() if (item := new(key, old, value)) is not old}
        return {**value, **changed} if changed else value

    def _of_message(self, key: str, value: Any, message: dict[str, Any]) -> Any:
        if key == "content":
            return self._blocks(value)
        return self._meta(value) if key == "meta" else value if key == "role" else self._value(value, key)

    def _blocks(self, content: Any) -> Any:
        if not isinstance(content, list):
            return self._value(content)
        blocks = [self._copied(b, self._of_block) if isinstance(b, dict) else self._value(b) for b in content]
        return blocks if any(new is not old for new, old in zip(blocks, content, strict=True)) else content

    def _of_block(self, key: str, value: Any, block: dict[str, Any]) -> Any:
        """The new value of a field of a block. Data of images, and of documents that are not text, is not searched."""
        if key in _NOT_SEARCHED:
            return value
        if key == "meta":
            return self._meta(value)
        if key == "content":
            return self._blocks(value)
        if key == "data" and block.get("type") in ("image", "document"):
            return self._data(value, block.get("mime_type"))
        return self._value(value, key)

    def _data(self, data: Any, mime: Any) -> Any:
        """The new base64 data of a file whose type is text; other data is not searched."""
        if not isinstance(data, str) or not isinstance(mime, str) or not _TEXT_KIND.match(mime):
            return data
        try:
            text = b64decode(data, validate=True).decode()
        except ValueError:
            return self.text(data)
        redacted = self.text(text)
        return data if redacted is text else b64encode(redacted.encode()).decode()

    def _meta(self, meta: Any) -> Any:
        """The new meta: fields of providers, models and users are searched, our ids and dates are not."""
        if not isinstance(meta, dict):
            return meta
        return self._copied(meta, lambda key, value, _: value if key in _OWN_META else self._value(value, key))

    def _value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return (
                f"[redacted:{_named(key)}]" if self._assignments and _is_named_secret(key, value) else self.text(value)
            )
        if isinstance(value, list):
            items = [self._value(item, key) for item in value]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if isinstance(value, dict):
            return self._renamed(self._copied(value, self._of_object))
        return value

    def _renamed(self, value: dict[str, Any]) -> dict[str, Any]:
        """The dict with redacted keys; the same dict if no key has a secret."""
        if not any(isinstance(key, str) and len(key) >= _LEAST_KEY and self.text(key) is not key for key in value):
            return value
        renamed: dict[str, Any] = {}
        for key, item in value.items():
            new = self.text(key) if isinstance(key, str) else key
            if new is not key:
                number, name = 1, new
                while new in renamed or new in value:
                    number += 1
                    new = f"{name} {number}"
            renamed[new] = item
        return renamed

    def _of_object(self, key: str, value: Any, whole: dict[str, Any]) -> Any:
        """The new value of a field inside a tool's input or provider content."""
        if isinstance(value, str):
            if key in _OPAQUE:
                return value
            kinds = [whole[name] for name in ("media_type", "mimeType", "mime_type") if name in whole]
            if key == "data" and kinds:
                return self._data(value, kinds[0])
        return self._value(value, str(key))


_OWN_META = frozenset(
    {"id", "source", "provider_message_id", "created_at", "timestamp", "aside", "parent_session_id", "root_session_id"}
)
"""Ids and dates that other entries refer to."""
_TEXT_KIND = re.compile(r"(?i)text/|application/(?:[\w.-]+\+)?(?:json|xml|yaml|toml|javascript|x-yaml|x-ndjson)\b")
_LEAST_KEY = 15
"""The length of the shortest secret that is recognized by its form."""
_NOT_SEARCHED = frozenset({"type", "id", "tool_use_id", "mime_type"})
_OPAQUE = frozenset({"signature", "encrypted_content"})
"""Signed or encrypted by a provider, which accepts them only unchanged."""


def _is_named_secret(key: str, value: str) -> bool:
    """Whether the name of a field says that its value is a secret; any value of a field `password` is one."""
    named = _SECRET_KEY.fullmatch(key) if key else None
    if named is None or _HARMLESS_BEFORE.search(named["before"]):
        return False
    if _named(key) == "password":
        return len(value) >= 6 and not any(map(str.isspace, value)) and _is_password(value)
    return is_secret_named(named["name"], value)


def _named(key: str) -> str:
    return "password" if key.lower().endswith(("password", "passwd", "passphrase", "pwd")) else "assignment"


redact_secrets = Redactor()
"""The default redactor: `redact_secrets(message)`, or `SessionStore(redact=redact_secrets)`."""
