"""A block is the same whether it was created from joined bytes or from records."""

from hypothesis import given
from hypothesis import strategies as st

from carrel.storage.base import Block

records = st.lists(st.sampled_from([b"", b",", b"{}", b'{"a":1}', b"x,", b",y", b"\r", b"\xff\x00"]), min_size=1)


@given(records, st.integers(1, 10))
def test_one_piece_and_records_are_alike(lines: list[bytes], first: int):
    read, made = Block(first, joined=b"\n".join(lines)), Block(first, list(lines))
    assert read == made
    assert read.records == lines
    assert read.count == made.count == len(lines)
    assert read.last_seq == made.last_seq == first + len(lines) - 1
    assert read.array == made.array == b"[" + b",\n".join(lines) + b"]"
