"""Values cross as data and arrive equal; everything else arrives as its repr."""

import copy
import dataclasses
import datetime
import decimal
import enum
import json
import math
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.guest.worker.values import Repr, decode, encode

plain: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters()),
    st.binary(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
)
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(plain, inner, max_size=4),
        st.frozensets(plain, max_size=4),
        st.sets(plain, max_size=4),
    ),
    max_leaves=20,
)


def crossed(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@given(nested)
def test_data_arrives_equal(value: object):
    assert crossed(value) == value
    assert type(crossed(value)) is type(value)


class Color(enum.Enum):
    RED = "r"


@dataclasses.dataclass
class Point:
    x: int
    y: list[int]


class Child(dict):
    pass


class Rude:
    def __repr__(self) -> str:
        raise OSError("no")


def test_the_kinds_with_a_rule_of_their_own():
    assert math.isnan(crossed(math.nan))
    assert crossed([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert crossed(Color.RED) == "r"
    assert crossed(Point(1, [2])) == {"x": 1, "y": [2]}
    assert crossed(Child(a=1)) == {"a": 1}
    assert crossed({"$": 1, "a": 2}) == {"$": 1, "a": 2}
    assert crossed(Path("/a/b")) == Path("/a/b")
    assert crossed(decimal.Decimal("NaN")).is_nan()
    assert crossed(True) is True
    assert crossed(uuid.UUID(int=5)) == uuid.UUID(int=5)


def test_what_is_no_data_arrives_as_its_repr():
    assert crossed(object).startswith("<class")
    assert isinstance(crossed(object()), Repr)
    assert "whose repr raised OSError" in crossed(Rude())
    assert crossed([1, Rude()])[0] == 1
    assert "generator" in crossed(x for x in "a")


def test_a_structure_inside_itself_ends():
    loop: list[Any] = [1]
    loop.append(loop)
    assert crossed(loop) == [1, "..."]


def test_what_is_too_large_or_too_deep_is_cut_with_a_note():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert crossed(deep).why == "it is nested deeper than 200 levels"
    large = crossed("x" * 40_000_000)
    assert isinstance(large, Repr)
    assert "40000000 characters in all" in large
    assert large.why == "it has more than 32 MiB"
    assert crossed(object()).why == ""
    assert copy.copy(large).why == large.why
    assert crossed(list(range(100_000))) == list(range(100_000))


@pytest.mark.parametrize(
    "forged",
    [
        {"$": "os.system", "of": "x"},
        {"$": "bytes", "of": "!"},
        {"$": "int", "of": "zz"},
        {"$": "set"},
        {"$": ["list"]},
        {"$": "tuple", "of": 5},
        {"$": "dict", "of": [[1]]},
        {"$": "datetime", "of": "soon"},
        {"$": "decimal", "of": "x"},
        {"$": "timedelta", "of": "99999999999 0 0"},
        {"$": "repr"},
    ],
)
def test_forged_data_is_an_error_not_a_surprise(forged: Any):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the forgery, it is this one error
        decode(forged)


def test_an_unhashable_key_does_no_harm():
    assert len(decode({"$": "dict", "of": [[[1], 2]]})) == 1
