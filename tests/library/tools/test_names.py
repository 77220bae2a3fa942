"""Names of tools and parameters in Python."""

from hypothesis import given
from hypothesis import strategies as st

from carrel.library.names import python_name, python_names


def test_names_as_code_writes_them() -> None:
    assert [python_name(name) for name in ("max-time", "get", "class", "2fa", "a.b/c", "-", "größe")] == [
        "max_time",
        "get",
        "class_",
        "_2fa",
        "a_b_c",
        "_",
        "größe",
    ]


def test_a_name_that_can_be_written_keeps_it() -> None:
    assert python_names(["a-b", "a_b", "a.b", "a_b_2", "a_b"]) == {
        "a_b_3": "a-b",
        "a_b": "a_b",
        "a_b_4": "a.b",
        "a_b_2": "a_b_2",
        "a_b_5": "a_b",
    }


@given(st.lists(st.text(min_size=1)))
def test_every_name_can_be_written_and_none_is_lost(names: list[str]) -> None:
    called = python_names(names)
    assert all(word.isidentifier() for word in called)
    assert sorted(called.values()) == sorted(names)
