"""A line of the log: anything JSON can say comes back as it was, anything else is refused or reported."""

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.log_entries import decode, decode_all, encode, timestamp
from carrel.errors import MessageRefused
from carrel.storage.base import Block

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def as_read(lines: list[bytes]) -> Block:
    return Block(1, joined=b"\n".join(lines))


@given(values)
def test_what_goes_in_comes_out(value: Any):
    message = {"role": "user", "content": [{"type": "text", "text": "x", "extra": value}]}
    line = encode(message)
    assert b"\n" not in line
    assert decode(line) == message


def test_numbers_that_are_no_numbers_are_kept():
    back = decode(encode({"role": "user", "content": [math.nan, math.inf, None, 2**200]}))["content"]
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, None, 2**200]


def test_lone_surrogates_and_nul_are_kept():
    message = {"role": "user", "content": [{"type": "text", "text": "a\ud800b\x00c\u2028d"}]}
    assert decode(encode(message)) == message


def test_a_line_is_one_line_to_every_program():
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh\ni – “q”"}],
    }
    line = encode(message)
    assert decode(line) == message
    assert len(line.decode().splitlines()) == 1


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("hello", "a message is a dict"),
        (None, "a message is a dict"),
        ({"content": []}, "needs a role"),
        ({"role": "", "content": []}, "needs a role"),
        ({"role": 5, "content": []}, "needs a role"),
        ({"role": "user", "content": [{1, 2}]}, "not JSON serializable"),
        ({"role": "unreadable"}, "use another"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(message: Any, why: str):
    with pytest.raises(MessageRefused, match=why):
        encode(message)


def test_a_message_that_holds_itself_is_refused():
    message: dict[str, Any] = {"role": "user", "content": []}
    message["content"].append(message)
    with pytest.raises(MessageRefused):
        encode(message)


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b'{"role": "user"', b"\x00" * 8],
)
def test_a_line_that_is_no_entry_is_reported_and_harms_no_other(line: bytes):
    good = b'{"role":"user","content":[]}'
    entries = decode_all(as_read([good, line, good]))
    assert [entry["role"] for entry in entries] == ["user", "unreadable", "user"]
    assert entries[1]["meta"]["reason"]


def test_blank_lines_are_no_entries():
    assert [entry["role"] for entry in decode_all(as_read([b"", b"  ", b'{"role":"user"}']))] == [
        "unreadable",
        "unreadable",
        "user",
    ]


def test_two_broken_lines_never_make_a_whole_one():
    entries = decode_all(as_read([b'{"role":"user","content":[1', b"2]}"]))
    assert [entry["role"] for entry in entries] == ["unreadable"] * 2


def test_a_line_for_the_slow_parser_is_found_among_others():
    large = {"role": "user", "content": [2**200]}
    others = [b'{"role":\t"user"}', b'{"role":"user"}']
    for place in range(3):
        lines = [*others[:place], encode(large), *others[place:]]
        assert decode_all(as_read(lines))[place] == large


def test_tabs_between_tokens_make_no_line_slow():
    assert decode_all(as_read([b'{"role":\t"user"}', b'{"role":"user"\t}'])) == [{"role": "user"}] * 2


def test_dates_are_those_of_the_clock_and_sort_as_text():
    before = datetime.now(UTC)
    dates = [timestamp() for _ in range(1000)]
    after = datetime.now(UTC)
    assert before <= datetime.fromisoformat(dates[0]) <= datetime.fromisoformat(dates[-1]) <= after
    assert dates == sorted(dates)
    assert {(len(date), date[-13:-12], date[-6:]) for date in dates} == {(32, ".", "+00:00")}
