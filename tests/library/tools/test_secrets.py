"""Secrets go in at the last moment and come out nowhere."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import ConfigurationError
from carrel.library.tools.secrets import Secrets

KEY = 'k3y/with "odd" +chars'


def test_names_are_looked_up_each_time() -> None:
    environment = {"TOKEN": "first-value"}
    secrets = Secrets(environment)
    assert secrets.fill("Bearer ${TOKEN}!") == "Bearer first-value!"
    environment["TOKEN"] = "second-value"
    assert secrets.fill("Bearer ${TOKEN}!") == "Bearer second-value!"
    assert secrets.hide("first-value second-value") == "${TOKEN} ${TOKEN}"
    assert secrets.fill_all({"A": "x", "B": "${TOKEN}"}) == {"A": "x", "B": "second-value"}
    assert secrets.fill("$TOKEN costs 5 $") == "$TOKEN costs 5 $"


def test_a_missing_one_is_named() -> None:
    with pytest.raises(ConfigurationError, match="the environment variable TOKEN is not set"):
        Secrets({}).fill("Bearer ${TOKEN}")
    with pytest.raises(ConfigurationError, match="names no environment variable"):
        Secrets({}).fill("${a b}")


def test_a_value_is_hidden_however_it_is_written() -> None:
    secrets = Secrets({"KEY": KEY})
    secrets.fill("${KEY}")
    encoded = base64.b64encode(KEY.encode()).decode()
    for written in (KEY, quote(KEY, safe=""), json.dumps(KEY), repr(KEY), encoded):
        hidden = secrets.hide(f"before {written} after")
        assert "${KEY}" in hidden
        assert "k3y" not in hidden


def test_data_is_cleared_all_through() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    data = {"hunter2": ["a hunter2", ("hunter2", b"x hunter2 \xff", 5, None)]}
    assert secrets.hide_in(data) == data
    secrets.fill("${KEY}")
    assert secrets.hide_in(data) == {"${KEY}": ["a ${KEY}", ("${KEY}", b"x ${KEY} \xff", 5, None)]}


def test_what_is_too_short_is_no_secret() -> None:
    secrets = Secrets({"FLAG": "1"})
    assert secrets.fill("${FLAG}") == "1"
    assert secrets.hide("1 of 11") == "1 of 11"


def test_of_two_where_one_begins_the_other_the_longer_is_hidden_whole() -> None:
    secrets = Secrets({"A": "abcdefgh", "B": "abcdefghijkl"})
    secrets.fill("${A} ${B}")
    assert secrets.hide("abcdefghijkl abcdefgh") == "${B} ${A}"


def test_numbers_flags_and_short_words_are_no_secrets() -> None:
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
    secrets.fill("".join(f"${{{name}}}" for name in plain))
    data = {"text": "id 15432 is true; branch main; DEBUG Alice -0.25 7 5432", "n": [5432, True]}
    assert secrets.hide_in(data) == data
    secrets = Secrets({"PIN": "12345678", "WORD": "sesameseed", "MIXED": "aXbYcZ"})
    secrets.fill("${PIN}${WORD}${MIXED}")
    assert secrets.hide("12345678 sesameseed aXbYcZ") == "${PIN} ${WORD} ${MIXED}"


def test_a_number_in_data_that_is_a_secret_is_hidden() -> None:
    secrets = Secrets({"PIN": "12345678"})
    secrets.fill("${PIN}")
    data = [12345678, 123456780, {12345678}, 10**5000]
    assert secrets.hide_in(data) == ["${PIN}", 123456780, {"${PIN}"}, 10**5000]


def test_a_short_value_is_hidden_as_a_word_of_its_own() -> None:
    secrets = Secrets({"V": "v1.2.3", "KEY": "hunt2", "ODD": "#a1!", "ZONE": "us-east", "HEX": "c0ffee"})
    secrets.fill("${V}${KEY}${ODD}${ZONE}${HEX}")
    for apart in ("v1.2.30", "xhunt2", "hunt23", "us-eastern", "0c0ffee0"):
        assert secrets.hide(apart) == apart
        assert secrets.hide_bytes(apart.encode()) == apart.encode()
    for text in ("%s", "=%s.", "_%s_", "/%s/", "\\n%s\\n", "%%2f%s", "\\u001b%s", "\\x00%s", "\x1b[1;31m%s\x1b[0m"):
        assert secrets.hide(text % "hunt2") == text % "${KEY}"
        assert secrets.hide_bytes((text % "hunt2").encode()) == (text % "${KEY}").encode()
    assert secrets.hide("x#a1!x") == "x${ODD}x"


def test_one_that_no_word_has_in_it_by_chance_is_hidden_anywhere() -> None:
    secrets = Secrets({"KEY": "hunter2", "ODD": "pa$$wd"})
    secrets.fill("${KEY}${ODD}")
    assert secrets.hide("passwordhunter2x and xpa$$wdx") == "password${KEY}x and x${ODD}x"
    assert secrets.hide_bytes(b"hunter23") == b"${KEY}3"


def test_a_short_value_is_hidden_in_all_encodings() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    secrets.fill("${KEY}")
    for written in (b"hunter2".hex(), base64.b64encode(b"hunter2").decode(), base64.b64encode(b"u:hunter2").decode()):
        assert "${KEY}" in secrets.hide(f"x{written}x")


@given(
    st.lists(
        st.sampled_from(
            ["hunter2", "hunt2", "hun", "ter2", "hunterhunter2", "h", "x\n", "\\n", "%2F", "abcabcab", "cdef"]
        )
    ),
    st.integers(1, 5),
)
def test_a_stream_is_cleared_also_where_a_value_is_cut(parts: list[str], size: int) -> None:
    secrets = Secrets({"KEY": "hunter2", "SHORT": "hunt2", "LONG": "abcabcab", "LONGER": "abcabcabcdef"})
    secrets.fill("${KEY}${SHORT}${LONG}${LONGER}")
    text = "".join(parts)
    said: list[str] = []
    stream = secrets.hiding(said.append)
    for start in range(0, len(text), size):
        stream(text[start : start + size])
    stream.end()
    assert "".join(said) == secrets.hide(text)


def test_a_stream_keeps_back_only_what_may_be_a_secret() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    secrets.fill("${KEY}")
    said: list[str] = []
    stream = secrets.hiding(said.append)
    stream("50 %")
    stream(" hunt")
    assert said == ["50 %", " "]
