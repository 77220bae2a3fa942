"""Arguments are checked before anything runs, and each wrong one is named."""

import datetime
import enum
import pathlib
from decimal import Decimal
from typing import Any

import pytest

from carrel.errors import ToolCallError
from carrel.library.tools.arguments import ArgumentValidator, bind_arguments, to_json_value
from carrel.library.tools.tool import Tool

BOX = {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"], "additionalProperties": False}
TOOL = Tool(
    name="pack",
    parameters={
        "type": "object",
        "properties": {
            "what": {"type": "string", "description": "What to pack\nand more"},
            "count": {"type": "integer", "minimum": 1},
            "how": {"enum": ["fast", "slow"]},
            "boxes": {"type": "array", "items": BOX},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "max_time": {"type": "number"},
        },
        "required": ["what"],
        "additionalProperties": False,
    },
    positional=("what", "count"),
)


def checked(arguments: dict[str, Any], tool: Tool = TOOL) -> dict[str, Any]:
    return ArgumentValidator(tool).validated(arguments)


def test_positional_arguments() -> None:
    assert bind_arguments(TOOL, ["a", 2], {"how": "fast"}) == {"what": "a", "count": 2, "how": "fast"}
    with pytest.raises(ToolCallError, match="pack: 3 positional arguments, and it takes only what, count"):
        bind_arguments(TOOL, [1, 2, 3], {})
    with pytest.raises(ToolCallError, match="pack: what is given twice"):
        bind_arguments(TOOL, ["a"], {"what": "b"})


def test_required_arguments_are_first() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}
    tool = Tool(name="x", parameters=schema, positional=("a", "b"))
    assert bind_arguments(tool, [1, 2], {}) == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "pack: what is missing (What to pack)"),
        ({"what": "a", "cuont": 2}, "pack: it has no parameter cuont; did you mean count?"),
        ({"what": 5}, "pack: what must be str, not int 5"),
        ({"what": "a", "count": True}, "pack: count must be int, not bool True"),
        ({"what": "a", "count": "2"}, "pack: count must be int, not str '2'"),
        ({"what": "a", "count": 0}, "pack: count: 0 is less than the minimum of 1"),
        ({"what": "a", "how": "soon"}, "pack: how must be one of 'fast', 'slow', not 'soon'"),
        ({"what": "a", "boxes": [{"w": 1}, {"w": "x"}]}, "pack: boxes[1].w must be int, not str 'x'"),
        ({"what": "a", "boxes": [{}]}, "pack: boxes[0].w is missing"),
        ({"what": "a", "boxes": [{"w": 1, "v": 2}]}, "pack: boxes[0] has no v; did you mean w?"),
        ({"what": b"a"}, "pack: what must be str, not bytes b'a'"),
        ({"what": "a", "max-time": 1, "max_time": 2}, "pack: max_time is given twice"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ToolCallError) as raised:
        checked(arguments)
    assert str(raised.value).startswith(expected.removesuffix("did you mean w?"))


def test_several_errors_at_once() -> None:
    with pytest.raises(ToolCallError) as raised:
        checked({"what": 1, "count": "x", "how": 0, "boxes": 5})
    assert str(raised.value).count("must be") == 3
    assert str(raised.value).endswith("and 1 more")


def test_none_means_not_given_unless_allowed() -> None:
    assert checked({"what": "a", "count": None, "note": None}) == {"what": "a", "note": None}
    with pytest.raises(ToolCallError, match="what must be str, not NoneType"):
        checked({"what": None})


def test_dashes_in_names() -> None:
    assert checked({"what": "a", "max-time": 1.5}) == {"what": "a", "max_time": 1.5}


def test_values_are_converted_to_data() -> None:
    class Color(enum.Enum):
        RED = "red"

    given = {
        "path": pathlib.Path("/a/b"),
        "when": datetime.date(2024, 2, 29),
        "pair": (1, {2}),
        "color": Color.RED,
        "price": Decimal("1.5"),
        3: None,
    }
    assert to_json_value(given) == {
        "path": "/a/b",
        "when": "2024-02-29",
        "pair": [1, [2]],
        "color": "red",
        "price": 1.5,
        "3": None,
    }


def test_unknown_names() -> None:
    listed = {"type": "object", "properties": {"query": {"type": "string"}}}
    with pytest.raises(ToolCallError, match="it has no parameter qeury; did you mean query"):
        checked({"qeury": "x"}, Tool(name="find", parameters=listed))
    schemas: list[dict[str, Any]]
    schemas = [{"additionalProperties": True}, {"patternProperties": {"^x-": {}}}, {"allOf": [{}]}]
    for opened in schemas:
        assert checked({"x-a": 1}, Tool(name="find", parameters={**listed, **opened})) == {"x-a": 1}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/never-fetched.json"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
        {"type": "object", "properties": {"a": {"type": 5}}},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "properties": None, "required": "a"},
        {},
    ],
)
def test_an_invalid_schema_does_not_stop_calls(schema: dict[str, Any]) -> None:
    assert checked({"a": "x"}, Tool(name="odd", parameters=schema)) == {"a": "x"}


def test_endless_arguments_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}},
    }
    with pytest.raises(ToolCallError, match="nested too deeply"):
        checked({"a": deep}, Tool(name="odd", parameters=schema))
