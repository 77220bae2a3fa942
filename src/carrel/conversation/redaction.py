"""Pure: secrets in a message, replaced before it is written."""

import math
import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from carrel.conversation.messages import ConversationMessage
from carrel.errors import MessageRefused

_WORD = r"(?<![A-Za-z0-9_-])"
"""A secret starts where a word does: so a long run of letters is looked at once, not once for each of them."""

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
"""Ways to keep a password, and names for one: short texts with a digit that stand where it would."""
_IN_EXAMPLES = frozenset({"password", "passwd", "pass", "pwd", "secret", "token", "user", "username"})


_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.=+-]+)*;base64,[A-Za-z0-9+/=\s]*")
"""A picture or another file in a text: left alone as a whole."""


@dataclass(frozen=True)
class Pattern:
    """One kind of secret. What its group `secret` matches is replaced, or all of it when it has no such group."""

    name: str
    regex: str | re.Pattern[str]
    hints: tuple[str, ...] = ()
    """Texts of which one must be there: most strings are passed over at the speed of a plain search."""
    any_case: bool = False
    """The hints are in lower case and stand for any."""
    accepts: Callable[[str], bool] | None = None
    """Asked about each secret found; False leaves it."""
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.regex))

    def replace(self, text: str, lowered: str) -> str:
        if self.hints and not any(map((lowered if self.any_case else text).__contains__, self.hints)):
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
    """Bits a character: about 4 for random hexadecimal, 5 and more for random letters and digits, less for words."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)


def looks_random(text: str) -> bool:
    """Whether a value was drawn rather than written: long enough, digits among letters, no two characters too often."""
    if len(text) < 12 or not any(map(str.isdigit, text)) or not any(map(str.isalpha, text)):
        return False
    return entropy(text) >= min(3.0, math.log2(len(text)) - 0.6)


def is_placeholder(text: str) -> bool:
    """Whether a value only stands for a secret: `<password>`, `${TOKEN}`, `your-key-here`, `settings.token`."""
    return bool(_PLACEHOLDER.match(text) or _IDENTIFIER.fullmatch(text)) or text.lower() in _IN_EXAMPLES


def is_secret_named(name: str, value: str, *, is_literal: bool = False) -> bool:
    """Whether the value of something called `password`, `api_key` and so on is one.

    `is_literal`: it stands as a value does and not as a name in code, so that a short password is one too."""
    refers = value.lower().endswith(name.lower())
    if refers or is_placeholder(value) or "(" in value or "[" in value:
        return False
    if name.lower().startswith(("pass", "pwd")):
        mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
        return mixed and (len(value) >= 8 or (is_literal and len(value) >= 6 and not _NO_PASSWORD.match(value)))
    return looks_random(value)


def _is_bearer_token(token: str) -> bool:
    if _PLACEHOLDER.match(token):
        return False
    return _is_drawn_from_letters(token) or (not is_placeholder(token) and looks_random(token))


def _is_drawn_from_letters(token: str) -> bool:
    """Whether a long run of letters is no word and no name of anything: those repeat letters and have long humps."""
    if len(token) < 20 or not token.isalpha() or entropy(token) < 3.5:
        return False
    humps = 1 + sum(before.islower() and after.isupper() for before, after in pairwise(token))
    return humps == 1 or len(token) / humps < 3.5


def _stands_alone(password: str) -> bool:
    """For places where nothing but a password stands, however simple it is."""
    return not _PLACEHOLDER.match(password) and password.lower() not in _IN_EXAMPLES


def _has_digit(value: str) -> bool:
    return any(map(str.isdigit, value))


def _keys(name: str, prefix: str, rest: str, *hints: str) -> Pattern:
    return Pattern(name, f"{_WORD}{prefix}{rest}", hints or (prefix,))


PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "private-key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:[A-Za-z0-9+/=\s\\:,.()]|-(?!----))*+-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"|(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{16,}+)++)",
        ("PRIVATE KEY",),
    ),
    _keys("anthropic", "sk-ant-", r"[A-Za-z0-9_-]{16,256}+"),
    _keys("openai", "sk-", r"(?:proj|svcacct|admin|None)-[A-Za-z0-9_-]{20,256}+"),
    _keys("openrouter", "sk-or-", r"[A-Za-z0-9-]{20,256}+"),
    Pattern("api-key", rf"{_WORD}sk-[A-Za-z0-9]{{32,64}}+(?![A-Za-z0-9_-])", ("sk-",), accepts=_has_digit),
    _keys("google", "AIza", r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    _keys("google-login", "ya29\\.", r"[A-Za-z0-9_-]{20,512}+", "ya29."),
    _keys("google", "GOCSPX-", r"[A-Za-z0-9_-]{24,40}+"),
    _keys("aws-access-key", "A(?:KIA|SIA|BIA|CCA)", r"[A-Z2-7]{16}(?![A-Za-z0-9_-])", "AKIA", "ASIA", "ABIA", "ACCA"),
    Pattern(
        "aws-secret-key",
        r"(?i:secret_?access_?key|aws_?secret_?key|aws_?secret)[\"'\\]{0,2}\s{0,4}[:=,]\s{0,4}[\"'\\]{0,2}"
        r"(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        ("secretaccess", "secret_access", "aws_secret", "awssecret"),
        any_case=True,
    ),
    _keys("github", "gh[pousr]_", r"[A-Za-z0-9]{36,255}+", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    _keys("github", "github_pat_", r"[A-Za-z0-9_]{22,255}+"),
    _keys(
        "gitlab",
        "gl(?:pat|dt|rt|cbt|ptt)-",
        r"[A-Za-z0-9_.=-]{20,300}+",
        "glpat-",
        "gldt-",
        "glrt-",
        "glcbt-",
        "glptt-",
    ),
    _keys("slack", "xox[abeoprs]-", r"[A-Za-z0-9-]{10,256}+", "xox"),
    _keys("slack", "xapp-", r"[A-Za-z0-9-]{20,256}+"),
    Pattern(
        "slack-webhook",
        r"hooks\.slack\.com/(?:services|workflows)/(?P<secret>[A-Za-z0-9/_-]{20,120}+)",
        ("hooks.slack.com",),
    ),
    _keys("stripe", "[rs]k_(?:live|test)_", r"[A-Za-z0-9]{16,256}+", "k_live_", "k_test_"),
    _keys("stripe", "whsec_", r"[A-Za-z0-9+/=]{24,256}+"),
    _keys("npm", "npm_", r"[A-Za-z0-9]{36}(?![A-Za-z0-9_-])"),
    _keys("pypi", "pypi-", r"AgE[A-Za-z0-9_-]{40,512}+"),
    _keys("huggingface", "hf_", r"[A-Za-z0-9]{30,64}+(?![A-Za-z0-9_-])"),
    _keys("groq", "gsk_", r"[A-Za-z0-9]{40,64}+(?![A-Za-z0-9_-])"),
    _keys("xai", "xai-", r"[A-Za-z0-9]{60,128}+"),
    _keys("perplexity", "pplx-", r"[A-Za-z0-9]{40,64}+"),
    _keys("replicate", "r8_", r"[A-Za-z0-9]{37,40}+(?![A-Za-z0-9_-])"),
    _keys("sendgrid", "SG\\.", r"[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}+", "SG."),
    _keys("digitalocean", "do[opr]_v1_", r"[a-f0-9]{64}", "_v1_"),
    _keys("telegram", r"[0-9]{8,10}:", r"AA[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])", ":AA"),
    Pattern(
        "jwt",
        r"(?<![A-Za-z0-9_.-])eyJ[A-Za-z0-9_-]{8,4096}+\.eyJ[A-Za-z0-9_-]{8,8192}+(?:\.[A-Za-z0-9_-]{0,4096}+)?",
        ("eyJ",),
    ),
    Pattern(
        "bearer-token",
        r"(?i:\bbearer)[ \t]{1,4}(?P<secret>[A-Za-z0-9._~+/=-]{16,4096}+)",
        ("bearer",),
        any_case=True,
        accepts=_is_bearer_token,
    ),
    Pattern(
        "basic-auth",
        r"(?i:authorization)[\"'\\]{0,2}\s{0,4}[:=]\s{0,4}[\"'\\]{0,2}(?i:basic)[ \t]{1,4}"
        r"(?P<secret>[A-Za-z0-9+/]{6,512}+={0,2})",
        ("basic",),
        any_case=True,
    ),
    Pattern(
        "url-password",
        r"://[^\s/?#:@\"'<>\\]{0,128}+:(?P<secret>[^\s/?#@\"'<>\\]{1,256}+)@",
        ("://",),
        accepts=_stands_alone,
    ),
)
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
    """`password = "…"`, `"api_key": "…"` and lines of .env files: the name says that a secret follows."""
    if not any(map(lowered.__contains__, _ASSIGNED_HINTS)):
        return text
    return _ASSIGNED.sub(_replaced_assignment, text)


def _replaced_assignment(match: re.Match[str]) -> str:
    name, secret = match["name"], match["secret"].rstrip("})]")
    before = match.string[max(0, match.start() - 80) : match.start()]
    tight = match[0][len(name) :].startswith("=") and not match[0][len(name) + 1].isspace()
    in_env = tight and name.isupper() and bool(_ENV_START.search(before))
    if in_env and name != "KEY":
        found = _stands_alone(secret) and not secret.isdigit()
    else:
        # `password = input1` is code; with a colon, in quotes, or without a space it is the password itself.
        is_literal = tight or match["sign"] == ":" or match[0][match.start("secret") - match.start() - 1] in "\"'`"
        found = is_secret_named(name, secret, is_literal=is_literal) and (in_env or name != "KEY")
    if not found or _HARMLESS_BEFORE.search(before):
        return match[0]
    start = match.start("secret") - match.start()
    return f"{match[0][:start]}[redacted:{'env' if in_env else 'assignment'}]{match[0][start + len(secret) :]}"


class _Hints:
    """Many texts to look for at once: none that holds another one, and those with a dash only where there is a dash."""

    def __init__(self, hints: Iterable[str]) -> None:
        wanted = set(hints)
        self.all = sorted(hint for hint in wanted if not any(other in hint for other in wanted - {hint}))
        self._groups = [(mark, [hint for hint in self.all if mark in hint]) for mark in "_-"]
        self._plain = [hint for hint in self.all if "_" not in hint and "-" not in hint]

    def among(self, text: str) -> bool:
        contains = text.__contains__
        return any(map(contains, self._plain)) or any(
            mark in text and any(map(contains, hints)) for mark, hints in self._groups
        )


class Redactor:
    """Replaces secrets in messages by `[redacted:NAME]`; give it to a store as `redact=`.

    `patterns` are the kinds to look for (`PATTERNS` when not given), `assignments` whether the values of names such
    as `password` or `API_KEY` are looked at too. Never edits a message: the same object comes back when there was
    nothing to replace, else a copy of what changed."""

    def __init__(self, patterns: Iterable[Pattern] | None = None, *, assignments: bool = True) -> None:
        self._patterns = PATTERNS if patterns is None else tuple(patterns)
        self._assignments = assignments
        self._exact = _Hints(hint for each in self._patterns if not each.any_case for hint in each.hints or ("",))
        self._lowered = _Hints(hint for each in self._patterns if each.any_case for hint in each.hints or ("",))
        if assignments:
            self._lowered = _Hints([*self._lowered.all, *_ASSIGNED_HINTS])

    def __call__(self, message: ConversationMessage) -> ConversationMessage:
        try:
            return self._copied(message, self._of_message)
        except RecursionError:
            raise MessageRefused("a message nested this deeply cannot be searched for secrets; not written") from None

    def text(self, text: str) -> str:
        """The text without secrets; the same object when there are none."""
        if _DATA_URL.fullmatch(text):
            return text
        lowered = text.lower()
        if not self._exact.among(text) and not self._lowered.among(lowered):
            return text
        redacted = text
        for pattern in self._patterns:
            redacted = pattern.replace(redacted, lowered)
        if self._assignments:
            redacted = redact_assignments(redacted, lowered)
        return text if redacted == text else redacted

    @staticmethod
    def _copied(value: dict[str, Any], new: Callable[[str, Any, dict[str, Any]], Any]) -> dict[str, Any]:
        """The dict with each value replaced by a new one, itself when all of them are the old ones."""
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
        """An image's data is left alone, a document's too unless it is text; a tool result may hold blocks."""
        if key in _NO_WORDS:
            return value
        if key == "meta":
            return self._meta(value)
        if key == "content":
            return self._blocks(value)
        if key == "data" and block.get("type") in ("image", "document"):
            return self._data(value, block.get("mime_type"))
        return self._value(value, key)

    def _data(self, data: Any, mime: Any) -> Any:
        """What a file says, where its kind is text: the data of every other is left alone."""
        if not isinstance(data, str) or not isinstance(mime, str) or not _TEXT_KIND.match(mime):
            return data
        try:
            text = b64decode(data, validate=True).decode()
        except ValueError:
            return self.text(data)
        redacted = self.text(text)
        return data if redacted is text else b64encode(redacted.encode()).decode()

    def _meta(self, meta: Any) -> Any:
        """What a provider, a model or a user wrote into it; what is ours has no words."""
        if not isinstance(meta, dict):
            return meta
        return self._copied(meta, lambda key, value, _: value if key in _META_OF_OURS else self._value(value, key))

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
        """The dict with secrets taken out of its keys, itself when there are none."""
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
        """Anything inside a tool's input or a provider's own words."""
        if isinstance(value, str):
            if key in _OPAQUE:
                return value
            kinds = [whole[name] for name in ("media_type", "mimeType", "mime_type") if name in whole]
            if key == "data" and kinds:
                return self._data(value, kinds[0])
        return self._value(value, str(key))


_META_OF_OURS = frozenset(
    {"id", "source", "provider_message_id", "created_at", "timestamp", "aside", "parent_session_id", "root_session_id"}
)
"""Ids and dates that others refer to."""
_TEXT_KIND = re.compile(r"(?i)text/|application/(?:[\w.-]+\+)?(?:json|xml|yaml|toml|javascript|x-yaml|x-ndjson)\b")
_LEAST_KEY = 15
"""Characters of the shortest secret that is known by its form."""
_NO_WORDS = frozenset({"type", "id", "tool_use_id", "mime_type"})
_OPAQUE = frozenset({"signature", "encrypted_content"})
"""Sealed by a provider: it takes them back unchanged or not at all."""


def _is_named_secret(key: str, value: str) -> bool:
    """Whether a field of an object is a secret by its name; a field called password holds one, however simple."""
    named = _SECRET_KEY.fullmatch(key) if key else None
    if named is None or _HARMLESS_BEFORE.search(named["before"]):
        return False
    if _named(key) == "password":
        return len(value) >= 6 and not any(map(str.isspace, value)) and _stands_alone(value)
    return is_secret_named(named["name"], value)


def _named(key: str) -> str:
    return "password" if key.lower().endswith(("password", "passwd", "passphrase", "pwd")) else "assignment"


redact_secrets = Redactor()
"""Looks for all that is known here: `redact_secrets(message)`, or `SessionStore(redact=redact_secrets)`."""
