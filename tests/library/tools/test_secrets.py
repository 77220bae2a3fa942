"""Secrets are substituted just before use and appear in no result, error or stream."""

import base64
import json
import sys
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import ConfigurationError, ToolCallError
from carrel.library.tools.secrets import Secrets
from tests.support.tools import catalog

KEY = 'k3y/with "odd" +chars'


def test_variables_are_read_each_time() -> None:
    environment = {"TOKEN": "first-value"}
    secrets = Secrets(environment)
    assert secrets.substitute("Bearer ${TOKEN}!") == "Bearer first-value!"
    environment["TOKEN"] = "second-value"
    assert secrets.substitute("Bearer ${TOKEN}!") == "Bearer second-value!"
    assert secrets.redact("first-value second-value") == "${TOKEN} ${TOKEN}"
    assert secrets.substitute_all({"A": "x", "B": "${TOKEN}"}) == {"A": "x", "B": "second-value"}
    assert secrets.substitute("$TOKEN costs 5 $") == "$TOKEN costs 5 $"


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ConfigurationError, match="the environment variable TOKEN is not set"):
        Secrets({}).substitute("Bearer ${TOKEN}")
    with pytest.raises(ConfigurationError, match="names no environment variable"):
        Secrets({}).substitute("${a b}")


def test_values_are_redacted_in_all_encodings() -> None:
    secrets = Secrets({"KEY": KEY})
    secrets.substitute("${KEY}")
    encoded = base64.b64encode(KEY.encode()).decode()
    for written in (KEY, quote(KEY, safe=""), json.dumps(KEY), repr(KEY), encoded):
        hidden = secrets.redact(f"before {written} after")
        assert "${KEY}" in hidden
        assert "k3y" not in hidden


def test_data_are_redacted() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    data = {"hunter2": ["a hunter2", ("hunter2", b"x hunter2 \xff", 5, None)]}
    assert secrets.redact_data(data) == data
    secrets.substitute("${KEY}")
    assert secrets.redact_data(data) == {"${KEY}": ["a ${KEY}", ("${KEY}", b"x ${KEY} \xff", 5, None)]}


def test_short_values_are_not_secrets() -> None:
    secrets = Secrets({"FLAG": "1"})
    assert secrets.substitute("${FLAG}") == "1"
    assert secrets.redact("1 of 11") == "1 of 11"


def test_a_secret_that_begins_with_another() -> None:
    secrets = Secrets({"A": "abcdefgh", "B": "abcdefghijkl"})
    secrets.substitute("${A} ${B}")
    assert secrets.redact("abcdefghijkl abcdefgh") == "${B} ${A}"


def test_numbers_flags_and_short_words_are_not_secrets() -> None:
    plain = {
        "PORT": "5432",
        "FLAG": "true",
        "BRANCH": "main",
        "LEVEL": "DEBUG",
        "NAME": "Alice",
        "R": "-0.25",
        "N": "7 ",
    }
    secrets = Secrets(plain)
    secrets.substitute("".join(f"${{{name}}}" for name in plain))
    data = {"text": "id 15432 is true; branch main; DEBUG Alice -0.25 7 5432", "n": [5432, True]}
    assert secrets.redact_data(data) == data
    secrets = Secrets({"PIN": "12345678", "WORD": "sesameseed", "MIXED": "aXbYcZ"})
    secrets.substitute("${PIN}${WORD}${MIXED}")
    assert secrets.redact("12345678 sesameseed aXbYcZ") == "${PIN} ${WORD} ${MIXED}"


def test_numbers_in_data_are_redacted() -> None:
    secrets = Secrets({"PIN": "12345678"})
    secrets.substitute("${PIN}")
    data = [12345678, 123456780, {12345678}, 10**5000]
    assert secrets.redact_data(data) == ["${PIN}", 123456780, {"${PIN}"}, 10**5000]


def test_a_short_value_is_redacted_as_a_separate_word() -> None:
    secrets = Secrets({"V": "v1.2.3", "KEY": "hunt2", "ODD": "#a1!", "ZONE": "us-east", "HEX": "c0ffee"})
    secrets.substitute("${V}${KEY}${ODD}${ZONE}${HEX}")
    for apart in ("v1.2.30", "xhunt2", "hunt23", "us-eastern", "0c0ffee0"):
        assert secrets.redact(apart) == apart
        assert secrets.redact_bytes(apart.encode()) == apart.encode()
    for text in ("%s", "=%s.", "_%s_", "/%s/", "\\n%s\\n", "%%2f%s", "\\u001b%s", "\\x00%s", "\x1b[1;31m%s\x1b[0m"):
        assert secrets.redact(text % "hunt2") == text % "${KEY}"
        assert secrets.redact_bytes((text % "hunt2").encode()) == (text % "${KEY}").encode()
    assert secrets.redact("x#a1!x") == "x${ODD}x"


def test_a_mixed_value_is_redacted_anywhere() -> None:
    secrets = Secrets({"KEY": "hunter2", "ODD": "pa$$wd"})
    secrets.substitute("${KEY}${ODD}")
    assert secrets.redact("passwordhunter2x and xpa$$wdx") == "password${KEY}x and x${ODD}x"
    assert secrets.redact_bytes(b"hunter23") == b"${KEY}3"


def test_a_short_value_is_redacted_in_all_encodings() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    secrets.substitute("${KEY}")
    for written in (base64.b64encode(b"hunter2").decode(), base64.b64encode(b"u:hunter2").decode()):
        assert "${KEY}" in secrets.redact(f"x{written}x")


@given(
    st.lists(
        st.sampled_from(
            ["hunter2", "hunt2", "hun", "ter2", "hunterhunter2", "h", "x\n", "\\n", "%2F", "abcabcab", "cdef"]
        )
    ),
    st.integers(1, 5),
)
def test_a_stream_is_redacted_also_between_pieces(parts: list[str], size: int) -> None:
    secrets = Secrets({"KEY": "hunter2", "SHORT": "hunt2", "LONG": "abcabcab", "LONGER": "abcabcabcdef"})
    secrets.substitute("${KEY}${SHORT}${LONG}${LONGER}")
    text = "".join(parts)
    output: list[str] = []
    stream = secrets.redacting(output.append)
    for start in range(0, len(text), size):
        stream(text[start : start + size])
    stream.end()
    assert "".join(output) == secrets.redact(text)


def test_a_stream_holds_back_only_what_may_be_a_secret() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    secrets.substitute("${KEY}")
    output: list[str] = []
    stream = secrets.redacting(output.append)
    stream("50 %")
    stream(" hunt")
    assert output == ["50 %", " "]


KEY = "sk-LIVE-0123456789abcdefXYZ"
LOUD = f"""
name: prog
command:
  - {sys.executable}
  - -c
  - "import os,sys; sys.%s.write('Authorization: '+os.environ['T']+'~'*int(sys.argv[1])); sys.exit(3)"
env: {{T: "${{TOK}}"}}
schema: {{positional: [{{name: v, type: integer}}]}}
"""


def parts_of(text: str, least: int = 4) -> list[str]:
    """The pieces of the secret that stand in a text."""
    pieces = {KEY[at : at + least] for at in range(len(KEY) - least + 1)}
    return sorted(piece for piece in pieces if piece in text)


@pytest.mark.parametrize(("stream", "shown"), [("stderr", 4000), ("stderr", 32 * 1024), ("stdout", 2000)])
async def test_a_shortened_error_has_no_rest_of_a_secret(stream: str, shown: int) -> None:
    tools = catalog(LOUD % stream, environment={"TOK": KEY})
    for padding in (shown - len(KEY) + 1, shown - len(KEY) // 2, shown - 5):
        with pytest.raises(ToolCallError) as failed:
            await tools.call("prog", {"v": padding})
        assert parts_of(str(failed.value)) == []
        assert parts_of(failed.value.stderr or "") == []


async def test_long_output_has_no_part_of_a_secret_at_the_gap() -> None:
    half = 5 * 1024 * 1024
    code = f"import os; t=os.environ['T']; print('a'*({half}-9)+t+'b'*{half + 99}+t+'c'*({half}-10))"
    tools = catalog(
        f'name: prog\ncommand: [{sys.executable}, -c, "{code}"]\nenv: {{T: "${{TOK}}"}}', environment={"TOK": KEY}
    )
    text = await tools.call("prog")
    assert "bytes left out" in text
    assert parts_of(text) == []
    assert text.startswith("aaaa")
    assert text.rstrip().endswith("cccc")


def test_pieces_have_no_part_of_a_secret_at_their_ends() -> None:
    secrets = Secrets({"KEY": KEY})
    secrets.substitute("${KEY}")
    filler = b"~" * 100
    for length in range(1, len(KEY)):
        start = secrets.redact_piece(KEY[-length:].encode() + filler, cut_start=True)
        end = secrets.redact_piece(filler + KEY[:length].encode(), cut_end=True)
        assert start == filler[: len(start)]
        assert end == filler[: len(end)]
    assert secrets.redact_piece(b"!? plain !?") == b"!? plain !?"


@pytest.mark.parametrize("before", ["", "u", "us", "user:", "alice@example.com:"])
@pytest.mark.parametrize("after", ["", "!", "!!", "\n"])
def test_a_secret_within_base64_is_redacted(before: str, after: str) -> None:
    secrets = Secrets({"KEY": KEY})
    secrets.substitute("${KEY}")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        written = encode(f"{before}{KEY}{after}".encode()).decode()
        hidden = secrets.redact(f"Basic {written} …")
        assert "${KEY}" in hidden
        left = hidden.removeprefix("Basic ").split("${KEY}")
        assert len(left[0]) <= (len(before) * 8 + 5) // 6 + 1
        assert len(left[1]) <= len(after) * 2 + 6


def test_a_quoted_secret_is_redacted() -> None:
    secrets = Secrets({"KEY": "p&ss/wörd <x>"})
    secrets.substitute("${KEY}")
    for written in (
        "p%26ss%2Fw%C3%B6rd%20%3Cx%3E",
        "p%26ss/w%C3%B6rd%20%3Cx%3E",
        "p&amp;ss/wörd &lt;x&gt;",
        "p&ss/w\\u00f6rd <x>",
    ):
        assert secrets.redact(f"[{written}]") == "[${KEY}]"
