"""Which texts are replaced as secrets before a message is written, and which are not."""

import base64
import copy
import hashlib
import json
import random
import re
import string
import time
import uuid
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import carrel.conversation.redaction as module
from carrel.conversation.messages import (
    document_block,
    image_block,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.redaction import PATTERNS, Pattern, Redactor, redact_secrets
from carrel.errors import MessageRefused

ALL = string.ascii_letters + string.digits


def drawn(length: int, letters: str = ALL) -> str:
    """A made-up secret, built here so that scanners do not report this file."""
    return "".join(random.Random(length).choices(letters, k=length))


def url_safe(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


JWT = f"{url_safe({'alg': 'HS256', 'typ': 'JWT'})}.{url_safe({'sub': '1234567890', 'name': 'Ada'})}.{drawn(43)}"
KEY_BLOCK = "-----BEGIN RSA PRIVATE KEY-----\n" + f"{drawn(64)}\n" * 12 + "-----END RSA PRIVATE KEY-----"

SECRETS = {
    "openai": "sk-proj-" + drawn(48),
    "anthropic": "sk-ant-api03-" + drawn(90),
    "openrouter": "sk-or-v1-" + drawn(64, "0123456789abcdef"),
    "api-key": "sk-" + drawn(48),
    "google": "AIza" + drawn(35),
    "aws-access-key": "AKIA" + drawn(16, string.ascii_uppercase),
    "github": "ghp_" + drawn(36),
    "gitlab": "glpat-" + drawn(20),
    "slack": "xoxb-" + drawn(12, string.digits) + "-" + drawn(24),
    "stripe": "sk_live_" + drawn(24),
    "npm": "npm_" + drawn(36),
    "pypi": "pypi-AgEIcHlwaS5vcmc" + drawn(60),
    "huggingface": "hf_" + drawn(34),
    "groq": "gsk_" + drawn(52),
    "sendgrid": "SG." + drawn(22) + "." + drawn(43),
    "telegram": "123456789:AA" + drawn(33),
    "jwt": JWT,
    "private-key": KEY_BLOCK,
}
FINE_GRAINED = {
    "github": "github_pat_" + drawn(22) + "_" + drawn(59),
    "google": "GOCSPX-" + drawn(28),
    "stripe": "whsec_" + drawn(32),
    "google-login": "ya29." + drawn(60),
    "slack": "xapp-1-A0" + drawn(40),
}
IN_PLACES = [
    ("aws-secret-key", "aws_secret_access_key = {}", drawn(40)),
    ("aws-secret-key", '"SecretAccessKey": "{}"', drawn(40)),
    ("bearer-token", "Authorization: Bearer {}", drawn(32)),
    ("bearer-token", "curl -H 'authorization: bearer {}' x", drawn(32)),
    ("basic-auth", "Authorization: Basic {}", base64.b64encode(b"ada:lovelace1815").decode()),
    ("url-password", "postgres://ada:{}@db.example/notes", "hunter2"),
    ("url-password", "https://:{}@example.com", "letmein"),
    ("slack-webhook", "https://hooks.slack.com/services/{}", "T00000000/B00000000/" + drawn(24)),
    ("assignment", 'api_key = "{}"', drawn(32)),
    ("assignment", "x-api-key: {}", drawn(32)),
    ("assignment", '{{"client_secret": "{}"}}', drawn(24)),
    ("assignment", 'log: {{\\"token\\":\\"{}\\"}}', drawn(24)),
    ("bearer-token", "Authorization: Bearer {}", "abcdefghijklmnopqrstuvwx"),
    ("bearer-token", "Bearer {}", "qWeRtYuIoPaSdFgHjKlZxCvB"),
    ("assignment", "password: {}", "hunter2222"),
    ("assignment", "password={}", "hunter2"),
    ("assignment", "my password: {}, do not tell", "hunter2"),
    ("assignment", '{{"password": "{}"}}', "hunter2"),
    ("assignment", "login(user='ada', passwd='{}')", "hunter2"),
    ("assignment", "https://example.com/?user=ada&password={}", "hunter2"),
    ("assignment", "DB_PASSWORD => '{}'", "s3cr3t-value"),
    ("env", "export DATABASE_PASSWORD={}", "correct-horse"),
    ("env", "DEBUG=1\nSESSION_SECRET={}\nPORT=80", "keyboardcat"),
    ("env", "ENCRYPTION_KEY={}", drawn(32)),
    ("env", "- GITHUB_TOKEN={}", drawn(20)),
]


@pytest.mark.parametrize(("name", "secret"), [*SECRETS.items(), *FINE_GRAINED.items()])
def test_a_known_kind_of_key_is_replaced_by_its_name(name: str, secret: str) -> None:
    for text in (secret, f"the key is {secret}, keep it", f'{{"k":"{secret}"}}', f"K={secret}\n", f"({secret})"):
        redacted = redact_secrets.text(text)
        assert secret not in redacted
        assert redacted == text.replace(secret, f"[redacted:{name}]")


@pytest.mark.parametrize(("name", "text", "secret"), IN_PLACES)
def test_a_secret_is_recognized_by_its_place(name: str, text: str, secret: str) -> None:
    assert redact_secrets.text(text.format(secret)) == text.format(f"[redacted:{name}]")


def test_every_pattern_finds_something() -> None:
    shown = {*SECRETS, *FINE_GRAINED, *(name for name, _, _ in IN_PLACES)}
    rest = {
        "xai": "xai-" + drawn(80),
        "perplexity": "pplx-" + drawn(48),
        "replicate": "r8_" + drawn(37),
        "digitalocean": "dop_v1_" + drawn(64, "0123456789abcdef"),
    }
    for name, secret in rest.items():
        assert redact_secrets.text(f"use {secret} now") == f"use [redacted:{name}] now"
    assert {pattern.name for pattern in PATTERNS} <= shown | set(rest)
    found_alone = {
        index
        for index, pattern in enumerate(PATTERNS)
        for text in [*SECRETS.values(), *FINE_GRAINED.values(), *rest.values(), *(t.format(s) for _, t, s in IN_PLACES)]
        if Redactor([pattern], assignments=False).text(text) != text
    }
    assert found_alone == set(range(len(PATTERNS)))


def test_a_key_that_was_cut_off_is_still_a_key() -> None:
    half = KEY_BLOCK[:400]
    assert redact_secrets.text(f"cat id_rsa\n{half}") == "cat id_rsa\n[redacted:private-key]"
    as_json = json.dumps({"key": KEY_BLOCK})
    assert redact_secrets.text(as_json) == '{"key": "[redacted:private-key]"}'


ORDINARY = [
    "The bearer of good news is the token optimist of the family; her secret: a sense of humour.",
    "Set your password: at least eight characters. Password = required field.",
    "The private key must start with -----BEGIN PRIVATE KEY----- and end with the matching line.",
    "password=<password> token=${TOKEN} api_key=$API_KEY secret: {{ secret }} key: ********",
    'api_key = os.environ["API_KEY"]; token = get_token(user1); password = getpass.getpass()',
    "token = self.tokens[index]\napi_key = settings.openai_api_key\nsecret = config.secret_v2",
    "const token = await fetchToken1(client2); const password = form.password.value;",
    "def login(username: str, password: str, token: Token | None = None) -> Session1: ...",
    "max_tokens=4096, num_tokens: 128000, token_count = 5000000, tokenizer: cl100k_base",
    'nextPageToken: "CAUQAA1234567890abcdef", continuation_token=abc123def456ghi789',
    "pad_token: <|endoftext|>, eos_token_id=50256, bos_token = '<s>1234567890ab'",
    "postgres://user:password@localhost/db and redis://localhost:6379/0 and http://127.0.0.1:8080/a@b",
    "git@github.com:ada/notes.git ssh://git@example.com:22/notes https://example.com/a:b@c",
    "sk-learn is written sklearn; class sk-circle-fade-dot; task-1234567890; ask-me-anything-about-sk-2024",
    "AKIA is a prefix. AIza too. ghp_ and xoxb- and hf_ and npm_ are others; npm_config_cache=/tmp/x",
    "process.env.NPM_TOKEN, secrets.GITHUB_TOKEN, ${{ secrets.PYPI_TOKEN }}, env.SECRET_KEY_BASE",
    'EXPIRED_TOKEN = "expired_token"; X_AUTH_KEY = "xet-auth/v1"; publicKeyToken="1fc8b3b9a1e18e3b"',
    'headers = {"x-metadata-token": imdsv2_session_token}; fd, token = probes.descriptors[-1]',
    "smb://myuser:mypassword@server/share and ftp://anonymous:your-password@server",
    "access token: https://example.com/oauth2/v4/token?grant=1234567890abcdef",
    "PUBLIC_KEY=ssh-rsa AAAA, SORT_KEY=created_at, PRIMARY_KEY=id, KEY=value, FOREIGN_KEY = user_id",
    "<input type='password' name='password' autocomplete='current-password'>",
    "assert_equal(token, 'expected'); it('returns a token', ...); // TODO: token: rotate weekly",
    "commit 9fceb02d0ae598e95dc970b74767f19372d61af8\nAuthor: Ada",
    f"sha256:{hashlib.sha256(b'x').hexdigest()} and md5 {hashlib.md5(b'x').hexdigest()}",
    f"id {uuid.UUID(int=2**127 + 5)}, request req_011CdMzWfroAZexCFHM4FjYy, call toolu_01QaU4sRkZ8zoCYdqxWbb8Ey",
    '"integrity": "sha512-' + base64.b64encode(hashlib.sha512(b"x").digest()).decode() + '"',
    "Basic auth is enabled. Basic Authentication with basic YWRhOmxvdmVsYWNl as in the RFC",
    "Choose a password: 8-20 characters, one digit. The password: sha256 of it is kept; password: argon2, then base64.",
    "password = input1; passwd = field2; login(user=user1, password=passwd1); password: str, pwd=pw1",
    "Her password was long and his password: none. Forgot password? Password (again): password123 is a bad idea",
    "bearer internationalization; Bearer accessTokenFromSettings; Bearer getAccessTokenSilently",
    "PASSWORD_MIN_LENGTH=12 TOKEN_TTL=3600 SECRET_NAME=my-app/prod TOKEN=123456",
    "Bearer tokens are described in RFC 6750; send Authorization: Bearer <token>",
    'eyJ is how base64 of {" begins; eyJhbGciOiJIUzI1NiJ9 alone is a header',
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_words_code_hashes_and_ids_are_kept(text: str) -> None:
    assert redact_secrets.text(text) is text


def test_our_own_source_has_no_secrets_in_it() -> None:
    for file in (Path(module.__file__), Path(module.__file__).with_name("secret_patterns.toml")):
        source = file.read_text("utf-8")
        assert redact_secrets.text(source) is source


def test_images_and_documents_are_not_searched() -> None:
    data = base64.b64encode(SECRETS["github"].encode()).decode()
    tricky = "AKIA" + drawn(16, string.ascii_uppercase)
    blocks = [
        image_block(tricky, mime_type="image/png"),
        document_block(tricky, mime_type="application/pdf", name="a.pdf"),
        tool_result_block(tool_use_id="t", content=[image_block(tricky, mime_type="image/png")]),
        tool_use_block(tool_id="t", name="show", input={"picture": f"data:image/png;base64,{data}{tricky}"}),
        {"type": "native", "provider": "x", "value": {"source": {"media_type": "image/png", "data": tricky}}},
    ]
    message = {"role": "user", "content": blocks}
    assert redact_secrets(message) is message


def test_text_documents_are_searched() -> None:
    def document(text: str, mime: str) -> dict[str, Any]:
        return document_block(base64.b64encode(text.encode()).decode(), mime_type=mime, name="a")

    for mime in ("text/plain", "text/csv; charset=utf-8", "application/json"):
        message = {"role": "user", "content": [document(f"ü {KEY}", mime)]}
        assert redact_secrets(message) == {"role": "user", "content": [document(f"ü {HIDDEN}", mime)]}
        result = tool_result_block(tool_use_id="t", model_text="", content=[document(KEY, mime)])
        redacted = redact_secrets({"role": "user", "content": [result]})
        assert redacted["content"][0]["content"] == [document(HIDDEN, mime)]
    for kept in (document(KEY, "application/pdf"), document("nothing", "text/plain")):
        message = {"role": "user", "content": [kept]}
        assert redact_secrets(message) is message


def test_two_secret_keys_stay_distinct() -> None:
    fields = {KEY: 1, SECRETS["anthropic"][::-1]: 2, "sk-ant-api03-" + drawn(80): 3}
    message = {"role": "assistant", "content": [tool_use_block(tool_id="t", name="f", input=fields)]}
    redacted = redact_secrets(message)["content"][0]["input"]
    assert list(redacted.values()) == [1, 2, 3]
    assert [key for key in redacted if key.startswith("[red")] == [HIDDEN, f"{HIDDEN} 2"]


def test_random_pictures_hold_no_secrets() -> None:
    noise = base64.b64encode(random.Random(5).randbytes(3_000_000)).decode()
    assert redact_secrets.text(f"data {noise}") == f"data {noise}"


KEY = SECRETS["anthropic"]
HIDDEN = "[redacted:anthropic]"


@pytest.mark.parametrize(
    "message",
    [
        user_text_message(f"my key is {KEY}"),
        {"role": "user", "content": f"plain {KEY}"},
        {"role": "assistant", "content": [thinking_block(f"they gave me {KEY}")]},
        {"role": "assistant", "content": [tool_use_block(tool_id="t", name="sh", input={"a": [{"b": f"echo {KEY}"}]})]},
        {"role": "user", "content": [tool_result_block(tool_use_id="t", model_text=KEY)]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": f"old {KEY}"}]},
        {"role": "user", "content": [tool_result_block(tool_use_id="t", content=[text_block(KEY)])]},
        {"role": "user", "content": [{"type": "hum", "tune": {"words": KEY}}]},
        {"role": "user", "content": [text_block("x", meta={"native": {"annotations": [KEY]}})]},
        {"role": "assistant", "content": [], "meta": {"native": {"error": KEY}}},
        {"role": "rewind", "meta": {"aside": "label", "text": KEY}},
        {"role": "rewind", "meta": {"aside": "meta", "set": {"title": KEY}}},
        {"role": "compact", "content": [text_block(f"the user's key {KEY}")]},
        {"role": "user", "content": [], "extra": KEY},
        {"role": "assistant", "content": [tool_use_block(tool_id="t", name="sh", input={"a": {KEY: 1}, "b": 2})]},
        {"role": "assistant", "content": [], "meta": {"usage": {"note": KEY}}},
        {"role": "user", "content": [text_block("x", meta={"mine": [KEY]})]},
        {"role": "user", "content": [{"type": "native", "value": {"media_type": "text/plain", "data": f"x {KEY}"}}]},
    ],
)
def test_a_secret_is_found_wherever_a_message_has_text(message: dict[str, Any]) -> None:
    before = copy.deepcopy(message)
    redacted = redact_secrets(message)
    assert message == before
    assert orjson.dumps(redacted).decode() == orjson.dumps(message).decode().replace(KEY, HIDDEN)


def test_unchanged_parts_are_not_copied() -> None:
    kept, changed = text_block("fine"), text_block(KEY)
    message = {"role": "user", "content": [kept, changed], "meta": {"source": {"id": "1"}}}
    redacted = redact_secrets(message)
    assert redacted is not message
    assert redacted["content"][0] is kept
    assert redacted["meta"] is message["meta"]
    assert redact_secrets(redacted) is redacted


def test_our_own_metadata_is_not_searched() -> None:
    message = {"role": "user", "content": [text_block("x", meta={"id": KEY})], "meta": {"source": {"id": KEY}}}
    assert redact_secrets(message) is message


def test_signed_and_encrypted_fields_are_not_searched() -> None:
    sealed = {"signature": JWT, "encrypted_content": SECRETS["google"]}
    message = {"role": "assistant", "content": [thinking_block("hm", meta={"native": sealed})]}
    assert redact_secrets(message) is message


def test_a_field_name_says_that_its_value_is_a_secret() -> None:
    fields = {
        "user": "ada",
        "password": "lovelace",
        "headers": {"X-Api-Key": drawn(24)},
        "nextPageToken": drawn(24),
        "token": "function",
        "max_tokens": "128000",
        "password_hint": "the first programmer",
    }
    message = {"role": "assistant", "content": [tool_use_block(tool_id="t", name="login", input=fields)]}
    assert redact_secrets(message)["content"][0]["input"] == {
        **fields,
        "password": "[redacted:password]",
        "headers": {"X-Api-Key": "[redacted:assignment]"},
    }


def test_own_patterns_can_be_added_or_taken_alone() -> None:
    badge = Pattern("badge", r"\bACME-\d{6}\b")
    assert Redactor([badge]).text(f"ACME-123456 {KEY}") == f"[redacted:badge] {KEY}"
    assert Redactor([*PATTERNS, badge]).text(f"ACME-123456 {KEY}") == f"[redacted:badge] {HIDDEN}"
    inner = Pattern("pin", r"pin (?P<secret>\d+)", accepts=lambda pin: len(pin) == 4)
    assert Redactor([inner]).text("pin 1234, pin 12345") == "pin [redacted:pin], pin 12345"
    assert Redactor([], assignments=False).text("password: hunter2222") == "password: hunter2222"


def test_nesting_beyond_reason_is_refused_not_a_crash() -> None:
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MessageRefused, match="deeply"):
        redact_secrets({"role": "user", "content": [tool_use_block(tool_id="t", name="x", input={"deep": deep})]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["role", "content", "meta", "x"]), JSON))
def test_any_message_goes_through_unharmed(message: dict[str, Any]) -> None:
    before = copy.deepcopy(message)
    redacted = redact_secrets(message)
    assert message == before
    assert redact_secrets(redacted) == redacted


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from(sorted(SECRETS)))
def test_text_around_a_secret_is_kept(before: str, after: str, name: str) -> None:
    text = f"{before} {SECRETS[name]} {after}"
    assert redact_secrets.text(text) == f"{before} [redacted:{name}] {after}"


SIZE = 1_000_000
HOSTILE = {
    name: (piece * (SIZE // len(piece) + 1))[:SIZE]
    for name, piece in {
        "one letter": "a",
        "spaces": " ",
        "dashes": "-",
        "prefix sk": "sk-",
        "prefix sk-ant": "sk-ant-",
        "jwt heads": "eyJ",
        "jwt parts": "eyJaaaaaaaa.",
        "bearer": "bearer ",
        "bearer long": "bearer " + "a" * 4095 + " ",
        "urls": "://a:",
        "colons": "://" + ":" * 300,
        "key heads": "-----BEGIN PRIVATE KEY-----",
        "key bodies": "-----BEGIN PRIVATE KEY-----" + "A" * 500 + "\n",
        "assignments": "password=",
        "quoted": 'token="',
        "long names": "x_" * 40 + "token=abcdefgh1234 ",
        "env": "\nA_SECRET=",
        "slack": "xoxb-",
        "aws": "AKIA",
        "sendgrid": "SG." + "a" * 20 + ".",
        "telegram": "12345678:AA",
        "everything": "sk-ant- eyJa. AKIA bearer a ://a:b password= ghp_ glpat- xoxb- SG.a. _v1_ :AA hf_ npm_ ",
    }.items()
}


def seconds(work: Any, *arguments: Any) -> float:
    """Seconds of processor time, which depend less on other programs than the clock."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


@pytest.fixture(scope="module")
def plain_scan() -> float:
    """The processor time to find every word of an ordinary text of the same length."""
    prose = ("It was the best of times, it was the worst of times; the key to it all was a message. " * 60_000)[:SIZE]
    return min(seconds(re.compile(r"\w+|\W+").findall, prose) for _ in range(3))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_made_to_be_slow_costs_about_what_any_text_costs(name: str, plain_scan: float) -> None:
    assert seconds(redact_secrets.text, HOSTILE[name]) < 40 * plain_scan


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_grows_with_the_text_and_not_with_its_square(name: str) -> None:
    short = min(seconds(redact_secrets.text, HOSTILE[name][:50_000]) for _ in range(3))
    # Sixteen times the text; a quadratic search would take 256 times as long.
    assert any(seconds(redact_secrets.text, HOSTILE[name][:800_000]) < 80 * max(short, 0.001) for _ in range(3))
