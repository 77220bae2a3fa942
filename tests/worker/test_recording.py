"""What is recorded of variables: bounded, and without calling anything of the user's."""

import collections
import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import pytest

from carrel.execution.results import RecordedVariable, VariableReport, read_report
from carrel.guest.channel import ChannelError
from carrel.guest.worker.recording import MAX_BYTES, NO_FILES, describe, fingerprint, record_variables


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a method of the user's was called")


class Hostile(type):
    """A class whose class has methods of its own."""

    __eq__ = __hash__ = __repr__ = __str__ = __instancecheck__ = refuse
    __name__ = __mro__ = property(refuse)


class Thing(metaclass=Hostile):
    __repr__ = __str__ = __eq__ = __hash__ = __getattribute__ = __sizeof__ = __len__ = __iter__ = __format__ = refuse
    __class__ = property(refuse)


class Names(dict[str, int]):
    __repr__ = __iter__ = __len__ = __getitem__ = items = keys = values = copy = refuse


class Number(int):
    __repr__ = __add__ = __int__ = __index__ = __hash__ = refuse


class Own:
    __dict__ = property(refuse)


@dataclasses.dataclass
class Point:
    x: int
    y: Any


def test_no_method_of_the_user_is_called() -> None:
    values = {"a": Thing(), "b": Thing, "c": Names(x=1), "d": Number(7), "e": Own(), "f": [Thing(), {"k": Names()}]}
    values["g"] = Point(1, Thing())
    found = record_variables(values, {}, lambda: True)
    assert found is not None
    shown = {name: preview for name, _, _, preview, _ in found[0]}
    assert shown["a"] == "<Thing>"
    assert shown["c"] == "<Names [('x', 1)]>"
    assert shown["d"] == "<Number 7>"
    assert shown["g"] == "<Point x=1, y=<Thing>>"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 3]),
        ({"a": 1}, {"a": 2}),
        (Point(1, 2), Point(1, 3)),
        ("x" * 50_000, "x" * 49_999 + "y"),
        (collections.Counter("ab"), collections.Counter("aab")),
        (lambda: 1, lambda: 2),
    ],
)
def test_a_digest_tells_values_apart(one: Any, other: Any) -> None:
    assert describe(one)[2] == describe(one)[2] != describe(other)[2]


def test_a_value_that_was_not_seen_whole_is_marked() -> None:
    assert not describe([1] * 100)[2].startswith("~")
    for value in ([1] * 100_000, "x" * 2_000_000, 1 << 100_000, object(), print, (n for n in [1])):
        assert describe(value)[2].startswith("~")
    ring: list[Any] = []
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert describe(ring)[1] == "[...]"
    assert len(describe(deep)[1]) <= 201


def test_a_report_is_bounded_and_ends_when_it_is_not_wanted() -> None:
    many: dict[str, Any] = {f"name_{number}": "é\n" * 1000 for number in range(3000)}
    found = record_variables(many, {}, lambda: True)
    assert found is not None
    listed, left_out = found
    assert len(listed) + left_out == 3000
    assert sum(len("".join(map(str, entry)).encode()) for entry in listed) < MAX_BYTES
    wanted = iter([True, True, False])
    assert record_variables(many, {}, lambda: next(wanted)) is None
    assert record_variables({"own": many, "_x": 1, "y" * 300: 1, "z": 1}, {"own": many}, lambda: True) == (
        [("z", "int", 28, "1", describe(1)[2])],
        1,
    )


def test_a_fingerprint_tells_of_changed_files(tmp_path: Path) -> None:
    assert fingerprint(str(tmp_path)) == NO_FILES == fingerprint(str(tmp_path / "missing"))
    (tmp_path / "a").write_text("x")
    first = fingerprint(str(tmp_path))
    (tmp_path / "a").write_text("xy")
    assert len({NO_FILES, first, fingerprint(str(tmp_path))}) == 3
    for number in range(2001):
        (tmp_path / str(number)).touch()
    assert fingerprint(str(tmp_path)) == ""


GOOD: dict[str, Any] = {"variables": [["x", "int", 28, "1", "d"]], "left_out": 0, "files": "f"}


def test_a_report_is_checked() -> None:
    assert read_report(GOOD, 100) == VariableReport({"x": RecordedVariable("int", 28, "1", "d")}, 0, "f")
    wrong: list[dict[str, Any]] = [{"variables": 1}, {"variables": [["x"]]}, {"variables": [[1, "int", 2, "", ""]]}]
    wrong += [{"left_out": -1}, {"left_out": True}, {"files": None}, {"variables": GOOD["variables"] * 1001}]
    for change in wrong:
        with pytest.raises(ChannelError):
            read_report(GOOD | change, 100)
    with pytest.raises(ChannelError):
        read_report(GOOD, 4 * MAX_BYTES)
