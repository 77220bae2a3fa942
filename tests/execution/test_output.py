"""Bounded output: whole when it fits, else its beginning and its end, with an honest mark."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from carrel.processes import BoundedOutput
from tests.execution.processes import memory


def taken(pieces: list[bytes], limit: int) -> str:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.add(piece)
    return output.text()


@given(st.lists(st.binary(max_size=50)), st.integers(2, 100))
def test_what_fits_is_whole_and_what_does_not_is_marked(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    text = taken(pieces, limit)
    if len(whole) <= limit:
        assert text == whole.decode("utf-8", "replace")
    else:
        found = re.search(r"\n\[… ([\d,]+) bytes left out …\]\n", text)
        assert found is not None
        left_out = int(found[1].replace(",", ""))
        assert len(whole) - limit <= left_out <= len(whole) - limit + 8


@given(st.text(alphabet="aé€😀", min_size=1, max_size=300), st.integers(8, 100), st.integers(1, 7))
def test_no_character_is_cut_in_two(text: str, limit: int, step: int) -> None:
    data = text.encode()
    assert "�" not in taken([data[at : at + step] for at in range(0, len(data), step)], limit)


def test_head_and_tail_are_the_real_ones() -> None:
    assert taken([b"abcdefghij"], 4) == "ab\n[… 6 bytes left out …]\nij"
    assert taken([b"a", b"b", b"c" * 10, b"i", b"j"], 4) == "ab\n[… 10 bytes left out …]\nij"


def test_memory_stays_flat() -> None:
    output = BoundedOutput(1 << 20)
    piece = b"x" * (1 << 16)
    output.add(piece)
    before = memory()
    for _ in range(4000):
        output.add(piece)
    assert memory() - before < 8 << 20
    assert output.total == 4001 << 16
